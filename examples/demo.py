"""The point of the project in two minutes: the same small transformer trained from 12 bytes a parameter down to 1.

Trains a byte-level GPT (393k parameters in its inner matrices) on the source text of Python's standard library, which
is on every machine, under seven configurations, two at a time, and prints what each costs and what it reaches.

    python examples/demo.py [--steps 600] [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from masterless.train.experiment import Experiment, load_rows, run_all

RUNS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("AdamW, all fp32", None, {"exp_avg": "fp32", "exp_avg_sq": "fp32"}),
    ("fp32 weights, int8 m, log8 v", None, {"exp_avg": "int8", "exp_avg_sq": "log8"}),
    ("fp32 weights, int4 m, log2 v", None, {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    ("FP8 weights + ECO, int4 m, log2 v", "fp8", {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.82, 0.95)}),
    ("INT4 weights + ECO, int4 m, log2 v", "int4", {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.35, 0.95)}),
    (
        "INT8 weights, no m, factored v",
        "int8",
        {"exp_avg": "none", "exp_avg_sq": "factored", "betas": (0.0, 0.95), "error_compensation": False},
    ),
    (
        "INT4 weights, naive (nearest)",
        "int4",
        {
            "exp_avg": "fp32",
            "exp_avg_sq": "fp32",
            "error_compensation": False,
            "weight_rounding": "nearest",
        },
    ),
]


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/demo.jsonl"), help="where finished runs are kept")
    parser.add_argument("--json", action="store_true", help="print the rows instead of the table")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    settings = {"steps": arguments.steps, "lr": 2e-3, "betas": (0.9, 0.95), "eval_batches": 64}
    experiments = [Experiment(label, weights=w, options=o, settings=settings) for label, w, o in RUNS]
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        done = {row["id"] for row in load_rows(arguments.out)}
        todo = [e for e in experiments if e.identity not in done]
        bar = progress.add_task("runs", total=len(experiments), completed=len(experiments) - len(todo))
        for row in run_all(experiments, arguments.out):
            progress.advance(bar)
            progress.log(f"{row['label']}: {_loss(row)}")
    rows = {row["id"]: row for row in load_rows(arguments.out)}
    chosen = [rows[e.identity] for e in experiments]
    if arguments.json:
        print(json.dumps(chosen))
        return
    reference = chosen[0]["loss"]
    table = Table(title=f"{arguments.steps} steps of 512 bytes of text; validation loss in nats per byte")
    for name in ("run", "bytes per parameter", "loss", "gap to fp32"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for row in chosen:
        gap = "" if row["loss"] is None else f"{100 * (row['loss'] / reference - 1):+.2f}%"
        table.add_row(row["label"], f"{row['bytes_per_parameter']:.2f}", _loss(row), gap)
    console.print(table)
    console.print("Bytes are of weight and both states, scales included, measured on the live tensors.")


def _loss(row: dict[str, Any]) -> str:
    return "diverged" if row["loss"] is None else f"{row['loss']:.4f}"


if __name__ == "__main__":
    main()
