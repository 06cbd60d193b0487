"""One self-contained HTML file about a run or a comparison: no script, no font, no picture is fetched."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .config import FIELDS, RunConfig, read_toml, resolve
from .observe import load_metrics
from .run_files import write_text
from .svg import Series, clip_definition, histogram, legend, line_chart, scatter

ROLES = ("weights", "first moment", "second moment", "gradients")
_POINTS = 400  # of a curve; more are averaged

_STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf8;--card:#fff;--ink:#1d2127;--soft:#5d6672;--rule:#e3e1dc;
--c0:#0b6bb0;--c1:#c8501b;--c2:#0f8a63;--c3:#a3489c;--c4:#b7860b;--c5:#3b9cc9;--c6:#6a55b8;--c7:#7d8590}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2026;--ink:#e8e6e1;--soft:#9aa4b0;--rule:#30363e;
--c0:#5aaee8;--c1:#f0895a;--c2:#4fc79c;--c3:#d68fd0;--c4:#e0b54a;--c5:#86cdea;--c6:#a899ea;--c7:#9aa4b0}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 20px 64px}
header p{color:var(--soft);margin:4px 0 0;max-width:75ch;overflow-wrap:anywhere}
h1{font-size:1.75rem;line-height:1.2;margin:0;letter-spacing:-.015em}
h2{font-size:1.05rem;margin:0 0 2px}
section>p,figcaption{color:var(--soft);font-size:.9rem;margin:0 0 12px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:28px 0}
.figures div,.card{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.figures div{padding:14px 16px}
.figures b{display:block;font-size:1.5rem;font-weight:600;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.figures span{color:var(--soft);font-size:.85rem}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px}
.card{padding:18px 18px 14px;min-width:0;margin:0}
.wide{margin-top:16px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:12.5px;font-family:inherit;font-variant-numeric:tabular-nums}
svg text.mark{fill:var(--ink);font-size:13px}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .axis{stroke:var(--soft);stroke-width:1}
svg path{fill:none;stroke-width:2;stroke-linejoin:round}
svg path.faint{stroke-width:1;opacity:.35}
svg path.dashed{stroke-dasharray:5 4}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:10px 0 0;padding:0;font-size:.88rem}
.legend i{display:inline-block;width:16px;height:4px;border-radius:2px;margin-right:7px;vertical-align:middle}
.legend i.dash{background-image:linear-gradient(90deg,transparent 50%,var(--card) 50%);background-size:6px}
.bar{margin:12px 0}
.bar p{display:flex;justify-content:space-between;gap:12px;margin:0 0 3px;font-size:.9rem}
.bar p span:last-child{color:var(--soft);font-variant-numeric:tabular-nums;white-space:nowrap}
.bar div{display:flex;height:18px;border-radius:4px;overflow:hidden;background:var(--rule)}
.bar div i{display:block;height:100%}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 10px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left;padding-left:0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:0 28px;margin:0}
dl div{display:flex;justify-content:space-between;gap:12px;border-bottom:1px solid var(--rule);padding:5px 0}
dt{color:var(--soft)}dd{margin:0;text-align:right;overflow-wrap:anywhere}
h3{font-size:.9rem;margin:18px 0 4px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;margin:6px 0 0}
@media(max-width:600px){main{padding:24px 14px 40px}.card{padding:14px 12px 12px}svg text{font-size:15px}
svg text.mark{font-size:15px}.figures{grid-template-columns:1fr 1fr}.figures b{font-size:1.3rem}}
""" + "".join(f".c{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.b{i}{{background:var(--c{i})}}" for i in range(8))


