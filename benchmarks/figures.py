"""The figures of the documentation, drawn from the committed results by `update_docs.py`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import frontier
import study

GROUPS = (  # label of the legend, colour, and what its rows are
    ("fp32 AdamW", "0.3", study.is_full_precision),
    ("others' formats", "C1", lambda row: row["label"] in {recipe.label for recipe in frontier.PEERS}),
    ("masterless, INT4 seen by the forward pass", "C2", lambda row: str(row["weights"]).startswith("int4")),
    ("masterless, 6 or 8 bits", "C0", lambda row: True),
)


def frontier_points() -> list[dict[str, Any]]:
    """One point a recipe of the deciding rows: bytes, the gap's mean and extremes over seeds, its group."""
    experiments = study.STUDIES["frontier"]()
    groups = study.grouped(study.finished(experiments), experiments)
    if not groups:
        return []
    ((_, best),) = study.references(groups).values()
    reference = {row["seed"]: row["loss"] for row in best}
    points = []
    for label, rows in groups.items():
        found = [row for row in rows if row["loss"] is not None and row["seed"] in reference]
        if found and not str(found[0]["weights"]).endswith("+32"):  # master weights cost what fp32 costs, and more
            gaps = [100 * (r["loss"] / reference[r["seed"]] - 1) for r in found]
            group = next(i for i, (_, _, belongs) in enumerate(GROUPS) if belongs(found[0]))
            points.append(
                {
                    "label": label if group == 0 else study.preset_of(found[0]) or label,
                    "bytes": found[0]["bytes_per_parameter"],
                    "gap": statistics.mean(gaps),
                    "least": min(gaps),
                    "most": max(gaps),
                    "group": group,
                }
            )
    return points


def draw_frontier(path: Path) -> None:
    """Loss gap against bytes per parameter; bars span the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    points = frontier_points()
    for index, (name, colour, _) in enumerate(GROUPS):
        own = [p for p in points if p["group"] == index]
        spread = [[p["gap"] - p["least"] for p in own], [p["most"] - p["gap"] for p in own]]
        axes.errorbar(
            [p["bytes"] for p in own], [p["gap"] for p in own], spread, fmt="o", color=colour, capsize=3, label=name
        )
    placed: list[tuple[float, float]] = []  # where labels stand: they run to the right and must not meet
    for p in sorted(points, key=lambda p: p["gap"]):
        near = [y for x, y in placed if max(x, p["bytes"]) / min(x, p["bytes"]) < 2.6]
        height = max([p["gap"] + 0.03, *(y + 0.09 for y in near)])
        placed.append((p["bytes"], height))
        line = {"arrowstyle": "-", "color": "0.7", "lw": 0.5} if height > p["gap"] + 0.04 else None
        axes.annotate(p["label"], (p["bytes"], p["gap"]), (1.05 * p["bytes"], height), fontsize=6.5, arrowprops=line)
    axes.axhline(0, color="0.8", zorder=0)
    axes.set_xscale("log")
    ticks = (1, 1.3, 1.8, 2.3, 4, 6, 9, 12)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.95, 18)  # room for labels
    axes.set_xlabel("bytes per parameter while training: weight and optimizer states, scales included")
    axes.set_ylabel("validation loss against the best fp32 AdamW, %")
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0.36, 0.08))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
