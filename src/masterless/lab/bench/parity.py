"""Kernel against reference, quickly: without equal bits no speed-up is printed.

The thorough comparison is ``tests/test_kernel.py``; this one runs the optimizers that the benchmark measures (and a few
beside them) for some steps on both backends and compares every stored byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import masterless as ml
from masterless.backends.cpu import library as kernels
from masterless.formats.layout import is_matrix_like
from masterless.lab.bench.footprint import moments, stored_tensors

STEPS = 3
_LR = 2.0**-7  # in fp32 the same number
_RECORDED = "AdamW, INT4, int4/log2"
_SHAPES = [(5, 200), (3, 1100), (2, 3, 48), (130,), (2, 256)]  # tails, several spans, stacks, vectors

Make = Callable[..., torch.optim.Optimizer]
CASES: dict[str, tuple[Make, dict[str, Any], str | None]] = {  # optimizer, options, format of the weights
    "AdamW, fp32 weights, int8/log8": (ml.AdamW, {}, None),
    "AdamW, fp32 weights, int4/log2": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}, None),
    "AdamW, INT4, int4/log2": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}, "int4"),
    "AdamW, FP8, int4/log2": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}, "fp8"),
    "AdamW, INT4 with hidden bits, dynamic4/fp8": (ml.AdamW, {"exp_avg": "dynamic4", "exp_avg_sq": "fp8"}, "int4+4"),
    "SGD, INT4, int4": (ml.SGD, {"momentum": 0.9, "momentum_buffer": "int4"}, "int4"),
    "Lion, fp32 weights, int3": (ml.Lion, {"exp_avg": "int3"}, None),
}


class ParityError(RuntimeError):
    """The kernel does not compute what the reference computes; its speed means nothing."""


def check() -> int:
    """Compares all cases; returns how many. Raises a `ParityError` that names those that differ."""
    if not kernels.available():
        raise ParityError(f"there is no compiled kernel to measure: {kernels.describe().reason}")
    red = differences()
    if red:
        raise ParityError(
            f"the compiled kernel differs from the reference, so no speed is reported: {'; '.join(red)}. "
            f"Rebuild the package and run tests/test_kernel.py"
        )
    return len(CASES)


def differences(device: str = "cpu") -> list[str]:
    """The cases in which a device's backend and the reference (on the CPU) differ, and how."""
    return [difference for name in CASES for difference in _differences(name, device)]


def _differences(name: str, device: str) -> Iterator[str]:
    make, options, weight = CASES[name]
    fused = _trained(make, options, weight, device)
    plain = _trained(make, {**options, "backend": "reference"}, weight, "cpu")
    wrong = sum(_bytes_differ(a, b) for a, b in zip(fused, plain, strict=True))
    if wrong:
        yield f"{name}: {wrong} of {len(plain)} tensors after {STEPS} steps"


def recorded_differences(device: str) -> list[str]:
    """The same of a step that the device repeats by itself, in a CUDA graph on devices that have them."""
    make, options, weight = CASES[_RECORDED]
    plain = _trained(make, {**options, "backend": "reference"}, weight, "cpu")
    try:
        recorded = _trained(make, options, weight, device, recorded=True)
    except (RuntimeError, ValueError) as error:
        return [f"{_RECORDED} by the device alone: {error}"]
    wrong = sum(_bytes_differ(a, b) for a, b in zip(recorded, plain, strict=True))
    return [f"{_RECORDED} by the device alone: {wrong} of {len(plain)} tensors after {STEPS} steps"] if wrong else []


def _recording(step: Callable[[], None], device: str) -> Callable[[], None]:
    """A step in a graph that can be played; where there are no graphs, the step itself."""
    if not device.startswith("cuda"):
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _trained(
    make: Make, options: dict[str, Any], weight: str | None, device: str, recorded: bool = False
) -> list[Tensor]:
    """Every stored tensor after some steps."""
    generator = torch.Generator().manual_seed(5)
    parameters = []
    for shape in _SHAPES:
        dense = (torch.randn(shape, generator=generator) * 0.05).to(device)
        quantized = weight is not None and is_matrix_like(shape)
        parameters.append(Parameter(ml.QuantizedTensor.from_dense(dense, weight) if quantized and weight else dense))
    lr = torch.tensor(_LR, device=device) if recorded else _LR
    optimizer: Any = make(parameters, lr=lr, weight_decay=0.1, **options)
    step = optimizer.step
    for i in range(STEPS):
        for p in parameters:
            grad = torch.randn(p.shape, generator=generator).to(device)
            p.grad = grad if p.grad is None else p.grad.copy_(grad)  # a graph reads where it lay
        if recorded and i < 2:  # the first time outside a graph, which compiles the kernels
            step = _recording(step, device) if i else optimizer.device_step()
        step()
    optimizer.synchronize()
    return [
        tensor.cpu()
        for p in parameters
        for whole in (p, *moments(optimizer.state[p]))
        for tensor in stored_tensors(whole.detach())
    ]


def _bytes_differ(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
