"""The step on every processor in one table: ratios to torch's fused fp32 AdamW in the same run, a row per run."""

from __future__ import annotations

from collections.abc import Iterable

from masterless.lab.bench.entries import ADAMW
from masterless.lab.bench.report import Document, processor_line
from masterless.optim.presets import PRESETS

KINDS = (
    "fp32 weights, int8/log8",
    "fp32 weights, int4/log2",
    "INT4 + ECO, int4/log2, bf16 gradient",
    "FP8 + ECO, int4/log2, bf16 gradient",
)
# The ratios that a step must not exceed, of KINDS and of presets, with the build for the machine.
MUSTS = {"gpt2": (1.0, 1.0, 1.1, 1.4, 1.2), "rows": (1.2,) * 5, "tiny": (1.2,) * 5}
_NAMES = [f"preset {name}, bf16 gradient" for name in PRESETS if "byte" in name]


def table(documents: Iterable[tuple[Document, str]], size: str) -> str:
    """A row for each document (with a remark on it) and number of threads, if all of today's presets were measured."""
    titles = [name.removesuffix(", bf16 gradient") for name in KINDS]
    rows = [
        f"| processor, threads | torch, ms | {' | '.join(titles)} | presets |",
        "| --- " * (len(titles) + 3) + "|",
        f"| must | | {' | '.join(map(str, MUSTS[size]))} |",
    ]
    for document, remark in documents:
        measured = [row for row in document.get("step", []) if row["size"] == size]
        for threads in sorted({row["threads"] for row in measured}, reverse=True):
            of = {row["name"]: row for row in measured if row["threads"] == threads}
            if not all(name in of for name in (ADAMW, *KINDS, *_NAMES)):
                continue
            ratios = [of[name]["ratio"] for name in _NAMES]
            cells = [
                f"{processor_line(document)}{remark}, {threads}",
                f"{of[ADAMW]['milliseconds']:.3g}",
                *(f"{of[name]['ratio']:.2f}" for name in KINDS),
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
