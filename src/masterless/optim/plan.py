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
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.formats import parse
from masterless.formats.rounding import PURPOSES, of_signed, parameter_id
from masterless.formats.storage import Storage, StorageError, memory_fault
from masterless.optim import resets, units
from masterless.optim.batch import Batch, Entry, batch_of, perform, turn_of
from masterless.optim.watch import Member, Roster, Watch
from masterless.step import dispatch
from masterless.step.scalars import Scalars
from masterless.step.task import Task
from masterless.tensor.quantized import local_of, weight_storage

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer
    from masterless.optim.device_step import DeviceStep

PLAIN = {torch.float32: parse("fp32"), torch.bfloat16: parse("bf16")}
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_shape, _grad = attrgetter("shape"), attrgetter("grad")


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
        if self.batch is not None and self.batch.watch is not None:
            self.batch.watch.gradients.ask()
        with torch._C.DisableTorchFunctionSubclass():  # a subclass's attributes are slow calls otherwise
            grads: list[Any] = [*map(_grad, self._parameters(members))]
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

    def _parameters(self, members: Sequence[Member]) -> Sequence[Tensor]:
        watch = self.batch.watch if self.batch is not None else None
        known = watch is not None and watch.are_members(members)
        return watch.parameters if watch is not None and known else [p for _, p, _ in members]

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


def _bad(outcome: dispatch.Outcome, members: Sequence[Member]) -> list[tuple[Member, int]]:
    return [(members[i], int(outcome.bad[i])) for i in np.flatnonzero(outcome.bad).tolist()]