def write_run_report(folder: Path) -> Path:
    """Writes ``report.html`` of a run from the files in its directory."""
    config = resolve({}, read_toml(folder / "config.toml"))
    rows = load_metrics(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    loss = summary["validation_loss"]
    figures = [
        ("validation loss", "-" if loss is None else f"{loss:.4f}"),
        ("bytes per parameter (fp32 AdamW: 12)", f"{summary['bytes_per_parameter']:.2f}"),
        ("peak memory of the process", _size(summary["peak_bytes"])),
        ("steps", f"{summary['step']:,} of {summary['steps']:,}"),
    ]
    if summary.get("tokens_per_second"):
        figures.append(("tokens per second", f"{summary['tokens_per_second']:,.0f}"))
    if summary.get("stalled") is not None:
        figures.append(("averages stalled, last sample", f"{summary['stalled']:.0%}"))
    cards = [_card("Loss", "Nats per token; validation text is held out.", _loss_chart(rows))]
    if stalls := _stall_chart([r for r in rows if "stalls" in r]):
        note = "Share of stored averages that a step left unchanged though it should have moved them."
        cards.append(_card("Stalled averages", note, stalls))
    cards.append(_card("Memory", "Live tensors of the whole model, beside AdamW in fp32.", _memory_bars(summary)))
    for i, (key, entry) in enumerate((summary.get("histograms") or {}).items()):
        note = f"How often each level of {entry['format']} is used in the inner matrices."
        cards.append(_card(f"Codes: {_plain(key)}", note, histogram(entry["counts"], f"codes of {key}", i)))
    sample = ""
    if summary.get("sample"):
        sample = f'<div class="card wide"><h2>A sample</h2><pre>{escape(summary["sample"])}</pre></div>'
    lead = f"{config.preset} · weights {config.weights}, first moment {config.exp_avg}, second {config.exp_avg_sq}"
    body = _figures(figures) + _grid(cards) + sample + _config_card(config)
    page = _page(f"Run {folder.name}", [lead, summary["text"]], body)
    return _write(folder / "report.html", page)


def write_comparison_report(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    table: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    text: str,
) -> Path:
    """Writes ``report.html`` of a comparison.

    Args:
        folder: where it goes.
        rows: the result rows of `masterless.lab.train.experiment`, one per run.
        table: one entry per label, as `masterless.lab.commands.compare` prints them.
        options: the configuration that all runs share.
        text: one line about the text.
    """
    colors = {entry["label"]: i for i, entry in enumerate(table)}
    done = [entry for entry in table if entry["loss"] is not None]
    marks = [(e["label"], e["bytes_measured"], e["loss"], colors[e["label"]]) for e in done]
    curves = [Series(label, _mean_curve(rows, label, "validation"), c, "dots") for label, c in colors.items()]
    late = [Series(s.name, _last_half(s.points), s.color, s.style) for s in curves]
    cards = [
        _card(
            "Loss against bytes",
            "Lower and further left is better. Bytes of weight and both moments, scales included.",
            scatter(marks, "bytes per parameter, measured", "validation loss"),
        ),
        _card("Memory", "Bytes per parameter of the inner matrices while they train.", _entry_bars(table)),
        _card("Validation loss", "Mean over seeds.", line_chart(curves, "step", "nats per token")),
        _card("The last half", "The same curves, where they differ.", line_chart(late, "step", "nats per token")),
    ]
    stalls = [
        Series(label, points, colors[label], style)
        for label in colors
        for key, field, style in (("exp_avg_sq", "stalled_codes", "line"), ("exp_avg_sq", "predicted", "dashed"))
        if (points := _stall_points(rows, label, key, field)) and max(points, key=lambda p: p[1])[1] > 0
    ]
    if stalls:
        named = [Series(s.name if s.style == "line" else "", s.points, s.color, s.style) for s in stalls]
        note = "Share of stored second moments that a step left unchanged; dashed: predicted."
        cards.append(_card("Stalled averages", note, line_chart(named, "step", "share", (0.0, 1.0), percent=True)))
    lost = [
        Series(label, points, colors[label])
        for label in colors
        if (points := _stall_points(rows, label, "weight", "lost"))
    ]
    if lost:
        note = "Share of weights of the inner matrices that a step should have moved and did not."
        cards.append(_card("Lost updates", note, line_chart(lost, "step", "share", (0.0, 1.0), percent=True)))
    columns = ("run", "loss", "gap", "bytes", "predicted", "peak", "step")
    head = "".join(f"<th>{name}</th>" for name in columns)
    lines = "".join(
        f"<tr><td>{escape(e['label'])}</td><td>{cell['loss']}</td><td>{cell['gap']}</td><td>{cell['measured']}</td>"
        f"<td>{cell['predicted']}</td><td>{cell['peak']}</td><td>{cell['time']}</td></tr>"
        for e in table
        for cell in (cells(e),)
    )
    scrolled = f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'
    wide = f'<div class="card">{scrolled}<p>{noise_note(table)}</p></div>'
    seeds = len({row["seed"] for row in rows})
    lead = f"{len(table)} configurations, {seeds} seed{'s' if seeds > 1 else ''} each, on the same text and batches."
    body = (
        f'<div style="height:24px"></div>{wide}<div style="height:16px"></div>' + _grid(cards) + _options_card(options)
    )
    return _write(folder / "report.html", _page("Comparison", [lead, text], body))


NOISE = "another processor or torch build moves the losses of low-bit presets by about 1%"


def noise_note(table: Sequence[Mapping[str, Any]]) -> str:
    """What a reader of the table should know about small differences."""
    seeds = max(len(e.get("losses", [])) for e in table)
    spread = f"±: standard deviation over {seeds} seeds" if seeds > 1 else "one seed: no spread is known, try --seeds 2"
    return f"{spread}; {NOISE}"


def cells(entry: Mapping[str, Any]) -> dict[str, str]:
    """One line of a comparison's table as text."""
    spread, noise = entry.get("loss_spread"), entry.get("gap_spread")
    loss = "diverged" if entry["loss"] is None else f"{entry['loss']:.4f}" + (f" ±{spread:.4f}" if spread else "")
    return {
        "loss": loss,
        "gap": "" if entry["gap"] is None else f"{entry['gap']:+.2%}" + (f" ±{noise:.2%}" if noise else ""),
        "measured": f"{entry['bytes_measured']:.3f}",
        "predicted": "" if entry["bytes_predicted"] is None else f"{entry['bytes_predicted']:.3f}",
        "peak": "" if entry["peak_bytes"] is None else _size(entry["peak_bytes"]),
        "time": "" if entry["seconds_per_step"] is None else f"{1000 * entry['seconds_per_step']:.1f} ms",
    }


# --- parts of a page ----------------------------------------------------------------------------------------


def _page(title: str, lead: Sequence[str], body: str) -> str:
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lead)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · masterless</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>{clip_definition()}<main><header><h1>{escape(title)}</h1>{paragraphs}</header>{body}</main></body></html>\n"
    )


