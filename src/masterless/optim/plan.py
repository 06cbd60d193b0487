"""The step plan of an optimizer: every parameter's task, validated and described to its backend once.

Contract:
    * Describing a parameter's step takes far longer than stepping a small tensor, so the plan keeps descriptions
      (`Entry`), and all that the last step put together (`Batch`). A later step fills in gradients, the keys of random
      bits and the rules' scalars (`dispatch.Turn`).
    * Nothing is assumed to have stayed. Every step looks at every tensor and option that a description was made from
      (`optim.watch`) and makes anew what differs; there, storages are validated. Gradients are checked every
      time.
    * All checks come first: whatever is refused, no parameter has moved and no step is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.formats import parse
from masterless.formats.rounding import PURPOSES, of_signed, parameter_id, stream_keys
from masterless.formats.scaling import FROZEN
from masterless.formats.storage import Storage, StorageError, memory_fault
from masterless.optim import resets, units
from masterless.optim.watch import Member, Roster, Watch
from masterless.step import dispatch
from masterless.step.rules import Rule
from masterless.step.scalars import Scalars, check_scalars
from masterless.step.task import Task
from masterless.tensor.quantized import local_of, weight_storage

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer
    from masterless.optim.device_step import DeviceStep

PLAIN = {torch.float32: parse("fp32"), torch.bfloat16: parse("bf16")}
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_shape = attrgetter("shape")


@dataclass(slots=True)
class Entry:
    """One parameter's step as its backend reads it, and what that description was made from."""

    task: Task
    backend: dispatch.Backend
    prepared: Any
    identity: int  # of the random bits
    counter: Any  # a memoryview of ``state["step"]``: hundreds of tensor additions outlast the kernel
    watch: Watch | None  # None: unknowable, or good for this step only
    original: Tensor | None = None  # of a weight that is not contiguous, and is stepped in a copy


@dataclass(slots=True)
class Batch:
    """Entries that are stepped together, put together for their backends."""

    entries: list[Entry]
    watch: Watch | None  # None: good for one step only
    parts: list[tuple[dispatch.Backend, list[int], Any]]  # a backend, which entries are its own, their description
    identities: NDArray[np.uint64]
    ages_differ: bool  # whether a moment of any parameter is younger than the parameter
    sharded: bool  # whether other ranks hold parts of any of them
    kinds: list[tuple[dict[str, Any], Rule]]  # the different pairs of group and rule ...
    which: NDArray[np.intp]  # ... and which of them each parameter has
    parameters: list[Tensor]
    counters: list[Any]  # of the entries


