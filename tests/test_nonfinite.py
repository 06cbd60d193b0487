"""Nothing non-finite reaches an encoder: scalars, targets and moments, as well as gradients."""

import pytest
import torch
from backends import every_backend  # noqa: F401
from torch import nn

import masterless as ml
from masterless.optim.base import NonFiniteGradientError
from masterless.step.rules import RULES
from masterless.step.scalars import Scalars, check_scalars
from masterless.tensor.quantized import QuantizedTensor

pytestmark = pytest.mark.usefixtures("every_backend")

OPTIMIZERS = {
    "AdamW": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "AdamW fp32": (ml.AdamW, {"exp_avg": "fp32", "exp_avg_sq": "fp32"}),
    "Adam factored": (ml.Adam, {"exp_avg": "int8", "exp_avg_sq": "factored", "weight_decay": 0.1}),
    "SGD": (ml.SGD, {"momentum": 0.9, "momentum_buffer": "int4"}),
    "RMSprop": (ml.RMSprop, {"momentum": 0.9}),
    "Adafactor": (ml.Adafactor, {"beta1": 0.9}),
    "Lion": (ml.Lion, {}),
    "AdaBelief": (ml.AdaBelief, {}),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(weights):
    dense = random(4, 256)
    if weights in ("fp32", "bf16"):
        return nn.Parameter(dense.to(torch.float32 if weights == "fp32" else torch.bfloat16))
    return nn.Parameter(QuantizedTensor.from_dense(dense, weights))


def everything(p, optimizer):
    weight = p.detach().stored.tensors if isinstance(p.detach(), QuantizedTensor) else {"values": p.detach()}
    return {k: v.clone() for k, v in [*weight.items(), *optimizer.state[p].items()]}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("weights", ["int4", "fp8", "int4:tensor", "bf16", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("lr", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_not_finite_is_refused_before_anything_changes(name, weights, lr):
    """It used to move 982 of 1024 INT4 weights, without a word, and everything stayed finite."""
    cls, options = OPTIMIZERS[name]
    p = parameters(weights)
    optimizer = cls([("p", p)], lr=1e-3, **options)
    p.grad = random(4, 256, seed=1).to(p.dtype)
    optimizer.step()
    before = everything(p, optimizer)
    optimizer.param_groups[0]["lr"] = lr  # as a scheduler does
    with pytest.raises(ValueError, match=r"(?s)not be finite with lr=.*Nothing has changed"):
        optimizer.step()
    assert same(everything(p, optimizer), before)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    assert not same(everything(p, optimizer), before)


def test_scalars_must_be_finite_in_fp32():
    check_scalars(Scalars(step_size=3.4e38), {})
    for value in (3.5e38, -1e300, float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="decay"):
            check_scalars(Scalars(decay=value), {"lr": 1.0})


# eps = 0: the second moment of a coordinate that never saw a gradient is zero, and so is what it is divided by.
WITHOUT_EPS = {
    "AdamW": (ml.AdamW, {"eps": 0.0, "exp_avg": "int4", "exp_avg_sq": "log2"}),
    "AdamW in gradient units": (
        ml.AdamW,
        {"eps": 0.0, "moment_units": "gradient", "error_compensation": False, "exp_avg": "fp32"},
    ),
    "AdamW without m": (ml.AdamW, {"eps": 0.0, "betas": (0.0, 0.99), "exp_avg": "none", "exp_avg_sq": "log4"}),
    "AdaBelief": (ml.AdaBelief, {"eps": 0.0}),
    "RMSprop": (ml.RMSprop, {"eps": 0.0}),
    "RMSprop with momentum": (ml.RMSprop, {"eps": 0.0, "momentum": 0.9}),
    "Adafactor": (ml.Adafactor, {"eps": (0.0, 1e-3), "exp_avg_sq": "fp32"}),
    "Adafactor with momentum": (ml.Adafactor, {"eps": (0.0, 1e-3), "beta1": 0.9, "exp_avg_sq": "log2"}),
}


@pytest.mark.parametrize("weights", ["int4", "fp32"])
@pytest.mark.parametrize("name", WITHOUT_EPS)
def test_a_zero_gradient_without_eps_moves_nothing(name, weights):
    cls, options = WITHOUT_EPS[name]
    p = parameters(weights)
    optimizer = cls([("p", p)], lr=1e-2, **{"weight_decay": 0.0, **options})
    decoded = p.detach().dequantize() if weights == "int4" else p.detach().clone()
    decoded = decoded.clone()
    for t in range(3):
        p.grad = random(4, 256, seed=t)
        p.grad[:, ::2] = 0.0
        optimizer.step()
    after = p.detach().dequantize() if weights == "int4" else p.detach()
    assert torch.equal(after[:, ::2], decoded[:, ::2]) and not torch.equal(after, decoded)
    assert torch.isfinite(after).all()


@pytest.mark.parametrize("weights", ["int4", "fp8:128", "int4+2", "fp32", "bf16"])
@pytest.mark.parametrize("states", [("fp32", "fp32"), ("int4", "log2")])
def test_a_target_that_is_not_finite_keeps_its_tile_and_the_others_move(weights, states):
    """A learning rate that is finite, and absurd: where there is a gradient the step would overflow."""
    p = parameters(weights)
    options = {"exp_avg": states[0], "exp_avg_sq": states[1], "weight_decay": 0.0, "moment_units": "weight"}
    optimizer = ml.AdamW([("p", p)], lr=1e-2, betas=(0.1, 0.9), nonfinite="skip", **options)
    p.grad = random(4, 256, seed=1).to(p.dtype)
    optimizer.step()
    before = everything(p, optimizer)
    optimizer.param_groups[0]["lr"] = 3.3e38
    p.grad = torch.zeros(4, 256, dtype=p.dtype)
    p.grad[2, 128:] = 10.0  # the second tile of row 2
    optimizer.step()
    assert optimizer.nonfinite_counts == {"p": 128}
    after = everything(p, optimizer)
    assert all(torch.isfinite(v.float()).all() for v in after.values())
    for key, value in after.items():
        if value.dim() == 0:
            continue
        old, new = (t.reshape(4, 2, -1) for t in (before[key], value))
        assert torch.equal(old[2, 1], new[2, 1]), key
    second = next(key for key in after if key.startswith("exp_avg_sq"))
    assert not torch.equal(before[second].reshape(4, 2, -1)[0], after[second].reshape(4, 2, -1)[0])


def test_targets_that_are_not_finite_are_raised_with_what_has_happened():
    p = parameters("int4")
    optimizer = ml.SGD([("p", p)], lr=3e38)
    p.grad = torch.full((4, 256), 1e3)
    with pytest.raises(NonFiniteGradientError, match=r"p \(1024 elements\).*everything else has been stepped"):
        optimizer.step()


@pytest.mark.parametrize("first", ["fp32", "bf16", "int8", "dynamic4"])
@pytest.mark.parametrize("weights", ["int4", "int4:tensor", "fp8"])
def test_an_injected_error_stops_short_of_infinity(weights, first):
    """At b = 0.001 the error is stored 999 times as large: weights of 10^37 would make it infinite."""
    p = nn.Parameter(QuantizedTensor.from_dense(random(2, 128) * 1e37, weights))
    optimizer = ml.SGD([("p", p)], lr=1e19, momentum=1e-3, momentum_buffer=first)
    for t in range(3):
        p.grad = random(2, 128, seed=t) * 1e17
        optimizer.step()
        buffer = optimizer.state_storage(p, optimizer.param_groups[0])["momentum_buffer"].decode()
        assert torch.isfinite(buffer).all() and torch.isfinite(p.detach().dequantize()).all()
    assert buffer.abs().max() > 1e38


def test_a_second_moment_stops_short_of_infinity():
    """L2 of a huge weight: the gradient's square overflows, its update does not."""
    p = nn.Parameter(torch.full((4, 64), 1e30))
    optimizer = ml.Adam(
        [("p", p)], lr=1e-3, weight_decay=1e-9, exp_avg="int8", exp_avg_sq="fp32", quantize_states="all"
    )
    for t in range(3):
        p.grad = random(4, 64, seed=t)
        optimizer.step()
    assert torch.isfinite(optimizer.state[p]["exp_avg_sq"]).all() and torch.isfinite(p).all()


def test_weight_decay_that_overflows_the_gradient_stops_what_statistics_are_made_of():
    """L2 of a huge weight: the gradient alone is finite, its sum with the decay is not."""
    p = nn.Parameter(torch.full((4, 64), 1e30))
    optimizer = ml.Adam([("p", p)], weight_decay=1e9, exp_avg="int8", exp_avg_sq="factored", nonfinite="skip")
    p.grad = random(4, 64)
    before = p.detach().clone()
    optimizer.step()
    assert optimizer.nonfinite_counts == {"p": 256} and torch.equal(p.detach(), before)
    assert torch.isfinite(optimizer.state[p]["exp_avg_sq.row"]).all()


def test_every_rule_has_a_number_in_the_kernel():
    from masterless.backends.cpu import library
    from masterless.backends.cpu.interface import interface

    if library.available():
        assert set(interface().rules) == set(RULES)
