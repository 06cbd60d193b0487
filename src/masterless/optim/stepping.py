"""One step of some parameters: their tasks, and who performs them.

Contract:
    * A parameter's step is a `reference.Task`. Building one and describing it to the compiled kernel takes far longer
      than stepping a small tensor, so the description is kept (`Prepared`), and later steps only fill in the
      gradient's address, the keys of the random bits and the rule's scalars.
    * Nothing is assumed to have stayed: every step looks at the addresses of weight and states, the options of the
      group and the name (`_evidence`), and what differs is described anew. States are known by address only, so none
      is kept alive. That look is all the Python a parameter costs, hence its loops run inside `map`.
    * What the kernel does not take (sharded parameters, other devices, ``backend="reference"``) is a task for
      `ops.step`, with the same result to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.backends.cpu import kernel as cpu
from masterless.backends.cpu import library as kernels
from masterless.formats import parse
from masterless.formats.rounding import PURPOSES, parameter_id, stream_key, stream_keys
from masterless.formats.scaling import FROZEN
from masterless.formats.storage import Storage
from masterless.optim import resets, units
from masterless.step import dispatch as ops
from masterless.step.reference import Task
from masterless.step.rules import Scalars
from masterless.tensor.quantized import QuantizedTensor, local_of, weight_storage

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer

Member = tuple[dict[str, Any], Tensor, str]  # a parameter between its group and its name
State = dict[str, Any]
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_dtype, _layout, _shape, _format = map(attrgetter, ("dtype", "layout", "shape", "format"))
PLAIN = {torch.float32: parse("fp32"), torch.bfloat16: parse("bf16")}


@dataclass(slots=True)
class Live:
    """Parameters to step and all that is theirs, as it is now; an entry a parameter, but for the last two fields."""

    members: Sequence[Member]
    groups: Sequence[dict[str, Any]]
    parameters: Sequence[Tensor]
    names: Sequence[str]
    grads: Sequence[Tensor]
    states: Sequence[State]
    plain: list[Tensor]  # the dense ones of the parameters ...
    stored: list[Storage]  # ... and what the quantized ones consist of

    @classmethod
    def of(cls, members: Sequence[Member], grads: Sequence[Tensor], states: Sequence[State]) -> Live:
        """The parameters of some members."""
        groups, parameters, names = zip(*members, strict=True) if members else ((), (), ())
        quantized = [isinstance(p, QuantizedTensor) for p in parameters]
        plain = [p for p, q in zip(parameters, quantized, strict=True) if not q]
        stored: list[Storage] = [p.stored for p in compress(parameters, quantized)]  # type: ignore[attr-defined]
        return cls(members, groups, parameters, names, grads, states, plain, stored)

    def one(self, i: int) -> Live:
        """A single parameter of them."""
        return Live.of([self.members[i]], [self.grads[i]], [self.states[i]])

    def some(self, wanted: Sequence[bool]) -> Live:
        """Those that are wanted."""
        if all(wanted):
            return self
        members, grads, states = self.members, self.grads, self.states
        return Live.of([*compress(members, wanted)], [*compress(grads, wanted)], [*compress(states, wanted)])


def step(optimizer: LowBitOptimizer, members: Sequence[Member]) -> dict[str, int]:
    """Steps the parameters that have a gradient; returns, by name, how many of its elements were not finite."""
    live = _live(optimizer, members)
    if not live.members:
        return {}
    batch = _last_batch(optimizer, live)
    prepared = batch.prepared if batch is not None else _still_prepared(optimizer, live)
    _count_step(optimizer, live, prepared)
    afterwards = [resets.before_step(optimizer, g, p, name) for g, p, name in live.members if g["reset"] is not None]
    others: dict[str, list[Task]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    if batch is None:
        for i in [i for i, known in enumerate(prepared) if known is None]:
            one = live.one(i)
            task = _task(optimizer, one, copies)
            prepared[i] = _prepare(optimizer, one, task)
            if prepared[i] is None:
                # Collectives have one order on all ranks: they are the reference's.
                others.setdefault("reference" if task.collective else task.group["backend"], []).append(task)
        fused = live.some([known is not None for known in prepared])
        batch = optimizer.batch = _batch(optimizer, fused, [known for known in prepared if known is not None])
        bad = _step_batch(optimizer, batch, fused)
    else:
        bad = _step_batch(optimizer, batch, live)
    for backend, tasks in others.items():
        bad |= _step_tasks(tasks, backend)
    for p, contiguous in copies:
        p.copy_(contiguous)
    increment_version(live.parameters)  # a quantized one changes below its own version counter
    for entry in (entry for finish in afterwards for entry in finish()):
        optimizer.reset_counts[entry.parameter] = optimizer.reset_counts.get(entry.parameter, 0) + entry.cleared
    return bad


def _live(optimizer: LowBitOptimizer, members: Sequence[Member]) -> Live:
    """The members with a gradient. All gradients are checked before any parameter moves."""
    with torch._C.DisableTorchFunctionSubclass():  # a subclass's `.grad` is a slow call otherwise
        grads: list[Any] = [p.grad for _, p, _ in members]
    if type(None) in {*map(type, grads)}:
        members = [member for member, grad in zip(members, grads, strict=True) if grad is not None]
        grads = [grad for grad in grads if grad is not None]
    usual = {*map(type, grads)} == {Tensor} and {*map(_layout, grads)} == {torch.strided}
    if not usual or not all(map(_is_contiguous, grads)):
        grads = [_dense_gradient(optimizer, grad, name) for grad, (_, _, name) in zip(grads, members, strict=True)]
    state = optimizer.state
    return Live.of(members, grads, [state[p] for _, p, _ in members])


def _dense_gradient(optimizer: LowBitOptimizer, grad: Tensor, name: str) -> Tensor:
    grad = local_of(grad)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{type(optimizer).__name__}: the gradient of {name} is sparse ({grad.layout}); blocks of a low-bit state "
            f"share a scale, so all of it changes at every step. Use dense gradients (sparse=False)"
        )
    return grad.contiguous()


def _count_step(optimizer: LowBitOptimizer, live: Live, prepared: Sequence[Prepared | None]) -> None:
    for known, group, p, state in zip(prepared, live.groups, live.parameters, live.states, strict=True):
        if known is not None:
            known.counter[0] += 1.0
        else:
            optimizer.state_storage(p, group)  # allocates, if need be
            state["step"] += 1


def _scale_policy(group: dict[str, Any], scalars: Scalars) -> str:
    """The group's; but a step that moves nothing (lr = 0) must not change a scale either."""
    return FROZEN if scalars.step_size == 0.0 and scalars.decay == 1.0 else group["scale_policy"]