def _write(path: Path, page: str) -> Path:
    write_text(path, page)
    return path


def _figures(figures: Sequence[tuple[str, str]]) -> str:
    return (
        '<div class="figures">'
        + "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in figures)
        + "</div>"
    )


def _grid(cards: Sequence[str]) -> str:
    return f'<div class="grid2">{"".join(cards)}</div>'


def _card(title: str, note: str, content: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2><p>{escape(note)}</p>{content}</section>'


def _loss_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    raw = [(r["step"], r["loss"]) for r in rows if r["loss"] is not None]
    validation = [(r["step"], r["validation_loss"]) for r in rows if r.get("validation_loss") is not None]
    if not raw:
        return "<p>No step was taken.</p>"
    # The first few percent fall from log(vocabulary); cutting them off shows what follows.
    rest = [y for x, y in raw if x >= 0.03 * raw[-1][0]] + [y for _, y in validation]
    span = max(rest) - min(rest) or 1.0
    window = (min(rest) - 0.05 * span, max(rest) + 0.05 * span)
    series = [Series("", _thin(raw), 0, "faint"), Series("training, smoothed", _thin(_smooth(raw)), 0)]
    return line_chart([*series, Series("validation", validation, 1, "dots")], "step", "nats per token", window)


def _stall_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    series = []
    keys = dict.fromkeys(key for row in rows for key in row["stalls"])
    for color, key in enumerate(keys):
        for field, style in (("stalled_codes", "line"), ("lost", "line"), ("predicted", "dashed")):
            points = [(r["step"], r["stalls"][key][field]) for r in rows if field in r["stalls"].get(key, {})]
            what = {"stalled_codes": "measured", "lost": "updates lost", "predicted": "predicted"}[field]
            series.append(Series(f"{_plain(key)}, {what}", points, color, style))
    return line_chart(series, "step", "share", (0.0, 1.0), percent=True)


def _memory_bars(summary: Mapping[str, Any]) -> str:
    memory = summary["memory"]
    dense = 4 * memory["parameters"]
    bars = {"this run": memory["bytes"], "AdamW, all fp32": dict.fromkeys(ROLES, dense)}
    longest = max(sum(roles.values()) for roles in bars.values())
    return _bars(bars, longest, lambda total: _size(total))


def _entry_bars(table: Sequence[Mapping[str, Any]]) -> str:
    bars = {e["label"]: e["roles"] for e in table if e.get("roles")}
    longest = max((sum(roles.values()) for roles in bars.values()), default=1.0)
    return _bars(bars, longest, lambda total: f"{total:.2f} bytes")


def _bars(bars: Mapping[str, Mapping[str, float]], longest: float, text: Any) -> str:
    parts = []
    for name, roles in bars.items():
        pieces = "".join(
            f'<i class="b{ROLES.index(role)}" style="width:{100 * size / longest:.3f}%" '
            f'title="{role}: {text(size)}"></i>'
            for role, size in roles.items()
        )
        total = text(sum(roles.values()))
        parts.append(
            f'<div class="bar"><p><span>{escape(name)}</span><span>{total}</span></p><div>{pieces}</div></div>'
        )
    used = [role for role in ROLES if any(role in roles for roles in bars.values())]
    return "".join(parts) + legend([(role, ROLES.index(role), "") for role in used])


def _config_card(config: RunConfig) -> str:
    sections: dict[str, dict[str, Any]] = {}
    for name, field in FIELDS.items():
        sections.setdefault(field.metadata["section"], {})[name] = getattr(config, name)
    body = "".join(f"<h3>{escape(name.capitalize())}</h3>{_list(options)}" for name, options in sections.items())
    return f'<div class="card wide"><h2>Configuration</h2>{body}</div>'


def _options_card(options: Mapping[str, Any]) -> str:
    return f'<div class="card wide"><h2>Configuration</h2>{_list(options)}</div>'


def _list(options: Mapping[str, Any]) -> str:
    items = "".join(
        f"<div><dt>{escape(_plain(name))}</dt><dd>{escape(_value(value))}</dd></div>"
        for name, value in options.items()
        if value is not None and not (name == "data" and not value)
    )
    return f"<dl>{items}</dl>"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(name: str) -> str:
    known = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "seq_len": "sequence length"}
    return known.get(name, name.replace("_", " "))


# --- numbers --------------------------------------------------------------------------------------------------


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_POINTS` points, each the mean of its neighbours."""
    size = math.ceil(len(points) / _POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential mean over about a fortieth of the curve, corrected for its start."""
    beta = 1 - 1 / max(2.0, len(points) / 40)
    mean = weight = 0.0
    result = []
    for x, y in points:
        mean, weight = beta * mean + (1 - beta) * y, beta * weight + (1 - beta)
        result.append((x, mean / weight))
    return result


def _mean_curve(rows: Sequence[Mapping[str, Any]], label: str, key: str) -> list[tuple[float, float]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["label"] == label:
            for step, value in row.get(key) or []:
                found.setdefault(step, []).append(value)
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]


def _last_half(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [p for p in points if p[0] >= points[-1][0] / 2] if points else []


def _stall_points(rows: Sequence[Mapping[str, Any]], label: str, key: str, field: str) -> list[tuple[float, float]]:
    """Means over seeds of one measured quantity."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for sample in (row.get("stalls") or []) if row["label"] == label else []:
            value = sample["stalls"].get(key, {}).get(field)
            if value is not None:
                found.setdefault(sample["step"], []).append(value)
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]
