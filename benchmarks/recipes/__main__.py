"""The command line of the study; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import plan
from .groups import cells, group_names
from .plan import Cell
from .recipe import Setting
from .store import RESULTS, Row, Store
from .texts import CACHE
from .workers import Event, run

USUAL_SPEED = {"37k": 60_000, "150k": 35_000, "600k": 14_000}  # tokens a second, before there are rows


def _speed(setting: Setting, rows: Sequence[Row]) -> float:
    """Tokens a second of a run, evaluation included, from the rows of its size."""
    known = sorted(row["tokens_per_second"] for row in rows if row["size"] == setting.size)
    return float(known[len(known) // 2]) if known else float(USUAL_SPEED.get(setting.size, 50_000))


def status(chosen: Sequence[Cell], store: Store) -> Table:
    """Runs done and left a group, and the core-hours that are left."""
    rows = store.rows()
    table = Table("group", "done", "left", "core-hours left")
    for group in dict.fromkeys(cell.group for cell in chosen):
        done, left, hours = set(), set(), 0.0
        for cell in (cell for cell in chosen if cell.group == group):
            mine = {row["key"] for row in rows.values() if plan.belongs(cell, row)}
            due = max(cell.expected_runs() - len(mine), len(cell.missing(rows)))
            seconds = cell.setting.steps * cell.setting.batch_tokens / _speed(cell.setting, list(rows.values()))
            fresh = (cell.recipe.label, cell.setting.name) not in left
            done |= mine
            if due and fresh:
                left.add((cell.recipe.label, cell.setting.name))
                hours += due * seconds / 3600
        table.add_row(group, str(len(done)), f"{len(left)} cells", f"{hours:.1f}")
    return table


def _show(event: Event) -> None:
    if event["kind"] == "row":
        row = event["row"]
        loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
        clock = time.strftime("%H:%M:%S")
        print(
            f"{clock} {event['job']}: {loss} ({row['seconds']:.0f} s, {row['tokens_per_second']} tokens/s)", flush=True
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("command", choices=("run", "status", "table", "noise", "figure"))
    parser.add_argument("--only", choices=group_names(), action="append", help="these groups only")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    chosen = parser.parse_args(arguments)
    store = Store(chosen.results, CACHE / "claims")
    wanted = [cell for cell in cells() if not chosen.only or cell.group in chosen.only]
    if chosen.command == "run":
        run(wanted, store, chosen.workers, _show)
    elif chosen.command == "status":
        Console().print(status(wanted, store))
    else:
        from . import analysis

        found = analysis.summarise(wanted, store.rows())
        if chosen.command == "table":
            print(json.dumps(analysis.as_data(found), indent=1) if chosen.json else analysis.markdown(found))
        elif chosen.command == "noise":
            print(analysis.noise_table(wanted, store.rows()))
        else:
            from .figure import draw

            print(draw(wanted, store.rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