class StepPlan:
    """What an optimizer keeps between steps; it can be thrown away at any time."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}  # by the parameter's id; a task keeps its parameter's memory alive
        self.roster = Roster()
        self.batch: Batch | None = None
        self.addresses: list[int] = []  # of the last step's gradients; empty where that is not known
        self.moved = True  # whether the last step moved anything
        self.unsettled: list[tuple[dispatch.Outcome, Batch, Sequence[Member]]] = []  # steps that the host ran ahead of
        self.captured: DeviceStep | None = None  # the step that the device repeats by itself

    def step(self, optimizer: LowBitOptimizer, members: Sequence[Member]) -> list[tuple[Member, int]]:
        """Steps the parameters that have a gradient; returns those with bad elements, and how many.

        If a gradient is not finite that must be (``nonfinite="raise"``), nothing has moved. A target that is not
        finite is found only on the way: its tile stays, the others have moved.
        """
        members, grads = self.with_gradients(optimizer, members)
        if not members:
            return []
        batch = self.current(optimizer, members, grads)
        turn = turn_of(optimizer, batch, members, grads)
        turn.addresses = self.addresses
        resetting = any(group["reset"] is not None for group, _ in batch.kinds)
        afterwards = [
            resets.before_step(optimizer, group, p, name)
            for group, p, name in (members if resetting else ())
            if group["reset"] is not None
        ]
        turn.later = not afterwards and all(group["nonfinite"] != "raise-now" for group in optimizer.param_groups)
        outcome = perform(batch, turn)
        if outcome.settle is not None:
            self.unsettled.append((outcome, batch, members))
        self.moved = outcome.moved
        bad = _bad(outcome, members)
        if not outcome.moved:
            return bad
        for counter in batch.counters:
            counter[0] += 1
        if batch.watch is None:
            for entry in batch.entries:
                if entry.original is not None:
                    entry.original.copy_(entry.task.weight.tensors["values"])
        increment_version(batch.parameters)  # a quantized one changes below its own version counter
        for cleared in (cleared for finish in afterwards for cleared in finish()):
            counts = optimizer.reset_counts
            counts[cleared.parameter] = counts.get(cleared.parameter, 0) + cleared.cleared
        return bad

    def settle(self) -> list[tuple[Member, int]]:
        """Waits for steps that the host ran ahead of; returns what was bad in them, as `step` does.

        A step that was stopped on its device is taken back from the counters: it has moved nothing.
        """
        bad: list[tuple[Member, int]] = []
        if self.captured is not None:
            bad, self.moved = self.captured.settle()
        while self.unsettled:
            outcome, batch, members = self.unsettled.pop(0)
            assert outcome.settle is not None
            known = outcome.settle()
            self.moved = known.moved
            if not known.moved:
                for counter in batch.counters:
                    counter[0] -= 1
            bad += _bad(known, members)
        return bad

    def complaint(self, found: Sequence[str]) -> str:
        """What to tell of the last step's bad elements where they must be finite."""
        where = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
        if self.moved:
            return (
                f"the step would have made weights that are not finite in {where}. Their "
                f"tiles were left as they were, everything else has been stepped. Check the learning rate and eps, or "
                f"pass nonfinite='skip' to go on and only count them"
            )
        return (
            f"gradients are not finite (or their squares overflow) in {where}. No weight and no state has changed. "
            f"Check the loss and the learning rate, clip gradients, or pass nonfinite='skip' to go on and only count "
            f"them"
        )

    def current(self, optimizer: LowBitOptimizer, members: Sequence[Member], grads: Sequence[Tensor]) -> Batch:
        """The last step's batch if everything is as it was then, else one of entries that are made anew as need be."""
        if (
            self.batch is not None
            and self.batch.watch is not None
            and self.batch.watch.holds(optimizer, members, grads)
        ):
            return self.batch
        grads = [_checked_gradient(optimizer, member, grad) for member, grad in zip(members, grads, strict=True)]
        present = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.entries = {key: entry for key, entry in self.entries.items() if key in present}
        entries = []
        for member, grad in zip(members, grads, strict=True):
            known = self.entries.get(id(member[1]))
            if known is None or known.watch is None or not known.watch.holds(optimizer, [member], [grad]):
                known = self.entries[id(member[1])] = _entry(optimizer, member, grad)
            entries.append(known)
        kept = all(entry.watch is not None for entry in entries)
        self.batch = batch_of(entries, Watch.of(optimizer, members, grads) if kept else None, members, optimizer)
        return self.batch

    def with_gradients(
        self, optimizer: LowBitOptimizer, members: Sequence[Member]
    ) -> tuple[Sequence[Member], Sequence[Tensor]]:
        """The members with a gradient, and their gradients as dense memory; all are checked before anything moves."""
        with torch._C.DisableTorchFunctionSubclass():  # a subclass's attributes are slow calls otherwise
            grads: list[Any] = [p.grad for _, p, _ in members]
            types = {*map(type, grads)}
            if type(None) in types:
                members = [member for member, grad in zip(members, grads, strict=True) if grad is not None]
                grads = [grad for grad in grads if grad is not None]
                types.discard(type(None))
            if types == {Tensor} and self._fit(members, grads) and all(map(_is_contiguous, grads)):
                # Memory that was resized has moved: only where an address is new need one look behind it.
                addresses = [*map(_address, grads)]
                last: Any = self.addresses if len(self.addresses) == len(grads) else repeat(-1)
                new = zip(grads, addresses, last, strict=False) if addresses != self.addresses else ()
                if not any(memory_fault(grad) for grad, now, then in new if now != then):
                    self.addresses = addresses
                    return members, grads
        self.addresses = []
        checked = [_checked_gradient(optimizer, member, grad) for member, grad in zip(members, grads, strict=True)]
        return members, checked

    def _fit(self, members: Sequence[Member], grads: Sequence[Tensor]) -> bool:
        """Whether gradients have the shapes of their parameters, as far as nobody changes one of these afterwards."""
        watch = self.batch.watch if self.batch is not None else None
        known = watch is not None and watch.are_members(members)  # then it will look whether they still have them
        shapes = watch.shapes if watch is not None and known else [p.shape for _, p, _ in members]
        return [*map(_shape, grads)] == shapes


# --- gradients --------------------------------------------------------------------------------------------------


