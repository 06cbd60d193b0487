"""The step, measured: entries take turns, the minimum of the repeats counts, all in one run.

Contract:
    * A ratio is to the entry's baseline on the same tensors and threads, in the same run.
    * `limit` is the time to move an entry's bytes once (gradient read, weight and states read and written) at the
      bandwidth of a large in-place addition measured in the same run, as a ratio to the same baseline.
    * Bytes are those of the live tensors (`footprint`).
    * Steps of a few milliseconds are repeated until they have taken some time: their noise is larger.
    * Other libraries are measured one after the other, each taking turns with all of ours and the baselines, and
      repeated until a budget of seconds is spent, twice at least. One that is missing or fails keeps its row, with the
      reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from masterless.lab.bench import peers
from masterless.lab.bench.entries import Entry, Gradients, Unavailable, build
from masterless.lab.bench.footprint import fallback_note, resident_bytes
from masterless.lab.bench.shapes import Shape

WARM_UP = 3
LEAST_SECONDS = 0.3
PEER_SECONDS = 10.0
PEER_REPEATS = 2  # at least


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


def measure(
    size: str,
    shapes: Sequence[Shape],
    entries: Sequence[Entry],
    threads: int,
    repeats: int,
    report: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Every entry on one set of tensors; `entries` must hold the baselines too. `report` is told what comes next."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    peers.prepare(threads)
    gradients = Gradients(shapes)
    parameters = sum(map(math.prod, shapes))
    done: dict[str, _Measured] = {}
    failed: dict[str, str] = {}
    for entry in (e for e in entries if not e.peer):
        report(entry.name)
        done[entry.name] = _Measured(entry, gradients, WARM_UP)
    turns = list(done.values())
    while turns and (turns[0].repeats < repeats or turns[0].spent < LEAST_SECONDS):
        report(f"repeat {turns[0].repeats + 1}")
        for one in turns:
            one.step()
    for entry in (e for e in entries if e.peer):
        report(entry.name)
        try:
            done[entry.name] = _measure_peer(entry, gradients, turns, repeats)
        except Unavailable as error:
            failed[entry.name] = str(error)
    bandwidth = memory_bandwidth(max(repeats, 3), 1 << 26 if parameters > 1 << 20 else 1 << 20)

    def row(entry: Entry) -> Row:
        what = Row(size, parameters, len(shapes), threads, entry.name, entry.baseline, entry.peer)
        if entry.name in failed:
            return replace(what, note=failed[entry.name])
        one, baseline = done[entry.name], done[entry.baseline]
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

    return [row(entry) for entry in entries]


def _measure_peer(entry: Entry, gradients: Gradients, turns: Sequence[_Measured], repeats: int) -> _Measured:
    try:
        with peers.quiet():
            one = _Measured(entry, gradients, warm_up=1)
    except Unavailable:
        raise
    except Exception as error:  # a peer that fails is a result too
        raise Unavailable(f"fails here: {peers.describe_error(error)}") from error
    while one.repeats < PEER_REPEATS or (one.repeats < repeats and one.spent < PEER_SECONDS):
        for other in turns:
            other.step()
        one.step()
    del one.optimizer
    return one
