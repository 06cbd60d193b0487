"""Steps on the compiled CPU kernel, with exactly the results of `masterless.step.reference`.

Contract:
    * All tasks of a step are one call and one parallel region, on ``torch.get_num_threads()`` threads; the number of
      threads does not show.
    * A task is a record of numbers and addresses (`interface`). What formats and tensors determine is filled in once
      (`prepare`), from storages that are validated at that moment; a step only fills in what changes.
    * Of a parameter whose statistics need other ranks only these statistics are theirs (`_given_by_ranks`): the kernel
      sums the shard's squares and, once the ranks have added them up, steps the shard.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.backends.cpu import library
from masterless.backends.cpu.interface import interface
from masterless.backends.reference import at
from masterless.formats import Format, minifloat, scaling
from masterless.formats.arithmetic import exact_arithmetic
from masterless.formats.codec import round_scale_up
from masterless.formats.layout import CHUNK
from masterless.formats.log_code import LOG_LOW_RANK
from masterless.formats.packing import row_bytes
from masterless.formats.storage import Storage
from masterless.step import dispatch, statistics
from masterless.step.dispatch import Outcome, Turn
from masterless.step.scalars import Scalars
from masterless.step.task import Task

_DTYPES = (torch.float32, torch.bfloat16)
_CONVERTED = 1 << 20  # elements that are converted at a time


class _Tables:
    """A codebook's levels and codes as arrays that the kernel reads; kept alive as long as the process."""

    def __init__(self, format: Format) -> None:
        levels, codes = format.table
        self.levels = np.full(256, np.inf, dtype=np.float32)
        self.levels[: len(levels)] = np.array(levels, dtype=np.float64)
        self.code_of_level = np.zeros(256, dtype=np.uint8)
        self.code_of_level[: len(codes)] = codes
        self.level_of_code = np.zeros(256, dtype=np.float32)
        self.level_of_code[np.array(codes)] = self.levels[: len(levels)]


@cache
def _tables(format: Format) -> _Tables:
    return _Tables(format)


@cache
def _format_fields(format: Format) -> dict[str, Any]:
    """What a format alone determines of an `MlStorage`."""
    known = interface()
    fields: dict[str, Any] = {
        "kind": known.kinds.get(format.kind, known.kinds["table"]),
        "bits": format.bits,
        "hidden": format.fine_bits,
        "is_signed": format.signed,
        "scale_kind": known.scale_kinds[format.scale],
        "per_tensor": format.granularity == "tensor",
        "adjacent": format.adjacent,
        "low_rank": LOG_LOW_RANK.get(format.bits, 0),
    }
    if format.kind == "codebook":
        small = minifloat(format)
        if small is not None:
            fields["kind"] = known.kinds["minifloat"]
            fields["exponent_bits"], fields["mantissa_bits"], _ = small
        fields["level_count"] = len(format.levels)
        tables = _tables(format)
        fields |= {name: array.ctypes.data for name, array in vars(tables).items()}
    if format.kind in ("linear", "codebook"):
        top = format.max_level
        fields |= {
            "zero_code": format.zero_code,
            "limit": top * 2.0**format.fine_bits,
            "max_level": top,
            "negative_factor": format.negative_factor,
            "overflow_level": scaling.overflow_level(format),
            "waste_level": scaling.WASTE * top,
            "fresh_factor": scaling.HEADROOM / top,
            "scale_limit": round_scale_up(torch.tensor(float("inf")), format).item(),
        }
    return fields


# Where the stored tensors' addresses go; those of other names have fields of their own.
_ADDRESS_FIELDS = {"hidden": "hidden_codes", "master": "values"}


def _fill_storage(record: Any, storage: Storage | None) -> None:
    """Describes a storage, after a look that its tensors still are what it was made of."""
    if storage is None:
        return
    storage.validate()
    format, layout = storage.format, storage.layout
    for name, value in _format_fields(format).items():
        record[name] = value
    record["block"] = layout.block(format)
    record["blocks_per_row"] = layout.blocks_per_row(format)
    record["row_bytes"] = row_bytes(layout.cols, format.bits) if format.scaled else 0
    record["hidden_row_bytes"] = row_bytes(layout.cols, format.fine_bits) if format.fine_bits else 0
    for name, tensor in storage.tensors.items():
        record[_ADDRESS_FIELDS.get(name, name)] = tensor.data_ptr()


