"""Rounding: the names, and the random bits as a pure function of a counter.

Contract:
    * `dither` gives 16 random bits for every element as a function of (seed, step, parameter, purpose,
      row, column) and of nothing else: no generator, no state. Replicas agree, a resumed run continues bit
      for bit, and a shard of rows sees what the whole tensor would have seen.
    * Construction: the first four become a 64-bit key; key and chunk number (128 elements of a row) go
      through SplitMix64. The lower 32 bits of the weight's are a, the uppermost 16 of the purpose's own b, and
      element e of the chunk gets the upper half of ``mix(a + e * W)`` plus b, with ``mix(x) = (x ^ x >> 12) * M``
      modulo 2^32. So weight and moments of an element share the mixed word, which is what costs.
    * The addition of b makes every element exactly uniform, and the purposes of an element exactly independent: given
      the mixed word, each has its own b. (What they share are differences: those of a chunk's elements are the same
      for all purposes of a step.)
    * Stochastic rounding goes to the upper neighbour where ``fraction > (u + 1/2) / 2^16``: a number that
      lies on the grid stays where it is, always, and the mean is right to 2^-17 of the gap.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from masterless.formats.layout import CHUNK

Rounding = Literal["nearest", "stochastic", "stochastic-log", "stochastic-value"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

PURPOSES = {"weight": 1, "exp_avg": 2, "exp_avg_sq": 3}

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Of random triples the one whose pairs of elements are the least dependent (`tests/test_rounding.py` says how little).
_WEYL32, _SHIFT32, _MULTIPLY32 = 0x18701E9B, 12, 0xCDF7CC2B


def of_signed(rounding: str) -> str:
    """The rounding of weights and first moments under this name: the variants are of second moments' log codes."""
    return "nearest" if rounding == "nearest" else "stochastic"


def check_rounding(rounding: str) -> None:
    """Raises a ValueError for a name that is no rounding."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; choose one of {', '.join(ROUNDINGS)}")


def parameter_id(name: str) -> int:
    """A 64-bit identity of a parameter from its name (or, nameless, from its position written as a name)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _splitmix64(z: Any) -> Any:  # an int, or an array of uint64
    z = _wrapped(z + _GOLDEN64)
    z = _wrapped((z ^ (z >> 30)) * _MIX1)
    z = _wrapped((z ^ (z >> 27)) * _MIX2)
    return z ^ (z >> 31)


def _wrapped(z: Any) -> Any:
    return z & _MASK64 if isinstance(z, int) else z  # an array wraps by itself


def stream_key(seed: int, step: int, parameter: int, purpose: str) -> int:
    """The 64-bit key of one parameter's random bits in one step for one purpose."""
    key = _splitmix64(seed & _MASK64)
    for part in (step, parameter, PURPOSES[purpose]):
        key = _splitmix64(key ^ (part & _MASK64))
    return key


def stream_keys(
    seeds: NDArray[np.uint64], steps: NDArray[np.uint64], parameters: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """`stream_key` of many parameters at once: ``[n, purposes]``, in the order of `PURPOSES`."""
    key = _splitmix64(_splitmix64(_splitmix64(seeds) ^ steps) ^ parameters)
    return _splitmix64(key[:, None] ^ np.array(list(PURPOSES.values()), dtype=np.uint64))


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, n: int) -> Tensor:
    """Logical right shift of 64-bit words held in int64."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def _chunk_words(key: int, chunks: Tensor) -> Tensor:
    """SplitMix64 of key and chunk numbers: 64-bit words held in int64."""
    z = _signed64(key) + (chunks + 1) * _signed64(_GOLDEN64)  # int64 wraps, which is what SplitMix64 wants
    z = (z ^ _shift(z, 30)) * _signed64(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed64(_MIX2)
    return z ^ _shift(z, 31)


def dither(
    key: int,
    rows: int,
    cols: int,
    first_row: int = 0,
    device: torch.device | str | None = None,
    *,
    weight_key: int | None = None,
) -> Tensor:
    """Random integers below 2^16 for `rows` rows of a tensor from `first_row` on: int32 ``[rows, cols]``.

    Args:
        key: of the parameter, the step and the purpose (`stream_key`).
        rows: how many.
        cols: elements of each.
        first_row: its number in the whole tensor.
        device: of the result.
        weight_key: of the same parameter and step for the purpose "weight"; None if `key` is that, or stands alone.
    """
    chunks_per_row = -(-cols // CHUNK)
    first = first_row * chunks_per_row
    chunks = torch.arange(first, first + rows * chunks_per_row, device=device).view(rows, chunks_per_row, 1)
    own = _chunk_words(key, chunks)
    a = (own if weight_key is None else _chunk_words(weight_key, chunks)) & _MASK32
    x = (a + torch.arange(CHUNK, device=device) * _WEYL32) & _MASK32
    x = ((x ^ (x >> _SHIFT32)) * _MULTIPLY32) & _MASK32
    return (((x >> 16) + _shift(own, 48)) & 0xFFFF).to(torch.int32).flatten(1)[:, :cols]


def threshold(u: Tensor) -> Tensor:
    """``(u + 1/2) / 2^16`` in fp32, exact: what a fraction is compared with in stochastic rounding."""
    return (u.to(torch.float32) + 0.5) * 2.0**-16
