"""Resets: a moving average that stopped moving starts again, and its bias correction with it.

Contract:
    * Each moment counts its own updates since it was last zero, ``step - state["<moment>.reset_step"]``, and bias
      correction uses that count. Zeroing v under the global count would make the next update 1 / sqrt(1 - b2) times
      as large (32 times at b2 = 0.999).
    * **hard**: the stored bytes are those of `Storage.zeros`, and the count is zero. The next estimate is one sample.
    * **soft**: the estimate stays, its weight is cut to that of `SOFT_SAMPLES` = n samples. With k updates seen,
      ``v <- v * (1 - b2^n) / (1 - b2^k)`` and the count becomes n, so that v / (1 - b2^n) is the estimate of before;
      the next gradient enters with weight 1/(n+1) instead of 1 - b2. The size of the next update changes by
      (z - 1) / (2 (n+1)) with z = g^2 / v: zero in the mean, 4% r.m.s. for Gaussian gradients at n = 16. Stalls are as
      rare as n steps after a zero start. Codes do not change, only their scales (a log code is encoded anew).
    * A schedule is plain data in the param group and reads nothing but counters of the state dict: a resumed run resets
      where the uninterrupted one would have.
    * Under error compensation the momentum holds what rounding took from the weights. A reset of m throws it away;
      hence m is reset only if it is named. A reset of v does not touch it: the momentum is then in units of the weight.
    * Scheduled resets are soft unless the schedule says otherwise: measured, soft ones halve what stalling costs, and
      hard ones cost more than they gain (`docs/staleness.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masterless.formats import Format, parse
from masterless.formats.packing import unpack
from masterless.formats.storage import Storage, factored_rows
from masterless.step import staleness
from masterless.step.scalars import Scalars

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer

SOFT_SAMPLES = 16
MODES = ("hard", "soft")
MEASURE_EVERY = 10  # steps between two measurements of an adaptive schedule
SAMPLE = 1 << 14  # elements of a parameter that it looks at
SLAB = 1 << 19  # elements decoded at a time
TOLERATED = 0.6  # s0 of `staleness`


@dataclass(frozen=True)
class StateReset:
    """What a reset did to one state of one parameter.

    Attributes:
        parameter: the parameter's name.
        state: the state's name, e.g. ``"exp_avg_sq"``.
        cleared: elements that were not zero before.
        elements: all elements.
        kept: why the state was left alone; empty if it was reset.
    """

    parameter: str
    state: str
    cleared: int
    elements: int
    kept: str = ""


@dataclass(frozen=True)
class ResetReport:
    """What a reset did: state by state, and in total. ``print`` it."""

    entries: tuple[StateReset, ...]

    @property
    def total(self) -> int:
        """Elements that were not zero and were reset."""
        return sum(entry.cleared for entry in self.entries)

    @property
    def per_parameter(self) -> dict[str, int]:
        """The same by parameter."""
        counts: dict[str, int] = {}
        for entry in self.entries:
            counts[entry.parameter] = counts.get(entry.parameter, 0) + entry.cleared
        return counts

    def __str__(self) -> str:
        lines = [f"{e.parameter} {e.state}: {e.kept or f'{e.cleared:,} of {e.elements:,}'}" for e in self.entries]
        return "\n".join([*lines, f"{self.total:,} elements reset"])


@dataclass(frozen=True)
class ResetSchedule:
    """When a group's second moments are reset, from the option ``reset=``.

    Written as ``"auto"``, ``"adaptive"`` or a number of steps, with ``":hard"`` behind it if the average is to go back
    to zero ("500:hard"); otherwise resets are soft, which ``":soft"`` says too.

    Attributes:
        kind: "auto" (when the moment has the age that the predictor says, where it says one: `planned_period`),
            "adaptive" (when the stalls measured since the last reset outweigh what a restart costs), or "period".
        period: for "period": reset after every so many steps.
        mode: "soft" or "hard".
    """

    kind: str
    period: int | None = None
    mode: str = "soft"

    @classmethod
    def parse(cls, value: Any) -> ResetSchedule:
        """The schedule that an option's value stands for."""
        head, _, mode = value.partition(":") if isinstance(value, str) else (value, "", "")
        if isinstance(head, str) and head.isdecimal():
            head = int(head)
        known = head in ("auto", "adaptive") or (isinstance(head, int) and not isinstance(head, bool) and head >= 1)
        if not known or mode not in ("", *MODES):
            raise ValueError(
                f"reset={value!r}: no such schedule; pass None, 'auto', 'adaptive' or a number of steps from 1 on, "
                f"with ':hard' behind it to go back to zero ('500:hard') instead of keeping the estimate"
            )
        return cls(head, None, mode or "soft") if isinstance(head, str) else cls("period", head, mode or "soft")


