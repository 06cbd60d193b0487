"""What a step could cost on a GPU, on paper: its bytes over the memory's speed, its instructions over the issue rate.

    python benchmarks/gpu_roofline.py            # prints the table; update_docs.py puts it into docs/gpu.md

Nothing here was measured on a GPU. Bytes follow from the formats; instructions are those of gpu_compile.json, slow
paths included, all at full rate; machines are as their data sheets say. Real kernels reach neither line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from masterless.formats import as_first_moment, as_second_moment, parse

RESULTS = Path(__file__).parent / "results" / "gpu_compile.json"


@dataclass(frozen=True)
class Machine:
    """A data sheet: the compile target, bytes per second, threads' instructions per second."""

    name: str
    target: str
    bandwidth: float
    instructions: float


MACHINES = (
    Machine("A100 80GB", "sm_80", 2.04e12, 108 * 128 * 1.41e9),
    Machine("H100 SXM", "sm_90", 3.35e12, 132 * 128 * 1.98e9),
    Machine("B200", "sm_100", 8.0e12, 148 * 128 * 1.965e9),
    Machine("MI300X", "gfx942", 5.3e12, 304 * 64 * 2.1e9),
)
TORCH_BYTES = 28  # fused AdamW in fp32: reads p, g, m, v, writes p, m, v


@dataclass(frozen=True)
class Step:
    """A kind of step: formats, the kernels that it launches over all elements, and how often it reads the gradient."""

    weight: str
    first: str
    second: str
    kernels: tuple[str, ...]
    gradients: int = 1

    @property
    def bytes(self) -> float:
        """Bytes moved per parameter, with gradients in bf16."""
        formats = (parse(self.weight), as_first_moment(self.first), as_second_moment(self.second))
        return 2 * self.gradients + 2 * sum(f.bits_per_element for f in formats) / 8


STEPS = (
    Step("int4", "int4", "log2", ("int4, int4/log2, injected",)),
    Step("int4+4", "int2", "factored", ("survey", "factored_sums", "int4+4, int2/factored"), gradients=3),
    Step("fp8:row", "int4", "log2", ("fp8:row, int4/log2, injected",)),
    Step("bf16", "bf16", "bf16", ("bf16, bf16/bf16",)),
)


def table() -> str:
    """Picoseconds per parameter: memory, instructions; and how many times faster than torch's step that could be."""
    if not RESULTS.exists():
        return "(not run yet)"
    compiled = {row["kernel"]: row for row in json.loads(RESULTS.read_text())}
    lines = [
        f"| weight, m/v (gradients in bf16) | bytes moved | {' | '.join(m.name for m in MACHINES)} |",
        "|---" * (len(MACHINES) + 2) + "|",
    ]
    torch_cells = [f"{1e12 * TORCH_BYTES / m.bandwidth:.1f}" for m in MACHINES]
    lines.append(f"| torch's fused AdamW, fp32 | {TORCH_BYTES} | {' | '.join(torch_cells)} |")
    for step in STEPS:
        cells = []
        for machine in MACHINES:
            memory = 1e12 * step.bytes / machine.bandwidth
            count = sum(compiled[kernel][machine.target]["per_element"] for kernel in step.kernels)
            work = 1e12 * count / machine.instructions
            gain = TORCH_BYTES / machine.bandwidth * 1e12 / max(memory, work)
            cells.append(f"{memory:.1f}, {work:.1f} ({gain:.1f}x)")
        lines.append(f"| {step.weight}, {step.first}/{step.second} | {step.bytes:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