def _described(storage: Storage) -> tuple[Any, Any, Any]:
    """Its record, rows and columns as the kernel takes them: made anew when a tensor is not what it was.

    A small matrix is decoded in less time than it is described.
    """
    now = [(t.data_ptr(), t.shape, t.dtype, t.is_contiguous()) for t in storage.tensors.values()]
    if storage.described is None or storage.described[0] != now:
        record = np.zeros(1, dtype=interface().storage)
        _fill_storage(record[0], storage)
        layout = storage.layout
        arguments = (ctypes.c_void_p(record.ctypes.data), ctypes.c_int64(layout.rows), ctypes.c_int64(layout.cols))
        object.__setattr__(storage, "described", (now, arguments, record))
    return storage.described[1]


@dataclass(slots=True)
class Prepared:
    """Tasks as the kernel reads them."""

    records: NDArray[Any]
    tasks: list[Task]
    shared: list[int]  # those whose statistics are the ranks' that hold parts of the parameter
    codes: list[Tensor]  # of quantized weights: autograd counts their changes ...
    beside: list[Tensor]  # ... and what else is stored of them, on which changes are announced


class CpuBackend:
    """See the module."""

    def refusal(self, task: Task) -> str:
        """Why the kernel cannot perform a task: something is not on the CPU, or of a type it does not know."""
        if library.load() is None:
            return library.describe().reason
        if task.rule.name not in interface().rules:
            return f"rule {task.rule.name!r}"
        if task.first_col is not None:
            return "a shard of a vector: its tiles are shared with other ranks"
        if task.grad.dtype not in _DTYPES:
            return f"a gradient of dtype {task.grad.dtype}"
        tensors = [task.grad, *(t for s in task.storages for t in s.tensors.values())]
        return "" if all(t.is_cpu for t in tensors) else "tensors on several devices"

    def prepare(self, tasks: Sequence[Task]) -> Prepared:
        """Records of the tasks, as far as they stay the same from step to step."""
        known = interface()
        records = np.zeros(len(tasks), dtype=known.task)
        for record, task in zip(records, tasks, strict=True):
            for name in ("weight", "first", "second"):
                _fill_storage(record[name], getattr(task, name))
            layout = task.weight.layout
            record["rows"], record["cols"], record["matrix_rows"] = layout.rows, layout.cols, layout.matrix_rows
            record["tile"] = task.chunks_per_tile * CHUNK
            record["first_row"] = task.first_row
            record["rule"] = known.rules[task.rule.name]
            record["indivisible"] = task.indivisible
            record["maximize"] = task.maximize
            record["inject_error"] = task.inject
            record["pays_back"] = task.pays_back
            record["grad_is_bf16"] = task.grad.dtype == torch.bfloat16
            for field, purpose in (("weight", "weight"), ("first", "exp_avg"), ("second", "exp_avg_sq")):
                record[f"{field}_rounding"] = known.roundings[task.rounding[purpose]]
        shared = [i for i, task in enumerate(tasks) if task.sharded and task.indivisible]
        codes = [task.weight.tensors["codes"] for task in tasks if task.weight.format.scaled]
        beside = [tensor for task in tasks for tensor in task.weight.beside_codes]
        return Prepared(records, list(tasks), shared, codes, beside)

    def join(self, prepared: Sequence[Prepared]) -> Prepared:
        """The records side by side."""
        starts = np.cumsum([0, *(len(part.tasks) for part in prepared)])
        # As bytes: numpy would pack records with gaps between fields more tightly than the kernel reads them.
        records = np.concatenate([part.records.view(np.uint8) for part in prepared]).view(interface().task)
        return Prepared(
            records,
            [task for part in prepared for task in part.tasks],
            [i + int(start) for part, start in zip(prepared, starts, strict=False) for i in part.shared],
            [codes for part in prepared for codes in part.codes],
            [tensor for part in prepared for tensor in part.beside],
        )

    def step(self, prepared: Prepared, turn: Turn, only_survey: bool = False) -> Outcome:
        """All tasks in one call."""
        records = prepared.records.copy() if prepared.shared else prepared.records
        records["grad"] = turn.addresses or [*map(Tensor.data_ptr, turn.grads)]
        records["must_be_finite"] = turn.must_be_finite
        for name, column in zip(("weight_key", "first_key", "second_key"), turn.keys.T, strict=True):
            records[name] = column
        which, numbers = np.asarray(turn.which, dtype=np.intp), _as_bytes(_numbers(turn, records.dtype))
        where = _place_of_numbers()
        _as_bytes(records)[:, where] = numbers[which, where]
        means = []  # alive until the kernel has read them
        for i in [] if only_survey else prepared.shared:
            means.append(_given_by_ranks(records[i : i + 1], at(prepared.tasks[i], turn, i)))
        if not only_survey:
            increment_version(prepared.beside)  # as `Storage.announce`, for all in one call
        moved = _run(records, only_survey)
        if moved:
            increment_version(prepared.codes)  # the kernel writes through addresses
        return Outcome(records["bad"], moved)

    def decode(self, storage: Storage, dtype: torch.dtype, visible: bool = True) -> Tensor:
        """The stored values as fp32, or as bf16 (rounded to nearest even), in the tensor's shape."""
        if dtype not in _DTYPES or not library.available() or storage.format.kind in ("none", "factored"):
            return dispatch.reference().decode(storage, dtype, visible)
        out = torch.empty(storage.shape, dtype=dtype)
        if out.numel():
            interface().library.ml_decode(
                *_described(storage),
                visible and not storage.format.shown,
                ctypes.c_void_p(out.data_ptr()),
                dtype == torch.bfloat16,
                torch.get_num_threads(),
            )
        return out

    def encode(self, storage: Storage, values: Tensor) -> None:
        """All rows in one call; what is neither fp32 nor bf16 is converted some rows at a time."""
        format, layout, values = storage.format, storage.layout, values.detach()
        by_rows = format.scaled and format.granularity != "tensor" and not format.two_level  # else all values count
        if not library.available() or not by_rows or not values.is_cpu or type(values) is not Tensor:
            return dispatch.reference().encode(storage, values)
        if values.dtype not in _DTYPES:
            rows = max(1, _CONVERTED * len(values) // max(1, values.numel()))
            for start in range(0, len(values), rows):
                part = values[start : start + rows]
                self.encode(storage.cut(start, start + len(part)), part.to(torch.float32))
            return None
        if tuple(values.shape) != storage.shape:
            raise ValueError(
                f"cannot store a tensor of shape {tuple(values.shape)} in storage of shape {storage.shape}"
            )
        if values.numel():
            values = values.contiguous()
            record = np.zeros(1, dtype=interface().storage)
            _fill_storage(record[0], storage)
            interface().library.ml_encode(
                ctypes.c_void_p(record.ctypes.data),
                ctypes.c_int64(layout.rows),
                ctypes.c_int64(layout.cols),
                ctypes.c_void_p(values.data_ptr()),
                values.dtype == torch.bfloat16,
                torch.get_num_threads(),
            )
            increment_version([storage.tensors["codes"]])
        return None


_ADAFACTOR = ("adafactor_step_size", "adafactor_rate1", "adafactor_min_rms", "adafactor_clip_threshold")
_NUMBERS = (*Scalars._fields, "has_l2", "scale_policy", "adafactor_without_buffer", *_ADAFACTOR)


def _as_bytes(records: NDArray[Any]) -> NDArray[np.uint8]:
    """Records as rows of bytes."""
    return records.view(np.uint8).reshape(len(records), records.dtype.itemsize)


@cache
def _place_of_numbers() -> slice:
    """The bytes of a record that hold a step's numbers: one copy is far cheaper than one for every field."""
    fields = interface().task.fields
    assert fields is not None
    places = {name: (offset, offset + dtype.itemsize) for name, (dtype, offset, *_) in fields.items()}
    start, stop = min(places[name][0] for name in _NUMBERS), max(places[name][1] for name in _NUMBERS)
    between = {name for name, (first, _) in places.items() if start <= first < stop}
    if between != {*_NUMBERS}:
        raise RuntimeError(
            f"fields of csrc/abi.h that a step does not fill in stand among those: {between - {*_NUMBERS}}"
        )
    return slice(start, stop)


@exact_arithmetic(alone=False)  # the kernel's threads see to themselves
def _numbers(turn: Turn, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A record for each of the turn's different sets of numbers."""
    numbers = np.zeros(len(turn.numbers), dtype=dtype)
    for record, (scalars, group, policy) in zip(numbers, turn.numbers, strict=True):
        _fill_numbers(record, scalars, group, policy)
    return numbers


def _fill_numbers(record: Any, scalars: Scalars, group: Mapping[str, Any], policy: str) -> None:
    """What the rule's scalars and the group say of one step."""
    for name, value in zip(Scalars._fields, scalars, strict=True):
        record[name] = value
    record["has_l2"] = scalars.l2 != 0.0
    record["scale_policy"] = interface().policies[policy]
    if "beta2_decay" in group:  # Adafactor's, whose step size is known only with the weight's RMS
        record["adafactor_without_buffer"] = group["beta1"] == 0.0
        for name, value in zip(
            _ADAFACTOR, (scalars.step_size, scalars.rate1, group["eps"][1], group["d"]), strict=True
        ):
            record[name] = value


def _run(records: NDArray[Any], only_survey: bool) -> bool:
    """Calls the kernel; says whether anything was allowed to move."""
    address, count = ctypes.c_void_p(records.ctypes.data), ctypes.c_int64(len(records))
    return bool(interface().library.ml_step(address, count, torch.get_num_threads(), only_survey))


# --- shards whose statistics are of the whole ---------------------------------------------------------------------


@exact_arithmetic()
def _given_by_ranks(record: NDArray[Any], task: Task) -> Tensor | None:
    """Fills in what the ranks agree on; returns what must live until the step is done."""
    _run(record, only_survey=True)
    if task.ranks.any(bool(record["bad"][0])):
        record["rows"] = 0  # a bad gradient anywhere: nothing of this parameter moves
        return None
    if not task.ranks.splits_matrix and task.rule.finish is None:
        return None  # whole matrices: the kernel finds their statistics itself
    grad = task.grad.detach().reshape(task.weight.layout.rows, task.weight.layout.cols)
    if task.rule.finish is not None or task.scalars.l2:
        known = statistics.collect(task, grad)
        if known.lost:
            record["rows"], record["bad"] = 0, known.lost
            return None
        _fill_scalars(record, known.scalars)
        means = known.row_means
    else:
        means = _split_matrix_means(record, task, grad)
    record["statistics_given"] = True
    if means is not None:
        record["mean_rows"] = means.data_ptr()
    return means


def _fill_scalars(record: NDArray[Any], scalars: Scalars) -> None:
    for name, value in zip(Scalars._fields, scalars, strict=True):
        record[name] = value


def _split_matrix_means(record: NDArray[Any], task: Task, grad: Tensor) -> Tensor:
    """Updates the factors of a matrix whose rows are on several ranks; returns the mean of its row factors."""
    rows, cols = grad.shape
    peak = torch.zeros((), dtype=torch.float64)
    if grad.numel():
        peak = torch.linalg.vector_norm(grad, float("inf")).to(torch.float64)
    peak = task.ranks.max(peak)
    row_sums, col_sums = (torch.zeros(n, dtype=torch.float64) for n in (rows, cols))
    assert task.ranks.shape is not None
    count = max(task.ranks.shape[0], cols)
    if rows:
        interface().library.ml_square_sums(
            ctypes.c_void_p(record.ctypes.data),
            ctypes.c_double(float(peak)),
            ctypes.c_int64(count),
            ctypes.c_void_p(row_sums.data_ptr()),
            ctypes.c_void_p(col_sums.data_ptr()),
            torch.get_num_threads(),
        )
    unit = statistics.sum_unit(peak * peak, count)
    return statistics.average_in(task, 0, row_sums * unit, task.ranks.sum(col_sums) * unit, task.ranks).view(1)


dispatch.register("cpu", CpuBackend())
