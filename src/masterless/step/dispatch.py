"""Who performs steps: backends register here, and a task goes to the first that takes it.

Contract:
    * Which backend runs does not show in the result: kernels equal the reference to the bit.
    * A backend is an object with the entry points of `Backend`, registered under its name for a type of device.
      "auto" takes the device's own backend for every task it accepts and the reference for the rest; "reference" is
      always the reference.
    * A backend is told only of validated storages and gradients (`formats.storage`).
    * A step announces that a quantized weight will change (`Storage.announce`), and counts it on its codes afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from masterless.formats.format import parse
from masterless.formats.storage import Storage, tensor_specs
from masterless.step.scalars import Course, Scalars
from masterless.step.task import Task

REFERENCE = "reference"
CHOICES = ("auto", REFERENCE)


@dataclass(slots=True)
class Turn:
    """What differs from one step of some tasks to the next.

    Attributes:
        grads: the gradients, validated, one per task.
        keys: of the random bits, ``[tasks, purposes]``.
        numbers: the different sets of numbers: a rule's scalars, the group they come from, and the scale policy ...
        which: ... and which of them each task takes; a single entry is that of all tasks.
        must_be_finite: of each task (or a single entry for all): whether one bad gradient stops the whole step.
        later: whether a backend that would have to wait for its device may tell later how the step went.
        addresses: of the gradients' memory, if they are known.
    """

    grads: Sequence[Tensor]
    keys: NDArray[np.uint64]
    numbers: Sequence[tuple[Scalars, Mapping[str, Any], str]]
    which: Sequence[int] | NDArray[np.intp]
    must_be_finite: Sequence[bool] | NDArray[np.bool_]
    later: bool = False
    addresses: Sequence[int] = ()

    def of(self, i: int) -> tuple[Tensor, NDArray[np.uint64], tuple[Scalars, Mapping[str, Any], str]]:
        """One task's part of it."""
        return self.grads[i], self.keys[i], self.numbers[self.which[i if len(self.which) > 1 else 0]]

    def some(self, indices: Sequence[int]) -> Turn:
        """The part of some of the tasks."""

        def chosen(values: Any) -> Any:
            return values if len(values) == 1 else [values[i] for i in indices]

        keys, finite = self.keys[np.asarray(indices)], chosen(self.must_be_finite)
        return Turn([self.grads[i] for i in indices], keys, self.numbers, chosen(self.which), finite)


class Outcome(NamedTuple):
    """How many elements of each gradient are not finite, and whether anything was allowed to move.

    With `settle` that is not known yet: it waits for the device and says how the step went. Until then nothing is known
    to be bad. Whatever it will say, nothing bad was written, and a step that was stopped has moved nothing.
    """

    bad: NDArray[np.int64]
    moved: bool
    settle: Callable[[], Outcome] | None = None


@dataclass(slots=True)
class Captive:
    """What a step needs that is to be repeated without the host: what `Turn` has, as far as it does not change.

    Attributes:
        courses: what the numbers of every task's steps follow from.
        kinds: of each task: scale policy, whether weight decay is coupled, whether eps is above zero.
        lrs: the learning rates, tensors of one element on the device ...
        which: ... and which of them each task takes.
        seeds: of the random bits.
        identities: of the parameters.
        counts: steps that each task has taken.
        must_be_finite: of each task: whether one bad gradient stops the whole step.
    """

    courses: Sequence[Course]
    kinds: Sequence[tuple[str, bool, bool]]
    lrs: Sequence[Tensor]
    which: Sequence[int]
    seeds: NDArray[np.uint64]
    identities: NDArray[np.uint64]
    counts: Sequence[int]
    must_be_finite: Sequence[bool]


class Tally(NamedTuple):
    """How captured steps went: every task's count of steps and bad elements; steps stopped; numbers not finite."""

    counts: list[int]
    bad: list[int]
    stopped: int
    odd: int


