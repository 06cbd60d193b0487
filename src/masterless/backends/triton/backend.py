"""Steps in Triton kernels, with exactly the results of `masterless.step.reference`.

Contract:
    * One launch per kind of step for all tensors, preceded by the few that statistics of whole parameters need; the
      host does not wait for any of them.
    * Contraction is switched off in every launch: products and sums are fused where the specification says so (`fma`).
    * Triton is imported with the first task, so that nothing changes for those who have no GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.backends.triton import launch
from masterless.backends.triton.capture import COUNTS, NUMBERS, CapturedStep
from masterless.backends.triton.launch import FIELDS, WORK, Launch
from masterless.backends.triton.spec import KNOWN_RULES, Codec, Step, at, codec_of
from masterless.formats.scaling import FROZEN
from masterless.formats.storage import Storage
from masterless.step import dispatch
from masterless.step.dispatch import Captive, Captured, Outcome, Turn
from masterless.step.scalars import Scalars
from masterless.step.task import Task

_DTYPES = (torch.float32, torch.bfloat16)
_ADAFACTOR = 5
_NOTHING = Codec()
Numbers = tuple[str, bool, bool]  # what of a step's kind its numbers decide: scale policy, coupled weight decay, eps


@cache
def missing() -> str:
    """Why there is no Triton; empty if there is."""
    return "" if importlib.util.find_spec("triton") else "the package triton is not installed (pip install triton)"


@cache
def _kernels() -> tuple[Any, Any, bool]:
    """The modules that import Triton, and whether it interprets."""
    import triton

    from masterless.backends.triton import entry, statistics

    return entry, statistics, bool(triton.knobs.runtime.interpret)


@dataclass(slots=True)
class Phases:
    """The launches of a step, in order."""

    survey: list[Launch]
    sums: list[Launch]
    finish: list[Launch]
    adafactor: list[Launch]
    adafactor_finish: list[Launch]
    peaks: list[Launch]
    tiles: list[Launch]
    scales: list[Launch]


@dataclass(slots=True)
class Prepared:
    """Tasks as the kernels read them."""

    records: NDArray[np.int64]
    steps: list[Step]
    tasks: list[Task]
    device: torch.device
    work: Tensor | None = None  # counters, the stop flag, and what the survey's followers find; zero before a step
    means: Tensor | None = None
    phases: dict[Any, Phases] = field(default_factory=dict)

    @property
    def codes(self) -> list[Tensor]:
        """Of quantized weights: autograd counts their changes."""
        return [task.weight.tensors["codes"] for task in self.tasks if task.weight.format.scaled]


class TritonBackend:
    """See the module."""

    def refusal(self, task: Task) -> str:
        """Why the kernels cannot perform a task."""
        if missing():
            return missing()
        if task.rule.name not in KNOWN_RULES:
            return f"rule {task.rule.name!r}"
        if task.first_col is not None:
            return "a shard of a vector: its tiles are shared with other ranks"
        if task.sharded and task.indivisible:
            return "statistics that other ranks share"
        if task.grad.dtype not in _DTYPES:
            return f"a gradient of dtype {task.grad.dtype}"
        tensors = [task.grad, *(t for s in task.storages for t in s.tensors.values())]
        return "" if len({t.device for t in tensors}) == 1 else "tensors on several devices"

    def prepare(self, tasks: Sequence[Task]) -> Prepared:
        """Records of the tasks, as far as they stay the same from step to step."""
        described = [launch.describe(task) for task in tasks]
        records = np.array([record for record, _ in described], dtype=np.int64).reshape(len(tasks), len(FIELDS))
        device = tasks[0].grad.device if tasks else torch.device("cpu")
        return Prepared(records, [step for _, step in described], list(tasks), device)

    def join(self, prepared: Sequence[Prepared]) -> Prepared:
        """The records side by side."""
        return Prepared(
            np.concatenate([part.records for part in prepared]),
            [step for part in prepared for step in part.steps],
            [task for part in prepared for task in part.tasks],
            prepared[0].device,
        )

    def step(self, prepared: Prepared, turn: Turn, only_survey: bool = False) -> Outcome:
        """All tasks in a few launches."""
        if not prepared.tasks:
            return Outcome(np.zeros(0, dtype=np.int64), not only_survey)
        records, numbers, adafactor, kinds = _fill(prepared, turn)
        must = [bool(m) for m in np.broadcast_to(np.asarray(turn.must_be_finite), (len(records),))]
        key = (tuple(kinds), tuple(must), only_survey)
        phases = prepared.phases.get(key)
        if phases is None:
            phases = prepared.phases[key] = _phases(prepared, kinds, must, only_survey)
        work = _workspace(prepared, records)
        _run(phases, prepared.device, records, numbers, adafactor, work)
        found = work[: COUNTS * len(records) + 1]
        if turn.later and not only_survey:
            increment_version(prepared.codes)
            return Outcome(np.zeros(len(records), dtype=np.int64), True, _Later(found).settle)
        outcome = _outcome(found.cpu(), only_survey)
        if outcome.moved:
            increment_version(prepared.codes)
        return outcome

    def capture(self, prepared: Prepared, captive: Captive) -> Captured:
        """A step of these tasks that the host only launches."""
        from masterless.backends.triton import course

        records = prepared.records
        records[:, FIELDS.index("must_be_finite")] = captive.must_be_finite
        phases = _phases(prepared, captive.kinds, captive.must_be_finite, False)
        _workspace(prepared, records)
        return CapturedStep(prepared, partial(_launch, phases), captive, course)

    def encode(self, storage: Storage, values: Tensor) -> None:
        """By the reference, which runs on the device, once for every weight of a model."""
        dispatch.reference().encode(storage, values)

    def decode(self, storage: Storage, dtype: torch.dtype, visible: bool = True) -> Tensor:
        """The stored values as fp32, or as bf16 (rounded to nearest even), in the tensor's shape."""
        if dtype not in _DTYPES or missing() or not storage.format.scaled:
            return dispatch.reference().decode(storage, dtype, visible)
        visible = visible and not storage.format.shown
        device = storage.tensors["codes"].device
        out = torch.empty(storage.shape, dtype=dtype, device=device)
        if out.numel() == 0:
            return out
        entry, _, interpreted = _kernels()
        record, aligned = launch.describe_storage(storage)
        step = launch.whole(_decoding(codec_of(storage.format), aligned), storage.layout.cols)
        step = launch.sized(step, record, interpreted)
        target = out.view(torch.uint16) if dtype == torch.bfloat16 else out
        entry.decode_kernel[(launch.places(step, record),)](
            torch.from_numpy(record).to(device),
            target,
            step,
            visible and not storage.format.shown,
            dtype == torch.bfloat16,
            **launch.options(step),
        )
        return out


