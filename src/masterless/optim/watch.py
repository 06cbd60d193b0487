"""What the descriptions of a step plan depend on, and whether it has stayed as it was.

Contract:
    * Tensors are known by address, bytes and contiguity: whatever replaces, casts, cuts, transposes or resizes one
      changes one of these. Options are known by value, everything else by identity.
    * `Watch.holds` is most of the Python that a parameter costs in a usual step, hence its loops run inside `map`, and
      of what is the same object as before only the memory is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masterless.backends.cpu import ahead
from masterless.formats.storage import COUNTERS
from masterless.tensor.quantized import QuantizedTensor

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer

Member = tuple[dict[str, Any], Tensor, str]  # a parameter between its group and its name
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_dtype, _shape, _nbytes, _stored = map(attrgetter, ("dtype", "shape", "nbytes", "stored"))


class Roster:
    """An optimizer's members; the same tuple as long as the same groups hold the same parameters and names."""

    def __init__(self) -> None:
        self._seen: list[tuple[dict[str, Any], list[Tensor], Any]] = []
        self._members: tuple[Member, ...] = ()

    def members(self, optimizer: LowBitOptimizer) -> tuple[Member, ...]:
        """All parameters with their groups and names."""
        groups = optimizer.param_groups
        if not _same(groups, [group for group, _, _ in self._seen]) or not all(
            _same(group["params"], parameters) and group.get("param_names") == names
            for group, parameters, names in self._seen
        ):
            self._seen = [(group, [*group["params"]], copy(group.get("param_names"))) for group in groups]
            self._members = tuple(optimizer.parameters())
        return self._members


def _settings(optimizer: LowBitOptimizer, group: dict[str, Any]) -> tuple[Any, ...]:
    """What of a group's options goes into a description. Hyperparameters that a schedule changes do not."""
    return (
        optimizer.rule(group),
        optimizer.rule(group, True),
        optimizer.has_momentum(group),
        optimizer.first_name and group[optimizer.first_name],
        optimizer.second_name and group[optimizer.second_name],
        group["quantize_states"],
        group["backend"],
        group["rounding"],
        group["weight_rounding"],
        group["error_compensation"],
        group["maximize"],
    )


# Tensors whose memory is looked at together: the second and the third look find them in a cache, and the next ones are
# on their way.
_AT_A_TIME = 128
_FEW = 8  # members: what these wait for does not pay for asking ahead


class _Places:
    """Where some tensors lie, how long they are, and that they are contiguous."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._addresses, self._nbytes = [*map(_address, tensors)], [*map(_nbytes, tensors)]
        if not all(map(_is_contiguous, tensors)):
            raise TypeError("described are only tensors that are contiguous")

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        tensors = self.tensors
        return (
            [*map(_address, tensors)] == self._addresses
            and [*map(_nbytes, tensors)] == self._nbytes
            and all(map(_is_contiguous, tensors))
        )


class Watch:
    """All that descriptions of some parameters' steps were made from."""

    def __init__(self, optimizer: LowBitOptimizer, members: Sequence[Member], grads: Sequence[Tensor]) -> None:
        self._members = members
        self._groups, self.parameters, names = zip(*members, strict=True)
        self._names = [*names]
        self._distinct = [*{id(group): group for group in self._groups}.values()]
        self._settings = [_settings(optimizer, group) for group in self._distinct]
        self._grads = [*map(_dtype, grads)]
        every = optimizer.state if len(members) > 1 else {}
        self._owners, self._states = [*every], [*every.values()]
        self._own_states = [optimizer.state[p] for p in self.parameters]
        self._keys = [*chain.from_iterable(self._own_states)]
        self._values = [*chain.from_iterable(map(dict.values, self._own_states))]
        self._quantized = [p for p in self.parameters if isinstance(p, QuantizedTensor)]
        self._dense = [p for p in self.parameters if not isinstance(p, QuantizedTensor)]
        self._storages = [*map(_stored, self._quantized)]
        # Of a moment's own counters, which are read as tensors, the identity says everything.
        tensors = [t for key, t in zip(self._keys, self._values, strict=True) if not key.endswith(COUNTERS)]
        tensors += self._dense
        for storage in self._storages:
            tensors += storage.tensors.values()
        whole = [t for t in tensors if t.dim()]  # of a number the address says everything
        self._places = [_Places(whole[i : i + _AT_A_TIME]) for i in range(0, len(whole), _AT_A_TIME)]
        self._numbers = [t for t in tensors if not t.dim()]
        self._of_numbers = [*map(_address, self._numbers)]
        self._dense_shapes = [*map(_shape, self._dense)]
        with torch._C.DisableTorchFunctionSubclass():  # a subclass's attributes are slow calls otherwise
            self.shapes = [*map(_shape, self.parameters)]
        few = len(members) < _FEW
        # Where the gradients were: in many loops the next ones are there, too.
        self.gradients = ahead.NOTHING if few else ahead.of_tensors([*self.parameters, *grads])
        objects = [*self._own_states, *self._values, *self._storages]
        self._objects = ahead.NOTHING if few else ahead.of_objects(objects)
        parts = [*(places.tensors for places in self._places), self._numbers]
        self._lines = [ahead.NOTHING if few else ahead.of_tensors(tensors) for tensors in parts]

    @classmethod
    def of(cls, optimizer: LowBitOptimizer, members: Sequence[Member], grads: Sequence[Tensor]) -> Watch | None:
        """A watch over these parameters; None if somebody keeps things in their states that cannot be watched."""
        try:
            return cls(optimizer, members, grads)
        except TypeError:
            return None

    def holds(self, optimizer: LowBitOptimizer, members: Sequence[Member], grads: Sequence[Tensor]) -> bool:
        """Whether all of it is as it was."""
        self._objects.ask()
        return (
            (self.are_members(members) or self._had_members(members))
            and self._has_states(optimizer.state)
            and [*chain.from_iterable(self._own_states)] == self._keys  # hence as many values
            and all(map(is_, chain.from_iterable(map(dict.values, self._own_states)), self._values))
            and _same([*map(_stored, self._quantized)], self._storages)
            and [*map(_dtype, grads)] == self._grads
            and self._have_memory()
            and [*map(_shape, self._dense)] == self._dense_shapes  # a quantized one's is that of its storage
            and [_settings(optimizer, group) for group in self._distinct] == self._settings
        )

    def _have_memory(self) -> bool:
        """Whether all tensors have the memory that they had."""
        lines = iter(self._lines)
        next(lines).ask()
        for places in self._places:
            next(lines).ask()
            if not places.hold():
                return False
        return [*map(_address, self._numbers)] == self._of_numbers

    def are_members(self, members: Sequence[Member]) -> bool:
        """Whether these are the very members, known at a glance (a tuple of them cannot have changed)."""
        return members is self._members and type(members) is tuple

    def _had_members(self, members: Sequence[Member]) -> bool:
        groups, parameters, names = zip(*members, strict=True)
        return _same(parameters, self.parameters) and _same(groups, self._groups) and [*names] == self._names

    def _has_states(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether the parameters have the very dictionaries that they had."""
        if len(self.parameters) == 1:
            return state.get(self.parameters[0]) is self._own_states[0]
        # A tensor's hash is a slow call, so the dictionary is walked and not asked for each.
        return _same([*state], self._owners) and _same([*state.values()], self._states)


def _same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether these are the very objects of then, in the same order."""
    return len(now) == len(then) and all(map(is_, now, then))