class Captured(Protocol):
    """A step that can be repeated without the host."""

    def set_counts(self, counts: Sequence[int]) -> None:
        """Says how many steps each task has taken."""

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step, which the host only launches."""

    def read(self) -> Tally:
        """Waits, and says how the steps since the last question went."""


class Backend(Protocol):
    """What performs steps and decodes. One that can also has ``capture(prepared, captive) -> Captured``."""

    def refusal(self, task: Task) -> str:
        """Why this backend cannot perform a task; empty if it can."""

    def prepare(self, tasks: Sequence[Task]) -> Any:
        """Describes tasks once for many steps: until a tensor moves or an option changes."""

    def join(self, prepared: Sequence[Any]) -> Any:
        """Several prepared descriptions as one."""

    def step(self, prepared: Any, turn: Turn, only_survey: bool = False) -> Outcome:
        """Performs the prepared tasks in place; nothing moves with `only_survey`, or if what must be finite is not."""

    def decode(self, storage: Storage, dtype: torch.dtype, visible: bool = True) -> Tensor:
        """The stored values, dense; `visible` leaves hidden bits out."""

    def encode(self, storage: Storage, values: Tensor) -> None:
        """Stores dense values of any floating dtype under new scales, rounded to nearest."""


_backends: dict[str, Backend] = {}


def register(device_type: str, backend: Backend) -> None:
    """Makes a backend responsible for a type of device ("cpu", "cuda", ...), or for everything else ("reference")."""
    _backends[device_type] = backend


def reference() -> Backend:
    """The backend that performs every task, on every device."""
    return _backends[REFERENCE]


def backend_of(task: Task, choice: str) -> Backend:
    """The backend that performs a task."""
    own = _backends.get(task.grad.device.type)
    if choice != "auto" or own is None:
        return reference()
    refusal = own.refusal(task)
    if refusal and task.grad.device.type != "cpu":  # the CPU's own backend says what it lacks, and lacks little
        _warn_once(f"steps on {task.grad.device.type!r} run on the reference, many times slower: {refusal}")
    return reference() if refusal else own


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def check_choice(choice: str) -> None:
    """Raises a ValueError for a name that is no choice of backend."""
    if choice not in CHOICES:
        raise ValueError(f"unknown backend {choice!r}; choose one of {', '.join(CHOICES)}")


def dequantize(storage: Storage, dtype: torch.dtype) -> Tensor:
    """The dense tensor that a forward pass sees: visible codes times scales, in `dtype`."""
    if torch.compiler.is_compiling():
        tensors = [storage.tensors[name] for name in tensor_specs(storage.format, storage.shape)]
        return torch.ops.masterless.dequantize(tensors, str(storage.format), list(storage.shape), dtype)
    return _backend_of_storage(storage).decode(storage, dtype)


def decode(storage: Storage) -> Tensor:
    """All that is stored, dense in fp32, hidden bits included."""
    return _backend_of_storage(storage).decode(storage, torch.float32, visible=False)


def encode(storage: Storage, values: Tensor) -> None:
    """Overwrites a storage with dense, finite values on its device: new scales, rounded to nearest."""
    storage.announce()
    _backend_of_storage(storage).encode(storage, values)


def _backend_of_storage(storage: Storage) -> Backend:
    stored = next(iter(storage.tensors.values()))
    own = _backends.get(stored.device.type)
    return reference() if own is None or type(stored) is not Tensor else own


@torch.library.custom_op("masterless::dequantize", mutates_args=())
def _dequantize(tensors: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`dequantize` as an operator of torch, for compiled graphs: they decode with the kernels, too."""
    named = dict(zip(tensor_specs(parse(format), shape), tensors, strict=True))
    return dequantize(Storage(parse(format), tuple(shape), named), dtype)


@_dequantize.register_fake
def _(tensors: Sequence[Tensor], format: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return tensors[0].new_empty(shape, dtype=dtype)
