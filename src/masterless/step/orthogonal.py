"""Orthogonalised steps: Newton-Schulz, the sizes that go with a matrix's shape, and the way back of a rounding error.

Contract:
    * A matrix is the last two dimensions; what stands before them is a stack, orthogonalised matrix by matrix.
    * `newton_schulz` repeats `torch.optim.Muon` operation by operation: a matrix in bf16 gives the same bits.
    * With O the result for U, ``U ~ O H = G O`` (polar factors): ``H ~ O^T U`` and ``G ~ U O^T`` cost one product each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ADJUSTMENTS = ("original", "match_rms_adamw")


def newton_schulz(
    update: Tensor, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The nearest semi-orthogonal matrix, about: all singular values of `update` become roughly 1 (0.7 to 1.2).

    Args:
        update: ``[..., rows, cols]``.
        coefficients: a, b, c of the polynomial ``a x + b x^3 + c x^5`` that is iterated.
        steps: how often.
        eps: the norm is not taken below this.
        dtype: of the products.
    """
    a, b, c = coefficients
    add_product = torch.addmm if update.dim() == 2 else torch.baddbmm
    tall = update.shape[-2] > update.shape[-1]
    x = update.to(dtype)
    x = x.mT if tall else x
    # The spectral norm is at most Frobenius', the iteration converges from below 1.
    norm = x.norm() if x.dim() == 2 else x.flatten(1).norm(dim=1).view(-1, 1, 1)
    x = x / norm.clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def shape_factor(adjust: str | None, shape: Sequence[int]) -> float:
    """What the learning rate of a matrix of this shape is multiplied by.

    "original" (Keller Jordan's, the default): ``sqrt(max(1, rows / cols))``; "match_rms_adamw" (Moonshot's):
    ``0.2 sqrt(max(rows, cols))``, an update of AdamW's usual size, so that AdamW's learning rate serves.
    """
    rows, cols = shape[-2:]
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def given_back(error: Tensor, update: Tensor, direction: Tensor, size: float) -> Tensor:
    """What added to `update` U turns the step ``-size * polar(U)`` by `error`, as far as turning can do it.

    To first order ``polar(U + X H) = O + X`` for every X that is tangent at O (``O^T X`` skew-symmetric, or orthogonal
    to the columns of O). The rest of the error, ``O`` times a symmetric matrix, would make the step longer or shorter,
    and no momentum can: it is lost (`docs/muon.md`).

    Args:
        error: what rounding took from the weight, fp32 ``[..., rows, cols]``.
        update: what was orthogonalised.
        direction: what came of it.
        size: of the step.
    """
    wanted = error * (-1.0 / size)
    o = direction.to(torch.float32)
    if update.shape[-2] >= update.shape[-1]:
        return wanted @ (o.mT @ update)
    return (update @ o.mT) @ wanted
