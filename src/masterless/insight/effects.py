"""What one optimizer step did to one parameter: stalls, lost updates, injected residue, code statistics.

Contract:
    * Nothing is written: a snapshot copies stored bytes before the step, and the measurement compares them with what
      is stored after it. The exact result of the step (before rounding) is computed anew from the snapshot and the
      gradient by the optimizer's own rule.
    * Whole rows are looked at, so that blocks stay together; of a large parameter, evenly spaced ones.
    * An element is *live* if its exact new value differs from the stored one. It *stalls* if it is live and its code
      (its value) does not change all the same. An update is *lost* if the weight should move and does not.
    * Of a stock torch.optim optimizer only states and weights before and after are known: an element is live there
      if its state or its gradient is not zero, and its weight's update is lost if the gradient is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from masterless.formats import parse
from masterless.formats.codec import bits_float, read_scale
from masterless.formats.log_code import read_log_metadata
from masterless.formats.packing import unpack
from masterless.formats.storage import Storage, factored_rows
from masterless.insight import forecast as predict
from masterless.optim.base import LowBitOptimizer
from masterless.optim.resets import local_step
from masterless.step import tile
from masterless.step.rules import SecondMoment
from masterless.step.scalars import Scalars
from masterless.tensor.quantized import weight_storage

_PLAIN = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass
class Snapshot:
    """What was stored of one parameter before a step, in the rows looked at."""

    name: str
    group: dict[str, Any]
    p: Tensor
    rows: Tensor
    weight: Storage
    states: dict[str, Storage]
    ages: dict[str, int]  # updates each state has seen since it was zero


def take_snapshot(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor, name: str, sample: int
) -> Snapshot | None:
    """Copies of a parameter's stored bytes; None if there is nothing to measure (no state yet, an odd dtype)."""
    state = optimizer.state.get(p, {})
    weight = _weight_of(p)
    if not state or weight is None or not p.numel():
        return None
    layout = weight.layout
    whole = isinstance(optimizer, LowBitOptimizer) and optimizer.rule(group).finish is not None
    stride = 1 if whole else max(1, -(-layout.rows * layout.cols // sample))
    rows = torch.arange(0, layout.rows, stride, device=p.device)
    stored = _states_of(optimizer, group, p)
    return Snapshot(
        name,
        group,
        p,
        rows,
        _take(weight, rows),
        {
            key: _take(storage, rows)
            for key, storage in stored.items()
            if storage.format.kind not in ("none", "factored")
        },
        {key: _age(state, key) for key in stored},
    )


def measure(optimizer: torch.optim.Optimizer, before: Snapshot, histogram: bool = True) -> dict[str, Any] | None:
    """What the step did; None if the parameter was not stepped (no gradient, or one that is not finite)."""
    p, group = before.p, before.group
    if p.grad is None:
        return None
    now = _weight_of(p)
    assert now is not None
    grad = p.grad.detach().reshape(now.layout.rows, -1)[before.rows].to(torch.float32)
    if not bool(torch.isfinite(grad * grad).all()):
        return None
    weight = _take(now, before.rows)
    stored = _states_of(optimizer, group, p)
    after = {key: _take(stored[key], before.rows) for key in before.states}
    exact = None
    if isinstance(optimizer, LowBitOptimizer) and optimizer.rule(group).by_tile:
        exact = _exact(optimizer, before, grad, weight, stored)
    result = {"weight": _weight_entry(before, weight, grad, exact, histogram)}
    for key, storage in after.items():
        if exact is not None and _age(optimizer.state[p], key) != before.ages[key] + 1:  # not what the step left
            result[key] = {"format": str(storage.format), "elements": p.numel(), "reset": True}
            continue
        moment = None if exact is None else exact.moments.get(key)
        entry = _state_entry(before.states[key], storage, grad, moment, p.numel(), histogram)
        entry["age"] = before.ages[key]
        entry["predicted"], entry["predicted_here"] = _predictions(optimizer, before, key, exact)
        result[key] = entry
    return result


# --- the step, exactly ------------------------------------------------------------------------------------


@dataclass
class _Exact:
    """The step's results before rounding."""

    target: Tensor
    moments: dict[str, Tensor]  # as they go to be stored, the injected residue included
    injected: float | None  # ||m' - m~|| / ||m~||
    innovation: Tensor | None  # what enters the second moment, g^2 for most rules
    scalars: Scalars


class _Watched(SecondMoment):
    """A second moment that remembers what entered it."""

    innovation: Tensor | None = None

    def __call__(self, innovation: Tensor) -> Tensor:
        self.innovation = innovation
        return super().__call__(innovation)


def _exact(
    optimizer: LowBitOptimizer, before: Snapshot, grad: Tensor, weight: Storage, stored: dict[str, Storage]
) -> _Exact:
    group, compensated = before.group, optimizer.compensates(before.p, before.group)
    rule = optimizer.rule(group, compensated)
    first, second = rule.first, rule.second
    c = rule.scalars(group, *(before.ages.get(key or "", 0) + 1 for key in (first, second)))
    w = before.weight.decode()
    g = tile.descent_gradient(grad, w, c, group["maximize"])
    m = before.states[first].decode() if first in before.states else None
    view = None
    if second is not None:
        current = second not in before.states  # a factored one is updated before the rule reads it
        average = factored_rows(stored[second])[before.rows] if current else before.states[second].decode()
        view = _Watched(average, current, c)

    if rule.finish is not None:
        raw = tile.moved(rule.update(g, None, view, c._replace(clip=1.0)))  # type: ignore[arg-type]
        c = rule.finish(c, group, _rms(w), _rms(raw))
    pays_back = compensated and rule.pays_back(weight.format, group["weight_rounding"])
    target, update = tile.advance(rule, c, g, w, m, view, pays_back)
    moments, injected = {}, None
    if first in before.states and update.first is not None:
        moments[first] = update.first
        if compensated:
            residue = tile.injected(update.first, c, target - weight.decode()) - update.first
            injected = _ratio(float(residue.norm()), float(update.first.norm()))
            moments[first] = update.first + residue
    if second in before.states and update.second is not None:
        moments[second] = update.second
    return _Exact(target, moments, injected, None if view is None else view.innovation, c)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


# --- entries ----------------------------------------------------------------------------------------------


def _weight_entry(
    before: Snapshot, weight: Storage, grad: Tensor, exact: _Exact | None, histogram: bool
) -> dict[str, Any]:
    old, new = before.weight.decode(), weight.decode()
    live = grad != 0 if exact is None else exact.target != old
    entry = {
        "format": str(weight.format),
        "elements": before.p.numel(),
        "live": _share(live),
        "lost": _share(new == old, live),
        "clipped": None if exact is None else _clipped(weight, exact.target),
        "injected": exact and exact.injected,
    }
    if histogram:
        entry["histogram"] = _histogram(weight)
    return entry


def _state_entry(
    old: Storage, new: Storage, grad: Tensor, exact: Tensor | None, elements: int, histogram: bool
) -> dict[str, Any]:
    before, after = old.decode(), new.decode()
    live = (before != 0) | (grad != 0) if exact is None else exact != before
    entry: dict[str, Any] = {
        "format": str(new.format),
        "elements": elements,
        "live": _share(live),
        "stalled_codes": _share(codes_of(old) == codes_of(new), live),
        "stalled_values": _share(before == after, live),
        "clipped": None if exact is None else _clipped(new, exact),
        "rounding_error": None if exact is None else _ratio(float((after - exact).norm()), float(exact.norm())),
    }
    if histogram:
        entry["histogram"] = _histogram(new)
    return entry


def _share(mask: Tensor, among: Tensor | None = None) -> float | None:
    if among is not None:
        mask = mask[among]
    return float(mask.double().mean()) if mask.numel() else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def codes_of(storage: Storage) -> Tensor:
    """The codes ``[rows, cols]``, hidden bits included; of a plain format the values."""
    format, cols = storage.format, storage.layout.cols
    if not format.scaled:
        return storage.rows_of("values")
    codes = unpack(storage.rows_of("codes"), cols, format.bits, format.adjacent)
    if format.fine_bits:
        codes = (codes << format.fine_bits) + unpack(storage.rows_of("hidden"), cols, format.fine_bits)
    return codes


def _histogram(storage: Storage) -> list[int] | None:
    """How often each code occurs (hidden bits left out); None for plain formats."""
    if not storage.format.scaled:
        return None
    codes = unpack(storage.rows_of("codes"), storage.layout.cols, storage.format.bits, storage.format.adjacent)
    return torch.bincount(codes.flatten(), minlength=2**storage.format.bits).tolist()


def _clipped(storage: Storage, exact: Tensor) -> float | None:
    """The share of values that lie beyond the outermost levels they were stored under."""
    format = storage.format
    if not format.scaled or format.master:
        return 0.0

    def spread(per_block: Tensor) -> Tensor:
        if not isinstance(format.granularity, int):
            return per_block
        return per_block.repeat_interleave(format.granularity, dim=1)[:, : storage.layout.cols]

    if format.kind == "log":
        top, step, flag = read_log_metadata({name: storage.rows_of(name) for name in ("top", "step")})
        last = 2**format.bits - 1 - flag.to(torch.int64)
        bottom = bits_float((top - last * step).clamp(min=0))
        return _share((exact > spread(bits_float(top))) | ((exact > 0) & (exact < spread(bottom))))
    scale = spread(read_scale(storage.slab(0, storage.layout.rows), format))
    return _share((exact > scale * format.levels[-1]) | (exact < scale * format.levels[0]))


# --- what was predicted -------------------------------------------------------------------------------------


def _predictions(
    optimizer: torch.optim.Optimizer, before: Snapshot, key: str, exact: _Exact | None
) -> tuple[float | None, float | None]:
    """The predicted stall probability, from the state's age and from this step; None where the model says nothing."""
    group, ages, states = before.group, before.ages, before.states
    rounding, in_updates = "nearest", False
    names: tuple[str | None, str | None]
    if isinstance(optimizer, LowBitOptimizer):
        if exact is None:
            return None, None
        rule = optimizer.rule(group, optimizer.compensates(before.p, group))
        c, rounding = exact.scalars, group["rounding"]
        # A momentum that is no average (SGD's, RMSprop's) or is scaled by the learning rate (as one that holds injected
        # residue is) is not the model's, nor is a second moment whose decay changes from step to step (Adafactor's).
        averages = rule.name in ("adam", "adam_update_units", "adabelief")
        names = (rule.first if averages else None, rule.second)
        names = (None, None) if rule.finish is not None else names
        betas, in_updates = (c.keep1, c.keep2), rule.name == "adam_update_units"
    elif "betas" in group:
        names, betas = ("exp_avg", "exp_avg_sq"), (float(group["betas"][0]), float(group["betas"][1]))
    else:
        names, betas = (None, "square_avg"), (0.0, float(group.get("alpha", 0.0)))
    second = names[1]
    if ages[key] == 0 or key not in names or second not in states:
        return None, None
    if key == second:
        entering = None if exact is None else exact.innovation
        here = None if entering is None else predict.second_here(states[key], entering, betas[1], rounding)
        return predict.second(states[key], betas[1], rounding, ages[key]), here
    m, v = states[key].decode(), states[second].decode()
    scale: Any = 1.0 if in_updates else v / (1 - betas[1] ** max(1, ages[second]))
    squares = ((m / (1 - betas[0] ** ages[key])) ** 2 / scale)[v > 0]
    ratio = float(squares.double().mean()) if squares.numel() else 0.0
    return predict.first(states[key].format, betas[0], rounding, ages[key], ratio), None


# --- stored tensors -----------------------------------------------------------------------------------------


def _weight_of(p: Tensor) -> Storage | None:
    storage = weight_storage(p)
    if storage is not None or p.dtype not in _PLAIN:
        return storage
    return Storage(parse(_PLAIN[p.dtype]), tuple(p.shape), {"values": p.detach()})


def _age(state: dict[str, Any], key: str) -> int:
    return local_step({"step": 0, **state}, key)


def _states_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> dict[str, Storage]:
    if isinstance(optimizer, LowBitOptimizer):
        return optimizer.state_storage(p, group)
    return {
        key: Storage(parse(_PLAIN[t.dtype]), tuple(p.shape), {"values": t})
        for key, t in optimizer.state[p].items()
        if isinstance(t, Tensor) and t.shape == p.shape and t.dim() > 0 and t.dtype in _PLAIN
    }


def _take(storage: Storage, rows: Tensor) -> Storage:
    """A copy of some rows (of a factored moment and of a scale for the whole tensor: all of it)."""

    def copy(part: str, tensor: Tensor) -> Tensor:
        shared = storage.format.kind == "factored" or (part == "scale" and storage.format.granularity == "tensor")
        return tensor.clone() if shared else tensor.reshape(storage.layout.rows, -1)[rows]

    tensors = {part: copy(part, tensor) for part, tensor in storage.tensors.items()}
    return Storage(storage.format, (len(rows), storage.layout.cols), tensors)