def _outcome(found: Tensor, only_survey: bool = False) -> Outcome:
    """What counters and stop flag say, on the host."""
    counts = found[:-1].view(-1, COUNTS).numpy().sum(axis=1)
    return Outcome(counts, not only_survey and not bool(found[-1]))


class _Later:
    """Counters on their way to the host, which goes on meanwhile."""

    def __init__(self, found: Tensor) -> None:
        self.event = None if found.is_cpu else torch.Event(found.device)
        # Pinned, or the copy would wait; of its own memory, for the next step starts with zeros.
        self.host = torch.empty_like(found, device="cpu", pin_memory=not found.is_cpu)
        self.host.copy_(found, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def settle(self) -> Outcome:
        """Waits for the copy, which by the next step has long arrived."""
        if self.event is not None:
            self.event.synchronize()
        return _outcome(self.host)


@cache
def _decoding(codec: Codec, aligned: bool) -> Step:
    return replace(_bare("sgd"), weight=codec, aligned=aligned)


def _bare(rule: str) -> Step:
    """A step of nothing but a gradient."""
    return Step(
        rule=rule,
        weight=_NOTHING,
        first=_NOTHING,
        second=_NOTHING,
        inject=False,
        pays_back=False,
        maximize=False,
        grad_bf16=False,
        l2=False,
        eps=False,
        held=True,
        indivisible=False,
        tile=1,
        chunks=16,
        walk="chunks",
        ragged=0,
        aligned=False,
    )


def _fill(prepared: Prepared, turn: Turn) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], list[Numbers]]:
    """Records and numbers of this step, and what of its kind depends on them."""
    records = prepared.records
    records[:, FIELDS.index("grad")] = [*map(Tensor.data_ptr, turn.grads)]
    records[:, FIELDS.index("must_be_finite")] = turn.must_be_finite
    keys = FIELDS.index("weight_key")
    records[:, keys : keys + 3] = turn.keys.view(np.int64)
    sets = np.zeros((len(turn.numbers), NUMBERS), dtype=np.float32)
    doubles = np.zeros((len(turn.numbers), _ADAFACTOR), dtype=np.float64)
    for numbers, wide, (scalars, group, policy) in zip(sets, doubles, turn.numbers, strict=True):
        numbers[:] = (*scalars, policy != FROZEN)
        if "beta2_decay" in group:  # Adafactor's, whose step size is known only with the weight's RMS
            numbers[Scalars._fields.index("clip")] = 1.0
            wide[:] = (scalars.step_size, scalars.rate1, group["eps"][1], group["d"], group["beta1"] == 0.0)
    which = np.broadcast_to(np.asarray(turn.which, dtype=np.intp), (len(records),))
    of_set = [(policy, scalars.l2 != 0.0, bool(np.float32(scalars.eps) > 0.0)) for scalars, _, policy in turn.numbers]
    return records, sets[which], doubles[which], [of_set[i] for i in which.tolist()]


