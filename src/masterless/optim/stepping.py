"""One step of some parameters: their tasks, and who performs them.

Contract:
    * A parameter's step is a `reference.Task`. Building one and describing it to the compiled kernel takes far longer
      than stepping a small tensor, so the description is kept (`Prepared`), and later steps only fill in the
      gradient's address, the keys of the random bits and the rule's scalars.
    * Nothing is assumed to have stayed: every step looks at the addresses of weight and states, the options of the
      group and the name, and what differs is described anew. Tensors are known by address only, so none is kept alive.
    * What the kernel does not take (sharded parameters, other devices, ``backend="reference"``) is a task for
      `ops.step`, with the same result to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless import kernels, ops
from masterless.formats import parse
from masterless.kernels import cpu
from masterless.optim import resets
from masterless.reference import Task
from masterless.rounding import PURPOSES, parameter_id, stream_key, stream_keys
from masterless.rules import Scalars
from masterless.scaling import FROZEN
from masterless.storage import Storage
from masterless.weight import QuantizedTensor, local_of, weight_storage

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer

Member = tuple[dict[str, Any], Tensor, str]  # a parameter between its group and its name
State = dict[str, Any]
PLAIN = {torch.float32: parse("fp32"), torch.bfloat16: parse("bf16")}


def step(optimizer: LowBitOptimizer, members: Sequence[Member]) -> dict[str, int]:
    """Steps the parameters; returns, by name, how many elements of a gradient were not finite (where any)."""
    with torch._C.DisableTorchFunctionSubclass():  # a subclass's `.grad` is a slow call otherwise
        grads = [_dense_gradient(optimizer, p, name) for _, p, name in members]  # all, before any of them moves
    states = [optimizer.state[p] for _, p, _ in members]
    prepared = _still_prepared(optimizer, members, grads, states)
    _count_step(optimizer, members, states, prepared)
    afterwards = [resets.before_step(optimizer, g, p, name) for g, p, name in members if g["reset"] is not None]
    batches: dict[str, list[Task]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for i in [i for i, known in enumerate(prepared) if known is None]:
        task = _task(optimizer, members[i], grads[i], states[i], copies)
        prepared[i] = _prepare(optimizer, members[i], task, states[i])
        if prepared[i] is None:
            # Collectives have one order on all ranks: they are the reference's.
            batches.setdefault("reference" if task.collective else task.group["backend"], []).append(task)
    bad = _step_prepared(optimizer, members, grads, states, prepared)
    for backend, tasks in batches.items():
        bad |= _step_tasks(tasks, backend)
    for p, contiguous in copies:
        p.copy_(contiguous)
    increment_version([p for _, p, _ in members])  # a quantized one changes below its own version counter
    for entry in (entry for finish in afterwards for entry in finish()):
        optimizer.reset_counts[entry.parameter] = optimizer.reset_counts.get(entry.parameter, 0) + entry.cleared
    return bad


def _dense_gradient(optimizer: LowBitOptimizer, p: Tensor, name: str) -> Tensor:
    grad = p.grad
    assert grad is not None
    if type(grad) is not Tensor:
        grad = local_of(grad)
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{type(optimizer).__name__}: the gradient of {name} is sparse ({grad.layout}); blocks of a low-bit state "
            f"share a scale, so all of it changes at every step. Use dense gradients (sparse=False)"
        )
    return grad if grad.is_contiguous() else grad.contiguous()


def _count_step(
    optimizer: LowBitOptimizer, members: Sequence[Member], states: Sequence[State], prepared: Sequence[Prepared | None]
) -> None:
    for (group, p, _), state, known in zip(members, states, prepared, strict=True):
        if known is not None:
            known.counter[()] += 1
        else:
            optimizer.state_storage(p, group)  # allocates, if need be
            state["step"] += 1


def _scale_policy(group: dict[str, Any], scalars: Scalars) -> str:
    """The group's; but a step that moves nothing (lr = 0) must not change a scale either."""
    return FROZEN if scalars.step_size == 0.0 and scalars.decay == 1.0 else group["scale_policy"]


