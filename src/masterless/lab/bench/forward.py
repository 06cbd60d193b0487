"""Decoding a layer's weight in the kernel, and the products that need it, against what torch offers.

One layer of GPT-2 small (768 to 3072). `decode` turns a stored weight into a dense one, in fp32 and bf16. `forward` and
`forward+backward` are the product with it in fp32, decoding included, at batches of training size, against a dense
fp32 weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import masterless as ml
from masterless.lab.bench.step_time import interleaved

OUT, IN = 3072, 768
TOKENS = (512, 4096)
FORMATS = ("int8", "fp8", "int4")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One computation, with the one it is compared with in the same run."""

    what: str  # "decode", "forward" or "forward+backward"
    name: str
    baseline: str
    dtype: str
    tokens: int
    threads: int
    milliseconds: float
    ratio: float


Calls = dict[str, Callable[[], object]]


def forward(
    threads: int,
    repeats: int,
    shape: tuple[int, int] = (OUT, IN),
    tokens: tuple[int, ...] = TOKENS,
    report: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Measures all comparisons; the first of each is the baseline of the others."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.02
    rows = []
    for what, dtype, count, calls in _comparisons(weight, tokens):
        report(f"{what}, {dtype}")
        interleaved(list(calls.values()), 2)
        times = dict(zip(calls, interleaved(list(calls.values()), repeats), strict=True))
        baseline = next(iter(times))
        rows += [
            Row(what, name, baseline, dtype, count, threads, t * 1e3, t / times[baseline]) for name, t in times.items()
        ]
    return rows


def _comparisons(weight: Tensor, tokens: tuple[int, ...]) -> Iterator[tuple[str, str, int, Calls]]:
    for name, dtype in DTYPES.items():
        yield "decode", name, 0, _decodings(weight, dtype)
    weights = {"dense": Parameter(weight)}
    weights |= {fmt: Parameter(ml.QuantizedTensor.from_dense(weight, fmt)) for fmt in FORMATS}
    for count in tokens:
        x = torch.randn(count, weight.shape[1], requires_grad=True)
        grad = torch.randn(count, weight.shape[0])
        yield "forward", "fp32", count, {n: _product(x.detach(), w) for n, w in weights.items()}
        yield "forward+backward", "fp32", count, {n: _training(x, w, grad) for n, w in weights.items()}


def _decodings(weight: Tensor, dtype: torch.dtype) -> Calls:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes, narrow = (weight / scale).round().to(torch.int8), scale.to(dtype)
    calls: Calls = {"torch: codes.to(dtype) * scale": lambda: codes.to(dtype) * narrow}
    for fmt in FORMATS:
        q = ml.QuantizedTensor.from_dense(weight, fmt)
        calls[fmt] = lambda q=q: q.dequantize(dtype)  # type: ignore[misc]
    return calls


def _product(x: Tensor, weight: Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            F.linear(x, weight)

    return call


def _training(x: Tensor, weight: Parameter, grad: Tensor) -> Callable[[], object]:
    def call() -> None:
        x.grad = weight.grad = None
        F.linear(x, weight).backward(grad)

    return call