def _workspace(prepared: Prepared, records: NDArray[np.int64]) -> Tensor:
    """Zeros, of which each task's record holds its part's addresses."""
    if prepared.work is None or prepared.means is None:
        n = len(prepared.tasks)
        size = COUNTS * n + 1
        offsets: list[dict[str, int]] = []
        means = 0
        for task in prepared.tasks:
            layout = task.weight.layout
            parts = {"workspace": len(WORK)} if task.indivisible else {}
            if task.factored:
                parts |= {"peaks": layout.matrices, "row_sums": layout.rows, "col_sums": layout.matrices * layout.cols}
            places = {}
            for name, length in parts.items():
                places[name] = size
                size += length
            places["means"] = means
            means += layout.matrices if task.factored else 0
            offsets.append(places)
        prepared.work = torch.zeros(size, dtype=torch.int64, device=prepared.device)
        prepared.means = torch.zeros(max(means, 1), dtype=torch.float32, device=prepared.device)
        for record, places in zip(records, offsets, strict=True):
            for name, offset in places.items():
                base = prepared.means if name == "means" else prepared.work
                record[FIELDS.index(name)] = base.data_ptr() + offset * base.itemsize
    return prepared.work.zero_()


def _phases(prepared: Prepared, kinds: Sequence[Numbers], must: Sequence[bool], only_survey: bool) -> Phases:
    """The launches of a step of these kinds."""
    interpreted = _kernels()[2]
    records, device = prepared.records, prepared.device
    steps = {i: at(step, *kinds[i]) for i, step in enumerate(prepared.steps) if records[i, 0] * records[i, 1]}
    cols = records[:, 1].tolist()

    def made(chosen: Mapping[int, Step | None], sizes: Mapping[int, int] | None = None) -> list[Launch]:
        found = {i: launch.sized(step, records[i], interpreted) for i, step in chosen.items() if step is not None}
        counted = sizes or {i: launch.places(step, records[i]) for i, step in found.items()}
        return launch.launches(found, counted, device)

    watched = {i: step for i, step in steps.items() if only_survey or must[i] or step.indivisible}
    survey = made({i: launch.whole(surveyed(step), cols[i]) for i, step in watched.items()})
    if only_survey:
        return Phases(survey, [], [], [], [], [], [], [])
    factored = {i: step for i, step in steps.items() if step.second.kind == "factored"}
    adafactor = {i: step for i, step in steps.items() if step.adafactor}
    single = {i: step for i, step in steps.items() if step.weight.scaled and step.weight.block < 0}
    ones = dict.fromkeys(steps, 1)
    return Phases(
        survey=survey,
        sums=made({i: launch.columns(_summed(step), cols[i]) for i, step in factored.items()}),
        finish=made(
            dict.fromkeys(factored, _bare("sgd")), {i: prepared.tasks[i].weight.layout.matrices for i in factored}
        ),
        adafactor=made({i: launch.whole(without_first(step), cols[i]) for i, step in adafactor.items()}),
        adafactor_finish=made({i: _bare(step.rule) for i, step in adafactor.items()}, ones),
        peaks=made({i: launch.whole(replace(step, inject=False), cols[i]) for i, step in single.items()}),
        tiles=[
            *made({i: launch.tiles(step, cols[i]) for i, step in steps.items()}),
            *made({i: launch.tails(step, cols[i]) for i, step in steps.items()}),
        ],
        scales=made({i: replace(_bare("sgd"), weight=step.weight, held=step.held) for i, step in single.items()}, ones),
    )


