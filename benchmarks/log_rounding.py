"""How rounding a logarithmic second moment changes the length of Adam's steps.

    python benchmarks/log_rounding.py           # prints the table of docs/states.md (some minutes)

200 steps of gradients ``N(0, 1) * exp(s * N(0, 1))``, the second factor fixed for each column. The factor is the mean
length of ``m / sqrt(v)`` over the last ten steps with v stored in the format, over that with an exact v: 1 is right.

A rounding that is unbiased in ``h(v) = v^gamma`` at every step leaves a slow average with a stationary distribution
over two neighbouring levels lo < hi, with odds ``(v - lo) / (hi - v) * h'(lo) / h'(hi)``: errors of one step stay in
the average for 1 / (1 - b2) steps. gamma = 1 keeps the mean of v, hence too much of 1/sqrt(v); gamma = -1/2, unbiased
in 1/sqrt(v) at every step, ends far too high. 1/4 has the right mean of 1/sqrt(v) in the middle (in the logarithm)
between the levels. Only the slopes at the two ends of the interval matter in that limit: the library's rounding is the
parabola ``s (1 + c - c s)`` with their ratio, c = tanh(ln(hi/lo) / 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from masterless.formats import Format, codec, log_code, parse
from masterless.formats.rounding import dither, stream_key

STEPS, LAST = 200, 10
ROWS, COLS = 8, 512
SPREADS = (0.0, 1.0, 2.0)
FORMATS = ("log2", "log3", "log4", "log8")
BETAS = (0.95, 0.999)
Store = Callable[[Tensor, int], Tensor]


def random_bits(shape: torch.Size, step: int) -> Tensor:
    return dither(stream_key(0, step, 0, "exp_avg_sq"), *shape)


def shipped(rounding: str) -> Callable[[Format], Store]:
    """A rounding of the library."""

    def of(format: Format) -> Store:
        def store(v: Tensor, step: int) -> Tensor:
            parts = codec.encode(v, format, random_bits(v.shape, step), rounding=rounding)
            return codec.decode(parts, v.shape[1], format)

        return store

    return of


def unbiased_in_power(gamma: float) -> Callable[[Format], Store]:
    """Unbiased in v^gamma at every step, exactly."""

    def of(format: Format) -> Store:
        def store(v: Tensor, step: int) -> Tensor:
            nearest = codec.encode(v, format)
            top, size, flag = (
                x.repeat_interleave(128, 1)[:, : v.shape[1]] for x in log_code.read_log_metadata(nearest)
            )
            depth = (top - codec.float_bits(v)).clamp(min=0)
            code = depth // size
            above_lower = 1.0 - (depth - code * size).double() / size.double()
            power = size.double() / 2**23 * math.log(2) * gamma
            up = torch.expm1(power * above_lower) / torch.expm1(power)
            u = (random_bits(v.shape, step).double() + 0.5) / 2**16
            code = torch.minimum(code + (1.0 - up > u), 2**format.bits - 1 - flag.long())
            return codec.bits_float((top - code * size).clamp(min=1))

        return store

    return of


ROUNDINGS: dict[str, Callable[[Format], Store]] = {
    "`stochastic-value` (gamma 1)": shipped("stochastic-value"),
    "gamma 1/2": unbiased_in_power(0.5),
    "gamma 3/8": unbiased_in_power(0.375),
    "gamma 1/4": unbiased_in_power(0.25),
    "gamma 1/8": unbiased_in_power(0.125),
    "`stochastic-log` (gamma 0)": shipped("stochastic-log"),
    "gamma -1/2": unbiased_in_power(-0.5),
    "**`stochastic`** (about 1/4)": shipped("stochastic"),
}


def step_factor(
    format: Format, rounding: Callable[[Format], Store], beta2: float, spread: float, seed: int = 0
) -> float:
    """The length of the steps with a stored second moment over that with an exact one."""
    store = rounding(format)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(spread * torch.randn(COLS, generator=generator))
    exact, stored, m = (torch.zeros(ROWS, COLS) for _ in range(3))
    found = []
    for step in range(1, STEPS + 1):
        g = torch.randn(ROWS, COLS, generator=generator) * scale
        m = 0.9 * m + 0.1 * g
        exact = beta2 * exact + (1 - beta2) * g * g
        used = beta2 * stored + (1 - beta2) * g * g  # what the update divides by; bias corrections cancel
        stored = store(used, step)
        if step > STEPS - LAST:
            found.append(float((m.abs() / used.sqrt()).mean() / (m.abs() / exact.sqrt()).mean()))
    return sum(found) / len(found)


def table() -> str:
    """Factors at spreads s = 0 / 1 / 2."""
    rows = [f"| b2, rounding | {' | '.join(FORMATS)} |", "|---|" + "---|" * len(FORMATS)]
    for beta2 in BETAS:
        for name, rounding in ROUNDINGS.items():
            cells = []
            for family in FORMATS:
                factors = [step_factor(parse(family), rounding, beta2, spread) for spread in SPREADS]
                cells.append(" / ".join(f"{factor:.2f}" for factor in factors))
            rows.append(f"| {beta2}, {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
