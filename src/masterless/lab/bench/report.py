"""Tables of a benchmark, from its JSON document: the command line and the documentation share them.

The document::

    {"machine": {...}, "options": {...}, "parity": 7,
     "step": [step_time.Row, ...], "forward": [forward.Row, ...], "end_to_end": [end_to_end.Row, ...],
     "growth": [growth.Point, ...]}
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from masterless import __version__
from masterless.backends.cpu import library as kernels
from masterless.lab.bench.processors import processor

Document = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # header, rows


def machine(peers: Mapping[str, str]) -> dict[str, Any]:
    """What the numbers were measured on; `peers` are the versions of other libraries."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "masterless": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "instruction_set": kernels.describe().instruction_set,
        "peers": dict(peers),
    }


def machine_line(document: Document) -> str:
    """The machine and the versions in one line."""
    m = document["machine"]
    versions = {"torch": m["torch"], **m["peers"]}
    listing = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{m['cores']} cores of {processor_line(document)}; {listing}"


def processor_line(document: Document) -> str:
    """The processor and the instruction set that the kernel used."""
    return f"{document['machine']['processor']} ({document['machine']['instruction_set']})"


def file_stem(document: Document) -> str:
    """A file name of the processor and the instruction set: results of another machine are another file."""
    return re.sub(r"[^a-z0-9]+", "-", processor_line(document).lower()).strip("-")


# --- tables -----------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"


def step_tables(document: Document) -> dict[str, Table]:
    """One table per size: a row per entry, thread counts side by side."""
    sizes = dict.fromkeys(row["size"] for row in document["step"])
    return {f"{size}: {_tensors(document, size)}": step_table(document, size) for size in sizes}


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
    body = []
    for row in document["forward"]:
        what = [row["what"], row["dtype"], str(row["tokens"] or "-"), row["name"], str(row["threads"])]
        body.append([*what, _number(row["milliseconds"], 3), _number(row["ratio"])])
    return header, body


def end_to_end_table(document: Document) -> Table:
    """A whole training step: a row per model, numbers of tokens side by side."""
    rows = document["end_to_end"]
    counts = list(dict.fromkeys((row["tokens"], row["threads"]) for row in rows))
    clock = "processor's ms" if rows[0]["processor_time"] else "ms"
    header = ["training"]
    for tokens, threads in counts:
        header += [f"{tokens} tokens, {threads} thr.: {clock}", "ratio", f"optimizer, {clock}"]
    body = []
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [name]
        for at in counts:
            row = next(r for r in rows if r["name"] == name and (r["tokens"], r["threads"]) == at)
            cells += [_number(row[key]) for key in ("milliseconds", "ratio", "step_milliseconds")]
        body.append(cells)
    return header, body


def growth_table(document: Document) -> Table:
    """Time and extra memory by size."""
    header = ["step", "parameters", "threads", "ms", "ns/param", "extra memory, KiB"]
    body = []
    for p in document["growth"]:
        extra = "-" if p["extra_bytes"] is None else f"{p['extra_bytes'] / 1024:.0f}"
        times = [_number(p["milliseconds"]), f"{p['nanoseconds_per_parameter']:.3f}"]
        body.append([p["name"], f"{p['parameters']:,}", str(p["threads"]), *times, extra])
    return header, body


def tables(document: Document) -> dict[str, Table]:
    """All tables of a document, by title, which says what they were measured on."""
    found: dict[str, Table] = {}
    if document.get("step"):
        found |= step_tables(document)
    if document.get("forward"):
        found["forward: decoding and products of one layer"] = forward_table(document)
    if document.get("end_to_end"):
        parameters = document["end_to_end"][0]["parameters"]
        kept = max(row.get("decode_cache", 0) for row in document["end_to_end"])
        how = f", up to {kept / 1e6:.3g} MB of decoded weights kept" if kept else ""
        found[f"end-to-end: a training step of a GPT of {parameters:,} parameters{how}"] = end_to_end_table(document)
    if document.get("growth"):
        found["growth: one step of one matrix"] = growth_table(document)
    return {f"{title}, on {processor_line(document)}": table for title, table in found.items()}


def markdown(table: Table) -> str:
    """A table as markdown."""
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- files ------------------------------------------------------------------------------------------------------


def write(document: Document, out: Path) -> list[Path]:
    """Writes a .md and a .json file named after the processor (`file_stem`); returns what was written."""
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"## {title}\n\n{markdown(table)}" for title, table in tables(document).items())
    written = [out / f"{file_stem(document)}{suffix}" for suffix in (".md", ".json")]
    written[0].write_text(f"{machine_line(document)}\n\n{text}\n")
    written[1].write_text(json.dumps(document, indent=1) + "\n")
    return written