# --- tasks ----------------------------------------------------------------------------------------------------


def _task(optimizer: LowBitOptimizer, live: Live, copies: list[tuple[Tensor, Tensor]]) -> Task:
    """One parameter's step. A weight that is not contiguous is stepped in a copy, noted in `copies`."""
    (group, p, name), grad, state = live.members[0], live.grads[0], live.states[0]
    local = local_of(p)
    states = optimizer.state_storage(p, group)
    weight = weight_storage(p)
    compensated = resets.carries_residue(p, group)
    rule = optimizer.rule(group, compensated)
    if compensated and not rule.compensable:
        raise ValueError(f"{type(optimizer).__name__} cannot compensate the rounding error of {name}: {rule.obstacle}")
    units.align(optimizer, group, p, state, states)
    if weight is None:
        values = local.detach()
        if not values.is_contiguous():
            values = values.contiguous()
            copies.append((local.detach(), values))
        weight = Storage(PLAIN[p.dtype], tuple(local.shape), {"values": values})
    rounding = {
        "weight": group["weight_rounding"],
        "exp_avg": group["rounding"],
        "exp_avg_sq": group["rounding"],
    }
    if rounding["exp_avg"] == "stochastic-log":  # a dither of logarithms, so for the second moment only
        rounding["exp_avg"] = "stochastic"
    place: dict[str, Any] = {}
    if local is not p:
        from masterless.sharding import place as sharding

        place = sharding.Place.of(p).task_fields()
    scalars = rule.scalars(group, *optimizer._local_steps(state))
    count, identity = int(state["step"]), parameter_id(name)
    return Task(
        name=name,
        rule=rule,
        scalars=scalars,
        group=group,
        grad=grad,
        weight=weight,
        first=states.get(optimizer.first_name) if optimizer.first_name else None,
        second=states.get(optimizer.second_name) if optimizer.second_name else None,
        rounding=rounding,
        keys={purpose: stream_key(group["seed"], count, identity, purpose) for purpose in PURPOSES},
        inject=compensated,
        maximize=group["maximize"],
        scale_policy=_scale_policy(group, scalars),
        **place,
    )


def _step_tasks(tasks: list[Task], backend: str) -> dict[str, int]:
    counts = ops.step(tasks, backend)
    if any(task.across is not None for task in tasks):
        from masterless.sharding import agreement

        counts = agreement.total_counts(tasks, counts)
    return {task.name: count for task, count in zip(tasks, counts, strict=True) if count}


# --- what is kept between steps -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Prepared:
    """One parameter's step as the kernel reads it, and what that description was made from."""

    parameter: Tensor
    name: str
    evidence: list[Any]
    counter: Any  # a memoryview of ``state["step"]``: hundreds of tensor additions outlast the kernel
    identity: int  # of the random bits
    compensated: bool
    row: bytes


@dataclass(slots=True)
class Batch:
    """All that the last step prepared, side by side: the next step is usually of the same parameters."""

    evidence: list[Any] | None
    prepared: list[Any]
    identities: NDArray[np.uint64]
    rows: bytes
    has_resets: bool  # whether a moment of any parameter is younger than the parameter
    is_uniform: bool  # all are of one group and one rule, and none has resets


