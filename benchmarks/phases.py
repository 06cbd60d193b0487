"""Where a step's time goes: nanoseconds and cycles of each phase, measured alone on a span that stays in the cache.

    python benchmarks/phases.py [--isa avx2] [--repeats 200] [--only TEXT] [--row 96]

Builds the kernel with `ml_phases` under `build/phases` and asks it for the rows of `ENTRIES`. Cycles are those of 16
elements (a vector of AVX-512), by the time that a chain of dependent multiplications takes. Phases that follow each
other overlap, so that "all" may be less than their sum.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
SPAN = 12288  # the longest that the kernel takes at once: a row by default, or some shorter ones
# what: format of the weight (None: dense fp32), dtype of the gradient, options of AdamW
ENTRIES = {
    "fp32, int8/log8": (None, "float32", {"exp_avg": "int8", "exp_avg_sq": "log8"}),
    "fp32, int4/log2": (None, "float32", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "INT4 + ECO, int4/log2": ("int4", "bfloat16", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "INT8 + ECO, int4/log4": ("int8", "bfloat16", {"exp_avg": "int4", "exp_avg_sq": "log4"}),
    "FP8 + ECO, int4/log2": ("fp8", "bfloat16", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
}


def build() -> Path:
    """The kernel with `ml_phases`."""
    folder, scripts = ROOT / "build" / "phases", Path(sysconfig.get_path("scripts"))
    cmake = scripts / "cmake" if (scripts / "cmake").exists() else shutil.which("cmake")
    if cmake is None:
        raise SystemExit("no cmake: pip install cmake")
    for command in (["-S", ROOT, "-B", folder, "-DMASTERLESS_PHASES=ON"], ["--build", folder, "-j", "2"]):
        subprocess.run([str(part) for part in (cmake, *command)], check=True, stdout=subprocess.DEVNULL)
    return folder / "_masterless_cpu.so"


def measure(name: str, repeats: int, row: int) -> dict[str, float]:
    """Nanoseconds per element of every phase, and those of a cycle."""
    import torch
    from torch.nn import Parameter

    import masterless as ml
    from masterless.backends.cpu.interface import interface

    torch.set_num_threads(1)
    shape = (16 * SPAN // row, row)
    torch.manual_seed(0)
    weight, dtype, options = ENTRIES[name]
    dense = (torch.randn(shape) * 0.02).to(getattr(torch, dtype))
    p = Parameter(dense if weight is None else ml.QuantizedTensor.from_dense(dense, weight))
    p.grad = (torch.randn(shape) * 0.01).to(dense.dtype)
    # Thousands of steps with the same random numbers must not lead anywhere, hence the tiny learning rate.
    optimizer = ml.AdamW([p], 1e-9, weight_decay=0.1, **options)
    for _ in range(300):  # until the correction of v's bias hardly moves: an early one would make momentum grow
        p.grad.copy_(torch.randn(shape) * 0.01)
        optimizer.step()
    assert optimizer.plan.batch is not None
    record = optimizer.plan.batch.parts[0][2].records
    task = optimizer.plan.batch.entries[0].task
    storages = [storage for storage in (task.weight, task.first, task.second) if storage is not None]
    stored = [(tensor, tensor.clone()) for storage in storages for tensor in storage.tensors.values()]
    library = interface().library
    library.ml_phases.restype = ctypes.c_char_p
    best: dict[str, float] = {}
    for _ in range(repeats):  # phases take turns, for a machine has slow moments
        for phase, time in json.loads(library.ml_phases(ctypes.c_void_p(record.ctypes.data), 5)).items():
            best[phase] = min(time, best.get(phase, time))
        for tensor, before in stored:  # or what the same random numbers round away would add up until it is not finite
            tensor.copy_(before)
    return best


def main() -> None:
    """Prints a table for each entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="", help="instruction set: avx512, avx2 or portable")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--row", type=int, default=SPAN, help="elements of a row")
    arguments = parser.parse_args()
    os.environ |= {"MASTERLESS_KERNEL": str(build()), "MASTERLESS_ISA": arguments.isa}
    for name in [name for name in ENTRIES if arguments.only in name]:
        phases = measure(name, arguments.repeats, arguments.row)
        cycle = phases.pop("cycle")
        print(f"\n| {name} | ns per parameter | cycles / 16 |", "| --- " * 3 + "|", sep="\n")
        for phase, time in phases.items():
            print(f"| {phase} | {time:.3f} | {time * 16 / cycle:.1f} |")


if __name__ == "__main__":
    main()
