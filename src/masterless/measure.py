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

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from masterless import staleness
from masterless.codec import LOG_STEP_UNIT, bits_float
from masterless.formats import Format, parse
from masterless.optim.base import LowBitOptimizer
from masterless.optim.resets import carries_residue, local_step
from masterless.packing import unpack
from masterless.rules import Scalars, Update, finish_adafactor
from masterless.staleness import Grid
from masterless.storage import Storage, factored_estimate
from masterless.weight import weight_storage

_PLAIN = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_OCTAVE = 23 - LOG_STEP_UNIT  # log2 of the units of a log block's step in a factor of two


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
    whole = isinstance(optimizer, LowBitOptimizer) and optimizer.rule(group).name == "adafactor"
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
    if isinstance(optimizer, LowBitOptimizer):
        exact = _exact(optimizer, before, grad, weight, stored)
    result = {"weight": _weight_entry(before, weight, grad, exact, histogram)}
    for key, storage in after.items():
        if exact is not None and _age(optimizer.state[p], key) != before.ages[key] + 1:  # not what the step left
            result[key] = {"format": str(storage.format), "elements": p.numel(), "reset": True}
            continue
        moment = None if exact is None else exact.moments.get(key)
        entry = _state_entry(before.states[key], storage, grad, moment, p.numel(), histogram)
        entry["age"] = before.ages[key]
        entry["predicted"] = _predicted(optimizer, before, key, exact)
        entry["predicted_here"] = _predicted_here(optimizer, before, key, exact)
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


def _exact(
    optimizer: LowBitOptimizer, before: Snapshot, grad: Tensor, weight: Storage, stored: dict[str, Storage]
) -> _Exact:
    group, rule = before.group, optimizer.rule(before.group)
    first, second = rule.first, rule.second
    c = rule.scalars(group, *(before.ages.get(key or "", 0) + 1 for key in (first, second)))
    w = before.weight.decode()
    g = -grad if group["maximize"] else grad
    g = g + w * c.l2 if c.l2 else g
    m = before.states[first].decode() if first in before.states else None

    entering = None

    def second_moment(innovation: Tensor) -> Tensor:
        nonlocal entering
        entering = innovation
        assert second is not None
        if second in before.states:
            return before.states[second].decode() * c.keep2 + innovation * c.rate2
        return factored_estimate(stored[second])[before.rows]  # updated before the rule reads it

    if rule.name == "adafactor":
        raw = rule.update(g, None, second_moment, c._replace(clip=1.0))
        assert raw.denominator is not None
        c = finish_adafactor(c, group, _rms(w), _rms(raw.direction / raw.denominator))
    update: Update = rule.update(g, m, second_moment, c)
    moved = update.direction if update.denominator is None else update.direction / update.denominator
    target = w * c.decay - moved * c.step_size
    moments, injected = {}, None
    if first in before.states and update.first is not None:
        moments[first] = update.first
        if carries_residue(before.p, group):
            unit = c.inject if update.denominator is None else update.denominator * c.inject
            residue = (target - weight.decode()) * unit
            injected = _ratio(float(residue.norm()), float(update.first.norm()))
            moments[first] = update.first + residue
    if second in before.states and update.second is not None:
        moments[second] = update.second
    return _Exact(target, moments, injected, entering, c)


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
    codes = unpack(storage.rows_of("codes"), cols, format.bits)
    if format.fine_bits:
        codes = (codes << format.fine_bits) + unpack(storage.rows_of("hidden"), cols, format.fine_bits)
    return codes


def _histogram(storage: Storage) -> list[int] | None:
    """How often each code occurs (hidden bits left out); None for plain formats."""
    if not storage.format.scaled:
        return None
    codes = unpack(storage.rows_of("codes"), storage.layout.cols, storage.format.bits)
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
        top = storage.rows_of("top").to(torch.int64) << 16
        raw = storage.rows_of("step").to(torch.int64) & 0xFFFF
        last = 2**format.bits - 1 - (raw >> 15)
        bottom = bits_float((top - last * ((raw & 0x7FFF) << LOG_STEP_UNIT)).clamp(min=0))
        return _share((exact > spread(bits_float(top))) | ((exact > 0) & (exact < spread(bottom))))
    scale = spread(storage.rows_of("scale").to(torch.float32))
    return _share((exact > scale * format.levels[-1]) | (exact < scale * format.levels[0]))


# --- what was predicted -------------------------------------------------------------------------------------