def _checked_gradient(optimizer: LowBitOptimizer, member: Member, grad: Tensor) -> Tensor:
    _, p, name = member
    grad = local_of(grad)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{type(optimizer).__name__}: the gradient of {name} is sparse ({grad.layout}); blocks of a low-bit state "
            f"share a scale, so all of it changes at every step. Use dense gradients (sparse=False)"
        )
    if grad.shape != local_of(p).shape:
        raise RuntimeError(
            f"{type(optimizer).__name__}: the gradient of {name} has shape {tuple(grad.shape)} and the parameter "
            f"{tuple(local_of(p).shape)}: the data of one of them was replaced. Call zero_grad() and backward()"
        )
    fault = memory_fault(grad.detach()) if grad.is_contiguous() else ""
    if fault:
        raise RuntimeError(
            f"{type(optimizer).__name__}: the gradient of {name} {fault}: its memory was freed or resized. Call "
            f"zero_grad() and backward()"
        )
    return grad.contiguous()


# --- descriptions -----------------------------------------------------------------------------------------------


def _entry(optimizer: LowBitOptimizer, member: Member, grad: Tensor) -> Entry:
    """Describes one parameter's step; here its storages are validated."""
    group, p, name = member
    with explained(optimizer, name):
        task, original = task_of(optimizer, member, grad)
        backend = dispatch.backend_of(task, group["backend"])
        prepared = backend.prepare([task])
    state = optimizer.state[p]
    watch = None if original is not None else Watch.of(optimizer, [member], [grad])
    return Entry(task, backend, prepared, parameter_id(name), counter_of(state), watch, original)


def counter_of(state: dict[str, Any]) -> Any:
    """A view of a parameter's count of steps as a mutable sequence of one integer."""
    return memoryview(state["step"].numpy().reshape(1))


@contextmanager
def explained(optimizer: LowBitOptimizer, name: str) -> Iterator[None]:
    """Says of a stored tensor that does not fit whose it is and what to do."""
    try:
        yield
    except StorageError as error:
        raise ValueError(
            f"{type(optimizer).__name__}: parameter {name}: {error}. Formats are fixed once there is state: build "
            f"another optimizer and load this one's state_dict(), which converts"
        ) from None


def task_of(
    optimizer: LowBitOptimizer, member: Member, grad: Tensor, rows: tuple[int, int] | None = None
) -> tuple[Task, Tensor | None]:
    """One parameter's task, or that of some of its rows; of a weight that is not contiguous over a copy, with it."""
    group, p, name = member
    local, states, weight, original = local_of(p), optimizer.state_storage(p, group), weight_storage(p), None
    compensated = optimizer.compensates(p, group)
    units.align(optimizer, group, p, optimizer.state[p], states)
    if weight is None:
        values = local.detach()
        if not values.is_contiguous():
            original, values = values, values.contiguous()
        weight = Storage(PLAIN[p.dtype], tuple(local.shape), {"values": values})
    where: dict[str, Any] = {} if local is p else _place(p)
    if rows is not None:
        weight, where = weight.cut(*rows), {"first_row": rows[0] * weight.layout.rows_per_slice}
        states = {key: state.cut(*rows) for key, state in states.items()}
    states_rounding = group["rounding"]
    rounding = {
        "weight": group["weight_rounding"],
        "exp_avg": of_signed(states_rounding),
        "exp_avg_sq": states_rounding,
    }
    task = Task(
        name=name,
        rule=optimizer.rule(group, compensated),
        scalars=Scalars(),
        group=group,
        grad=grad.new_empty(0),  # its dtype and device; a description that kept the gradient would keep its memory
        weight=weight,
        first=states.get(optimizer.first_name) if optimizer.first_name else None,
        second=states.get(optimizer.second_name) if optimizer.second_name else None,
        rounding=rounding,
        keys=dict.fromkeys(PURPOSES, 0),
        inject=compensated,
        maximize=group["maximize"],
        **where,
    )
    return task, original


def _place(p: Tensor) -> dict[str, Any]:
    from masterless.sharding.place import Place  # torch.distributed is large, and one process does without

    return Place.of(p).task_fields(p.device)


def batch_of(entries: list[Entry], watch: Watch | None, members: Sequence[Member], optimizer: LowBitOptimizer) -> Batch:
    """Entries put together for their backends."""
    by_backend: dict[int, tuple[dispatch.Backend, list[int]]] = {}
    for i, entry in enumerate(entries):
        by_backend.setdefault(id(entry.backend), (entry.backend, []))[1].append(i)
    parts = []
    for backend, indices in by_backend.values():
        prepared = [entries[i].prepared for i in indices]
        parts.append((backend, indices, prepared[0] if len(prepared) == 1 else backend.join(prepared)))
    ages_differ = any(key.endswith(".reset_step") for _, p, _ in members for key in optimizer.state[p])
    identities = np.array([entry.identity for entry in entries], dtype=np.uint64)
    pairs = [(group, entry.task.rule) for (group, _, _), entry in zip(members, entries, strict=True)]
    kinds = {(id(group), id(rule)): (group, rule) for group, rule in pairs}
    position = {kind: i for i, kind in enumerate(kinds)}
    which = np.array([position[id(group), id(rule)] for group, rule in pairs], dtype=np.intp)
    sharded = any(entry.task.sharded for entry in entries)
    parameters, counters = [p for _, p, _ in members], [entry.counter for entry in entries]
    different = [*kinds.values()]
    return Batch(entries, watch, parts, identities, ages_differ, sharded, different, which, parameters, counters)


