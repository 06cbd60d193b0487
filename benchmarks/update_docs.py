"""Puts the studies' figures and tables into the documentation.

A table stands between ``<!-- study:NAME -->`` and ``<!-- /study:NAME -->``.

    python benchmarks/update_docs.py           # rewrite the tables from benchmarks/results
    python benchmarks/update_docs.py --check   # fail if a table differs from the results (a test does this)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bench_figures
import bench_summary
import dither_study
import figures
import finetune_study
import gpu_compile
import gpu_roofline
import ideas_study
import products_study
import rounding_again
import scale_drift
import smollm2_study
import staleness_study
import study
import tasks_study
from jobs import load
from recipes import analysis
from recipes.groups import SMALL, group_names, parts
from recipes.groups import cells as recipe_cells
from recipes.store import RESULTS as RECIPES
from recipes.store import Store

from masterless.lab.bench import report
from masterless.lab.plan.parameters import load_model
from masterless.lab.plan.table import Settings, gigabytes, make_plan
from masterless.optim.presets import PRESETS

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
MARKED = re.compile(r"(<!-- study:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /study:(?P=name) -->)", re.DOTALL)


def _study_table(name: str) -> Callable[[], str]:
    def build() -> str:
        experiments = study.STUDIES[name]()
        return study.table(study.finished(experiments), experiments)

    return build


TABLES: dict[str, Callable[[], str]] = {name: _study_table(name) for name in study.STUDIES}


def presets_table() -> str:
    """Every preset that the deciding rows of the frontier study measured: bytes of a large matrix, loss, gaps."""
    experiments = study.STUDIES["frontier"]()
    groups = study.grouped(study.finished(experiments), experiments)
    if not groups:
        return "(not run yet)"
    ((first, best),) = study.references(groups).values()
    rows = [
        "| preset | what | bytes/param | validation loss | gap to fp32, b1 .9 | gap to the best fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for preset in PRESETS.values():
        for found in groups.values():
            if study.preset_of(found[0]) == preset.name:
                losses = " ".join(f"{row['loss']:.4f}" for row in found)
                cells = (f"`{preset.name}`", preset.summary, f"{preset.bytes_per_parameter:.2f}", losses)
                rows.append(f"| {' | '.join((*cells, study.gap(found, first), study.gap(found, best)))} |")
    return "\n".join(rows)


TABLES["presets"] = presets_table
TABLES["dither"] = lambda: dither_study.table(load(dither_study.RESULTS))
TABLES["gpu-compile"] = lambda: gpu_compile.table(gpu_compile.committed())
TABLES["gpu-roofline"] = gpu_roofline.table
TABLES["products"] = lambda: products_study.table(load(products_study.RESULTS))
TABLES["ideas"] = lambda: ideas_study.table(load(ideas_study.RESULTS))
TABLES["scale-drift"] = lambda: scale_drift.table(load(scale_drift.RESULTS))
TABLES["stalls"] = lambda: staleness_study.stalls_table(load(staleness_study.RESULTS))
TABLES["resets"] = lambda: staleness_study.resets_table(load(staleness_study.RESULTS))
TABLES["tasks"] = lambda: tasks_study.table(load(tasks_study.RESULTS))
TABLES["smollm2"] = lambda: smollm2_study.losses_table(load(smollm2_study.RESULTS))
TABLES["smollm2-jump"] = lambda: smollm2_study.jump_table(load(smollm2_study.RESULTS))
TABLES["smollm2-memory"] = lambda: smollm2_study.memory_table(load(smollm2_study.RESULTS))
TABLES["finetune"] = lambda: finetune_study.table(load(finetune_study.RESULTS))


def _bench_documents(folder: str = "bench") -> list[report.Document]:
    """What the benchmark has measured, one document for each processor."""
    return [json.loads(path.read_text()) for path in sorted((study.RESULTS / folder).glob("*.json"))]


def _bench(
    table: Callable[[report.Document], str], section: str, size: str = "", folder: str = "bench"
) -> Callable[[], str]:
    """A table of the benchmark for every processor on which it was measured."""

    def build() -> str:
        measured = []
        for document in _bench_documents(folder):
            rows = document.get(section, [])
            if any(row["size"] == size for row in rows) if size else rows:
                measured.append(f"{report.processor_line(document)}:\n\n{table(document)}")
        return "\n\n".join(measured) or "(not run yet)"

    return build


TABLES["bench-alone"] = _bench(
    lambda document: report.markdown(report.step_table(document, "gpt2")), "step", "gpt2", "bench_alone"
)
TABLES["bench-alone-slow"] = _bench(
    lambda document: report.markdown(report.step_table(document, "gpt2")), "step", "gpt2", "bench_alone_slow"
)
TABLES["bench-summary"] = lambda: bench_summary.table(
    [
        *((document, "") for document in _bench_documents("bench_alone")),
        *((document, ", slow memory") for document in _bench_documents("bench_alone_slow")),
    ],
    "gpt2",
)
for _size in ("rows", "tiny"):
    TABLES[f"bench-summary-{_size}"] = lambda size=_size: bench_summary.table(
        ((document, "") for document in _bench_documents("bench_short")), size
    )
TABLES["bench-machine"] = lambda: "\n\n".join(map(report.machine_line, _bench_documents())) or "(not run yet)"
for _size in ("gpt2", "odd", "moe", "short", "tiny"):
    TABLES[f"bench-{_size}"] = _bench(
        lambda document, size=_size: report.markdown(report.step_table(document, size)), "step", _size
    )
TABLES["bench-forward"] = _bench(lambda document: report.markdown(report.forward_table(document)), "forward")
TABLES["bench-end-to-end"] = _bench(
    lambda document: report.markdown(report.end_to_end_table(document)), "end_to_end", folder="bench_end_to_end"
)
TABLES["bench-end-to-end-cached"] = _bench(
    lambda document: report.markdown(report.end_to_end_table(document)), "end_to_end", folder="bench_end_to_end_cached"
)
for _size in ("rows", "tiny"):
    TABLES[f"bench-alone-{_size}"] = _bench(
        lambda document, size=_size: report.markdown(report.step_table(document, size)), "step", _size, "bench_short"
    )
TABLES["rounding-again"] = lambda: rounding_again.table("ring")
TABLES["rounding-fma"] = lambda: rounding_again.table("fma")
TABLES["bench-growth"] = _bench(lambda document: report.markdown(report.growth_table(document)), "growth")


def _recipes(setting: str, group: str) -> Callable[[], str]:
    """A table of the study of recipes, the gap to fp32 first."""

    def build() -> str:
        rows = Store(RECIPES).rows()
        found = [s for s in analysis.summarise(recipe_cells(), rows) if (s.setting, s.group) == (setting, group)]
        return analysis.table(found) if found else "(not run yet)"

    return build


for _setting in dict.fromkeys(cell.setting.name for cell in recipe_cells()):
    for _group in group_names():
        name = "-".join(("recipes", *re.split("[@, ]+", _setting), *_group.split()))
        TABLES[name] = _recipes(_setting, _group)


def additivity_at_37k() -> str:
    """Whether the parts of a recipe add up."""
    cells = [cell for cell in recipe_cells() if cell.setting == SMALL and cell.group not in ("muon", "lion")]
    return analysis.additivity(cells, Store(RECIPES).rows(), parts)


TABLES["recipes-additivity"] = additivity_at_37k


def presets_at_20(only_measured: bool = False) -> str:
    """Every preset (or those that were measured) with its gap at 20 tokens per parameter, as far as it is known."""
    cells = recipe_cells()
    found = analysis.summarise(cells, Store(RECIPES).rows())
    settings = ("37k@20", "150k@20", "600k@20")
    rows = [
        f"| preset | what | bytes/param | {' | '.join(f'gap, {s}' for s in settings)} | pretrained start |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset in PRESETS.values():
        gaps = []
        for setting in settings:
            best = analysis.of_preset(cells, found, preset, setting)
            gaps.append("-" if best is None else analysis.gap_text(best) + (", one seed" if best.seeds == 1 else ""))
        if only_measured and set(gaps) == {"-"}:
            continue
        start = "rounded stochastically" if preset.pretrained else "as it is"
        start = "INT8, no first moment" if preset.for_trained_weights().weights != preset.weights else start
        cost = f"{preset.bytes_per_parameter:.2f}"
        rows.append(f"| `{preset.name}` | {preset.summary} | {cost} | {' | '.join(gaps)} | {start} |")
    return "\n".join(rows)


TABLES["presets-at-20"] = presets_at_20
TABLES["presets-measured"] = lambda: presets_at_20(only_measured=True)
TABLES["recipes-noise"] = lambda: analysis.noise_table(recipe_cells(), Store(RECIPES).rows())


def cluster_table() -> str:
    """What a rank of a cluster would hold and send, as `masterless plan` computes it."""
    rows = [
        "| model, ranks | system | weights + master | states | total | gather | reduce |",
        "|---|---|---|---|---|---|---|",
    ]
    configs = ROOT / "tests" / "data" / "configs"
    models = (
        ("Llama-3-8B", configs / "llama-3-8b.json", 8),
        ("Llama-3-70B", configs / "llama-3-70b.json", 64),
        ("1.03T MoE", ROOT / "docs" / "data" / "moe-1t.json", 256),
    )
    for title, path, shards in models:
        plan = make_plan(load_model(path), Settings(checkpointing="full", shards=shards))
        known = {row.system.name: row for row in plan.rows}
        for name in ("torch AdamW", "2-byte", "1.3-byte", "1-byte-int4"):
            row = known[name]
            sizes = (row.weights + row.master, row.states, row.total, row.gathered, row.reduced)
            first = f"{title}, {shards}" if name == "torch AdamW" else ""
            rows.append(f"| {first} | {name} | {' | '.join(map(gigabytes, sizes))} |")
    return "\n".join(rows)


TABLES["plan-cluster"] = cluster_table


def pages() -> list[Path]:
    """The README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def outdated() -> Iterator[tuple[Path, str]]:
    """Pages whose tables differ from the results, with their text brought up to date."""
    for page in pages():
        text = page.read_text()

        def fresh(match: re.Match[str]) -> str:
            return f"{match[1]}{TABLES[match['name']]()}\n{match[4]}"

        updated = MARKED.sub(fresh, text)
        if updated != text:
            yield page, updated


def _draw_bench() -> None:
    for document in _bench_documents()[:1]:  # libraries differ by far more than machines do
        if document.get("step"):
            bench_figures.draw_step(document, FIGURES / "bench.png")
        if document.get("growth"):
            bench_figures.draw_growth(document, FIGURES / "growth.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    arguments = parser.parse_args()
    stale = list(outdated())
    if not arguments.check:
        figures.draw_frontier(FIGURES / "frontier.png")
        staleness_study.draw(load(staleness_study.RESULTS), FIGURES / "staleness.png")
        _draw_bench()
    for page, text in stale:
        print(f"{'out of date' if arguments.check else 'updated'}: {page.relative_to(ROOT)}")
        if not arguments.check:
            page.write_text(text)
    sys.exit(1 if stale and arguments.check else 0)


if __name__ == "__main__":
    main()