def _predicted(optimizer: torch.optim.Optimizer, before: Snapshot, key: str, exact: _Exact | None) -> float | None:
    """The predicted stall probability of a state in this step; None where the model has nothing to say."""
    group, ages, states = before.group, before.ages, before.states
    rounding, in_updates = "nearest", False
    names: tuple[str | None, str | None]
    if isinstance(optimizer, LowBitOptimizer):
        assert exact is not None
        rule, c, rounding = optimizer.rule(group), exact.scalars, group["rounding"]
        if rule.name == "adafactor":  # its decay changes from step to step
            return None
        # A momentum that is no average (SGD's, RMSprop's) or holds injected residue is not the model's.
        averages = rule.name.startswith("ada") and exact.injected is None
        names, betas = (rule.first if averages else None, rule.second), (c.keep1, c.keep2)
        in_updates = rule.name == "adam_update_units"
    elif "betas" in group:
        names, betas = ("exp_avg", "exp_avg_sq"), (float(group["betas"][0]), float(group["betas"][1]))
    else:
        names, betas = (None, "square_avg"), (0.0, float(group.get("alpha", 0.0)))
    second = names[1]
    if ages[key] == 0 or key not in names or second not in states:
        return None
    if key == second:
        return predicted_second(states[key], betas[1], rounding, ages[key])
    m, v = states[key].decode(), states[second].decode()
    scale: Any = 1.0 if in_updates else v / (1 - betas[1] ** max(1, ages[second]))
    squares = ((m / (1 - betas[0] ** ages[key])) ** 2 / scale)[v > 0]
    if not squares.numel():
        return None
    return _predicted_first(states[key].format, betas[0], rounding, ages[key], float(squares.double().mean()))


def _predicted_here(optimizer: torch.optim.Optimizer, before: Snapshot, key: str, exact: _Exact | None) -> float | None:
    """As `_predicted` for a second moment, at the r = v/sigma^2 that this very step's gradients show.

    It does not ask how v came to be where it is, so what is left to test is the model of rounding. The median of
    chi-square(1) is 0.455: that over the median of g^2/v is r, whatever the few largest elements do.
    """
    is_second = isinstance(optimizer, LowBitOptimizer) and key == optimizer.rule(before.group).second
    if not is_second or exact is None or exact.innovation is None or before.ages[key] == 0:
        return None
    v = before.states[key].decode()
    z = (exact.innovation / v)[v > 0]
    if not z.numel() or not float(z.median()):
        return None
    r, rounding = 0.4549 / float(z.median()), before.group["rounding"]
    kind = "nearest" if rounding == "nearest" else "stochastic"
    ratios = [staleness.stall_ratio(grid, exact.scalars.keep2) for grid in grids_of(before.states[key])]
    return float(sum(staleness._second(rho, r, kind) for rho in ratios)) / len(ratios)


def _predicted_first(format: Format, beta: float, rounding: str, age: int, ratio: float) -> float | None:
    """Prediction for a first moment whose squares are `ratio` of the second: (s^2 + c) / (s^2 + 1), s the SNR."""
    left = beta**age
    noise = (1 - beta) / (1 + beta) * (1 + left) / (1 - left)
    snr = 10.0 if ratio >= 0.99 else math.sqrt(max(0.0, ratio - noise) / (1 - ratio))
    if format.kind == "float32":
        return 0.0
    kind = "nearest" if rounding == "nearest" else "stochastic"
    return staleness.stall_probability(format, beta, kind, age, "first", round(min(snr, 10.0), 2))


def predicted_second(storage: Storage, beta: float, rounding: str, age: int) -> float:
    """Prediction for a second moment, `age` updates after zero, on the grid that its blocks really have.

    Under nearest rounding it follows the mean path (`staleness.expected_trajectory`), under stochastic rounding the
    exact average, which the rounded one then keeps to.
    """
    predictions = [_on_grid(grid, beta, rounding, age) for grid in grids_of(storage)]
    return sum(predictions) / len(predictions)


def grids_of(storage: Storage) -> list[Grid]:
    """The grids on which a second moment lies: one, or five that stand for the blocks of a log code."""
    format = storage.format
    if format.kind == "log":
        steps = (storage.rows_of("step").to(torch.int64) & 0x7FFF).flatten().sort().values
        picked = [int(steps[(2 * i + 1) * steps.numel() // 10]) for i in range(5)]
        return [Grid(_coarse(max(1, step) / 2**_OCTAVE * math.log(2)), mantissa=False) for step in picked]
    grid = staleness.grid_of(format)
    if not grid.levels:
        return [grid]
    values = storage.decode()
    positions = values / values.amax(1, keepdim=True)
    typical = float(positions[values > 0].median()) if bool((values > 0).any()) else 1.0
    return [Grid.from_levels(format.levels, _coarse(min(1.0, typical)))]


def _coarse(x: float) -> float:
    """To 5%, so that predictions are computed once and not anew at each sample."""
    return min(1.05 ** round(math.log(x) / math.log(1.05)), max(x, 1.0))


@lru_cache(maxsize=1024)
def _on_grid(grid: Grid, beta: float, rounding: str, age: int) -> float:
    if rounding != "nearest":
        return staleness.stall_probability(grid, beta, "stochastic", age)
    # To the next power of two, and not beyond where a path has come to rest.
    horizon = min(max(64, 1 << (age - 1).bit_length()), math.ceil(16 / (1 - beta)))
    return float(_path(grid, beta, horizon)[min(age, horizon) - 1])


@lru_cache(maxsize=64)
def _path(grid: Grid, beta: float, steps: int) -> Any:
    return staleness.expected_trajectory(grid, beta, steps).stall


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