# --- tasks ----------------------------------------------------------------------------------------------------


def _task(
    optimizer: LowBitOptimizer, member: Member, grad: Tensor, state: State, copies: list[tuple[Tensor, Tensor]]
) -> Task:
    """One parameter's step. A weight that is not contiguous is stepped in a copy, noted in `copies`."""
    group, p, name = member
    local, rule = local_of(p), optimizer.rule(group)
    states = optimizer.state_storage(p, group)
    weight = weight_storage(p)
    lossy = weight is not None and not weight.format.master
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
        from masterless.distributed import sharding

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
        inject=lossy and bool(group["error_compensation"]),
        maximize=group["maximize"],
        scale_policy=_scale_policy(group, scalars),
        **place,
    )


def _step_tasks(tasks: list[Task], backend: str) -> dict[str, int]:
    counts = ops.step(tasks, backend)
    if any(task.across is not None for task in tasks):
        from masterless.distributed import agreement

        counts = agreement.total_counts(tasks, counts)
    return {task.name: count for task, count in zip(tasks, counts, strict=True) if count}


# --- what is kept between steps -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Prepared:
    """One parameter's step as the kernel reads it, and what that description was made from."""

    parameter: Tensor
    name: str
    settings: tuple[Any, ...]  # of its group: `_settings`
    grad_dtype: torch.dtype
    weight: list[Any]  # `_weight_evidence`
    state_keys: list[str]  # of the stored tensors in the parameter's state ...
    state_addresses: list[int]  # ... and where they lie
    counter: NDArray[np.float32]  # ``state["step"]`` in place: hundreds of tensor additions outlast the kernel
    identity: int  # of the random bits
    row: bytes


