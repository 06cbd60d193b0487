"""From rows to gaps: a recipe at its best learning rate against fp32 AdamW at its best learning rate and beta1.

Contract:
    * The rows of the groups "muon" and "lion" are compared with fp32 Muon and with fp32 Lion instead.
    * A gap is the mean over seeds of ``loss / reference loss - 1``, each run against the reference of its own seed.
    * Its error is the standard error of that mean. Three runs say little about their own spread, so the spread is
      pooled over the recipes of a setting (all that stay within 10% of fp32): `Summary.error`; the recipe's own is
      `Summary.own_error`.
    * Rows of another text, of another meaning of the library (`recipe.SPEC`) or of another regime never meet.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from masterless.optim.presets import Preset

from .plan import Cell
from .recipe import Job, Recipe, Setting
from .store import Row

POOLED_WITHIN = 10.0  # percent
QAT = "int4+32"  # what an INT4 forward pass costs with master weights and exact states


@dataclass(frozen=True)
class Summary:
    """What the rows say about one cell; gaps and errors in percent.

    Attributes:
        group: the question.
        setting: name of the setting.
        label: name of the recipe.
        bytes_per_parameter: its cost.
        lr: its best learning rate.
        losses: by seed, at that learning rate.
        sweep: mean loss over the seeds of the sweep, by learning rate (None: diverged).
        complete: whether the sweep has a best inside and all seeds are there.
        seeds: number of pairs behind the gap.
        gap: against the best fp32 (None: no pair, or diverged).
        error: standard error of the gap, from the pooled spread.
        own_error: from the recipe's own spread.
        qat_gap: against INT4 with master weights at its best beta1, for recipes whose forward pass is INT4.
    """

    group: str
    setting: str
    label: str
    bytes_per_parameter: float
    lr: float
    losses: dict[int, float | None]
    sweep: dict[float, float | None]
    complete: bool
    seeds: int = 0
    gap: float | None = None
    error: float | None = None
    own_error: float | None = None
    qat_gap: float | None = None


@dataclass(frozen=True)
class Noise:
    """How far runs scatter that differ in one kind of chance only: standard deviation in percent of the mean loss."""

    setting: str
    label: str
    kind: str
    runs: int
    deviation: float


def _cell_rows(cell: Cell, rows: Mapping[str, Row]) -> dict[tuple[float, int], Row]:
    """The plain runs of a cell by learning rate and seed."""
    _, lrs = _known_lrs(cell, rows)
    seeds = sorted({*cell.sweep, *cell.seeds})
    jobs = ((lr, seed, cell.job(lr, seed).key) for lr in lrs for seed in seeds)
    return {(lr, seed): rows[key] for lr, seed, key in jobs if key in rows}


def _known_lrs(cell: Cell, rows: Mapping[str, Row]) -> tuple[float | None, list[float]]:
    lrs, _, best = cell.swept(rows)
    return best, lrs


def _loss(row: Row) -> float:
    return math.inf if row["loss"] is None else float(row["loss"])


def describe(cell: Cell, rows: Mapping[str, Row]) -> Summary | None:
    """A cell without its gap; None if no learning rate has all seeds of the sweep."""
    found = _cell_rows(cell, rows)
    best, lrs = _known_lrs(cell, rows)
    sweep = {
        lr: statistics.mean(_loss(found[lr, seed]) for seed in cell.sweep)
        for lr in lrs
        if all((lr, seed) in found for seed in cell.sweep)
    }
    if not sweep:
        return None
    lr = best if best is not None else min(sweep, key=lambda lr: sweep[lr])
    losses = {seed: row["loss"] for (at, seed), row in sorted(found.items()) if at == lr}
    row = next(row for (at, _), row in found.items() if at == lr)
    return Summary(
        group=cell.group,
        setting=cell.setting.name,
        label=cell.recipe.label,
        bytes_per_parameter=row["bytes_per_parameter"],
        lr=lr,
        losses=losses,
        sweep={lr: None if math.isinf(loss) else loss for lr, loss in sweep.items()},
        complete=best is not None and cell.growth > 0 and set(cell.seeds) <= set(losses),
    )


def of_preset(cells: Sequence[Cell], found: Sequence[Summary], preset: Preset, setting: str) -> Summary | None:
    """What is known of a preset in a setting: of the rows with its formats and options, those with the most seeds."""
    known = {(s.group, s.setting, s.label): s for s in found}
    same = [
        known.get((c.group, setting, c.recipe.label))
        for c in cells
        if c.setting.name == setting
        and c.recipe.weights == preset.weights
        and (c.recipe.traded_last, c.recipe.traded_for) == (preset.trade_last, preset.trade_for)
        and dict(c.recipe.options) == dict(preset.options)
    ]
    return max((s for s in same if s is not None and s.gap is not None), key=lambda s: s.seeds, default=None)


def paired_gaps(losses: Mapping[int, float | None], reference: Mapping[int, float | None]) -> list[float]:
    """Percent above the reference, seed by seed, over the seeds that both have; infinite where a run diverged."""
    gaps = []
    for seed in sorted(set(losses) & set(reference)):
        mine, theirs = losses[seed], reference[seed]
        if theirs is not None:
            gaps.append(math.inf if mine is None else 100 * (mine / theirs - 1))
    return gaps


def standard_error(deviation: float, runs: int) -> float:
    """Of the mean of so many runs."""
    return deviation / math.sqrt(runs)


def pooled_deviation(samples: Sequence[Sequence[float]]) -> float | None:
    """The common standard deviation of samples with means of their own."""
    squares = sum(statistics.variance(sample) * (len(sample) - 1) for sample in samples if len(sample) > 1)
    freedom = sum(len(sample) - 1 for sample in samples)
    return math.sqrt(squares / freedom) if freedom > 0 else None


def best_reference(summaries: Sequence[Summary]) -> Summary | None:
    """The row with the lowest mean loss among those with the most seeds."""
    finite = [s for s in summaries if s.losses and None not in s.losses.values()]
    if not finite:
        return None
    most = max(len(s.losses) for s in finite)
    return min(
        (s for s in finite if len(s.losses) == most), key=lambda s: statistics.mean(x for x in s.losses.values() if x)
    )


def of_one_text(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of that version of each corpus which most of them have (another Python has another source text)."""
    texts: dict[str, Counter[str]] = {}
    for row in rows.values():
        texts.setdefault(row["corpus"], Counter())[row["text"]] += 1
    usual = {corpus: count.most_common(1)[0][0] for corpus, count in texts.items()}
    return {key: row for key, row in rows.items() if row["text"] == usual[row["corpus"]]}


