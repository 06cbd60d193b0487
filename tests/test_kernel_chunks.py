"""Chunks of presets' formats, which the compiled kernel takes another way: every byte as the reference's."""

from __future__ import annotations

import random
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
@pytest.mark.parametrize("shape", [(5, 384), (2, 2176), (3, 576), (37, 96), (50, 32), (9, 192), (2, 1120)], ids=str)
@pytest.mark.parametrize(
    "weight", ["fp32", "bf16", "int8", "int8:128", "int6", "int4", "int4+4", "int4+4:32", "fp8", "int4:32"]
)
def test_even_chunks(weight, shape, perform):
    """What presets are made of, in whole chunks and even ends of rows: rules, moments, gradients, rounding, eps."""
    rng = random.Random(f"{weight}{shape}")
    cases = [
        Case(
            rule,
            weight,
            first,
            second,
            shape,
            weight_rounding=rng.choice(("nearest", "stochastic")),
            inject=rule == "adam_weight_units" and rng.random() < 0.7,
            grad=torch.float32 if weight == "fp32" or rng.random() < 0.5 else torch.bfloat16,
            gradients=rng.choice(("normal", "normal", "zeros", "sparse", "tiny", "huge", "mixed")),
            no_eps=rng.random() < 0.3,
            maximize=rng.random() < 0.1,
            lr=rng.choice((0.01, 1e-4)),
        )
        for rule in ("adam", "adam_update_units", "adam_weight_units")
        for first in ("int4", "int2", "int8", "dynamic4")
        for second in ("log2", "log4", "log8", "factored")
    ]
    check(cases, perform)
