"""The plots of a benchmark, drawn from its JSON document by `update_docs.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def _axes(count: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def draw_step(document: dict[str, Any], path: Path) -> None:
    """Ratios to the baseline, one panel per size, logarithmic because peers are far away."""
    sizes = list(dict.fromkeys(row["size"] for row in document["step"]))
    names = list(dict.fromkeys(row["name"] for row in document["step"] if row["ratio"] is not None))
    threads = max(row["threads"] for row in document["step"])
    figure, axes = _axes(len(sizes), 3.2 + 2.6 * len(sizes), 0.9 + 0.28 * len(names))
    for axis, size in zip(axes, sizes, strict=True):
        ratios = {r["name"]: r for r in document["step"] if r["size"] == size and r["threads"] == threads}
        shown = [name for name in names if name in ratios and ratios[name]["ratio"] is not None]
        colours = ["tab:gray" if ratios[n]["peer"] else "tab:blue" for n in shown]
        axis.barh([names.index(n) for n in shown], [ratios[n]["ratio"] for n in shown], color=colours)
        for name in shown:
            axis.text(ratios[name]["ratio"], names.index(name), f" {ratios[name]['ratio']:.3g}", va="center")
        axis.axvline(1.0, color="black", linewidth=0.8)
        widest = max((ratios[n]["ratio"] for n in shown), default=1.0)
        axis.set(xscale="log", title=f"{size}, {threads} threads", xlabel="time / torch fused", xlim=(0.5, 3 * widest))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [])
        axis.invert_yaxis()
    figure.savefig(path, dpi=110)


def draw_growth(document: dict[str, Any], path: Path) -> None:
    """Time of a step, and time per parameter, against the number of parameters."""
    figure, (total, each) = _axes(2, 9, 3.6)
    for name in dict.fromkeys(p["name"] for p in document["growth"]):
        points = [p for p in document["growth"] if p["name"] == name]
        x = [p["parameters"] for p in points]
        total.plot(x, [p["milliseconds"] for p in points], "o-", label=name)
        each.plot(x, [p["nanoseconds_per_parameter"] for p in points], "o-", label=name)
    total.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms per step")
    each.set(xscale="log", xlabel="parameters", ylabel="ns per parameter")
    each.set_ylim(bottom=0)
    total.legend(fontsize="small")
    figure.savefig(path, dpi=110)
