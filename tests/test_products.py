"""Products in 8 bits: the same operands as the specification's, exact sums in int8, straight-through gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn

import masterless as ml
from masterless.formats import codec, parse
from masterless.tensor import products
from masterless.tensor.products import KINDS, LowBitLinear, quantized_activations, reference_product, stored_operand


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(kind: str, inputs: int = 64, outputs: int = 48, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    ml.quantize_(model, kind)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_those_of_the_specification(kind):
    weight = layer(kind)[0].weight
    c, t = stored_operand(weight, kind)
    assert torch.equal(c.float() * t.t(), weight.dequantize())
    x = random(7, 64)
    a, s = quantized_activations(x, kind)
    fmt = parse(f"{kind}:row:fp32")
    expected = codec.decode(codec.encode(x, fmt, scale=s), 64, fmt)
    assert torch.equal(a.float() * s, expected)
    assert bool(
        ((a.float() * s - x).abs() <= x.abs().amax(1, keepdim=True) * (0.5 / 127 if kind == "int8" else 0.04)).all()
    )


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_int8_products_are_exact(rows):
    c, t = stored_operand(layer("int8")[0].weight, "int8")
    a, s = quantized_activations(random(rows, 64, seed=rows), "int8")
    found = products._product(a, s, c, t, "int8")
    assert torch.equal(found, reference_product(a, s, c, t, "int8"))
    assert torch.equal(found, (a.long() @ c.long().t()).float() * s * t)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fp8_products_are_those_of_the_reference_but_for_the_order_of_the_sum(rows):
    c, t = stored_operand(layer("fp8", 256)[0].weight, "fp8")
    a, s = quantized_activations(random(rows, 256, seed=rows), "fp8")
    found, expected = (f(a, s, c, t, "fp8") for f in (products._product, reference_product))
    exact = (a.double() @ c.double().t()) * s * t
    terms = (a.double().abs() @ c.double().abs().t()) * s * t
    # Half a unit of bf16, and 256 roundings of fp32 at most in the sum.
    allowed = exact.abs() * 2.0**-8 + terms * 256 * 2.0**-24
    for y in (found, expected):
        assert y.dtype == torch.bfloat16
        assert bool(((y.double() - exact).abs() <= allowed).all())
    assert (found == expected).float().mean() > 0.98  # the order shows only next to a tie


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_straight_through(kind, dtype):
    model, x = layer(kind).to(dtype), random(3, 5, 64, dtype=dtype).requires_grad_()
    assert ml.use_products_(model, kind) == ["0"]
    y = model(x)
    assert (y.shape, y.dtype) == ((3, 5, 48), dtype)
    upstream = random(3, 5, 48, seed=2, dtype=dtype)
    y.backward(upstream)

    a, s = quantized_activations(x.detach().reshape(-1, 64), kind)
    seen = (x + ((a.float() * s).to(dtype).view_as(x) - x).detach()).detach().requires_grad_()
    weight = model[0].weight.dequantize().detach().requires_grad_()
    nn.functional.linear(seen, weight, model[0].bias.detach()).backward(upstream)
    # The same sums by another call: bf16 rounds their results, fp32 shows the order of 15 and 48 terms.
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(x.grad, seen.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model[0].weight.grad, weight.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model[0].bias.grad, upstream.sum((0, 1)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_the_way_back(kind):
    model, x = layer(kind, bias=False), random(32, 64)
    decoded = model(x)
    ml.use_products_(model, kind)
    assert 0 < (model(x) - decoded).abs().max() < 0.1 * decoded.abs().max()
    opt = ml.AdamW(model.named_parameters(), lr=3e-2, exp_avg="int8", exp_avg_sq="log4")
    target, losses = random(32, 48, seed=3), []
    for _ in range(20):
        opt.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    twin = copy.deepcopy(model)
    assert type(twin[0]) is LowBitLinear
    assert torch.equal(twin(x), model(x))
    assert ml.use_products_(model, None) == ["0"]
    assert type(model[0]) is nn.Linear
    assert torch.equal(model(x), nn.functional.linear(x, model[0].weight.dequantize()))
    model.load_state_dict(twin.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind):
    model, x = layer(kind), random(4, 64)
    ml.use_products_(model, kind)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    assert model(x).isfinite().all(1).tolist() == [True, False, False, True]
    assert model(x[:0]).shape == (0, 48)
    assert torch.equal(model(torch.zeros(2, 64)), model[0].bias.expand(2, -1).to(torch.float32))


def test_a_weight_that_changed_before_the_backward_pass_is_an_error():
    model = layer("fp8")
    ml.use_products_(model, "fp8")
    y = model(random(4, 64)).sum()
    with torch.no_grad():
        model[0].weight.encode_(random(48, 64))
    with pytest.raises(RuntimeError, match="changed between the forward and the backward pass"):
        y.backward()


def test_autocast_and_what_is_left_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40), nn.Linear(40, 32))
    ml.quantize_(model, "fp8", rules={"2.weight": "int4"})
    assert ml.use_products_(model, "fp8") == ["0"]  # 40 is no multiple of 16, and int4 is not multiplied
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](random(2, 64)).dtype == torch.bfloat16
    ml.dequantize_(model)
    model(random(2, 64))  # a dense weight is multiplied as ever


def test_refusals():
    with pytest.raises(ValueError, match=r"unknown products 'fp4'; choose one of int8, fp8, or None"):
        ml.use_products_(layer("fp8"), "fp4")
    for model in (layer("int8"), layer("fp8:128"), nn.Linear(64, 64)):
        with pytest.raises(ValueError, match=r"call quantize_\(model, 'fp8'\) first"):
            ml.use_products_(model, "fp8")
