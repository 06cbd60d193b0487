"""The step, measured: entries take turns, the minimum of the repeats counts, all in one run.

Contract:
    * A ratio is to the entry's baseline on the same tensors and threads, in the same run.
    * `limit` is the time to move an entry's bytes once (gradient read, weight and states read and written) at the
      bandwidth of a large in-place addition measured in the same run, as a ratio to the same baseline.
    * Bytes are those of the live tensors (`footprint`).
    * Steps of a few milliseconds are repeated until they have taken some time: their noise is larger.
    * Guests (other libraries, see ``benchmarks/``) are measured one after the other, each taking turns with all of ours
      and the baselines, and repeated until a budget of seconds is spent, twice at least.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from masterless.lab.bench.entries import Entry, Gradients, build
from masterless.lab.bench.footprint import fallback_note, resident_bytes
from masterless.lab.bench.tensor_sizes import Shape

WARM_UP = 3
LEAST_SECONDS = 0.3
GUEST_SECONDS = 10.0
GUEST_REPEATS = 2  # at least


@dataclass(frozen=True)
class Row:
    """One entry on one set of tensors and threads; None where it could not be measured."""

    size: str
    parameters: int
    tensors: int
    threads: int
    name: str
    baseline: str
    peer: bool
    milliseconds: float | None = None
    ratio: float | None = None
    limit: float | None = None
    bytes_per_parameter: float | None = None
    bytes_moved_per_parameter: float | None = None
    repeats: int = 0
    note: str = ""


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The shortest time of each call; they take turns."""
    best = [math.inf] * len(calls)
    for _ in range(repeats):
        best = [min(b, seconds(call)) for b, call in zip(best, calls, strict=True)]
    return best


def memory_bandwidth(repeats: int, elements: int = 1 << 26) -> float:
    """Bytes read plus written per second by a large addition in place, which like a step writes only what it read."""
    source, target = torch.zeros(elements), torch.zeros(elements)
    return 3 * source.nbytes / min(seconds(lambda: target.add_(source)) for _ in range(repeats))


class _Measured:
    """An entry's optimizer with the best time so far."""

    def __init__(self, entry: Entry, gradients: Gradients, warm_up: int) -> None:
        self.entry = entry
        self.optimizer = build(entry, gradients)
        self.best, self.repeats, self.spent = math.inf, 0, 0.0
        for _ in range(warm_up):  # allocation, caches, and states that are not zero any more
            self.optimizer.step()
        self.resident = resident_bytes(self.optimizer)
        groups = self.optimizer.param_groups
        self.grad = sum(p.grad.nbytes for group in groups for p in group["params"])
        self.note = fallback_note(self.optimizer) if entry.low_bit else ""

    def step(self) -> None:
        took = seconds(self.optimizer.step)
        self.best, self.repeats, self.spent = min(self.best, took), self.repeats + 1, self.spent + took


class StepTimes:
    """Every entry on one set of tensors; `entries` must hold the baselines too. `report` is told what comes next."""

    def __init__(
        self,
        size: str,
        shapes: Sequence[Shape],
        entries: Sequence[Entry],
        threads: int,
        repeats: int,
        report: Callable[[str], None] = lambda what: None,
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._size, self._shapes, self._threads, self._repeats = size, shapes, threads, repeats
        self._gradients = Gradients(shapes)
        self._done: dict[str, _Measured] = {}
        self._entries, self._failed = list(entries), {}  # type: ignore[var-annotated]
        for entry in entries:
            report(entry.name)
            self._done[entry.name] = _Measured(entry, self._gradients, WARM_UP)
        self._turns = turns = list(self._done.values())
        while turns and (turns[0].repeats < repeats or turns[0].spent < LEAST_SECONDS):
            report(f"repeat {turns[0].repeats + 1}")
            for one in turns:
                one.step()

    def add_guest(self, entry: Entry) -> None:
        """Measures an entry that takes turns with those that are there; its own errors are raised."""
        one = _Measured(entry, self._gradients, warm_up=1)
        while one.repeats < GUEST_REPEATS or (one.repeats < self._repeats and one.spent < GUEST_SECONDS):
            for other in self._turns:
                other.step()
            one.step()
        del one.optimizer
        self._entries.append(entry)
        self._done[entry.name] = one

    def add_failed(self, entry: Entry, reason: str) -> None:
        """Gives an entry that could not be measured a row with the reason."""
        self._entries.append(entry)
        self._failed[entry.name] = reason

    def rows(self) -> list[Row]:
        """One row per entry, in the order in which they came."""
        parameters = sum(map(math.prod, self._shapes))
        bandwidth = memory_bandwidth(max(self._repeats, 3), 1 << 26 if parameters > 1 << 20 else 1 << 20)
        return [self._row(entry, parameters, bandwidth) for entry in self._entries]

    def _row(self, entry: Entry, parameters: int, bandwidth: float) -> Row:
        what = Row(self._size, parameters, len(self._shapes), self._threads, entry.name, entry.baseline, entry.peer)
        if entry.name in self._failed:
            return replace(what, note=self._failed[entry.name])
        one, baseline = self._done[entry.name], self._done[entry.baseline]
        moved = one.grad + 2 * one.resident
        return replace(
            what,
            milliseconds=one.best * 1e3,
            ratio=one.best / baseline.best,
            limit=moved / bandwidth / baseline.best,
            bytes_per_parameter=one.resident / parameters,
            bytes_moved_per_parameter=moved / parameters,
            repeats=one.repeats,
            note=one.note,
        )