def summarise(cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Summary]:
    """All cells that have rows, with gaps and errors, in the order of the cells."""
    rows = of_one_text(rows)
    settings: dict[tuple[str, str], list[tuple[Cell, Summary]]] = {}
    widest: dict[tuple[str, str, str], Cell] = {}  # a cell may be asked for again with more seeds
    for cell in cells:
        name = (cell.group, cell.setting.name, cell.recipe.label)
        if name not in widest or len(widest[name].seeds) < len(cell.seeds):
            widest[name] = replace(cell, sweep=widest[name].sweep if name in widest else cell.sweep)
    for cell in widest.values():
        if (summary := describe(cell, rows)) is not None:
            settings.setdefault((summary.setting, _baseline(cell)), []).append((cell, summary))
    return [summary for found in settings.values() for summary in _with_gaps(found)]


def _baseline(cell: Cell) -> str:
    """The optimizer whose fp32 rows a cell is compared with."""
    return cell.group if cell.group in ("muon", "lion") else "adamw"


def _with_gaps(found: Sequence[tuple[Cell, Summary]]) -> list[Summary]:
    fp32 = [s for cell, s in found if cell.recipe.is_fp32 and cell.recipe.optimizer == _baseline(cell)]
    reference = best_reference(fp32)
    if reference is None:
        return [s for _, s in found]
    qat = best_reference([s for cell, s in found if cell.recipe.weights == QAT and not cell.recipe.coarse_from])
    gaps = [paired_gaps(s.losses, reference.losses) for _, s in found]
    # A recipe that several groups ask for counts once.
    usual = {tuple(g) for g, (_, s) in zip(gaps, found, strict=True) if s.losses != reference.losses and _usual(g)}
    spread = pooled_deviation(sorted(usual))
    summaries = []
    for mine, (cell, summary) in zip(gaps, found, strict=True):
        if not mine or any(map(math.isinf, mine)):
            summaries.append(summary)
            continue
        shows_more = cell.recipe.traded_for == "int8"
        visible4 = (cell.recipe.weights or "").startswith("int4") and not shows_more and qat is not None
        against = paired_gaps(summary.losses, qat.losses) if visible4 and qat else []
        is_reference = summary.losses == reference.losses
        summaries.append(
            replace(
                summary,
                seeds=len(mine),
                gap=statistics.mean(mine),
                error=None if spread is None or is_reference else standard_error(spread, len(mine)),
                own_error=standard_error(statistics.stdev(mine), len(mine)) if len(mine) > 2 else None,
                qat_gap=statistics.mean(against) if against else None,
            )
        )
    return summaries


def _usual(gaps: Sequence[float]) -> bool:
    return len(gaps) > 1 and all(abs(gap) < POOLED_WITHIN for gap in gaps)


