"""Charts as inline SVG, with colours left to the page's style sheet so that they follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 12, 42


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: for the legend; empty keeps it out.
        points: pairs (x, y) in rising x.
        color: index into the page's palette.
        style: "line", "faint", "dashed" or "dots" (a line with its points).
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    style: str = "line"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high], about `count` of them."""
    span = high - low or abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(x: float) -> str:
    """A tick's label."""
    if x and abs(x) >= 10_000:
        return f"{x / 1000:,.12g}k"
    return f"{x:.6g}"


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    percent: bool = False,
) -> str:
    """Lines over a common axis, with a legend under it; values beyond `y_range` are cut off."""
    series = [s for s in series if s.points]
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    if not xs:
        return ""
    x_low, x_high = min(xs), max(xs)
    low, high = y_range or _padded(min(ys), max(ys))
    at_x, at_y = _scales((x_low, x_high), (low, high))
    body = [_axes(ticks(x_low, x_high), ticks(low, high), at_x, at_y, x_label, y_label, percent)]
    body.append('<g clip-path="url(#plot)">')
    for s in series:
        path = "M" + "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in s.points)
        body.append(f'<path class="{s.style} c{s.color % 8}" d="{path}"/>')
        if s.style == "dots" or len(s.points) == 1:
            for x, y in s.points:
                tip = f"{s.name}, {x_label} {number(x)}: {y:.4f}"
                body.append(
                    f'<circle class="f{s.color % 8}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3">'
                    f"<title>{escape(tip)}</title></circle>"
                )
    body.append("</g>")
    return _svg(body, f"{y_label} over {x_label}") + legend([(s.name, s.color, s.style) for s in series if s.name])


def scatter(points: Sequence[tuple[str, float, float, int]], x_label: str, y_label: str) -> str:
    """Named points (name, x, y, colour) over a logarithmic x axis."""
    if not points:
        return ""
    x_low, x_high = min(p[1] for p in points), max(p[1] for p in points)
    x_low, x_high = math.log2(x_low) - 0.25, math.log2(x_high) + 0.35
    low, high = _padded(min(p[2] for p in points), max(p[2] for p in points), 0.12)
    at_log, at_y = _scales((x_low, x_high), (low, high))

    def at_x(x: float) -> float:
        return at_log(math.log2(x))

    marks = [x for x in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32) if x_low <= math.log2(x) <= x_high]
    body = [_axes(marks, ticks(low, high), at_x, at_y, x_label, y_label, False)]
    taken = [(at_x(x) - 7, at_y(y) - 7, at_x(x) + 7, at_y(y) + 7) for _, x, y, _ in points]
    for name, x, y, color in sorted(points, key=lambda p: p[2]):
        px, py = at_x(x), at_y(y)
        body.append(
            f'<circle class="f{color % 8}" cx="{px:.1f}" cy="{py:.1f}" r="5.5">'
            f"<title>{escape(name)}: {x:.2f} bytes, loss {y:.4f}</title></circle>"
        )
        anchor, tx, ty = _label_place(name, px, py, taken)
        body.append(  # in its point's colour: where points are close, a label may stand nearer to another one
            f'<text class="mark" text-anchor="{anchor}" x="{tx:.1f}" y="{ty:.1f}" style="fill:var(--c{color % 8})">'
            f"{escape(name)}</text>"
        )
    return _svg(body, f"{y_label} against {x_label}")


def histogram(counts: Sequence[int], label: str, color: int = 0) -> str:
    """A bar for each of the counts, as shares."""
    total = sum(counts) or 1
    shares = [count / total for count in counts]
    height, bottom = 150, 24
    top = max(shares) * 1.08 or 1.0
    width = (WIDTH - 20) / len(shares)
    gap = 0.0 if width < 3 else min(2.0, width * 0.15)
    body = []
    for i, share in enumerate(shares):
        h = share / top * (height - bottom - 16)
        body.append(
            f'<rect class="f{color % 8}" x="{10 + i * width:.2f}" y="{height - bottom - h:.2f}" '
            f'width="{width - gap:.2f}" height="{h:.2f}"><title>level {i}: {share:.2%}</title></rect>'
        )
    middle = height - 6
    body.append(f'<line class="axis" x1="10" x2="{WIDTH - 10}" y1="{height - bottom}" y2="{height - bottom}"/>')
    body.append(f'<text x="10" y="{middle}">smallest level</text>')
    body.append(f'<text x="{WIDTH - 10}" y="{middle}" text-anchor="end">largest</text>')
    body.append(f'<text x="10" y="12">most frequent {max(shares):.1%}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">{"".join(body)}</svg>'
    )


def legend(entries: Sequence[tuple[str, int, str]]) -> str:
    """Names with a swatch of their colour."""
    items = "".join(
        f'<li><i class="b{color % 8}{" dash" if style == "dashed" else ""}"></i>{escape(name)}</li>'
        for name, color, style in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _padded(low: float, high: float, share: float = 0.05) -> tuple[float, float]:
    margin = (high - low or abs(high) or 1.0) * share
    return low - margin, high + margin


def _scales(
    x: tuple[float, float], y: tuple[float, float]
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    x_span, y_span = (x[1] - x[0]) or 1.0, (y[1] - y[0]) or 1.0
    return (
        lambda v: LEFT + (v - x[0]) / x_span * (WIDTH - LEFT - RIGHT),
        lambda v: HEIGHT - BOTTOM - (v - y[0]) / y_span * (HEIGHT - TOP - BOTTOM),
    )


def _axes(
    xs: Sequence[float],
    ys: Sequence[float],
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    x_label: str,
    y_label: str,
    percent: bool,
) -> str:
    floor = HEIGHT - BOTTOM
    parts = []
    for y in ys:
        text = f"{y:.0%}" if percent else number(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at_y(y) + 4:.1f}" text-anchor="end">{text}</text>')
    for x in xs:
        parts.append(f'<text x="{at_x(x):.1f}" y="{floor + 17}" text-anchor="middle">{number(x)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="label" transform="translate(13 {(TOP + floor) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def _label_place(
    name: str, px: float, py: float, taken: list[tuple[float, float, float, float]]
) -> tuple[str, float, float]:
    """Beside, above or below a point, wherever no other label is."""
    width, height = 7.0 * len(name), 14.0
    places = [
        ("start", px + 9, py + 4),
        ("end", px - 9, py + 4),
        ("middle", px, py - 10),
        ("middle", px, py + 20),
        ("start", px - 4, py - 24),
        ("end", px + 4, py + 34),
    ]

    def box(place: tuple[str, float, float]) -> tuple[float, float, float, float]:
        anchor, x, y = place
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        return left, y - height + 3, left + width, y + 3

    def free(b: tuple[float, float, float, float]) -> bool:
        inside = b[0] >= LEFT and b[2] <= WIDTH - 2 and b[1] >= 0 and b[3] <= HEIGHT - BOTTOM
        return inside and not any(b[0] < t[2] and t[0] < b[2] and b[1] < t[3] and t[1] < b[3] for t in taken)

    chosen = next((place for place in places if free(box(place))), places[0])
    taken.append(box(chosen))
    return chosen


def clip_definition() -> str:
    """What the charts of a page refer to; once a page."""
    clip = (
        f'<clipPath id="plot"><rect x="{LEFT - 4}" y="0" width="{WIDTH - LEFT - RIGHT + 8}" '
        f'height="{HEIGHT - BOTTOM + 2}"/></clipPath>'
    )
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{clip}</defs></svg>'


def _svg(body: Sequence[str], label: str) -> str:
    name = escape(label, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(body)}</svg>'
