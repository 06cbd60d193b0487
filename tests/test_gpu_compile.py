"""The GPU kernels compile without a GPU, spill nothing, stay within their instructions and use exact operations."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

from benchmarks import gpu_compile  # noqa: E402

LIMITS = {"int4, int4/log2, injected": 180.0, "int4+4, int2/factored (1.3-byte-int4)": 135.0}  # on sm_90
GROWTH = 1.02  # another ptxas may place an instruction more; a change of a kernel that costs more is meant to be seen
BY_NAME = {kernel.name: kernel for kernel in gpu_compile.kernels()}


def committed() -> dict[str, dict[str, dict[str, float]]]:
    rows = json.loads(gpu_compile.RESULTS.read_text()) if gpu_compile.RESULTS.exists() else []
    return {row["kernel"]: row for row in rows}


@pytest.mark.parametrize("target", gpu_compile.TARGETS)
@pytest.mark.parametrize("name", LIMITS)
def test_main_kernels(name, target):
    kernel = BY_NAME[name]
    made = gpu_compile.compiled(kernel, target)
    found = gpu_compile.measured(kernel, target, made)
    assert found["spilled"] == 0
    if target == "sm_90":
        assert found["per_element"] <= LIMITS[name]
    if name in committed():
        assert found["per_element"] <= committed()[name][target]["per_element"] * GROWTH
    if target.startswith("sm_"):
        check_ptx(made.asm["ptx"], kernel)


def check_ptx(ptx: str, kernel: gpu_compile.Kernel) -> None:
    """No approximate operation, and no fused multiply-add but the two of each exact division by a scale."""
    elements = kernel.step.chunks * 128 // (kernel.step.warps * 32)
    encoded = sum(codec.scaled for codec in (kernel.step.weight, kernel.step.first, kernel.step.second))
    single, double = (len(re.findall(rf"\bfma\.rn\.{kind}\b", ptx)) for kind in ("f32", "f32x2"))  # Blackwell has pairs
    assert single + 2 * double == 2 * encoded * elements
    assert "fma.rn.ftz" not in ptx
    for approximate in ("div.full", "div.approx", "sqrt.approx", "rsqrt.approx", "rcp.approx", "ex2.approx"):
        assert approximate not in ptx
    assert set(re.findall(r"\b(\w+)(?:\.\w+)*\.ftz\b", ptx)) <= {"cvt"}  # floor, where it does not show
