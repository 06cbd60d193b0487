"""``masterless bench``: how fast the step is, against torch's fused one, in one run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from masterless.lab.bench import parity, report, tensor_sizes
from masterless.lab.bench.end_to_end import end_to_end
from masterless.lab.bench.entries import BASELINES, OURS, Entry
from masterless.lab.bench.forward import forward
from masterless.lab.bench.growth import SIZES, grow
from masterless.lab.bench.step_time import StepTimes
from masterless.lab.commands.common import fail
from masterless.lab.train.config import MOST_THREADS
from masterless.tensor.cache import byte_count

SECTIONS = ("step", "forward", "end-to-end", "growth")
Tell = Callable[[str], None]


class Guests(Protocol):
    """Optimizers of other libraries, to be measured beside ours."""

    ENTRIES: list[Entry]

    def versions(self) -> dict[str, str]:
        """The versions of the libraries that are installed."""

    def measure(self, times: StepTimes, entries: Sequence[Entry], threads: int, tell: Tell) -> None:
        """Adds these entries to a measurement."""


GUESTS: list[Guests] = []  # benchmarks/bench.py adds some


def bench(
    sections: list[str] = typer.Argument(None, help="step, forward, end-to-end, growth; all of them by default."),  # noqa: B008
    sizes: str = typer.Option("gpt2,odd,moe,short,tiny", help="Tensors to step, separated by commas."),
    threads: str = typer.Option("1,2", help="Numbers of threads, separated by commas."),
    repeats: int = typer.Option(9, min=1, help="Repeats of each entry; the fastest counts."),
    only: str = typer.Option("", help="Only steps whose name contains this, with their baselines."),
    largest: int = typer.Option(500_000_000, min=1, help="Parameters up to which growth is measured."),
    processor_time: bool = typer.Option(False, help="End to end: the processor's time (busy machines, one thread)."),
    decode_cache: str = typer.Option("0", help="End to end: keep decoded weights, up to so many bytes, e.g. 64MB."),
    out: Path | None = typer.Option(None, help="Write tables (.md, .json) into this directory."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of tables."),
) -> None:
    """Measure the step: ratios to torch's fused AdamW and to the bytes-moved limit, memory, growth."""
    chosen = list(sections or SECTIONS)
    for section in chosen:
        if section not in SECTIONS:
            raise ValueError(f"{section!r}: no such section; choose from {', '.join(SECTIONS)}")
    counts = [_thread_count(text) for text in threads.split(",")]
    tensors = tensor_sizes.choose(sizes.split(","))
    kept = _decode_cache(decode_cache)
    status = Console(stderr=True).status("kernel against reference")
    with status:
        try:
            compared = parity.check()
        except parity.ParityError as error:
            raise fail(str(error)) from None
        options = {"sizes": sizes, "threads": threads, "repeats": repeats, "only": only, "decode_cache": kept}
        versions = {name: version for guests in GUESTS for name, version in guests.versions().items()}
        document: dict[str, Any] = {"machine": report.machine(versions), "options": options, "parity": compared}

        def tell(what: str) -> None:
            status.update(what)

        def save() -> list[Path]:
            return [] if out is None else report.write(document, out)

        if "step" in chosen:
            document["step"] = []
            for rows in _step(tensors, counts, repeats, only, tell):
                document["step"] += rows
                save()  # a run of half an hour should not be lost when it is interrupted
        if "forward" in chosen:
            document["forward"] = [asdict(row) for n in counts for row in forward(n, repeats, report=tell)]
            save()
        if "end-to-end" in chosen:
            document["end_to_end"] = [
                asdict(row)
                for n in counts
                for row in end_to_end(n, repeats, processor_time=processor_time, decode_cache=kept, report=tell)
            ]
            save()
        if "growth" in chosen:
            measured = [size for size in SIZES if size <= largest] or [largest]
            document["growth"] = [asdict(point) for point in grow(measured, max(counts), repeats, tell)]
        written = save()
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _show(document)
        for path in written:
            typer.echo(f"wrote {path}")


def _thread_count(text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,6}\s*", text) or not 1 <= int(text) <= MOST_THREADS:
        raise ValueError(f"--threads {text[:60]!r}: no number of threads up to {MOST_THREADS}; write e.g. 1,2")
    return int(text)


def _decode_cache(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError:
        raise ValueError(
            f"--decode-cache {text[:60]!r}: is no number of bytes; write e.g. 64MB or 64MiB, or 0 for none"
        ) from None


def _step(
    tensors: dict[str, Any], threads: list[int], repeats: int, only: str, tell: Tell
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one size after the other."""
    every = [*BASELINES, *OURS, *(entry for guests in GUESTS for entry in guests.ENTRIES)]
    wanted = [entry for entry in every if only.lower() in entry.name.lower()]
    if not wanted:
        names = ", ".join(e.name for e in every)
        raise ValueError(f"--only {only!r}: no entry has that in its name; there are {names}")
    needed = {entry.name for entry in wanted} | {entry.baseline for entry in wanted}
    ours = [entry for entry in every if entry.name in needed and not entry.peer]
    for size, shapes in tensors.items():
        rows = []
        for n in threads:

            def say(what: str, at: str = f"{size}, {n} thread{'s' if n > 1 else ''}") -> None:
                tell(f"{at}: {what}")

            times = StepTimes(size, shapes, ours, n, repeats, say)
            for guests in GUESTS:
                guests.measure(times, [entry for entry in wanted if entry in guests.ENTRIES], n, say)
            rows += times.rows()
        yield [asdict(row) for row in rows]


def _show(document: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe or a file has no width to fit into
    console.print(report.machine_line(document), markup=False, highlight=False)
    console.print(f"kernel equals reference in {document['parity']} cases", markup=False, highlight=False)
    for title, (header, rows) in report.tables(document).items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in header:
            text = column in ("step", "training", "note", "what", "weight", "dtype")
            table.add_column(column, justify="left" if text else "right", no_wrap=column in ("step", "training"))
        for cells in rows:
            table.add_row(*cells)
        console.print(table, markup=False)
