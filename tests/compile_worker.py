"""Compiles what random cases would launch: `python -m tests.compile_worker COUNT [TARGET]`, about ten seconds a case.

The interpreter accepts what the compiler refuses, and knows no registers: this finds kinds of steps that do not
compile, or spill, beyond those in the table of docs/gpu.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import kernel_cases
from benchmarks import gpu_compile

from masterless.backends.triton import backend
from masterless.backends.triton.backend import TritonBackend

FUNCTIONS = {
    "survey": "statistics.survey_kernel",
    "sums": "statistics.factored_sums_kernel",
    "finish": "statistics.factored_finish_kernel",
    "adafactor": "statistics.adafactor_kernel",
    "adafactor_finish": "statistics.adafactor_finish_kernel",
    "peaks": "statistics.target_peak_kernel",
    "tiles": "entry.step_kernel",
    "scales": "statistics.store_scale_kernel",
}


# Rows that a program holds, with and without gaps, and rows that are walked.
SHAPES = ((64, 1024), (64, 1000), (8, 4096), (8, 3072), (4, 20_000), (3, 4, 48), (130,), (6, 384))


def kernels_of(case: kernel_cases.Case) -> list[gpu_compile.Kernel]:
    """The kernels that a step of a case launches."""
    task = kernel_cases.build(case)
    prepared = TritonBackend().prepare([task])
    numbers = kernel_cases.turn_of([kernel_cases.at_step(task, case, 1, task.grad)]).numbers
    scalars, _, policy = numbers[0]
    phases = backend._phases(prepared, [(policy, scalars.l2 != 0.0, scalars.eps > 0.0)], [True], False)
    found = []
    for phase, function in FUNCTIONS.items():
        more = (("SECOND_PASS", True),) if phase == "adafactor" else ()
        for one in getattr(phases, phase):
            found.append(gpu_compile.Kernel(f"{case}: {phase}", function, (("STEP", one.step), *more)))
    return found


def main(count: int, target: str) -> int:
    """Compiles, and says what did not compile or spills; the number of those."""
    seen, wrong = set(), 0
    for case in kernel_cases.covering(count, seed=count, shapes=SHAPES):
        for kernel in kernels_of(case):
            if (kernel.function, kernel.constants) in seen:
                continue
            seen.add((kernel.function, kernel.constants))
            try:
                spilled = gpu_compile.measured(kernel, target, gpu_compile.compiled(kernel, target))["spilled"]
                fault = f"{spilled} bytes spilled" if spilled else ""
            except Exception as error:
                fault = str(error)[:300]
            if fault:
                wrong += 1
                size = f"{kernel.step.walk}, {kernel.step.chunks} chunks, {kernel.step.warps} warps"
                print(f"{kernel.name}, {size}: {fault}", flush=True)
    print(f"{len(seen)} kernels compiled for {target}, {wrong} of them wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "sm_90"), 1))