def _bad(outcome: dispatch.Outcome, members: Sequence[Member]) -> list[tuple[Member, int]]:
    return [(members[i], int(outcome.bad[i])) for i in np.flatnonzero(outcome.bad).tolist()]


# --- one step ---------------------------------------------------------------------------------------------------


def turn_of(
    optimizer: LowBitOptimizer, batch: Batch, members: Sequence[Member], grads: Sequence[Tensor]
) -> dispatch.Turn:
    """The numbers of the coming step: parameters of one group, rule and age share their scalars."""
    counts = [counter[0] + 1 for counter in batch.counters]
    if batch.ages_differ:
        states = [optimizer.state[p] for _, p, _ in members]
        ages = [tuple(age + 1 for age in optimizer._local_steps(state)) for state in states]
    else:
        ages = [(count, count) for count in counts] if counts.count(counts[0]) < len(counts) else [(counts[0],) * 2]
    which: Any = batch.which
    if len(ages) == 1:  # as usual: what differs is known
        different = [(kind, ages[0]) for kind in range(len(batch.kinds))]
        counts = counts[:1]
    else:
        position: dict[Any, int] = {}
        which = [position.setdefault(pair, len(position)) for pair in zip(batch.which.tolist(), ages, strict=True)]
        different = [*position]
    numbers: list[tuple[Scalars, dict[str, Any], str]] = []
    for kind, age in different:
        group, rule = batch.kinds[kind]
        scalars = rule.scalars(group, *age)
        check_scalars(scalars, group)  # hyperparameters are the user's to change at any time
        numbers.append((scalars, group, scale_policy(group, scalars)))
    seeds = np.array([group["seed"] for group, _ in batch.kinds], dtype=np.uint64)
    finite = np.array([group["nonfinite"] != "skip" for group, _ in batch.kinds])
    return dispatch.Turn(
        grads=grads,
        keys=stream_keys(seeds[batch.which], np.array(counts, dtype=np.uint64), batch.identities),
        numbers=numbers,
        which=which,
        must_be_finite=finite[batch.which],
    )


def scale_policy(group: dict[str, Any], scalars: Scalars) -> str:
    """The group's; but a step that moves nothing (lr = 0) must not change a scale either."""
    return FROZEN if scalars.step_size == 0.0 and scalars.decay == 1.0 else group["scale_policy"]


def perform(batch: Batch, turn: dispatch.Turn) -> dispatch.Outcome:
    """Lets every backend step its part, unless a gradient that must be finite is not: then nobody moves."""
    if len(batch.parts) == 1 and not batch.sharded:
        backend, _, prepared = batch.parts[0]
        return backend.step(prepared, turn)
    turns = [turn.some(indices) for _, indices, _ in batch.parts]
    bad = np.zeros(len(batch.entries), dtype=np.int64)
    for (backend, indices, prepared), own in zip(batch.parts, turns, strict=True):
        bad[indices] = backend.step(prepared, own, only_survey=True).bad
    tasks = [entry.task for entry in batch.entries]
    mine, bad = bad, np.array(of_all_ranks(tasks, bad.tolist()))
    moved = not bool((bad * np.asarray(turn.must_be_finite)).any())
    if moved:
        more = np.zeros_like(bad)  # than their gradients say: targets
        for (backend, indices, prepared), own in zip(batch.parts, turns, strict=True):
            outcome = backend.step(prepared, replace(own, must_be_finite=[False]))  # they are: no need to look again
            more[indices] = np.maximum(outcome.bad - mine[indices], 0)
        bad = bad + np.array(of_all_ranks(tasks, more.tolist()))
    return dispatch.Outcome(bad, moved)


def of_all_ranks(tasks: Sequence[Task], counts: list[int]) -> list[int]:
    """Counts of bad elements, summed over the ranks that share each parameter."""
    if not any(task.sharded for task in tasks):
        return counts
    from masterless.sharding.agreement import total_counts

    return total_counts(tasks, counts)
