"""Chunks of presets' formats, which the compiled kernel takes another way: every byte as the reference's."""

from __future__ import annotations

from dataclasses import replace

import kernel_cases
import pytest
import torch
from kernel_cases import Case, check, step_on_the_kernel

from masterless.backends.cpu import library as kernels
from masterless.backends.cpu.backend import CpuBackend

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no compiled kernel: {kernels.describe().reason}")


def surveyed_first(tasks):
    """Performs the tasks as an optimizer does by default: a bad gradient keeps everything from moving."""
    cpu = CpuBackend()
    turn = kernel_cases.turn_of(tasks)
    return cpu.step(cpu.prepare(tasks), replace(turn, must_be_finite=[True] * len(tasks))).bad.tolist()


@pytest.mark.parametrize("perform", [step_on_the_kernel, surveyed_first])
@pytest.mark.parametrize("shape", kernel_cases.CHUNK_SHAPES, ids=str)
@pytest.mark.parametrize("weight", kernel_cases.CHUNK_WEIGHTS)
def test_even_chunks(weight, shape, perform):
    check(kernel_cases.chunk_cases(weight, shape), perform)


@pytest.mark.parametrize("gradients", ["normal", "zeros", "sparse", "tiny", "huge", "mixed"])
@pytest.mark.parametrize(
    "shape", [(40, 384), (67, 1120), (300, 256), (9, 4096), (1500, 96), (2100, 32), (3, 700, 96)], ids=str
)
def test_sums_of_squares_of_bf16_gradients(shape, gradients):
    update = Case("adam_update_units", "int6", "int2", "factored", shape, grad=torch.bfloat16, gradients=gradients)
    cases = [update, replace(update, rule="adam_weight_units", weight="int4", first="int4", inject=True)]
    check(cases, step_on_the_kernel)
    check(cases, surveyed_first)


@pytest.mark.parametrize("perform", [step_on_the_kernel, surveyed_first])
@pytest.mark.parametrize("shape", [(40, 128), (9, 96), (6, 160), (2, 1000), (3, 4096), (2, 20000)], ids=str)
def test_targets_that_are_not_finite_among_weights_stepped_where_they_lie(shape, perform):
    """Some tiles keep every byte, in the middle of a span, at its ends, several after one another; the others move."""
    overflows = Case(weight="fp32", inject=False, shape=shape, weight_decay=-0.02, lr=10.0, weight_size=1e38)
    rare = replace(overflows, weight_size=8e37, seed=1)
    formats = [("int4", "log2"), ("int8", "log8"), ("int4", "factored"), ("int8:row", "log8"), ("int4", "fp32")]
    cases = [
        replace(case, rule="adam", first=first, second=second)
        for case in (overflows, rare)
        for first, second in formats
    ]
    check(cases, perform)
    # The cases are what they say: some targets overflow, and most do not.
    case = replace(overflows, rule="adam", first="int8", second="log8")
    task = kernel_cases.at_step(kernel_cases.build(case), case, 1, kernel_cases.gradient(case, case.generator()))
    assert 0 < step_on_the_kernel([task])[0] < 0.1 * task.grad.numel()
