"""The last part of a run: the momentum's bits go to the weights.

Contract:
    * Under error compensation ``theta = W - b/(1-b) u`` is what is trained (docs/error-compensation.md): the stored
      weight W is a rounding of it, and the momentum u holds what rounding took and, while the learning rate is high, an
      average of gradients. When the learning rate has fallen, u holds hardly more than what rounding took. Then INT4
      weights with a 4-bit momentum are an eight-bit theta of which the forward pass sees four bits; traded, they are
      INT8 weights without momentum: theta itself, in the same bytes, all of it seen.
    * What a trade changes: the weights, to the nearest to theta in the new format under new scales; the momentum, which
      goes; and the options of the groups that the weights are in (no beta1, no first moment, stochastic rounding of
      weights, since no buffer holds an error any longer). Second moments, counters and random bits stay. Parameters are
      the same objects afterwards: models, schedulers and DDP go on with them.
    * Either all of it happens or none: what cannot be traded is refused first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.formats import Format, FormatError
from masterless.formats.storage import Storage
from masterless.optim import units
from masterless.optim.plan import explained
from masterless.step import dispatch
from masterless.tensor import places
from masterless.tensor.pieces import empty_storage
from masterless.tensor.quantized import QuantizedTensor, as_weight, local_of

if TYPE_CHECKING:
    from masterless.optim.adam import Adam

_SLAB = 1 << 20  # elements of theta that are dense at a time


@dataclass(frozen=True)
class TradeReport:
    """What a trade did. ``print`` it.

    Attributes:
        formats: the weights' formats before and after, by the parameter's name.
        without_momentum: other parameters of the same groups, whose momentum ended with it.
        bytes_before: of the traded weights and their momentum.
        bytes_after: of the traded weights.
    """

    formats: dict[str, tuple[str, str]]
    without_momentum: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        kinds = sorted({f"{before} -> {after}" for before, after in self.formats.values()})
        others = f"; no momentum any more: {', '.join(self.without_momentum)}" if self.without_momentum else ""
        return (
            f"momentum traded for bits in {len(self.formats)} weights ({', '.join(kinds)}), "
            f"{self.bytes_before:,} -> {self.bytes_after:,} bytes{others}"
        )


@torch.no_grad()
def trade_momentum_(optimizer: Adam, weights: str | Format | None = None) -> TradeReport:
    """Gives the bits of the momentum to the weights, for the last part of a run.

    INT4 weights with a 4-bit momentum become INT8 weights without one: as many bytes, and nothing that rounding took is
    outstanding. For AdamW and Adam whose weights inject their rounding errors; best when the learning rate has fallen
    to a sixth of its peak or so (docs/recipes-appendix.md).

    Args:
        optimizer: `AdamW` or `Adam` over quantized parameters.
        weights: their new format; by default as many bits as weight and momentum have together ("int8" for "int4" and
            "int4"). A format with hidden bits ("int4+4") shows the forward pass as much as before.

    Returns:
        What was changed, also of parameters that shared a group with those: print it.

    >>> from masterless import prepare
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    >>> optimizer = prepare(model, "1-byte-int4", lr=1e-2)
    >>> model(torch.randn(4, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> print(trade_momentum_(optimizer))
    momentum traded for bits in 1 weights (int4 -> int8:row), 4,352 -> 4,224 bytes; no momentum any more: 2.weight
    >>> str(model[0].weight.format), optimizer.param_groups[0]["betas"]
    ('int8:row', (0.0, 0.95))
    """
    optimizer.synchronize()
    chosen = _checked(optimizer, weights)
    optimizer.plan = optimizer.new_plan()  # it would keep what is traded alive
    formats, before, after = {}, 0, 0
    while chosen:
        group, p, name, theta, format = chosen.pop(0)
        old = p.stored.nbytes + optimizer.state_bytes_of(p)
        formats[name] = (str(p.format), str(format))
        replaced, p.stored = p.stored, theta.stored_as(format)
        places.hand_over(replaced, p.stored)
        del theta, replaced
        _forget_momentum(optimizer, p)  # at once, so that there are never many weights in both forms
        before, after = before + old - optimizer.state_bytes_of(p), after + p.stored.nbytes
        increment_version([p, p.stored.tensors["codes"]])  # a backward pass that is still to come has other weights
    groups = {id(group): group for group, _, name in optimizer.parameters() if name in formats}
    others = [(p, name) for group, p, name in optimizer.parameters() if id(group) in groups and name not in formats]
    for p, _ in others:
        _forget_momentum(optimizer, p)
    for group in groups.values():
        group["betas"], group["exp_avg"] = (0.0, group["betas"][1]), "none"
        group["weight_rounding"], group["error_compensation"] = "stochastic", None
    return TradeReport(formats, tuple(name for _, name in others), before, after)


def _forget_momentum(optimizer: Adam, p: Tensor) -> None:
    state = optimizer.state.get(p, {})
    for key in [key for key in state if key.split(".")[0] == "exp_avg"]:
        del state[key]


class _Theta(NamedTuple):
    """``weight - factor * momentum``, never dense as a whole."""

    weight: Storage
    momentum: Storage | None
    factor: float

    def slabs(self, whole: bool = False) -> Iterator[tuple[int, int, Tensor]]:
        """Runs of slices of dimension 0, dense in fp32."""
        layout = self.weight.layout
        whole = whole or self.weight.format.granularity == "tensor"
        step = layout.slices if whole else max(1, _SLAB * layout.slices // max(1, layout.rows * layout.cols))
        for start in range(0, layout.slices, step):
            stop = min(start + step, layout.slices)
            cut = [s if whole or s is None else s.cut(start, stop) for s in (self.weight, self.momentum)]
            theta = dispatch.decode(cut[0])  # type: ignore[arg-type]
            yield start, stop, theta if cut[1] is None else theta - dispatch.decode(cut[1]) * self.factor

    def stored_as(self, format: Format) -> Storage:
        """In another format, to nearest, under new scales."""
        whole = format.granularity == "tensor" or format.two_level
        target = empty_storage(format, self.weight.shape, next(iter(self.weight.tensors.values())).device)
        for start, stop, theta in self.slabs(whole):
            dispatch.encode(target if whole else target.cut(start, stop), theta)
        return target


def _checked(optimizer: Any, weights: str | Format | None) -> list[tuple[dict[str, Any], Any, str, _Theta, Format]]:
    """The parameters that are traded and what they become; raises a ValueError for what cannot be done."""
    from masterless.optim.adam import Adam

    if not isinstance(optimizer, Adam):
        raise ValueError(
            f"trade_momentum_: {type(optimizer).__name__} without momentum takes other steps than with it; trade with "
            f"AdamW or Adam"
        )
    if optimizer.plan.captured is not None:
        raise ValueError("trade_momentum_: the step is captured in a device graph; trade first, capture then")
    found = []
    for group, p, name in optimizer.parameters():
        if not optimizer.compensates(p, group):
            continue
        if local_of(p) is not p or not isinstance(p, QuantizedTensor):
            raise ValueError(
                f"trade_momentum_: parameter {name!r} is sharded, and FSDP2 keeps buffers of what it gathers; save the "
                f"model and its optimizer, trade on the whole ones, and shard those"
            )
        momentum = optimizer.state_formats(p, group)["exp_avg"]
        try:
            format = traded_format(p.format, momentum) if weights is None else as_weight(weights)
        except FormatError as error:
            raise ValueError(f"trade_momentum_: parameter {name!r}: {error}") from None
        if format.bits + format.fine_bits > p.format.bits + p.format.fine_bits:
            with explained(optimizer, name):
                theta = _theta_of(optimizer, group, p)
            if not all(bool(slab.isfinite().all()) for _, _, slab in theta.slabs()):
                raise ValueError(f"trade_momentum_: parameter {name!r} and its momentum add up to what is not finite")
            found.append((group, p, name, theta, format))
    if not found:
        raise ValueError(
            "trade_momentum_: no weight of this optimizer injects its rounding error into a momentum and would gain "
            "bits; it is for quantized weights with a first moment, such as preset '1-byte-int8' has"
        )
    return found


def _theta_of(optimizer: Adam, group: dict[str, Any], p: Any) -> _Theta:
    """What a parameter is a rounding of; its storages are validated, its momentum is in units of the weight."""
    beta1, weight = float(group["betas"][0]), p.stored.validate()
    if p not in optimizer.state:
        return _Theta(weight, None, 0.0)
    storages = optimizer.state_storage(p, group)
    units.align(optimizer, group, p, optimizer.state[p], storages)
    return _Theta(weight, storages["exp_avg"].validate(), beta1 / (1.0 - beta1))


def traded_format(weight: Format, momentum: Format) -> Format:
    """The weight's format that has the bits of both; 8 at most."""
    bits = weight.bits + weight.fine_bits + (momentum.bits if momentum.scaled else 32)
    try:
        return as_weight(f"int{min(bits, 8)}")
    except FormatError:
        raise FormatError(
            f"'{weight}' weights and a '{momentum}' momentum have {bits} bits together, and there is no such format; "
            f"name one, for instance weights='int8'"
        ) from None
