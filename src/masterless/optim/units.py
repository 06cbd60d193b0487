"""In which units a first moment is kept, and how it is brought into others.

Contract:
    * "gradient": an average of gradients; "update": of normalised ones, the step over its size; "weight": the step
      itself. ``weight = size * update``, ``update = gradient / d``, with the size of the step that was made last
      (``lr / (1 - b1^t)`` for Adam) and d the denominator of the second moment.
    * Error compensation needs weight units: no learning rate rescales them. A moment in weight units is marked as
      such in its parameter's state, so that neither a checkpoint nor a change of options can take it for another.
    * A checkpoint of version 1 has no moments in weight units; what error compensation had put into them is kept.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masterless.formats.arithmetic import exact_sqrt
from masterless.formats.storage import Storage
from masterless.optim.resets import local_step
from masterless.step.rules import Rule
from masterless.tensor.quantized import weight_storage

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer

MARK = ".in_weight_units"  # a scalar beside a first moment that is


def wanted(optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor) -> str:
    """The units in which the optimizer keeps a parameter's first moment."""
    return optimizer.rule(group, optimizer.compensates(p, group)).units


def saved(optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, state: dict[str, Any], version: int) -> str:
    """The units of a first moment in a saved state, under the group's options when it was saved."""
    if f"{optimizer.first_name}{MARK}" in state:
        return "weight"
    return wanted(optimizer, group, p) if version >= 2 else plain_rule(optimizer, group).units


def plain_rule(optimizer: LowBitOptimizer, group: dict[str, Any]) -> Rule:
    """The group's rule in the units that it would have without weight units."""
    rule = optimizer.rule(group)
    return rule if rule.units != "weight" else optimizer.rule({**group, "moment_units": "gradient"})


def mark(optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    """Notes in a parameter's state whether its first moment is in weight units."""
    key = f"{optimizer.first_name}{MARK}"
    if wanted(optimizer, group, p) == "weight" and optimizer.has_momentum(group):
        state.setdefault(key, torch.tensor(1.0))
    else:
        state.pop(key, None)


def align(
    optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, state: dict[str, Any], storages: dict[str, Storage]
) -> None:
    """Brings a first moment into the units that the group's options, which may have changed, ask for now."""
    first = optimizer.first_name
    is_weight = f"{first}{MARK}" in state
    target = wanted(optimizer, group, p)
    if first not in storages or is_weight == (target == "weight"):
        return
    source = "weight" if is_weight else plain_rule(optimizer, group).units
    second = storages.get(optimizer.second_name or "")
    ages = [local_step(state, name) for name in (first, optimizer.second_name)]
    values = storages[first].decode()
    if bool(values.any()):
        size, d = step_parts(optimizer, group, p, second, ages[0], ages[1])
        storages[first].encode_(convert(values, source, target, size, d))
    mark(optimizer, group, p, state)


def step_parts(
    optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, second: Storage | None, t1: int, t2: int
) -> tuple[float, Tensor | None]:
    """The size of a step, and the denominator of one in gradient units (None: 1)."""
    rule = plain_rule(optimizer, group)
    c = rule.scalars(group, max(t1, 1), max(t2, 1))
    if rule.finish is not None:
        stored = weight_storage(p)
        weight = (p.detach() if stored is None else stored.decode()).to(torch.float64)
        c = rule.finish(c, group, float(weight.square().mean().sqrt()), 0.0)
    d = None if second is None else exact_sqrt(second.decode()) * c.bias2 + c.eps
    return c.step_size, d


def convert(values: Tensor, source: str, target: str, size: float, denominator: Tensor | None) -> Tensor:
    """A first moment's values in other units (see the module)."""
    if source == target:
        return values
    if source == "gradient" and denominator is not None:
        values = torch.where(denominator > 0, values / denominator, 0.0)
    elif source == "weight" and size == 0.0:
        warnings.warn(
            "a momentum in units of the weight cannot be expressed in those of the gradient or the update while the "
            "learning rate is 0, and starts again from zero; set a learning rate first",
            stacklevel=2,
        )
        return torch.zeros_like(values)
    elif source == "weight":
        values = values / torch.tensor(size, dtype=values.dtype, device=values.device)
    if target == "gradient" and denominator is not None:
        values = values * denominator
    return values * size if target == "weight" else values