# --- what the optimizers call -----------------------------------------------------------------------------


def check_schedule(optimizer: LowBitOptimizer, group: dict[str, Any]) -> None:
    """Raises a ValueError for a ``reset=`` that the group's rule cannot follow."""
    value = group["reset"]
    if value is None:
        return
    schedule, name, rule = ResetSchedule.parse(value), type(optimizer).__name__, optimizer.rule(group)
    if rule.second is None:
        raise ValueError(f"reset={value!r}: {name} has no second moment to reset; leave it out")
    if not _corrected(optimizer, group, rule.second):
        raise ValueError(f"reset={value!r}: {_uncorrected(optimizer, group)}")
    constant = rule.scalars(group, 10, 10).keep2 == rule.scalars(group, 10, 1000).keep2
    if schedule.kind != "period" and not constant:
        raise ValueError(
            f"reset={value!r}: the decay of {name}'s second moment changes from step to step, and stalls are predicted "
            f"for a constant one; pass a number of steps"
        )


@lru_cache(maxsize=256)
def planned_period(format: Format, beta: float, rounding: str) -> int | None:
    """The period of an "auto" schedule: K* of the predictor where stalling does harm, None where it does not.

    None under stochastic rounding (the mean keeps its time constant however often a value stalls), for a factored or
    plain fp32 moment (nothing stalls), for any format below its gate (rho < 1), and for a log code, whose levels follow
    each block: what stalls there is not known before the run, which is what "adaptive" is for.
    """
    if rounding != "nearest" or format.kind in ("none", "factored", "log"):
        return None
    return staleness.reset_period(format, beta)