def _settings(optimizer: LowBitOptimizer, group: dict[str, Any]) -> tuple[Any, ...]:
    """What of a group's options goes into a description. Hyperparameters that a schedule changes do not."""
    return (
        optimizer.rule(group),
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


def _weight_evidence(p: Tensor) -> list[Any]:
    """Where a weight lies, and its shape."""
    if isinstance(p, QuantizedTensor):
        return [p.stored.shape, p.stored.format, *[tensor.data_ptr() for tensor in p.stored.tensors.values()]]
    return [p.data_ptr(), p.shape, p.dtype, p.is_contiguous()]


def _prepare(optimizer: LowBitOptimizer, member: Member, task: Task, state: State) -> Prepared | None:
    """Describes a parameter's step and keeps the description; None if the kernel cannot step it where it lies."""
    group, p, name = member
    in_place = local_of(p) is p and (isinstance(p, QuantizedTensor) or p.is_contiguous())
    if not in_place or group["backend"] != "auto" or kernels.load() is None or not cpu.supports(task):
        return None
    moments = [storage for storage in (task.first, task.second) if storage is not None]
    stored = {id(tensor) for storage in moments for tensor in storage.tensors.values()}
    keys = ["step", *(key for key, value in state.items() if id(value) in stored)]
    optimizer.prepared[id(p)] = prepared = Prepared(
        parameter=p,
        name=name,
        settings=_settings(optimizer, group),
        grad_dtype=task.grad.dtype,
        weight=_weight_evidence(p),
        state_keys=keys,
        state_addresses=[state[key].data_ptr() for key in keys],
        counter=state["step"].numpy(),
        identity=parameter_id(name),
        row=cpu.describe(task),
    )
    return prepared


def _still_prepared(
    optimizer: LowBitOptimizer, members: Sequence[Member], grads: Sequence[Tensor], states: Sequence[State]
) -> list[Prepared | None]:
    """The descriptions that still hold; None where there is none."""
    found = [optimizer.prepared.get(id(p)) for _, p, _ in members]
    groups = {id(group): group for group, _, _ in members}
    settings = {key: _settings(optimizer, group) for key, group in groups.items()}
    if None not in found and _hold(found, members, grads, states, settings):  # the usual case: all at once
        return found
    rows = zip(found, members, grads, states, strict=True)
    return [known if known and _hold([known], [m], [g], [s], settings) else None for known, m, g, s in rows]


def _hold(
    prepared: Sequence[Any],
    members: Sequence[Member],
    grads: Sequence[Tensor],
    states: Sequence[State],
    settings: dict[int, tuple[Any, ...]],
) -> bool:
    """Whether nothing has changed that these descriptions were made from."""
    try:
        return (
            all([known.parameter is p for known, (_, p, _) in zip(prepared, members, strict=True)])
            and [known.name for known in prepared] == [name for _, _, name in members]
            and [known.settings for known in prepared] == [settings[id(group)] for group, _, _ in members]
            and [known.grad_dtype for known in prepared] == [grad.dtype for grad in grads]
            and [known.weight for known in prepared] == [_weight_evidence(p) for _, p, _ in members]
            and [address for known in prepared for address in known.state_addresses]
            == [s[key].data_ptr() for s, known in zip(states, prepared, strict=True) for key in known.state_keys]
        )
    except KeyError:  # a state has been taken away
        return False


def _step_prepared(
    optimizer: LowBitOptimizer,
    members: Sequence[Member],
    grads: Sequence[Tensor],
    states: Sequence[State],
    prepared: Sequence[Prepared | None],
) -> dict[str, int]:
    """Steps all that is prepared in one call of the kernel; returns what `step` does."""
    known = [one for one in prepared if one is not None]
    if not known:
        return {}
    if len(known) < len(prepared):
        chosen = [one is not None for one in prepared]
        members, grads, states = [*compress(members, chosen)], [*compress(grads, chosen)], [*compress(states, chosen)]
    counts = [int(one.counter) for one in known]
    numbers = _Numbers(optimizer)
    which = [numbers.of(group, s, count) for (group, _, _), s, count in zip(members, states, counts, strict=True)]
    seeds, identities = [group["seed"] for group, _, _ in members], [one.identity for one in known]
    keys = stream_keys(*(np.array(column, dtype=np.uint64) for column in (seeds, counts, identities)))
    changes = cpu.Changes([grad.data_ptr() for grad in grads], keys, numbers.different, which)
    bad = cpu.step_described([one.row for one in known], changes)
    # The kernel writes through pointers: tell autograd, which checks that saved weights are unchanged.
    quantized = [p.stored for _, p, _ in members if isinstance(p, QuantizedTensor)]
    increment_version([next(iter(storage.tensors.values())) for storage in quantized])
    return {known[i].name: int(bad[i]) for i in np.flatnonzero(bad)}


class _Numbers:
    """The different sets of scalars of one step: parameters of one group and one age share theirs."""

    def __init__(self, optimizer: LowBitOptimizer) -> None:
        self.different: list[cpu.Numbers] = []
        self._optimizer = optimizer
        self._first_reset, self._second_reset = (
            f"{optimizer.first_name}.reset_step",
            f"{optimizer.second_name}.reset_step",
        )
        self._positions: dict[tuple[int, int, int], int] = {}

    def of(self, group: dict[str, Any], state: State, count: int) -> int:
        """The position in `different` of a parameter's numbers."""
        first = second = count
        if self._first_reset in state or self._second_reset in state:
            first, second = self._optimizer._local_steps(state)
        position = self._positions.get((id(group), first, second))
        if position is None:
            position = self._positions[id(group), first, second] = len(self.different)
            rule = self._optimizer.rule(group)
            scalars = rule.scalars(group, first, second)
            self.different.append(cpu.Numbers(rule, scalars, group, _scale_policy(group, scalars)))
        return position
