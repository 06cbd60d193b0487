"""Rounding: the names, and the random bits as a pure function of a counter.

Contract:
    * `dither` gives 16 random bits for every element as a function of (seed, step, parameter, purpose,
      row, column) and of nothing else: no generator, no state. Replicas agree, a resumed run continues bit
      for bit, and a shard of rows sees what the whole tensor would have seen.
    * Construction: the first four become a 64-bit key; key and chunk number (128 elements of a row) go
      through SplitMix64, once for every purpose. A fixed permutation of the numbers below 1024 lies in a ring, and each
      sixteen elements of the chunk read it from a place of their own: ten bits of the word, six bits further for each
      next sixteen. That makes the upper ten bits of u; the lower six, the same for a chunk, are the word's uppermost.
      So a processor loads what it would otherwise mix, and nothing is kept from one rounding to the next.
    * Every element is exactly uniform: its place in the ring is, and its lower bits are. Elements are independent but
      for those that were read together, and there nearly (`tests/test_rounding.py` says how nearly).
    * Stochastic rounding goes up with probability ``fraction``: a number that lies on the grid stays where it is,
      always, and the mean is right to 2^-16 of the gap (second moments' log code: 2^-11, see `log_code`).
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

FRACTION = 15  # bits of a fraction that stochastic rounding looks at, by adding random ones to them

_FEW = 4  # parameters, such as the one of a step in backward: numpy's calls take longer than their keys
_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
RING = 1024
_READ_TOGETHER = 16
# x (985 + x 368) modulo 1024: a permutation, for the first factor is odd and the second even; and of all those the one
# whose neighbours are the least dependent.
_RING_POLYNOMIAL = (985, 368)


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
    if len(parameters) <= _FEW:
        steps = np.broadcast_to(steps, parameters.shape)
        each = zip(seeds.tolist(), steps.tolist(), parameters.tolist(), strict=True)
        return np.array([_keys_of_purposes(*numbers) for numbers in each], dtype=np.uint64)
    key = _splitmix64(_splitmix64(_splitmix64(seeds) ^ steps) ^ parameters)
    return _splitmix64(key[:, None] ^ np.array(list(PURPOSES.values()), dtype=np.uint64))


def _keys_of_purposes(seed: int, step: int, parameter: int) -> list[int]:
    key = _splitmix64(_splitmix64(_splitmix64(seed) ^ step) ^ parameter)
    return [_splitmix64(key ^ purpose) for purpose in PURPOSES.values()]


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


def ring() -> Tensor:
    """The permutation of the numbers below 1024 that random bits are read from, int64."""
    x, (a, b) = torch.arange(RING), _RING_POLYNOMIAL
    return x * (a + x * b) % RING


def dither(key: int, rows: int, cols: int, first_row: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Random integers below 2^16 for `rows` rows of a tensor from `first_row` on: int32 ``[rows, cols]``.

    Args:
        key: of the parameter, the step and the purpose (`stream_key`).
        rows: how many.
        cols: elements of each.
        first_row: its number in the whole tensor.
        device: of the result.
    """
    chunks_per_row = -(-cols // CHUNK)
    first = first_row * chunks_per_row
    chunks = torch.arange(first, first + rows * chunks_per_row, device=device).view(rows, chunks_per_row, 1)
    words, elements = _chunk_words(key, chunks), torch.arange(CHUNK, device=device)
    places = (words >> 6 * (elements // _READ_TOGETHER)) + elements % _READ_TOGETHER
    u = (ring().to(device)[places % RING] << 6) | _shift(words, 58)
    return u.to(torch.int32).flatten(1)[:, :cols]


def threshold(u: Tensor) -> Tensor:
    """``(u + 1/2) / 2^16`` in fp32, exact: what a fraction is compared with in stochastic rounding."""
    return (u.to(torch.float32) + 0.5) * 2.0**-16