def reset_state(
    optimizer: LowBitOptimizer, params: Any = None, states: str | Iterable[str] | None = None, mode: str = "hard"
) -> ResetReport:
    """See `LowBitOptimizer.reset_state`."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: no such reset; pass 'hard' (to zero) or 'soft' (keep the estimate)")
    every = states == "all"
    entries = []
    for group, p, name in _chosen(optimizer, params):
        for state in _state_names(optimizer, group, states):
            if every and state == optimizer.first_name and optimizer.compensates(p, group):
                reason = f"kept: it holds the residue of the rounded weight; name {state!r} in states= to reset it"
                entries.append(StateReset(name, state, 0, p.numel(), reason))
            else:
                entries.append(_reset(optimizer, group, p, name, state, mode))
    return ResetReport(tuple(entries))


def before_step(
    optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, name: str
) -> Callable[[], list[StateReset]]:
    """Called before a parameter's step is taken and counted; returns what to call after it."""
    state_name = optimizer.second_name
    assert state_name is not None
    storage, state = optimizer.state_storage(p, group)[state_name], optimizer.state[p]
    schedule = ResetSchedule.parse(group["reset"])
    beta = optimizer.rule(group).scalars(group, 1, 1).keep2
    age = local_step(state, state_name) + 1  # once the coming step is counted
    due = False
    before = None
    if schedule.kind == "adaptive":
        if hasattr(p, "device_mesh"):
            raise ValueError(
                f"reset={group['reset']!r}: stalls are measured on the local shard of {name}, and ranks would reset it "
                f"at different steps; use 'auto' or a number of steps"
            )
        stalls = storage.format.kind not in ("none", "factored")
        before = sampled_codes(storage) if stalls and age % MEASURE_EVERY == 0 else None
    elif schedule.period:
        due = (int(state["step"]) + 1) % schedule.period == 0
    else:
        period = planned_period(storage.format, beta, group["rounding"])
        due = period is not None and age >= period

    def after_step() -> list[StateReset]:
        wanted = due
        if before is not None:
            stalled = float((sampled_codes(storage) == before).double().mean())
            wanted = _adaptive_due(state, state_name, stalled, age // MEASURE_EVERY, beta)
        if not wanted:
            return []
        return [_reset(optimizer, group, p, name, state_name, schedule.mode)]

    return after_step


def local_step(state: dict[str, Any], name: str | None) -> int:
    """Updates that a moment has seen since it was last zero."""
    return int(state["step"]) - (int(state.get(f"{name}.reset_step", 0)) if name else 0)


# --- one state --------------------------------------------------------------------------------------------


def _reset(
    optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, name: str, state_name: str, mode: str
) -> StateReset:
    corrected = _corrected(optimizer, group, state_name, optimizer.compensates(p, group))
    if not corrected and state_name == optimizer.second_name:
        raise ValueError(f"states={state_name!r}: {_uncorrected(optimizer, group)}")
    if not corrected and mode == "soft":
        raise ValueError(
            f"mode='soft': {type(optimizer).__name__} has no bias correction of {state_name!r} that could restart; use "
            f"mode='hard', after which it builds up from zero"
        )
    state = optimizer.state.get(p, {})
    age = local_step(state, state_name) if "step" in state else 0
    if age == 0 or (mode == "soft" and age <= SOFT_SAMPLES):
        return StateReset(name, state_name, 0, p.numel())
    storage = optimizer.state_storage(p, group)[state_name]
    cleared = _count_nonzero(storage)
    if mode == "hard":
        for part, zeros in Storage.zeros(storage.format, storage.shape, p.device).tensors.items():
            storage.tensors[part].copy_(zeros)
        new_age = 0
    else:
        _rescale(storage, _weight(optimizer, group, state_name, SOFT_SAMPLES, age))
        new_age = SOFT_SAMPLES
    state[f"{state_name}.reset_step"] = state["step"] - new_age
    state.pop(f"{state_name}.stalled", None)
    return StateReset(name, state_name, cleared, p.numel())


def _count_nonzero(storage: Storage) -> int:
    rows, height = storage.layout.rows, max(1, SLAB // max(1, storage.layout.cols))
    slabs = ((start, min(rows, start + height)) for start in range(0, rows, height))
    return sum(int(torch.count_nonzero(_decoded_rows(storage, *slab))) for slab in slabs)


def _decoded_rows(storage: Storage, start: int, stop: int) -> Tensor:
    if storage.format.kind == "factored":
        return factored_rows(storage, start, stop)
    part = Storage(storage.format, (stop - start, storage.layout.cols), storage.slab(start, stop))
    return part.decode()


def _rescale(storage: Storage, factor: float) -> None:
    """Multiplies a stored tensor by `factor`: its scales if they are plain; a positive number stays positive."""
    if storage.format.kind == "log" or storage.format.scale == "e8m0":
        storage.encode_(storage.decode() * factor)
        return
    for part, tensor in storage.tensors.items():
        if part in ("values", "scale", "row", "col"):
            scaled = tensor * factor
            tensor.copy_(torch.where(scaled == 0, tensor, scaled))


# --- what a rule's scalars say of its bias correction -------------------------------------------------------


def _scalars(optimizer: LowBitOptimizer, group: dict[str, Any], t1: int, t2: int, compensated: bool = False) -> Scalars:
    return optimizer.rule(group, compensated).scalars({**group, "lr": 1.0}, t1, t2)


def _corrected(optimizer: LowBitOptimizer, group: dict[str, Any], state_name: str, compensated: bool = False) -> bool:
    """Whether the rule's step counts this moment's updates since zero."""
    if state_name == optimizer.second_name:
        start, later = (_scalars(optimizer, group, t, t) for t in (1, 2))
        return (start.bias2, start.rate2) != (later.bias2, later.rate2)
    start, later = (_scalars(optimizer, group, t, 9, compensated) for t in (1, 2))
    return start.step_size != later.step_size


def _weight(optimizer: LowBitOptimizer, group: dict[str, Any], state_name: str, n: int, k: int) -> float:
    """What a moment of k updates is multiplied by to mean the same under a count of n: (1 - b^n) / (1 - b^k)."""
    now, then = _scalars(optimizer, group, k, k), _scalars(optimizer, group, n, n)
    if state_name == optimizer.second_name:
        return (now.bias2 / then.bias2) ** 2
    return _scalars(optimizer, group, k, 1).step_size / _scalars(optimizer, group, n, 1).step_size


def recounted(optimizer: LowBitOptimizer, group: dict[str, Any], state_name: str, old: int, new: int) -> float:
    """The factor that keeps a moment's estimate when its count of updates changes; 1 without bias correction."""
    same = old == new or not _corrected(optimizer, group, state_name)
    return 1.0 if same else _weight(optimizer, group, state_name, max(1, new), max(1, old))


def _uncorrected(optimizer: LowBitOptimizer, group: dict[str, Any]) -> str:
    rate = _scalars(optimizer, group, 1, 1).rate2
    return (
        f"{type(optimizer).__name__} does not correct its second moment for a zero start, so the next update would be "
        f"{rate**-0.5:.0f} times as large; use Adam with betas=(0, {1 - rate:g}), the same with that correction"
    )


# --- adaptive schedules -------------------------------------------------------------------------------------


def sampled_codes(storage: Storage) -> Tensor:
    """A copy of the codes of evenly spaced rows, about `SAMPLE` of them (of a plain format: the values)."""
    stride = max(1, -(-storage.layout.rows * storage.layout.cols // SAMPLE))
    if storage.format.scaled:
        codes, format = storage.rows_of("codes")[::stride], storage.format
        return unpack(codes, storage.layout.cols, format.bits, format.adjacent)
    return storage.rows_of("values")[::stride].clone()


def _adaptive_due(state: dict[str, Any], name: str, stalled: float, measurements: int, beta: float) -> bool:
    """Adds a measurement to the sum in the state, and says whether the stalls since the last reset call for one."""
    excess = max(0.0, (stalled - TOLERATED) / (1 - TOLERATED))
    total = state.get(f"{name}.stalled", torch.tensor(0.0, dtype=torch.float64)) + excess
    state[f"{name}.stalled"] = total
    # Sbar is a mean, so as many measurements of the mean size say the same as the measurements themselves.
    mean = TOLERATED + (1 - TOLERATED) * min(1.0, float(total) / measurements)
    return staleness.should_reset([mean] * measurements, beta, TOLERATED, MEASURE_EVERY)


# --- which parameters, which states -------------------------------------------------------------------------


def _chosen(optimizer: LowBitOptimizer, params: Any) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
    known = list(optimizer.parameters())
    if params is None:
        yield from known
        return
    by_key: dict[Any, Any] = {id(p): (g, p, n) for g, p, n in known}
    by_key.update({n: (g, p, n) for g, p, n in known})
    for wanted in [params] if isinstance(params, (Tensor, str)) else params:
        key = wanted if isinstance(wanted, str) else id(wanted)
        if key not in by_key:
            what = repr(wanted) if isinstance(wanted, str) else f"a tensor of shape {tuple(wanted.shape)}"
            raise ValueError(
                f"params={what}: not a parameter of this optimizer; pass its parameters or their names "
                f"({', '.join(n for _, _, n in known[:4])}, ...)"
            )
        yield by_key[key]


def _state_names(optimizer: LowBitOptimizer, group: dict[str, Any], states: str | Iterable[str] | None) -> list[str]:
    rule = optimizer.rule(group)
    held = [rule.first] if rule.first and optimizer.has_momentum(group) else []
    if held and parse(group[held[0]]).kind == "none":
        held = []
    held += [rule.second] if rule.second else []
    if states == "all":
        return [name for name in held if name]
    if states is None and rule.second is None:
        raise ValueError(
            f"states=None: the second moment is meant, and {type(optimizer).__name__} has none; name the state, "
            f"e.g. states={rule.first!r}"
        )
    wanted = [rule.second] if states is None else [states] if isinstance(states, str) else list(states)
    for name in wanted:
        if name not in held:
            raise ValueError(
                f"states={name!r}: {type(optimizer).__name__} keeps no such state here; it has "
                f"{', '.join(map(repr, held)) or 'none'}, or pass 'all'"
            )
    return [name for name in wanted if name]