def _evidence(optimizer: LowBitOptimizer, live: Live) -> list[Any] | None:
    """All that descriptions of these parameters depend on: equal evidence, equal descriptions. None if unknowable."""
    group_ids = [*map(id, live.groups)]
    try:
        return [
            *map(id, live.parameters),
            *live.names,
            *group_ids,
            *[_settings(optimizer, group) for group in dict(zip(group_ids, live.groups, strict=True)).values()],
            *map(_dtype, live.grads),
            *map(_address, chain.from_iterable(map(dict.values, live.states))),
            *map(_address, live.plain),
            *map(_shape, live.plain),
            *map(_dtype, live.plain),
            *map(_is_contiguous, live.plain),
            *map(_shape, live.stored),
            *map(_format, live.stored),
            *map(_address, chain.from_iterable([storage.tensors.values() for storage in live.stored])),
        ]
    except TypeError:  # somebody keeps things in the state that are no tensors
        return None


def _settings(optimizer: LowBitOptimizer, group: dict[str, Any]) -> tuple[Any, ...]:
    """What of a group's options goes into a description. Hyperparameters that a schedule changes do not."""
    return (
        optimizer.rule(group),
        optimizer.rule(group, compensated=True),
        optimizer.has_momentum(group),
        optimizer.first_name and group[optimizer.first_name],
        optimizer.second_name and group[optimizer.second_name],
        group["quantize"],
        group["backend"],
        group["rounding"],
        group["weight_rounding"],
        group["error_compensation"],
        group["maximize"],
    )


def _prepare(optimizer: LowBitOptimizer, live: Live, task: Task) -> Prepared | None:
    """Describes a parameter's step and keeps the description; None if the kernel cannot step it where it lies."""
    group, p, name = live.members[0]
    in_place = local_of(p) is p and (isinstance(p, QuantizedTensor) or p.is_contiguous())
    if not in_place or group["backend"] != "auto" or kernels.load() is None or not cpu.supports(task):
        return None
    evidence = _evidence(optimizer, live)
    if evidence is None:
        return None
    counter = memoryview(live.states[0]["step"].numpy().reshape(1))
    known = Prepared(p, name, evidence, counter, parameter_id(name), task.inject, cpu.describe(task))
    optimizer.prepared[id(p)] = known
    return known


def _still_prepared(optimizer: LowBitOptimizer, live: Live) -> list[Prepared | None]:
    """The descriptions that still hold; None where there is none."""
    found = [optimizer.prepared.get(id(p)) for p in live.parameters]
    return [
        known if known is not None and known.evidence == _evidence(optimizer, live.one(i)) else None
        for i, known in enumerate(found)
    ]


def _batch(optimizer: LowBitOptimizer, live: Live, prepared: list[Prepared]) -> Batch:
    kinds = {(id(group), known.compensated) for group, known in zip(live.groups, prepared, strict=True)}
    has_resets = any(key.endswith(".reset_step") for state in live.states for key in state)
    return Batch(
        evidence=_evidence(optimizer, live) if prepared else None,
        prepared=prepared,
        identities=np.array([known.identity for known in prepared], dtype=np.uint64),
        rows=b"".join([known.row for known in prepared]),
        has_resets=has_resets,
        is_uniform=not has_resets and len(kinds) == 1,
    )


def _last_batch(optimizer: LowBitOptimizer, live: Live) -> Batch | None:
    """The last step's batch, if it was of these very parameters and nothing has changed since."""
    batch = optimizer.batch
    # It keeps its parameters alive, so equal ids are the same parameters.
    if batch is None or batch.evidence is None or batch.evidence != _evidence(optimizer, live):
        return None
    return batch


def _step_batch(optimizer: LowBitOptimizer, batch: Batch, live: Live) -> dict[str, int]:
    """Steps all of a batch in one call of the kernel; returns what `step` does."""
    if not batch.prepared:
        return {}
    counts: list[Any] = [int(known.counter[0]) for known in batch.prepared]
    groups: Sequence[dict[str, Any]] = live.groups
    if batch.is_uniform and counts.count(counts[0]) == len(counts):  # then one entry speaks for all
        groups, counts = groups[:1], counts[:1]
    ages = [optimizer._local_steps(state) for state in live.states] if batch.has_resets else [(n, n) for n in counts]
    compensated = [known.compensated for known in batch.prepared[: len(groups)]]
    # Parameters of one group, one rule and one age share their scalars.
    kinds = [*zip(map(id, groups), compensated, ages, strict=True)]
    different = dict(zip(kinds, groups, strict=True))
    position = {kind: i for i, kind in enumerate(different)}
    numbers = []
    for (_, with_error, age), group in different.items():
        rule = optimizer.rule(group, with_error)
        scalars = rule.scalars(group, *age)
        numbers.append(cpu.Numbers(rule, scalars, group, _scale_policy(group, scalars)))
    seeds, steps = (np.array(column, dtype=np.uint64) for column in ([group["seed"] for group in groups], counts))
    changes = cpu.Changes(
        grads=[*map(_address, live.grads)],
        keys=stream_keys(seeds, steps, batch.identities),
        numbers=numbers,
        which=[position[kind] for kind in kinds],
    )
    bad = cpu.step_described(batch.rows, changes)
    # The kernel writes through pointers: tell autograd, which checks that saved weights are unchanged.
    increment_version([next(iter(storage.tensors.values())) for storage in live.stored])
    return {batch.prepared[i].name: int(bad[i]) for i in np.flatnonzero(bad)}
