"""Times the step of two worktrees against each other: is this commit slower than that one?

    python benchmarks/compare_commits.py ../before ../after [--threads 1 2] [--repeats 15] [--only TEXT] [--sizes gpt2]

Each worktree is a checkout of this repository with a `.venv` of its own, in which its masterless is installed. A
process of each holds the same parameters and gradients; they take turns, step by step, and the minimum of the repeats
counts. The options are those that all versions of the library have. Wants an idle machine; on a busy one `--cpu` counts
processor time instead, which means something with one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from pathlib import Path

GPT2 = [
    (50257, 768),
    (1024, 768),
    *[
        (768,),
        (768,),
        (2304, 768),
        (2304,),
        (768, 768),
        (768,),
        (768,),
        (768,),
        (3072, 768),
        (3072,),
        (768, 3072),
        (768,),
    ]
    * 12,
    (768,),
    (768,),
]
SIZES = {
    "gpt2": GPT2,
    "500 tiny": [(4, 33)] * 250 + [(33,)] * 250,
    "500 short": [(64, 33)] * 250 + [(33,)] * 250,
    "rows of 96": [(50304, 96)],
    "one matrix": [(2048, 768)],
}
# what: format of the matrices (None: dense fp32), dtype of the gradients, options
ENTRIES = {
    "fp32, int8/log8": (None, "float32", {"exp_avg": "int8", "exp_avg_sq": "log8"}),
    "fp32, int4/log2": (None, "float32", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "INT4 + ECO, int4/log2": ("int4", "bfloat16", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "FP8 + ECO, int4/log2": ("fp8", "bfloat16", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "INT8 + ECO, int4/log4": ("int8", "bfloat16", {"exp_avg": "int4", "exp_avg_sq": "log4"}),
    "INT8, no m, factored": (
        "int8",
        "bfloat16",
        {"betas": (0.0, 0.95), "exp_avg": "none", "exp_avg_sq": "factored", "error_compensation": False},
    ),
    "torch fused AdamW": (None, "float32", {}),
}

WORKER = """
import json, sys, time, torch, masterless as ml
from torch.nn import Parameter

def build(shapes, weight, dtype, options, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    parameters = []
    for shape in shapes:
        dense = torch.randn(shape) * 0.02
        quantized = weight is not None and len(shape) > 1
        parameters.append(Parameter(ml.QuantizedTensor.from_dense(dense.to(dtype), weight) if quantized else dense))
        parameters[-1].grad = (torch.randn(shape) * 0.01).to(dtype if quantized else torch.float32)
    if not options:
        return torch.optim.AdamW(parameters, 1e-4, weight_decay=0.1, fused=True)
    return ml.AdamW(parameters, 1e-4, weight_decay=0.1, **options)

for line in sys.stdin:
    order = json.loads(line)
    if "build" in order:
        optimizer = None
        optimizer = build(**order["build"])
        for _ in range(3):
            optimizer.step()
        seconds = 0.0
    else:
        clock = getattr(time, order["clock"])
        start = clock()
        for _ in range(order["steps"]):
            optimizer.step()
        seconds = (clock() - start) / order["steps"]
    print(json.dumps(seconds), flush=True)
"""


class Worktree:
    """The process of one worktree."""

    def __init__(self, path: Path) -> None:
        command = [str(path / ".venv" / "bin" / "python"), "-c", WORKER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=path)

    def order(self, **what: object) -> float:
        """Lets the process do something; returns the seconds it took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("a worktree's process has died; its own message stands above")
        return float(json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(timeout=60)


def compare(worktrees: list[Worktree], build: dict[str, object], repeats: int, clock: str) -> list[float]:
    """The shortest step of each worktree; they take turns."""
    for worktree in worktrees:
        worktree.order(build=build)
    steps = max(1, math.ceil(0.02 / worktrees[0].order(steps=1, clock=clock)))
    best = [math.inf] * len(worktrees)
    for _ in range(repeats):
        best = [min(b, worktree.order(steps=steps, clock=clock)) for b, worktree in zip(best, worktrees, strict=True)]
    return best


def main() -> None:
    """Prints a table: milliseconds of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    arguments = parser.parse_args()
    clock = "process_time" if arguments.cpu else "perf_counter"
    worktrees = [Worktree(arguments.before), Worktree(arguments.after)]
    print("| tensors | step | threads | before, ms | after, ms | after/before |", "| --- " * 6 + "|", sep="\n")
    for size in arguments.sizes:
        for name, (weight, dtype, options) in ENTRIES.items():
            if arguments.only not in name:
                continue
            for threads in arguments.threads:
                build = {
                    "shapes": SIZES[size],
                    "weight": weight,
                    "dtype": dtype,
                    "options": options,
                    "threads": threads,
                }
                before, after = compare(worktrees, build, arguments.repeats, clock)
                times = f"{before * 1e3:.2f} | {after * 1e3:.2f} | {after / before:.2f}"
                print(f"| {size} | {name} | {threads} | {times} |", flush=True)
    for worktree in worktrees:
        worktree.close()


if __name__ == "__main__":
    main()
