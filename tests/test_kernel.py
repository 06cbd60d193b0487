"""The compiled kernel against the specification: every stored byte, over formats, rules, roundings, shapes, threads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import kernel_cases
import pytest
import torch
from kernel_cases import (
    FIRSTS,
    GRADIENTS,
    SECONDS,
    SHAPES,
    WEIGHTS,
    Case,
    build,
    check,
    copy,
    differences,
    step_on_the_kernel,
)

from masterless.backends.cpu import library as kernels
from masterless.backends.cpu.backend import CpuBackend
from masterless.backends.cpu.interface import interface
from masterless.formats import parse
from masterless.formats.rounding import ROUNDINGS
from masterless.formats.storage import Storage
from masterless.step.reference import Task
from masterless.step.rules import RULES

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no compiled kernel: {kernels.describe().reason}")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# --- each dimension by itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("weight", WEIGHTS)
def test_weight_formats(weight):
    check(
        [
            Case(weight=weight, weight_rounding=rounding, policy=policy, inject=inject, first="fp32", second="fp32")
            for rounding in ("nearest", "stochastic")
            for policy in ("held", "recompute")
            for inject in (False, True)
        ]
    )


@pytest.mark.parametrize("first", FIRSTS)
def test_first_moment_formats(first):
    check([Case(first=first, second="fp32", rounding=r, inject=False, shape=(3, 300)) for r in ROUNDINGS[:2]])


@pytest.mark.parametrize("second", SECONDS)
def test_second_moment_formats(second):
    check([Case(first="fp32", second=second, rounding=r, shape=(3, 4, 150)) for r in ROUNDINGS])


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    check(
        [
            Case(
                rule=rule,
                weight=weight,
                first=first,
                second=second,
                inject=first != "none",
                grad=grad,
            )
            for weight, grad in (("int4", torch.bfloat16), ("fp32", torch.float32), ("bf16", torch.bfloat16))
            for first in ("int4", "none")
            for second in ("log2", "factored")
        ]
    )


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_unusual_gradients(gradients):
    check(
        [
            Case(weight=weight, first=first, second=second, gradients=gradients, weight_size=size, rule=rule, lr=lr)
            for weight, first, second in (
                ("int4", "int4", "log2"),
                ("fp8:row", "int8", "log8"),
                ("fp32", "fp8", "ufp8"),
            )
            for size in (0.05, 1e-30, 1e30)
            for rule, lr in (("adam", 0.01), ("adam_weight_units", 0.01), ("sgd_weight_units", 1e-5))
        ]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    check(
        [
            Case(weight=weight, first=first, second=second, shape=shape)
            for weight, first, second in (
                ("int4", "int4", "log2"),
                ("int4+6:32", "int3:64", "log3:256"),
                ("int8:tensor", "int6:row", "factored"),
                ("fp8:row", "dynamic8", "log4:1024"),
            )
        ]
    )


@pytest.mark.parametrize("granularity", ["32", "64", "128", "256", "512", "1024", "row"])
def test_granularities(granularity):
    families = (("int4", "int4", "log2"), ("fp8", "dynamic4", "log8"), ("int4+2", "fp4", "ufp4"))
    check(
        [
            Case(*("adam_weight_units", *(f"{f}:{granularity}" for f in formats)), shape=(2, 1300))
            for formats in families
        ]
    )


# --- all dimensions together ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_random_cases(seed):
    rng = random.Random(seed)
    check([kernel_cases.random_case(rng) for _ in range(14)])


@pytest.mark.parametrize("seed", range(12))
def test_hostile_cases(seed):
    """Targets and moments that are not finite, or too large: the same tiles stay, byte for byte, and are counted."""
    rng = random.Random(1000 + seed)
    check([kernel_cases.hostile_case(rng) for _ in range(14)])


def test_many_steps():
    check([Case(weight=w, first="int4", second="log2", steps=25) for w in ("int4", "fp8", "int4+4", "fp32")])


# --- geometry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(37, 96), (3, 11, 64), (50, 41), (5, 512), (70, 33)])
def test_short_rows_are_taken_together(shape):
    """More than fit into one span, with a remainder; blocks that end inside a row; bad gradients in one row of many."""
    formats = [("int4", "int4", "log2"), ("int8:row", "int8:64", "log8:32"), ("fp32", "int3:32", "log4:row")]
    formats += [("int4+6:32", "dynamic8", "factored"), ("fp8", "none", "log3"), ("bf16", "bf16", "ufp4")]
    formats += [("int4:tensor", "fp4", "log2")]
    cases = [
        Case(weight=weight, first=first, second=second, shape=shape, gradients=gradients, first_row=7)
        for weight, first, second in formats
        for gradients in ("normal", "nan", "sparse")
    ]
    check(cases)


@pytest.mark.parametrize("weight", ["int4:row", "fp8:row", "fp32"])
def test_rows_longer_than_the_buffers(weight):
    check(
        [
            Case(weight=weight, first=first, second=second, shape=(2, 20_000), gradients=gradients, steps=2)
            for first, second in (("int8:row", "log4:row"), ("int4", "log2:row"), ("dynamic4:row", "ufp8"))
            for gradients in ("normal", "sparse")
        ]
    )


def test_a_bad_gradient_in_a_long_row_keeps_the_whole_row():
    check([Case(weight="int8:row", first="int8:row", shape=(3, 20_000), gradients="nan", steps=1)])


def _shard(task: Task, start: int, stop: int) -> Task:
    def cut(storage: Storage | None) -> Storage | None:
        if storage is None:
            return None
        shape = (stop - start, *storage.shape[1:])
        return Storage(storage.format, shape, {k: t[start:stop].clone() for k, t in storage.tensors.items()})

    weight = cut(task.weight)
    assert weight is not None
    return kernel_cases.replace(
        task, weight=weight, first=cut(task.first), second=cut(task.second), grad=task.grad[start:stop], first_row=start
    )


def test_shards_agree_with_the_whole():
    case = Case(weight="int4", first="int4", second="log2", shape=(9, 300))
    whole = kernel_cases.at_step(build(case), case, 1, build(case).grad)
    shards = [_shard(whole, 0, 4), _shard(whole, 4, 9)]
    step_on_the_kernel([whole])
    step_on_the_kernel(shards)
    for role in ("weight", "first", "second"):
        for name, tensor in getattr(whole, role).tensors.items():
            pieces = torch.cat([getattr(shard, role).tensors[name] for shard in shards])
            assert torch.equal(pieces.view(torch.uint8), tensor.view(torch.uint8)), f"{role}.{name}"


@pytest.mark.parametrize("weight", ["int4", "fp8:row", "int8:tensor", "fp32"])
@pytest.mark.parametrize("second", ["log2", "factored"])
def test_threads_do_not_show(weight, second):
    rules = ("adam_weight_units", "adafactor_weight_units", "adafactor", "sgd")
    cases = [Case(rule=r, weight=weight, first="int4", second=second, shape=(301, 515), steps=1) for r in rules]
    tasks = [kernel_cases.at_step(build(c), c, 1, build(c).grad) for c in cases]
    by_threads = {}
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        by_threads[threads] = [copy(task) for task in tasks]
        step_on_the_kernel(by_threads[threads])
    for one, two, five in zip(*by_threads.values(), strict=True):
        assert not differences(one, two)
        assert not differences(one, five)


# --- what a bad gradient may touch, stated without the reference ------------------------------------------


def test_a_bad_tile_keeps_every_byte_and_the_others_move():
    case = Case(weight="int4", first="int4", second="log2", shape=(2, 384), gradients="normal", lr=0.3)
    task = kernel_cases.at_step(build(case), case, 1, build(case).grad)
    task.grad[0, 130] = float("nan")
    task.grad[0, 131] = float("inf")
    before = copy(task)
    assert step_on_the_kernel([task]) == [2]
    for role, bits in (("weight", 4), ("first", 4), ("second", 2)):
        old, new = getattr(before, role).tensors, getattr(task, role).tensors
        tile = slice(16 * bits, 32 * bits)  # bytes of the second chunk of 128 codes
        assert torch.equal(old["codes"][0, tile], new["codes"][0, tile])
        assert not torch.equal(old["codes"][1], new["codes"][1])
        for name in set(new) - {"codes"}:
            block = slice(2, 4) if name == "step" else slice(1, 2)  # of one byte, or two
            assert torch.equal(old[name][0, block], new[name][0, block])


def test_records_that_are_joined_keep_the_layout_of_the_kernel():
    """Of concatenated records numpy makes a layout of its own, without the gaps that C leaves between fields."""
    cases = [Case(weight="int4", shape=(5, 200)), Case(shape=(3, 128), first="int4"), Case(shape=(7,))]
    tasks = [build(case) for case in cases]
    cpu = CpuBackend()
    joined = cpu.join([cpu.prepare([task]) for task in tasks])
    assert joined.records.dtype == interface().task
    assert joined.records.tobytes() == cpu.prepare(tasks).records.tobytes()


def test_an_empty_list_and_empty_tensors():
    assert step_on_the_kernel([]) == []
    empty = [Case(shape=(0,), second="fp32", first="fp32"), Case(shape=(0, 40), second="log2")]
    assert step_on_the_kernel([build(case) for case in empty]) == [0, 0]


# --- whole tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*WEIGHTS, *SECONDS} - {"factored"}))
@pytest.mark.parametrize("visible", [True, False])
def test_dequantize(name, visible):
    fmt = parse(name)
    x = torch.randn(7, 5, 210, generator=torch.Generator().manual_seed(1))
    storage = Storage.zeros(fmt, x.shape).encode_(x if fmt.signed else x.abs())
    expected = storage.decode(visible)
    assert torch.equal(CpuBackend().decode(storage, torch.float32, visible), expected)
    assert torch.equal(CpuBackend().decode(storage, torch.bfloat16, visible), expected.to(torch.bfloat16))


def test_what_the_kernel_does_not_decode_the_specification_does():
    storage = Storage.zeros(parse("int4"), (3, 64)).encode_(torch.randn(3, 64))
    assert torch.equal(CpuBackend().decode(storage, torch.float64), storage.decode(visible=True).double())
    factored = Storage.zeros(parse("factored"), (3, 64)).encode_(torch.rand(3, 64))
    assert torch.equal(CpuBackend().decode(factored, torch.float32), factored.decode())


def encoded_by(encode, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    storage = Storage.zeros(parse(name), x.shape)
    for tensor in storage.tensors.values():  # every byte is to be written
        tensor.view(torch.uint8).fill_(0xA5)
    encode(storage, x)
    return {part: tensor.view(torch.uint8) for part, tensor in storage.tensors.items()}


@pytest.mark.parametrize("name", sorted({*WEIGHTS, *SECONDS} - {"factored", "nvfp4"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize(name, dtype):
    generator = torch.Generator().manual_seed(2)
    for shape in [(7,), (3, 128), (7, 5, 210), (2, 1100), (0, 40), (2, 13000), (300, 16), (3, 12300)]:
        x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp2()
        x[..., ::17] = 0.0
        x = (x if parse(name).signed else x.abs()).to(dtype)
        expected = encoded_by(Storage.encode_, name, x)
        found = encoded_by(CpuBackend().encode, name, x)
        assert {part for part in expected if not torch.equal(found[part], expected[part])} == set(), shape


@pytest.mark.parametrize(
    "name", ["int4", "int6", "fp8:row", "int8:row", "int4:32", "int8:1024", "int4:tensor", "nvfp4", "log2"]
)
def test_quantizing_hostile_numbers(name):
    rng = random.Random(3)
    for scale in (1e-45, 1e-38, 1e-20, 1.0, 1e20, 3e38):
        x = torch.tensor(
            [[rng.choice((0.0, -0.0, 1.0, 0.5, rng.random())) * scale for _ in range(16400)] for _ in range(2)]
        )
        x = x * torch.tensor([1.0, -1.0]).repeat(8200) if parse(name).signed else x.abs()
        for values in (x, x.t()[:600].contiguous().t(), torch.zeros_like(x)):
            expected = encoded_by(Storage.encode_, name, values)
            found = encoded_by(CpuBackend().encode, name, values)
            assert all(torch.equal(found[part], expected[part]) for part in expected), scale


def test_quantizing_refuses_another_shape():
    with pytest.raises(ValueError, match=r"cannot store a tensor of shape \(3, 63\) in storage of shape \(3, 64\)"):
        CpuBackend().encode(Storage.zeros(parse("int4"), (3, 64)), torch.zeros(3, 63))


# --- the library ----------------------------------------------------------------------------------------


def test_description_and_memory_of_a_thread():
    description = kernels.describe()
    assert description.available
    assert description.instruction_set in ("avx512", "avx2", "portable")
    assert kernels.load().ml_thread_bytes() < 1 << 20


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_instruction_set_agrees(isa):
    code = (
        "import random, kernel_cases as k; r = random.Random(99); k.check([k.random_case(r) for _ in range(40)]); "
        "k.check([k.hostile_case(r) for _ in range(40)]); "
        "k.check(r.sample([c for w in k.CHUNK_WEIGHTS for s in k.CHUNK_SHAPES for c in k.chunk_cases(w, s)], 150))"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "MASTERLESS_ISA": isa, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=200)


def test_a_missing_library_is_reported_once(tmp_path):
    code = (
        "import warnings, masterless.backends.cpu.library as k\n"
        "with warnings.catch_warnings(record=True) as w:\n"
        "    warnings.simplefilter('always')\n"
        "    assert k.load() is None and k.load() is None and not k.available()\n"
        "assert len(w) == 1 and 'compiler' in str(w[0].message), w\n"
        "assert k.describe().reason\n"
    )
    environment = {
        **os.environ,
        "MASTERLESS_KERNEL": str(tmp_path / "none.so"),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=100)
