"""Simulated moving averages, for the tests of the stall mathematics.

They round with the library's own codecs and random bits, one callable `(x, key or None) -> stored value` per format,
on a grid that stands still, as the formulas assume: bf16 has no scale, E4M3 gets one that is held, the four-bit float
one that only moves by powers of two. Simulated populations draw sigma^2 log-uniformly over a binade (mantissas are then
log-uniform, as the formulas assume).
"""

from collections.abc import Callable

import numpy as np
import torch

from masterless.formats import codec, log_code, parse
from masterless.formats.rounding import dither
from masterless.step.staleness import (
    Grid,
)

BF16, E4M3, TWO_BITS, E2M1 = (Grid.floating(bits) for bits in (7, 3, 2, 1))
Rounding = Callable[[np.ndarray, int | None], np.ndarray]


def as_rows(x: np.ndarray) -> torch.Tensor:
    """Any number of values as rows of one block, the last one filled up with values of the same kind."""
    return torch.from_numpy(np.resize(np.asarray(x, dtype=np.float32), (-(-x.size // 128), 128)))


def through(name: str, scale: float | None = None, rounding: str = "stochastic") -> Rounding:
    """Rounds as the library stores, under a scale that is held (or the blocks' own); dithered if given a key."""
    format = parse(name)

    def round_(x: np.ndarray, key: int | None = None) -> np.ndarray:
        rows = as_rows(x)
        held = None if scale is None else torch.full((len(rows), 1), scale)
        u = None if key is None else dither(key, *rows.shape)
        stored = codec.encode(rows, format, u, scale=held, rounding=rounding)
        return codec.decode(stored, 128, format).numpy().astype(float).ravel()[: x.size]

    return round_


def round_one_fraction_bit(x: np.ndarray, key: int | None = None) -> np.ndarray:
    """E2M1 with exponents without end: the format itself has three binades, too few for an m that crosses zero."""
    assert key is None
    mantissa, exponent = np.frexp(x)  # mantissa in [1/2, 1): one bit more than the stored fraction
    return np.ldexp(np.rint(mantissa * 4) / 4, exponent)


def round_floating(fraction_bits: int) -> Rounding:
    """The library's format with that many fraction bits."""
    return {
        7: through("bf16"),
        3: through("fp8", scale=2.0**-6),  # E4M3: normal numbers from 2^-12 to 7
        2: through("ufp4:128:pow2"),
        1: round_one_fraction_bit,
    }[fraction_bits]


def simulate(
    round_: Rounding, beta: float, steps: int, n: int, snr: float | None = None, stochastic: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """A moving average from zero, by step: its mean in units of sigma^2 or sigma, and the stalled share.

    `snr=None` averages squares of zero-mean gradients, a number gradients of that signal-to-noise ratio.
    """
    rng = np.random.default_rng(0)
    scale = 2 ** rng.random(n)
    stored = np.zeros(n)
    mean, stalled = np.empty(steps), np.empty(steps)
    for t in range(steps):
        g = rng.standard_normal(n)
        incoming = g * g if snr is None else g + snr
        new = beta * stored + (1 - beta) * scale * incoming
        new = round_(new, t if stochastic else None)
        stalled[t] = np.mean(new == stored)
        stored = new
        mean[t] = np.mean(stored / scale)
    return mean, stalled


def one_step(round_: Rounding, beta: float, stochastic: bool = False, r: float = 1.0) -> float:
    """Stalled share of 400,000 second moments that stand on a level, at r sigma^2, and see one gradient."""
    rng = np.random.default_rng(1)
    v = round_(2 ** rng.random(400_000), None)
    new = beta * v + (1 - beta) * v / r * rng.standard_normal(v.size) ** 2
    return float(np.mean(round_(new, 7 if stochastic else None) == v))


def log_levels(step: int, k: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The values of codes k of the library's log code, and the metadata of its blocks: ratio 2^(step/1024)."""
    top = torch.full((len(k), 1), 2.0**23, dtype=torch.bfloat16)
    metadata = {"top": top, "step": torch.full((len(k), 1), step, dtype=torch.int16).view(torch.uint8)}
    return codec.decode({"codes": codec.pack(k, 8), **metadata}, k.shape[1], parse("log8")), metadata


def log_codes(x: torch.Tensor, metadata: dict[str, torch.Tensor], key: int | None = None) -> torch.Tensor:
    u = None if key is None else dither(key, *x.shape)
    stored = log_code.encode_log(x, metadata, parse("log8"), u, rounding="stochastic-log")
    return codec.unpack(stored["codes"], x.shape[1], 8)
