"""One optimizer step on the compiled CPU kernel, with exactly the results of `masterless.step.reference`.

Contract:
    * `step(tasks)` does what ``[reference.step(t) for t in tasks]`` does, to the bit, in one call and one parallel
      region over all tensors, on ``torch.get_num_threads()`` threads; the number of threads does not show.
    * The kernel is told everything as numbers and pointers (`csrc/abi.h`). What a parameter's formats and tensors
      determine is described once and cached under the tensors' addresses; a step only fills in what changes.
    * `step_described(rows, changes)` is the same for whoever keeps descriptions (`describe`) from step to step: it
      costs no Python per parameter.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from masterless.backends.cpu import library as kernels
from masterless.formats import MINIFLOATS, Format, scaling
from masterless.formats.codec import LOG_LOW_RANK, round_scale_up
from masterless.formats.layout import CHUNK, Layout
from masterless.formats.packing import row_bytes
from masterless.formats.storage import Storage
from masterless.step.reference import Task
from masterless.step.rules import Rule, Scalars

_PLAIN_KINDS = {"none": 0, "float32": 1, "bfloat16": 2, "linear": 3, "log": 6, "factored": 7}
_MINIFLOAT, _TABLE = 4, 5
_SCALES = {"bf16": 0, "fp32": 1, "pow2": 2}
_POLICIES = {"held": 0, "recompute": 1, scaling.FROZEN: 2}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "stochastic-log": 2}
_RULES = {
    name: number
    for number, name in enumerate(
        (
            *("adam", "adam_update_units", "adabelief", "rmsprop", "sgd", "sgd_nesterov", "lion", "adafactor"),
            *(f"{name}_weight_units" for name in ("adam", "rmsprop", "sgd", "sgd_nesterov", "adafactor")),
        )
    )
}

# The structs of csrc/abi.h: MlStorage, and MlTask as its constant and its changing part.
_STORAGE = struct.Struct("@12i4q6fQ3P8P")
_GEOMETRY = struct.Struct("@4q2i")
_CHANGING = struct.Struct("@Pq3Q9i11f4dq")
_SCALARS = struct.Struct("11f")
_EMPTY_STORAGE = bytes(_STORAGE.size)
_CONSTANT_SIZE = 3 * _STORAGE.size + _GEOMETRY.size
_TASK_SIZE = _CONSTANT_SIZE + _CHANGING.size
# The same changing part by names, for filling in many tasks at once.
_ROW = np.dtype(
    [
        ("constant", np.void, _CONSTANT_SIZE),
        ("grad", np.uint64),
        ("first_row", np.int64),
        ("keys", np.uint64, 3),
        ("rounding", np.int32, 3),
        ("grad_is_bf16", np.int32),
        ("maximize", np.int32),
        ("has_l2", np.int32),
        ("inject_error", np.int32),
        ("scale_policy", np.int32),
        ("without_buffer", np.int32),
        ("scalars", np.float32, 11),
        ("adafactor", np.float64, 4),
        ("bad", np.int64),
    ]
)
assert _ROW.itemsize == _TASK_SIZE
_CACHE_LIMIT = 1 << 16


@cache
def _library() -> ctypes.CDLL:
    library = kernels.load()
    if library is None:
        raise RuntimeError(f"the compiled CPU kernel is not there: {kernels.describe().reason}")
    sizes = library.ml_storage_size(), library.ml_task_size()
    if sizes != (_STORAGE.size, _TASK_SIZE):
        raise RuntimeError(
            f"the compiled CPU kernel {kernels.describe().path} is of another version: its structs have {sizes} bytes, "
            f"expected {(_STORAGE.size, _TASK_SIZE)}; reinstall the package"
        )
    return library


# --- formats as numbers ---------------------------------------------------------------------------------


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

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self.levels.ctypes.data, self.code_of_level.ctypes.data, self.level_of_code.ctypes.data


@cache
def _tables(format: Format) -> _Tables:
    return _Tables(format)


@cache
def _format_numbers(format: Format) -> dict[str, Any]:
    """What a format alone determines of an `MlStorage`."""
    numbers: dict[str, Any] = {
        "kind": _PLAIN_KINDS.get(format.kind, _TABLE),
        "exponent_bits": 0,
        "mantissa_bits": 0,
        "level_count": 0,
        "low_rank": LOG_LOW_RANK.get(format.bits, 0),
        "levels": (0, 0, 0),
        "floats": (0.0,) * 6,
        "zero_code": 0,
    }
    if format.kind == "codebook":
        family = format.family.removesuffix("+32")
        if family in MINIFLOATS:
            numbers["kind"] = _MINIFLOAT
            numbers["exponent_bits"], numbers["mantissa_bits"], _ = MINIFLOATS[family]
        numbers["level_count"] = len(format.levels)
        numbers["levels"] = _tables(format).addresses
    if format.kind in ("linear", "codebook"):
        top = format.max_level
        largest_scale = round_scale_up(torch.tensor(float("inf")), format).item()
        numbers["zero_code"] = format.zero_code
        numbers["floats"] = (
            top * 2.0**format.fine_bits,
            top,
            scaling.overflow_level(format),
            scaling.WASTE * top,
            scaling.HEADROOM / top,
            largest_scale,
        )
    return numbers


def _address(storage: Storage, name: str) -> int:
    tensor = storage.tensors.get(name)
    return 0 if tensor is None else tensor.data_ptr()


def _describe_storage(storage: Storage | None) -> bytes:
    """The bytes of an `MlStorage`."""
    if storage is None:
        return _EMPTY_STORAGE
    format, layout = storage.format, storage.layout
    numbers = _format_numbers(format)
    return _STORAGE.pack(
        numbers["kind"],
        format.bits,
        format.fine_bits,
        format.signed,
        numbers["zero_code"],
        _SCALES[format.scale],
        format.granularity == "tensor",
        0,
        numbers["exponent_bits"],
        numbers["mantissa_bits"],
        numbers["level_count"],
        numbers["low_rank"],
        layout.block(format),
        layout.blocks_per_row(format),
        row_bytes(layout.cols, format.bits) if format.scaled else 0,
        row_bytes(layout.cols, format.fine_bits) if format.fine_bits else 0,
        *numbers["floats"],
        0,
        *numbers["levels"],
        _address(storage, "codes"),
        _address(storage, "hidden"),
        _address(storage, "master") if format.master else _address(storage, "values"),
        _address(storage, "scale"),
        _address(storage, "top"),
        _address(storage, "step"),
        _address(storage, "row"),
        _address(storage, "col"),
    )


# --- tasks as structs -----------------------------------------------------------------------------------

# Signature -> description, and the formats in the signature, which it must keep alive because it has their ids.
_constant_parts: dict[tuple[Any, ...], tuple[bytes, list[Format]]] = {}


def _signature(task: Task) -> tuple[Any, ...]:
    """Everything that the constant part of a task is computed from; tensors by their address, formats by id."""
    parts: list[Any] = [task.rule.name]
    for storage in (task.weight, task.first, task.second):
        if storage is not None:
            parts.append(id(storage.format))
            parts.append(storage.shape)
            parts += [t.data_ptr() for t in storage.tensors.values()]
        else:
            parts.append(None)
    return tuple(parts)


def _describe_constant(task: Task) -> bytes:
    layout: Layout = task.weight.layout
    return b"".join(
        (
            _describe_storage(task.weight),
            _describe_storage(task.first),
            _describe_storage(task.second),
            _GEOMETRY.pack(
                layout.rows,
                layout.cols,
                layout.matrix_rows,
                task.chunks_per_tile * CHUNK,
                _RULES[task.rule.name],
                task.indivisible,
            ),
        )
    )


def _constant_part(task: Task) -> bytes:
    signature = _signature(task)
    described = _constant_parts.get(signature)
    if described is None:
        if len(_constant_parts) >= _CACHE_LIMIT:
            _constant_parts.clear()
        described = _describe_constant(task), [s.format for s in task.storages]
        _constant_parts[signature] = described
    return described[0]


def _adafactor_numbers(rule: Rule, scalars: Scalars, group: Mapping[str, Any]) -> tuple[float, float, float, float]:
    if rule.finish is None:
        return (0.0, 0.0, 0.0, 0.0)
    return (scalars.step_size, scalars.rate1, group["eps"][1], group["d"])


def _changing_part(task: Task) -> bytes:
    c, keys, rounding = task.scalars, task.keys, task.rounding
    return _CHANGING.pack(
        task.grad.data_ptr(),
        task.first_row,
        keys["weight"],
        keys["exp_avg"],
        keys["exp_avg_sq"],
        _ROUNDINGS[rounding["weight"]],
        _ROUNDINGS[rounding["exp_avg"]],
        _ROUNDINGS[rounding["exp_avg_sq"]],
        task.grad.dtype == torch.bfloat16,
        task.maximize,
        c.l2 != 0.0,
        task.inject,
        _POLICIES[task.scale_policy],
        task.rule.finish is not None and task.group["beta1"] == 0.0,
        *c,
        *_adafactor_numbers(task.rule, c, task.group),
        0,
    )


def describe(task: Task) -> bytes:
    """A task as the kernel reads it; good for `step_described` until a tensor moves or an option changes."""
    return _constant_part(task) + _changing_part(task)


def supports(task: Task) -> bool:
    """Whether the kernel can perform this step: everything on the CPU, contiguous, of known types."""
    if not kernels.available() or task.rule.name not in _RULES or task.tensor_scale is not None:
        return False
    if task.collective or task.first_col is not None:  # what ranks must agree on is the reference's
        return False
    grad = task.grad
    return (
        grad.is_cpu
        and grad.dtype in (torch.float32, torch.bfloat16)
        and grad.is_contiguous()
        and all(t.is_cpu and t.is_contiguous() for s in task.storages for t in s.tensors.values())
    )


def step(tasks: Sequence[Task]) -> list[int]:
    """Performs the steps in place; returns for each how many gradient elements were not finite."""
    return _run(bytearray().join(map(describe, tasks)))["bad"].tolist()


class Numbers(NamedTuple):
    """What a rule computes for a step from hyperparameters and counters; many parameters share one."""

    rule: Rule
    scalars: Scalars
    group: Mapping[str, Any]
    scale_policy: str


class Changes(NamedTuple):
    """What differs from one step to the next, one entry a task.

    Attributes:
        grads: addresses of the gradients.
        keys: of the random bits, ``[tasks, purposes]``.
        numbers: the different sets of numbers ...
        which: ... and which of them a task takes; a single entry is that of all tasks.
    """

    grads: Sequence[int]
    keys: NDArray[np.uint64]
    numbers: Sequence[Numbers]
    which: Sequence[int]


def step_described(rows: bytes, changes: Changes) -> NDArray[np.int64]:
    """As `step`, for tasks that were described before (joined); fills in what has changed since."""
    described = bytearray(rows)
    tasks = np.frombuffer(described, dtype=_ROW)
    tasks["grad"] = changes.grads
    tasks["keys"] = changes.keys
    kinds = np.zeros(len(changes.numbers), dtype=_ROW)
    for kind, (rule, scalars, group, policy) in zip(kinds, changes.numbers, strict=True):
        kind["has_l2"] = scalars.l2 != 0.0
        kind["scale_policy"] = _POLICIES[policy]
        kind["scalars"] = np.frombuffer(_SCALARS.pack(*scalars), dtype=np.float32)
        kind["adafactor"] = _adafactor_numbers(rule, scalars, group)
    for name in ("has_l2", "scale_policy", "scalars", "adafactor"):
        tasks[name] = kinds[name][np.asarray(changes.which)]
    return _run(described)["bad"]


def _run(described: bytearray) -> NDArray[Any]:
    tasks = np.frombuffer(described, dtype=_ROW)
    if len(tasks):
        pointer = (ctypes.c_char * len(described)).from_buffer(described)
        _library().ml_step(pointer, ctypes.c_int64(len(tasks)), torch.get_num_threads())
    return tasks


# --- whole tensors --------------------------------------------------------------------------------------


def dequantize(storage: Storage, dtype: torch.dtype = torch.float32, visible: bool = True) -> Tensor:
    """The stored values as fp32, or as bf16 (rounded to nearest even), in the tensor's shape.

    Args:
        storage: a stored tensor on the CPU; not a factored one.
        dtype: torch.float32 or torch.bfloat16.
        visible: leave hidden bits out, as a forward pass does.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: the kernel decodes to torch.float32 or torch.bfloat16")
    if storage.format.kind in ("none", "factored"):
        raise ValueError(f"format {str(storage.format)!r} stores no elements to decode")
    out = torch.empty(storage.shape, dtype=dtype)
    if out.numel():
        layout = storage.layout
        _library().ml_decode(
            _describe_storage(storage),
            ctypes.c_int64(layout.rows),
            ctypes.c_int64(layout.cols),
            visible,
            ctypes.c_void_p(out.data_ptr()),
            dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
    return out