def as_data(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Plain data for JSON."""
    return [asdict(summary) for summary in summaries]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def gap_text(summary: Summary) -> str:
    """A gap with its error."""
    if None in summary.losses.values():
        return "diverged"
    if summary.gap is None:
        return ""
    return f"{summary.gap:+.2f}%" + ("" if summary.error is None else f" ± {summary.error:.2f}")


def markdown(summaries: Sequence[Summary]) -> str:
    """Tables, one a setting and group."""
    groups: dict[tuple[str, str], list[Summary]] = {}
    for s in summaries:
        groups.setdefault((s.setting, s.group), []).append(s)
    parts = [f"### {setting}: {group}\n\n{table(own)}" for (setting, group), own in sorted(groups.items())]
    return "\n\n".join(parts)


def table(summaries: Sequence[Summary]) -> str:
    """One table; an unfinished row is marked with a star."""
    lines = ["| recipe | bytes/param | best lr | loss | seeds | gap to fp32 | own error | gap to INT4 QAT |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for s in summaries:
        finite = [x for x in s.losses.values() if x is not None]
        cells = [
            s.label + ("" if s.complete else " *"),
            f"{s.bytes_per_parameter:.2f}",
            f"{s.lr:g}",
            _number(statistics.mean(finite) if finite else None, ".4f"),
            str(len(s.losses)),
            gap_text(s),
            _number(s.own_error, ".2f"),
            _number(s.qat_gap, "+.2f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def noise(cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Noise]:
    """The scatter by kind of chance: order of the data, dither, and the seed of everything."""
    found = []
    for cell in cells:
        if not cell.extra or (summary := describe(cell, rows)) is None:
            continue
        base = cell.job(summary.lr)
        first = rows.get(base.key)
        samples: dict[str, list[float]] = {"seed": [x for x in summary.losses.values() if x is not None]}
        for seed, order, dither in cell.extra:
            row = rows.get(base.at(seed=seed, order=order, dither=dither).key)
            if row is not None and row["loss"] is not None and first is not None:
                kind = "dither" if order is None else "order"
                samples.setdefault(kind, [_loss(first)]).append(row["loss"])
        for kind, losses in samples.items():
            if len(losses) > 1:
                deviation = 100 * statistics.stdev(losses) / statistics.mean(losses)
                found.append(Noise(cell.setting.name, cell.recipe.label, kind, len(losses), deviation))
    return found


def noise_table(cells: Sequence[Cell], rows: Mapping[str, Row]) -> str:
    """The scatter as a table."""
    lines = ["| setting | recipe | what differs | runs | standard deviation |", "|---|---|---|---|---|"]
    lines += [f"| {n.setting} | {n.label} | {n.kind} | {n.runs} | {n.deviation:.2f}% |" for n in noise(cells, rows)]
    return "\n".join(lines)


def additivity(cells: Sequence[Cell], rows: Mapping[str, Row], parts: Callable[[Recipe], list[Recipe]]) -> str:
    """Whether the gaps of a recipe's parts add up to its own: all against fp32 of the same beta1, seed by seed.

    Args:
        cells: of one setting.
        rows: the rows.
        parts: the recipes that a recipe is made of.
    """
    widest = {_what(cell.recipe): cell for cell in sorted(cells, key=lambda cell: len(cell.seeds))}
    found = {what: s.losses for what, cell in widest.items() if (s := describe(cell, of_one_text(rows))) is not None}
    exact = {
        cell.recipe.beta1: found[what] for what, cell in widest.items() if what in found and _is_usual(cell.recipe)
    }
    table: list[tuple[str, list[list[float]]]] = []
    for what, cell in widest.items():
        pieces = [_what(piece) for piece in parts(cell.recipe)] if cell.recipe.weights else []
        if pieces and what not in pieces and {what, *pieces} <= found.keys() and cell.recipe.beta1 in exact:
            losses = exact[cell.recipe.beta1]
            table.append((cell.recipe.label, [paired_gaps(found[one], losses) for one in (*pieces, what)]))
    spread = pooled_deviation([gaps for _, row in table for gaps in row]) or 0.0
    heads = ("recipe", "weight alone", "first moment alone", "second moment alone", "sum", "together", "difference")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for label, row in table:
        *alone, together = (statistics.mean(gaps) for gaps in row)
        error = math.hypot(*(standard_error(spread, len(gaps)) for gaps in row))
        figures = [f"{gap:+.2f}%" for gap in (*alone, sum(alone), together)]
        lines.append(f"| {label} | {' | '.join(figures)} | {together - sum(alone):+.2f} ± {error:.2f} |")
    return "\n".join(lines)


def _what(recipe: Recipe) -> str:
    """What tells recipes apart, whatever their labels."""
    return Job(recipe, Setting(), 0.0).key


def _is_usual(recipe: Recipe) -> bool:
    """fp32 AdamW with nothing unusual but beta1."""
    return recipe.is_fp32 and recipe.optimizer == "adamw" and "moment_units" not in recipe.options
