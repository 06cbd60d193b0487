"""One self-contained HTML file about a run or a comparison: no script, no font, no picture is fetched."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .config import FIELDS, RunConfig, read_toml, resolve
from .observe import load_metrics
from .run_files import write_text
from .svg import Series, clip_definition, histogram, legend, line_chart, scatter

ROLES = ("weights", "first moment", "second moment", "gradients")
_POINTS = 400  # of a curve; more are averaged


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
    cards = [Card("Loss", "Nats per token; validation text is held out.", _loss_chart(rows))]
    if stalls := _stall_chart([r for r in rows if "stalls" in r]):
        note = "Share of stored averages that a step left unchanged though it should have moved them."
        cards.append(Card("Stalled averages", note, stalls))
    cards.append(Card("Memory", "Live tensors of the whole model, beside AdamW in fp32.", _memory_bars(summary)))
    for i, (key, entry) in enumerate((summary.get("histograms") or {}).items()):
        note = f"How often each level of {entry['format']} is used in the inner matrices."
        cards.append(Card(f"Codes: {_plain(key)}", note, histogram(entry["counts"], f"codes of {key}", i)))
    lead = f"{config.preset} · weights {config.weights}, first moment {config.exp_avg}, second {config.exp_avg_sq}"
    return _write(
        folder,
        title=f"Run {folder.name}",
        lead=[lead, summary["text"]],
        words=_words_of_run(rows, summary),
        figures=figures,
        cards=cards,
        sample=summary.get("sample"),
        configuration=_sections(config),
    )


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
        Card(
            "Loss against bytes",
            "Lower and further left is better. Bytes of weight and both moments, scales included.",
            scatter(marks, "bytes per parameter, measured", "validation loss"),
        ),
        Card("Memory", "Bytes per parameter of the inner matrices while they train.", _entry_bars(table)),
        Card("Validation loss", "Mean over seeds.", line_chart(curves, "step", "nats per token")),
        Card("The last half", "The same curves, where they differ.", line_chart(late, "step", "nats per token")),
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
        cards.append(Card("Stalled averages", note, line_chart(named, "step", "share", (0.0, 1.0), percent=True)))
    lost = [
        Series(label, points, colors[label])
        for label in colors
        if (points := _stall_points(rows, label, "weight", "lost"))
    ]
    if lost:
        note = "Share of weights of the inner matrices that a step should have moved and did not."
        cards.append(Card("Lost updates", note, line_chart(lost, "step", "share", (0.0, 1.0), percent=True)))
    columns = ("run", "loss", "gap", "bytes", "predicted", "peak", "step")
    lines = [[e["label"], *cells(e).values()] for e in table]
    seeds = len({row["seed"] for row in rows})
    lead = f"{len(table)} configurations, {seeds} seed{'s' if seeds > 1 else ''} each, on the same text and batches."
    note = f"gap: loss above the first row's; less is better, and a minus sign is a lower loss. {noise_note(table)}"
    return _write(
        folder,
        title="Comparison",
        lead=[lead, text],
        words=_words_of_comparison(table),
        table={"columns": columns, "rows": lines, "note": note},
        cards=cards,
        configuration={"": _texts(options)},
    )


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


# --- the page -----------------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A chart with its heading and a line of explanation."""

    title: str
    note: str
    content: str


def _write(folder: Path, **context: Any) -> Path:
    import jinja2  # torch needs it as well

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    page = environment.get_template("report.html").render(clip=clip_definition(), **context)
    write_text(folder / "report.html", page)
    return folder / "report.html"


def _words_of_run(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """What a run shows, in a few sentences."""
    memory = summary["memory"]
    whole, dense = sum(memory["bytes"].values()), 16 * memory["parameters"]
    words = [
        f"The inner matrices took {summary['bytes_per_parameter']:.2f} bytes per parameter (fp32 AdamW: 12); the whole "
        f"model with its gradients {_size(whole)}, {whole / dense:.0%} of what fp32 AdamW takes."
    ]
    losses = [r["validation_loss"] for r in rows if r.get("validation_loss") is not None]
    if len(losses) > 1:
        trend = "still falling" if losses[-1] <= min(losses[:-1]) else f"lowest ({min(losses):.4f}) before the end"
        words.append(f"Validation loss went from {losses[0]:.4f} to {losses[-1]:.4f} and was {trend}.")
    if summary.get("stalled") is not None:
        words.append(
            f"In the last sampled step {summary['stalled']:.0%} of the stored averages kept their codes; under "
            f"stochastic rounding that is usual, and they follow their gradients on average."
        )
    return " ".join(words)


def _words_of_comparison(table: Sequence[Mapping[str, Any]]) -> str:
    """What a comparison shows, in a few sentences."""
    done = [e for e in table if e["loss"] is not None]
    if not done:
        return "No run finished."
    best, first = min(done, key=lambda e: e["loss"]), table[0]
    words = [f"{best['label']} has the lowest loss, {best['loss']:.4f}, at {best['bytes_measured']:.2f} bytes/param."]
    others = [e for e in done if e is not first and e["gap"] is not None]
    near = [e["label"] for e in others if abs(e["gap"]) <= max(e.get("gap_spread") or 0.0, 0.01)]
    if near:
        words.append(f"Within 1% of {first['label']}, or within the spread of the seeds: {', '.join(near)}.")
    elif others:
        words.append(f"None of the others comes within 1% of {first['label']}.")
    diverged = [e["label"] for e in table if e["loss"] is None]
    return " ".join(words + ([f"Diverged: {', '.join(diverged)}."] if diverged else []))


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


def _sections(config: RunConfig) -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, Any]] = {}
    for name, field in FIELDS.items():
        sections.setdefault(field.metadata["section"].capitalize(), {})[name] = getattr(config, name)
    return {name: _texts(options) for name, options in sections.items()}


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    shown = {k: v for k, v in options.items() if v is not None and not (k == "data" and not v)}
    return {_plain(name): _value(value) for name, value in shown.items()}


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
