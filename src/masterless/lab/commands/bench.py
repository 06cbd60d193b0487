"""``masterless bench``: how fast the step is, against torch's fused one and other libraries, in one run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from masterless.lab.commands.common import fail
from masterless.lab.train.config import MOST_THREADS

SECTIONS = ("step", "forward", "growth")


def bench(
    sections: list[str] = typer.Argument(None, help="step, forward, growth; all of them by default."),  # noqa: B008
    sizes: str = typer.Option("gpt2,odd,moe,short,tiny", help="Tensors to step, separated by commas."),
    threads: str = typer.Option("1,2", help="Numbers of threads, separated by commas."),
    repeats: int = typer.Option(9, min=1, help="Repeats of each entry; the fastest counts."),
    only: str = typer.Option("", help="Only steps whose name contains this, with their baselines."),
    peers: bool = typer.Option(True, help="Measure other libraries too, where they install and run."),
    largest: int = typer.Option(500_000_000, min=1, help="Parameters up to which growth is measured."),
    out: Path | None = typer.Option(None, help="Write bench.md, bench.json and plots into this directory."),  # noqa: B008
    figures: Path | None = typer.Option(None, help="Write the plots into this directory instead."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of tables."),
) -> None:
    """Measure the step: ratios to torch's fused AdamW and to the bytes-moved limit, memory, growth."""
    chosen = list(sections or SECTIONS)
    for section in chosen:
        if section not in SECTIONS:
            raise ValueError(f"{section!r}: no such section; choose from {', '.join(SECTIONS)}")
    counts = [_thread_count(text) for text in threads.split(",")]

    from rich.console import Console

    from masterless.lab.bench import parity, report, shapes

    tensors = shapes.choose(sizes.split(","))
    status = Console(stderr=True).status("kernel against reference")
    with status:
        try:
            compared = parity.check()
        except parity.ParityError as error:
            raise fail(str(error)) from None
        options = {"sizes": sizes, "threads": threads, "repeats": repeats, "only": only, "peers": peers}
        document: dict[str, Any] = {"machine": report.machine(), "options": options, "parity": compared}

        def tell(what: str) -> None:
            status.update(what)

        def save() -> list[Path]:
            return [] if out is None else report.write(document, out, figures or out)

        if "step" in chosen:
            document["step"] = []
            for rows in _step(tensors, counts, repeats, only, peers, tell):
                document["step"] += rows
                save()  # a run of half an hour should not be lost when it is interrupted
        if "forward" in chosen:
            document["forward"] = _forward(counts, repeats, tell)
            save()
        if "growth" in chosen:
            document["growth"] = _growth(largest, max(counts), repeats, tell)
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


def _step(
    tensors: dict[str, Any], threads: list[int], repeats: int, only: str, peers: bool, tell: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one size after the other."""
    from masterless.lab.bench.entries import BASELINES, OURS
    from masterless.lab.bench.measure import measure
    from masterless.lab.bench.peers import PEERS

    every = [*BASELINES, *OURS, *(PEERS if peers else [])]
    wanted = [entry for entry in every if only.lower() in entry.name.lower()]
    if not wanted:
        raise ValueError(
            f"--only {only!r}: no entry has that in its name; there are {', '.join(e.name for e in every)}"
        )
    needed = {entry.name for entry in wanted} | {entry.baseline for entry in wanted}
    entries = [entry for entry in every if entry.name in needed]
    for size, shapes in tensors.items():
        rows = []
        for n in threads:
            prefix = f"{size}, {n} thread{'s' if n > 1 else ''}"
            rows += measure(size, shapes, entries, n, repeats, lambda what, at=prefix: tell(f"{at}: {what}"))  # type: ignore[misc]
        yield [asdict(row) for row in rows]


def _forward(threads: list[int], repeats: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    from masterless.lab.bench.forward import forward

    return [asdict(row) for n in threads for row in forward(n, repeats, report=tell)]


def _growth(largest: int, threads: int, repeats: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    from masterless.lab.bench.growth import SIZES, grow

    sizes = [size for size in SIZES if size <= largest] or [largest]
    return [asdict(point) for point in grow(sizes, threads, repeats, tell)]


def _show(document: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from masterless.lab.bench import report

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe or a file has no width to fit into
    console.print(report.machine_line(document), markup=False, highlight=False)
    console.print(f"kernel equals reference in {document['parity']} cases", markup=False, highlight=False)
    for title, (header, rows) in report.tables(document).items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in header:
            text = column in ("step", "note", "what", "weight", "dtype")
            table.add_column(column, justify="left" if text else "right", no_wrap=column == "step")
        for cells in rows:
            table.add_row(*cells)
        console.print(table, markup=False)
