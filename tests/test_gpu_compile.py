"""The GPU kernels compile without a GPU, spill nothing, stay within their instructions and use exact operations."""

from __future__ import annotations

import importlib.util
import re

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

from benchmarks import gpu_compile  # noqa: E402

LIMITS = {
    ("int4, int4/log2, injected", "sm_90"): 131.0,
    ("int4+4, int2/factored", "sm_90"): 81.0,
}
GROWTH = 1.02  # another ptxas may place an instruction more; a change of a kernel that costs more is meant to be seen
BY_NAME = {kernel.name: kernel for kernel in gpu_compile.kernels()}


COMMITTED = {row["kernel"]: row for row in gpu_compile.committed()}
# A few seconds each; `python -m benchmarks.gpu_compile` compiles all of them for all targets.
COMPILED_HERE = [
    *(("int4, int4/log2, injected", target) for target in gpu_compile.TARGETS),
    *((name, "sm_90") for name in ("int4+4, int2/factored", "fp8:row, int4/log2, injected", "course")),
]


@pytest.mark.parametrize(("name", "target"), COMPILED_HERE)
def test_some_kernels_as_they_are_now(name, target):
    kernel = BY_NAME[name]
    made = gpu_compile.compiled(kernel, target)
    found = gpu_compile.measured(kernel, target, made)
    assert found["spilled"] == 0
    assert found["per_element"] <= LIMITS.get((name, target), float("inf"))
    assert found["per_element"] <= COMMITTED[name][target]["per_element"] * GROWTH
    if target.startswith("sm_"):
        check_ptx(made.asm["ptx"])


def test_every_kernel_has_been_compiled_for_every_target_and_spills_nothing():
    assert list(COMMITTED) == list(BY_NAME)
    for name, row in COMMITTED.items():
        assert {target: row[target]["spilled"] for target in gpu_compile.TARGETS} == dict.fromkeys(
            gpu_compile.TARGETS, 0
        ), name


def check_ptx(ptx: str) -> None:
    """No approximate operation, and no fused multiply-add but `numbers.fma`: fp32 (or a pair of it), denormals kept."""
    assert set(re.findall(r"\bfma\.[.\w]+", ptx)) <= {"fma.rn.f32", "fma.rn.f32x2"}
    products_and_sums = re.findall(r"\b(?:mul|add|sub)(?:\.\w+)*\.f32(?:x2)?\b", ptx)
    assert all(".rn." in operation for operation in products_and_sums)  # which is also what keeps them apart
    for approximate in ("div.full", "div.approx", "sqrt.approx", "rsqrt.approx", "rcp.approx", "ex2.approx"):
        assert approximate not in ptx
    assert set(re.findall(r"\b(\w+)(?:\.\w+)*\.ftz\b", ptx)) <= {"cvt"}  # floor, where it does not show
