"""Factored second moments: row and column means of a matrix, and sums whose bits do not depend on their order.

Contract:
    * A sum is of whole numbers of a unit, a power of two chosen from the largest summand: fp64 adds them without error,
      so slabs, threads, vector lanes and ranks may add in any order.
    * The estimate of element (i, j) is ``row_i / mean(row) * col_j``; a matrix of zeros is estimated as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact_sum(x: Tensor, dim: int, peak: Tensor, count: int) -> Tensor:
    """The sum of non-negative numbers whose bits do not depend on the order of summation.

    The summands are rounded to integers in units of a power of two, chosen from the largest one so that
    the sum stays below 2^53; fp64 adds such integers without error, so threads, vector lanes and ranks may
    add in any order. The loss is at most ``count * 2^-52`` of the largest summand.

    Args:
        x: non-negative summands, fp64.
        dim: the dimension to sum over.
        peak: a largest summand, broadcastable to `x` and constant along `dim` (of the whole, if `x` is a shard).
        count: the largest number of summands of one sum (of the whole, if `x` is a shard).
    """
    unit = sum_unit(peak, count)
    return ((x / unit).round().sum(dim, keepdim=True) * unit).squeeze(dim)


def sum_unit(peak: Tensor, count: int) -> Tensor:
    """The power of two in which `exact_sum` counts, fp64."""
    _, exponent = torch.frexp(peak.to(torch.float64))  # peak < 2^exponent
    bits = 52 - (max(count, 1) - 1).bit_length()
    return torch.ldexp(torch.ones_like(peak, dtype=torch.float64), exponent - bits)


def matrix_means(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column means, order-free, of non-negative fp64 matrices ``[n, rows, cols]``; rounded to fp32."""
    _, rows, cols = stack.shape
    peak = stack.amax((1, 2), keepdim=True)
    row = exact_sum(stack, 2, peak, max(rows, cols)) / stack.new_tensor(cols)
    col = exact_sum(stack, 1, peak, max(rows, cols)) / stack.new_tensor(rows)
    return row.to(torch.float32), col.to(torch.float32)


def row_means(row: Tensor) -> Tensor:
    """The mean of the row factors of every matrix ``[matrices, rows]``, order-free: fp32 ``[matrices]``."""
    wide = row.to(torch.float64)
    count = row.shape[1]
    return (exact_sum(wide, 1, wide.amax(1, keepdim=True), count) / wide.new_tensor(count)).to(torch.float32)


def estimate(row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    """``row_i / mean(row) * col_j``: row factors ``[rows, 1]``, column factors and means of their matrices."""
    ratio = torch.where(mean > 0, row / torch.where(mean > 0, mean, 1.0), 0.0)
    return ratio * col
