"""What a block scale that is rounded up at every step does to a second moment: v / true v over time.

1024 averages of squared Gaussian gradients, beta2 = 0.999, stored and read through the library's codecs at every step.

    python benchmarks/scale_drift.py           # simulates, writes results/scale_drift.jsonl, prints the table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from masterless.formats import as_second_moment, codec
from masterless.formats.rounding import dither

RESULTS = Path(__file__).parent / "results" / "scale_drift.jsonl"
FORMATS = ("fp8", "fp8:128:fp32", "fp8:128:pow2", "fp4", "fp4:128:pow2", "uint8", "log4", "log2")
STEPS = (100, 320, 1000, 2000)
BETA2 = 0.999


def simulate(name: str, rounding: str) -> list[float]:
    """Bias-corrected mean of v / sigma^2 at each of `STEPS`; sigma^2 differs from element to element."""
    format, generator = as_second_moment(name), torch.Generator().manual_seed(0)
    variance = torch.exp2(torch.rand(8, 128, generator=generator))
    v, found = torch.zeros(8, 128), []
    for step in range(1, max(STEPS) + 1):
        gradient = torch.randn(8, 128, generator=generator)
        u = dither(step, 8, 128) if rounding == "stochastic" else None
        parts = codec.encode(BETA2 * v + (1 - BETA2) * variance * gradient.square(), format, u)
        v = codec.decode(parts, 128, format)
        if step in STEPS:
            found.append(float((v / variance).mean()) / (1 - BETA2**step))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A markdown table."""
    lines = [f"| v / true v after {', '.join(map(str, STEPS))} steps | nearest | stochastic |", "|---|---|---|"]
    for name in FORMATS:
        cells = (
            " ".join(f"{x:.2f}" for row in rows if (row["format"], row["rounding"]) == (name, kind) for x in row["v"])
            for kind in ("nearest", "stochastic")
        )
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    rows = [
        {"format": name, "rounding": rounding, "v": simulate(name, rounding)}
        for name in FORMATS
        for rounding in ("nearest", "stochastic")
    ]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))


if __name__ == "__main__":
    main()