def surveyed(step: Step) -> Step:
    """A step as far as the survey sees it."""
    bare = replace(_bare("sgd"), grad_bf16=step.grad_bf16, aligned=step.aligned, chunks=step.chunks)
    if not step.indivisible:
        return bare
    rule = "adafactor" if step.adafactor else "sgd"
    weight = step.weight if step.l2 or step.adafactor else _NOTHING
    second = Codec("factored") if step.second.kind == "factored" else _NOTHING
    bare = replace(bare, rule=rule, weight=weight, second=second, indivisible=True)
    return replace(bare, l2=step.l2, maximize=step.maximize and step.l2)


def _summed(step: Step) -> Step:
    """A step as far as the sums of squares see it."""
    return replace(surveyed(step), rule="sgd", weight=step.weight if step.l2 else _NOTHING)


def without_first(step: Step) -> Step:
    """A step as far as Adafactor's statistics see it."""
    return replace(step, rule="adafactor", first=_NOTHING, inject=False)


def _run(
    phases: Phases,
    device: torch.device,
    records: NDArray[np.int64],
    numbers: NDArray[np.float32],
    adafactor: NDArray[np.float64],
    work: Tensor,
) -> None:
    """Uploads what changed and launches everything."""
    record, table, wide = (torch.from_numpy(array).to(device) for array in (records, numbers, adafactor))
    _launch(phases, record, table, wide, work)


def _launch(phases: Phases, record: Tensor, table: Tensor, wide: Tensor, work: Tensor) -> None:
    """Launches everything, over what is on the device."""
    entry, statistics, _ = _kernels()
    counts, stop = work, work[COUNTS * len(record) :]

    def go(kernel: Any, found: Sequence[Launch], *more: Any) -> None:
        for one in found:
            kernel[one.grid](record, table, one.owners, counts, stop, one.step, *more, **launch.options(one.step))

    go(statistics.survey_kernel, phases.survey)
    go(statistics.factored_sums_kernel, phases.sums)
    go(statistics.factored_finish_kernel, phases.finish)
    go(statistics.adafactor_kernel, phases.adafactor, False)
    go(statistics.adafactor_kernel, phases.adafactor, True)
    for one in phases.adafactor_finish:
        statistics.adafactor_finish_kernel[one.grid](
            record, table, wide, one.owners, counts, stop, one.step, **launch.options(one.step)
        )
    go(statistics.target_peak_kernel, phases.peaks)
    go(entry.step_kernel, phases.tiles)
    go(statistics.store_scale_kernel, phases.scales)


for _device in ("cuda", "xpu"):  # ROCm's devices are called "cuda", too
    dispatch.register(_device, TritonBackend())
