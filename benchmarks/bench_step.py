"""How long one optimizer step takes, as a ratio to torch's fused full-precision step measured in the same run.

All entries take turns; the minimum of the repeats counts. `limit` is the time to move the entry's bytes once at the
copy bandwidth of the machine, measured in the same run, as a ratio to the same baseline. Example::

    python benchmarks/bench_step.py --threads 1 2 --json step.json

A further entry (another library, say) is a function from shapes to a `Stepper`, listed in `ENTRIES`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from bench_shapes import SIZES, Shape

from masterless import kernels
from masterless.formats import parse
from masterless.kernels import cpu
from masterless.layout import is_matrix_like
from masterless.reference import Task
from masterless.rounding import PURPOSES, parameter_id, stream_key
from masterless.rules import RULES
from masterless.storage import Storage


@dataclass
class Stepper:
    """Something that steps: the call to time, the bytes it must read and write, and a remark."""

    step: Callable[[], object]
    bytes_moved: int
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """A row of the table: the name, what it is compared with, and how to make it."""

    name: str
    baseline: str
    make: Callable[[Sequence[Shape]], Stepper]


# --- torch ----------------------------------------------------------------------------------------------


def _torch(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], states: int):
    def build(shapes: Sequence[Shape]) -> Stepper:
        parameters = [torch.nn.Parameter(torch.randn(s) * 0.02) for s in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p) * 0.01
        total = sum(p.numel() for p in parameters)
        return Stepper(make(parameters).step, total * 4 * (1 + 2 * (1 + states)))

    return build


# --- masterless -----------------------------------------------------------------------------------------

_HYPERPARAMETERS = {
    "lr": 1e-4,
    "next_lr": None,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
}


def _moved(storage: Storage | None) -> int:
    return 0 if storage is None else 2 * storage.nbytes


def _ours(rule: str, weight: str, first: str, second: str, grad: torch.dtype = torch.float32):
    """Steps on the kernel; vectors stay in fp32 with fp32 states, as by default in the library."""

    def build(shapes: Sequence[Shape]) -> Stepper:
        tasks, bytes_moved = [], 0
        for i, shape in enumerate(shapes):
            formats = [parse(f if is_matrix_like(shape) else "fp32") for f in (weight, first, second)]
            w = Storage.zeros(formats[0], shape).encode_(torch.randn(shape) * 0.02)
            tasks.append(
                Task(
                    name=f"#{i}",
                    rule=RULES[rule],
                    scalars=RULES[rule].scalars(_HYPERPARAMETERS, 1, 1),
                    group=_HYPERPARAMETERS,
                    grad=(torch.randn(shape) * 0.01).to(grad),
                    weight=w,
                    first=Storage.zeros(formats[1], shape),
                    second=Storage.zeros(formats[2], shape) if RULES[rule].second else None,
                    rounding={"weight": "stochastic", "exp_avg": "stochastic", "exp_avg_sq": "stochastic"},
                    keys=dict.fromkeys(PURPOSES, 0),
                    inject=formats[0].scaled,
                )
            )
            bytes_moved += tasks[-1].grad.nbytes + sum(map(_moved, tasks[-1].storages))
        identities = [parameter_id(task.name) for task in tasks]
        counter = 0

        def step() -> None:
            nonlocal counter
            counter += 1
            for task, identity in zip(tasks, identities, strict=True):
                task.scalars = task.rule.scalars(_HYPERPARAMETERS, counter, counter)
                task.keys = {p: stream_key(0, counter, identity, p) for p in PURPOSES}
            cpu.step(tasks)

        return Stepper(step, bytes_moved)

    return build


ENTRIES = [
    Entry(
        "torch fused AdamW fp32", "torch fused AdamW fp32", _torch(lambda p: torch.optim.AdamW(p, 1e-4, fused=True), 2)
    ),
    Entry(
        "torch fused SGD momentum fp32",
        "torch fused SGD momentum fp32",
        _torch(lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, fused=True), 1),
    ),
    Entry("fp32 weights, int8/log8", "torch fused AdamW fp32", _ours("adam", "fp32", "int8", "log8")),
    Entry("fp32 weights, int4/log2", "torch fused AdamW fp32", _ours("adam", "fp32", "int4", "log2")),
    Entry(
        "INT4 + ECO, int4/log2, bf16 grad",
        "torch fused AdamW fp32",
        _ours("adam", "int4", "int4", "log2", torch.bfloat16),
    ),
    Entry(
        "FP8 + ECO, int4/log2, bf16 grad",
        "torch fused AdamW fp32",
        _ours("adam", "fp8:row", "int4", "log2", torch.bfloat16),
    ),
    Entry(
        "SGD momentum, INT4 + ECO",
        "torch fused SGD momentum fp32",
        _ours("sgd", "int4", "int4", "fp32", torch.bfloat16),
    ),
]


# --- measuring ------------------------------------------------------------------------------------------


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _copy_bandwidth(repeats: int) -> float:
    """Bytes read plus written per second by a large copy."""
    source, target = torch.zeros(1 << 26), torch.empty(1 << 26)
    return 2 * source.nbytes / min(_seconds(lambda: target.copy_(source)) for _ in range(repeats))


def measure(size: str, threads: int, repeats: int, only: str = "") -> list[dict[str, object]]:
    """One table: every entry on one set of shapes."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shapes = SIZES[size]
    parameters = sum(map(math.prod, shapes))
    wanted = [e for e in ENTRIES if only in e.name]
    entries = [e for e in ENTRIES if e in wanted or any(w.baseline == e.name for w in wanted)]
    steppers = {e.name: e.make(shapes) for e in entries}
    for stepper in steppers.values():  # allocation, caches, and states that are not zero any more
        for _ in range(3):
            stepper.step()
    best = dict.fromkeys(steppers, math.inf)
    for _ in range(repeats):
        for name, stepper in steppers.items():
            best[name] = min(best[name], _seconds(stepper.step))
    bandwidth = _copy_bandwidth(repeats)
    return [
        {
            "size": size,
            "parameters": parameters,
            "threads": threads,
            "name": e.name,
            "baseline": e.baseline,
            "milliseconds": best[e.name] * 1e3,
            "ratio": best[e.name] / best[e.baseline],
            "bytes_per_parameter": steppers[e.name].bytes_moved / parameters,
            "limit": steppers[e.name].bytes_moved / bandwidth / best[e.baseline],
            "note": steppers[e.name].note,
        }
        for e in entries
    ]


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    description = kernels.describe()
    return {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "instruction_set": description.instruction_set,
        "kernel": description.path,
    }


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["gpt2"], choices=sorted(SIZES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="entries whose name contains this (and their baselines)")
    parser.add_argument("--json", help="write the measurements to this file")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    print(*(f"{k}: {v}" for k, v in machine().items()), sep="; ")
    for size in options.sizes:
        for threads in options.threads:
            table = measure(size, threads, options.repeats, options.only)
            rows += table
            print(f"\n{size}, {table[0]['parameters']:,} parameters, {threads} thread(s)")
            print(f"{'step':36}{'ms':>9}{'ratio':>8}{'limit':>8}{'bytes/param':>13}")
            for row in table:
                print(
                    f"{row['name']:36}{row['milliseconds']:9.2f}{row['ratio']:8.2f}{row['limit']:8.2f}"
                    f"{row['bytes_per_parameter']:13.2f}  {row['note']}"
                )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
