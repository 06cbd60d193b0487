"""What is asked for ahead of a look at tensors: the lines it is said to be, and nothing that anybody could notice."""

from __future__ import annotations

import gc

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import masterless as ml
from masterless.backends.cpu import ahead


def lines_of(lines: ahead.Lines) -> set[int]:
    return {int(address) for address in lines.addresses}


def test_lines_cover_every_byte_and_are_asked_for_once() -> None:
    lines = ahead.Lines([(130, 1), (100, 40), (192, 64), (1000, 1)])
    assert lines_of(lines) == {64, 128, 192, 960}


def test_a_tensor_s_object_and_its_memory_s_are_among_them() -> None:
    tensors = [torch.zeros(3) for _ in range(20)]
    found = lines_of(ahead.of_tensors(tensors))
    for t in tensors:
        for address in (id(t), t._cdata, t.untyped_storage()._cdata):
            assert address // 64 * 64 in found


def test_any_address_may_be_asked_for() -> None:
    """Also where nothing is, or something else by now."""
    tensor = torch.zeros(1 << 20)
    lines = ahead.of_tensors([tensor])
    del tensor
    gc.collect()
    lines.ask()
    nowhere = ahead.Lines(
        (int(start), 64) for start in np.array([0, 1 << 40, 2**63 - 128, 2**64 - 256], dtype=np.uint64)
    )
    nowhere.ask()
    ahead.NOTHING.ask()


def many() -> list[Parameter]:
    torch.manual_seed(0)
    dense = [torch.randn(4, 33) * 0.02 for _ in range(12)]
    return [Parameter(ml.QuantizedTensor.from_dense(x, "int4") if i % 2 else x) for i, x in enumerate(dense)]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 33, generator=generator) for _ in range(12)]


def test_gradients_that_are_gone_are_no_matter() -> None:
    """A loop that drops its gradients, and one that keeps them, step to the same bytes."""
    kept, dropped = many(), many()
    optimizers = [ml.AdamW(parameters, 1e-2, exp_avg="int4", exp_avg_sq="log2") for parameters in (kept, dropped)]
    for p in kept:
        p.grad = torch.zeros(4, 33)
    for step in range(4):
        for p, q, grad in zip(kept, dropped, gradients(step), strict=True):
            assert p.grad is not None
            p.grad.copy_(grad)
            q.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].zero_grad(set_to_none=True)
        gc.collect()
    for p, q in zip(kept, dropped, strict=True):
        assert torch.equal(
            p.detach().dequantize() if isinstance(p, ml.QuantizedTensor) else p,
            q.detach().dequantize() if isinstance(q, ml.QuantizedTensor) else q,
        )
