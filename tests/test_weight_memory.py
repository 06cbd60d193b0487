"""No dense copy of a quantized weight outlives the call that used it: live bytes, measured."""

import gc

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from torch import nn
from torch.utils.checkpoint import checkpoint
from weight_cases import quantized, random

import masterless as ml
from masterless.tensor.quantize import quantize_

WIDTH = 128
LAYER = WIDTH * WIDTH * 4  # bytes of one dense layer; activations are 1/64 of it


def run_deep(depth, kind="linear", naive=False, wrap=None, dtype=None):
    """Bytes alive after the forward pass, and the peak of forward and backward, of a deep and narrow-batched model."""
    shape = (2, WIDTH // 2, WIDTH) if kind in ("einsum", "transposed bmm", "one by one") else (WIDTH, WIDTH)
    weights = [quantized(*shape, seed=i).requires_grad_(False) for i in range(depth)]  # weight gradients would add up
    x = random(2, 1, WIDTH).requires_grad_()

    def layer(x, w):
        w = w.dequantize() if naive else w
        if kind == "linear":
            return F.linear(x, w)
        if kind == "x @ w.T":
            return x @ w.T
        if kind == "one by one":
            y = torch.stack([F.linear(x[e], w[e]) for e in range(2)])
            return torch.cat([y, y], dim=-1)
        y = torch.einsum("eci,eoi->eco", x, w) if kind == "einsum" else torch.bmm(x, w.transpose(1, 2))
        return torch.cat([y, y], dim=-1)

    gc.collect()
    with LiveBytes() as live, torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = x
        for w in weights:
            y = layer(y, w) if wrap is None else wrap(layer, y, w)
        loss = y.float().sum()
        after_forward = live.now
        loss.backward()
    assert x.grad is not None
    return after_forward, live.peak


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", ["linear", "x @ w.T", "einsum", "transposed bmm", "one by one"])
def test_no_dense_weight_survives_the_layer_that_used_it(kind, dtype):
    after_forward, peak = run_deep(12, kind, dtype=dtype)
    assert after_forward < LAYER, "a dense weight was kept for the backward pass"
    assert peak < run_deep(3, kind, dtype=dtype)[1] + LAYER, "the peak grows with depth"


def test_the_measurement_sees_a_naive_implementation():
    after_forward, peak = run_deep(12, naive=True)
    assert after_forward > 12 * LAYER and peak > run_deep(3, naive=True)[1] + 8 * LAYER


def test_no_dense_weight_survives_inside_multi_head_attention():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(6)))
    quantize_(model, "int4", include=["*in_proj_weight"])
    x = random(1, 2, WIDTH).requires_grad_()
    with LiveBytes() as live:
        y = x
        for layer in model:
            y = layer(y, y, y, need_weights=False)[0]
        assert live.now < LAYER  # one in_proj alone is three times that
        y.sum().backward()


def test_activation_checkpointing_computes_the_same_and_keeps_no_activations():
    x = random(200, 64).requires_grad_()
    kept, results = {}, {}
    for name, wrap in (
        ("plain", lambda f, x: f(x)),
        ("checkpoint", lambda f, x: checkpoint(f, x, use_reentrant=False)),
    ):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        model.load_state_dict({k: random(*v.shape, seed=len(k)) / 8 for k, v in model.state_dict().items()})
        quantize_(model, "int4")
        x.grad = None
        with LiveBytes() as live:
            y = wrap(model, x)
            kept[name] = live.now
            y.square().sum().backward()
        results[name] = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    activation = 200 * 64 * 4
    assert kept["checkpoint"] < 2 * activation < 7 * activation < kept["plain"]
    assert all(torch.equal(a, b) for a, b in zip(*results.values(), strict=True))


@pytest.mark.parametrize(
    "use",
    [F.linear, lambda x, w: x[:1] * w, lambda x, w: F.linear(x, w[8:16])],
    ids=["linear", "elementwise", "slice"],
)
@pytest.mark.parametrize("change", ["optimizer", "copy_", "input"])
def test_what_changes_between_forward_and_backward_is_an_error(change, use):
    q, x = quantized(40, 64), random(2, 64).requires_grad_()
    h = x * 1
    loss = use(h, q).sum()
    if change == "optimizer":
        q.grad = random(40, 64)
        ml.SGD([q], lr=0.1, momentum=0.9, backend="reference").step()
    elif change == "copy_":
        q.detach().encode_(random(40, 64))
    else:
        h.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"was changed|modified by an inplace operation"):
        loss.backward()
