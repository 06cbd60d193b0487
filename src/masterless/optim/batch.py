"""Parameters that are stepped together: what their backends were told, the numbers of one step, and the step itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from masterless.formats.rounding import stream_keys
from masterless.formats.scaling import FROZEN
from masterless.optim.watch import Member, Watch
from masterless.step import dispatch
from masterless.step.rules import Rule
from masterless.step.scalars import Scalars, check_scalars
from masterless.step.task import Task

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer


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
