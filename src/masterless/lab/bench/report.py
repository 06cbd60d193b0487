"""Tables and plots of a benchmark, from its JSON document: the command line and the documentation share them.

The document::

    {"machine": {...}, "options": {...}, "parity": 7,
     "step": [measure.Row, ...], "forward": [forward.Row, ...], "growth": [growth.Point, ...]}
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Document = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # header, rows


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    from masterless import __version__
    from masterless.backends.cpu import library as kernels
    from masterless.lab.bench import peers

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "masterless": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "instruction_set": kernels.describe().instruction_set,
        "peers": peers.versions(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_line(document: Document) -> str:
    """The machine and the versions in one line."""
    m = document["machine"]
    versions = {"torch": m["torch"], **m["peers"]}
    listing = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{m['cores']} cores of {m['processor']} ({m['instruction_set']}); {listing}"


# --- tables -----------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"


def step_tables(document: Document) -> dict[str, Table]:
    """One table a size: an entry a row, thread counts side by side."""
    return {f"{size}: {_tensors(document, size)}": step_table(document, size) for size in _sizes(document)}


def _sizes(document: Document) -> list[str]:
    return list(dict.fromkeys(row["size"] for row in document["step"]))


def _tensors(document: Document, size: str) -> str:
    row = next(row for row in document["step"] if row["size"] == size)
    return f"{row['parameters']:,} parameters in {row['tensors']} tensor{'s' if row['tensors'] > 1 else ''}"


def step_table(document: Document, size: str) -> Table:
    """The entries on one size: milliseconds, ratio and limit for each number of threads, bytes, remarks."""
    rows = [row for row in document["step"] if row["size"] == size]
    threads = sorted({row["threads"] for row in rows}, reverse=True)
    header = ["step"]
    for n in threads:
        header += [f"ms, {n} thr.", "ratio", "limit"]
    header += ["bytes/param", "moved/param", "note"]
    body = []
    for name in dict.fromkeys(row["name"] for row in rows):
        by_threads = {row["threads"]: row for row in rows if row["name"] == name}
        cells = [name]
        for n in threads:
            row = by_threads.get(n, {})
            cells += [_number(row.get("milliseconds")), _number(row.get("ratio")), _number(row.get("limit"))]
        first = next(iter(by_threads.values()))
        cells += [_number(first["bytes_per_parameter"]), _number(first["bytes_moved_per_parameter"]), first["note"]]
        body.append(cells)
    return header, body


def forward_table(document: Document) -> Table:
    """Decoding and products, each with its ratio to the first of its kind."""
    header = ["what", "dtype", "tokens", "weight", "threads", "ms", "ratio"]
    return header, [
        [
            row["what"],
            row["dtype"],
            str(row["tokens"] or "-"),
            row["name"],
            str(row["threads"]),
            _number(row["milliseconds"], 3),
            _number(row["ratio"]),
        ]
        for row in document["forward"]
    ]


def growth_table(document: Document) -> Table:
    """Time and extra memory by size."""
    header = ["step", "parameters", "threads", "ms", "ns/param", "extra memory, KiB"]
    return header, [
        [
            p["name"],
            f"{p['parameters']:,}",
            str(p["threads"]),
            _number(p["milliseconds"]),
            f"{p['nanoseconds_per_parameter']:.3f}",
            "-" if p["extra_bytes"] is None else f"{p['extra_bytes'] / 1024:.0f}",
        ]
        for p in document["growth"]
    ]


def tables(document: Document) -> dict[str, Table]:
    """All tables of a document, by title."""
    found: dict[str, Table] = {}
    if document.get("step"):
        found |= step_tables(document)
    if document.get("forward"):
        found["forward: decoding and products of one layer"] = forward_table(document)
    if document.get("growth"):
        found["growth: one step of one matrix"] = growth_table(document)
    return found


def markdown(table: Table) -> str:
    """A table as markdown."""
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- files ------------------------------------------------------------------------------------------------------


def write(document: Document, out: Path, figures: Path) -> list[Path]:
    """Writes bench.md, bench.json and the plots; returns what was written."""
    import json

    out.mkdir(parents=True, exist_ok=True)
    figures.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"## {title}\n\n{markdown(table)}" for title, table in tables(document).items())
    (out / "bench.md").write_text(f"{machine_line(document)}\n\n{text}\n")
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    written = [out / "bench.md", out / "bench.json"]
    if document.get("step"):
        written.append(plot_step(document, figures / "bench.png"))
    if document.get("growth"):
        written.append(plot_growth(document, figures / "growth.png"))
    return written


def _axes(count: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width, height), squeeze=False, layout="constrained")
    return figure, axes[0]


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def plot_step(document: Document, path: Path) -> Path:
    """Ratios to the baseline, one panel a size, logarithmic because peers are far away."""
    sizes = _sizes(document)
    names = list(dict.fromkeys(row["name"] for row in document["step"] if row["ratio"] is not None))
    threads = max(row["threads"] for row in document["step"])
    figure, axes = _axes(len(sizes), 3.2 + 2.6 * len(sizes), 0.9 + 0.28 * len(names))
    for axis, size in zip(axes, sizes, strict=True):
        ratios = {r["name"]: r for r in document["step"] if r["size"] == size and r["threads"] == threads}
        shown = [name for name in names if name in ratios and ratios[name]["ratio"] is not None]
        colours = ["tab:gray" if ratios[n]["peer"] else "tab:blue" for n in shown]
        axis.barh([names.index(n) for n in shown], [ratios[n]["ratio"] for n in shown], color=colours)
        for name in shown:
            axis.text(ratios[name]["ratio"], names.index(name), f" {_number(ratios[name]['ratio'])}", va="center")
        axis.axvline(1.0, color="black", linewidth=0.8)
        widest = max((ratios[n]["ratio"] for n in shown), default=1.0)
        axis.set(xscale="log", title=f"{size}, {threads} threads", xlabel="time / torch fused", xlim=(0.5, 3 * widest))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [])
        axis.invert_yaxis()
    return _save(figure, path)


def plot_growth(document: Document, path: Path) -> Path:
    """Time of a step, and time per parameter, against the number of parameters."""
    figure, (total, each) = _axes(2, 9, 3.6)
    for name in dict.fromkeys(p["name"] for p in document["growth"]):
        points = [p for p in document["growth"] if p["name"] == name]
        x = [p["parameters"] for p in points]
        total.plot(x, [p["milliseconds"] for p in points], "o-", label=name)
        each.plot(x, [p["nanoseconds_per_parameter"] for p in points], "o-", label=name)
    total.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms a step")
    each.set(xscale="log", xlabel="parameters", ylabel="ns a parameter")
    each.set_ylim(bottom=0)
    total.legend(fontsize="small")
    return _save(figure, path)
