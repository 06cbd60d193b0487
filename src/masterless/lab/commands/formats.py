"""``masterless formats``: every number format with its bits and a picture of its levels."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from masterless.formats import Format, FormatError, as_first_moment, as_second_moment, names, parse

WIDTH = 31  # odd, so that zero has a cell of its own in the middle
_SHADES = " ▁▂▃▄▅▆▇█"


def formats(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of a table."),
) -> None:
    """List the formats of weights and optimizer states."""
    rows = [describe(parse(name)) for name in names()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(caption="bits: per element, metadata included; for: W weights, m and v first and second moments")
    for column in ("name", "bits", "levels", "for", "where they lie, largest = 1"):
        table.add_column(column, justify="right" if column in ("bits", "levels") else "left", no_wrap=True)
    short = {"weight": "W", "first moment": "m", "second moment": "v"}
    for row in rows:
        count = "" if row["levels"] is None else str(row["levels"])
        uses = " ".join(short[use] for use in row["uses"])
        table.add_row(row["name"], f"{row['bits_per_element']:g}", count, uses, row["picture"])
    Console().print(table)


def describe(format: Format) -> dict[str, Any]:
    """What there is to know of one format, as plain data."""
    levels = _levels(format)
    return {
        "name": str(format),
        "kind": format.kind,
        "bits": format.bits,
        "hidden_bits": format.hidden,
        "bits_per_element": format.bits_per_element,
        "signed": format.signed,
        "block": format.granularity if format.scaled else None,
        "levels": None if levels is None else 2**format.bits if format.kind == "log" else len(levels),
        "uses": _uses(format),
        "picture": "" if levels is None else picture(levels),
    }


def picture(levels: list[float]) -> str:
    """The density of levels on [-1, 1] (on [0, 1], if none is negative) as a line of characters."""
    low = -1.0 if min(levels) < 0 else 0.0
    counts = [0] * WIDTH
    for level in levels:
        counts[round((level - low) / (1.0 - low) * (WIDTH - 1))] += 1
    # Square roots: a dynamic map has a hundred times as many levels around zero as at its ends.
    peak = max(counts) ** 0.5
    cells = [0 if not count else max(1, round(count**0.5 / peak * (len(_SHADES) - 1))) for count in counts]
    return "|" + "".join(_SHADES[cell] for cell in cells) + "|"


def _levels(format: Format) -> list[float] | None:
    """The levels in units of the block's absmax; of a log code for a block that spans three decades."""
    if not format.scaled:
        return None
    if format.kind == "log":
        last = 2**format.bits - 1
        return [10.0 ** (-3 * k / last) for k in range(last + 1)]
    return [level / format.max_level for level in format.levels]


def _uses(format: Format) -> list[str]:
    uses = ["weight"] if format.signed and format.kind != "none" else []
    for name, accept in (("first moment", as_first_moment), ("second moment", as_second_moment)):
        try:
            accept(format)
        except FormatError:
            continue
        uses.append(name)
    return uses
