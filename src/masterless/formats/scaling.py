"""When the scale of a stored weight changes.

Contract:
    * ``held`` (the default): a block keeps its scale until a weight overflows the grid by more than half of
      its last gap, or the whole block fits into half of the grid; only then is a new one taken, with
      some headroom. A weight that nobody moved keeps its exact code, because the grid did not move.
    * ``recompute``: absmax at every step (the ECO paper's): every stored weight falls off the moving grid and
      is rounded anew each step.
    * The scale *kind* (bf16, fp32, power of two) is a field of the format and applies under either policy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from masterless.formats.codec import block_peak, read_scale, round_scale_up, scale_for
from masterless.formats.format import Format

POLICIES = ("held", "recompute")
FROZEN = "frozen"  # what both come to in a step that moves nothing (lr = 0): not even the grid moves
HEADROOM = 1.0625
WASTE = 0.5


def overflow_level(format: Format) -> float:
    """The magnitude, in units of the scale, beyond which a held scale gives way: half a gap past the end."""
    levels = format.levels
    return levels[-1] + (levels[-1] - levels[-2]) / 2


def next_scale(format: Format, policy: str, target: Tensor, held: Mapping[str, Tensor]) -> Tensor | None:
    """The scales under which the weights `target` ``[rows, cols]`` are stored (fp32; None: plain format).

    Args:
        format: of the weights.
        policy: see the module.
        target: what is to be stored.
        held: what is stored now.
    """
    if not format.scaled:
        return None
    return scale_from_absmax(format, policy, block_peak(target, format), held)


def scale_from_absmax(format: Format, policy: str, absmax: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """As `next_scale`, from the largest magnitude of every block."""
    tensor_scale = held.get("tensor_scale")
    if policy == "recompute":
        return scale_for(absmax, format, tensor_scale)
    old = read_scale(held, format)
    if policy == FROZEN:
        return old
    overflows = absmax > old * overflow_level(format)
    wastes = absmax < old * (WASTE * format.max_level)
    fresh = round_scale_up(absmax * (HEADROOM / format.max_level), format, tensor_scale)
    return torch.where(overflows | wastes, fresh, old)
