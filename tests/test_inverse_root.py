"""Adam's division by the root of a coarse second moment: how near it is to the exact one, and what it must never do."""

import math

import pytest
import torch
from torch.nn import Parameter

import masterless as ml
from masterless.formats.arithmetic import ROOT_UNIT, inverse_root
from masterless.step import tile
from masterless.step.rules import RULES, SecondMoment
from masterless.step.scalars import Scalars

ERROR = 6.6e-4  # what its docstring calls 0.07%: Kadlec's bound is 6.501e-4, and fp32 rounds a few times on the way


def test_within_its_error_over_every_binade_of_normal_numbers():
    """Exhausted over the upper 16 bits of all positive normal floats, with three choices of the lower ones."""
    bits = torch.arange(0x0080, 0x7F80, dtype=torch.int32) << 16
    x = torch.cat([(bits + low).view(torch.float32) for low in (0, 0x5555, 0xFFFF)])
    error = inverse_root(x).double() * ROOT_UNIT * x.double().sqrt() - 1
    assert error.abs().max() < ERROR
    assert error.max() > 6e-4 and error.min() < -6e-4  # balanced: neither end is wasted


def test_of_zero_and_denormal_numbers_it_is_finite_and_too_small():
    x = torch.tensor([0.0, 1e-45, 1e-40, 1.17e-38])
    y = inverse_root(x)
    assert bool(y.isfinite().all()) and bool((y > 0).all())
    assert bool((y[1:].double() * ROOT_UNIT <= (1 + ERROR) / x[1:].double().sqrt()).all())


def numbers(**changes: float) -> Scalars:
    usual = {"step_size": 1.0, "keep1": 0.7, "rate1": 3e-4, "keep2": 0.95, "rate2": 0.05, "bias2": 1.3, "eps": 1e-8}
    return Scalars(**{**usual, "bias2_before": 1.4, **changes})


@pytest.mark.parametrize("name", ["adam", "adam_update_units", "adam_weight_units"])
@pytest.mark.parametrize("current", [False, True])
def test_coarse_and_exact_rules_agree(name, current):
    """The same rule on the same numbers, once with v taken for exact: 0.07% per root, two where u is carried over."""
    torch.manual_seed(0)
    g, m = torch.randn(4096) * 1e-2, torch.randn(4096) * 1e-4
    stored = torch.rand(4096) * 1e-4 + 1e-9
    c = numbers()
    exact = RULES[name].update(g, m, SecondMoment(stored, current, c, True), c)
    coarse = RULES[name].update(g, m, SecondMoment(stored, current, c, False), c)
    moved = tile.moved(exact)
    step = coarse.direction if coarse.size is None else coarse.direction * coarse.size
    assert torch.equal(exact.second, coarse.second)
    assert coarse.denominator is None
    # Of a sum each part is off by at most 0.13%; parts of either sign may cancel, so the bound is of the larger one.
    scale = moved.abs().clamp(min=float(moved.abs().median()))
    assert ((step - moved).abs() / scale).max() < 3 * ERROR


def test_eps_stands_under_the_root():
    """sqrt(v + eps^2), v and eps after bias correction: as sqrt(v) + eps where either is small."""
    g = torch.full((5,), 2.0)
    v = torch.tensor([0.0, 1e-8, 1e-4, 1.0, 100.0])
    for eps in (1e-8, 1e-2):
        c = numbers(eps=eps)
        moved = RULES["adam_update_units"].update(g, None, SecondMoment(v, True, c, False), c).direction
        expected = g / (v * c.bias2**2 + eps**2).sqrt()
        assert torch.allclose(moved, expected, rtol=ERROR + 1e-6)


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-30])  # whose square is zero, too
def test_without_eps_nothing_moves_where_v_is_zero(current, eps):
    zero, m, c = torch.zeros(3), torch.full((3,), 1e-3), numbers(eps=eps)
    second = SecondMoment(zero, current, c, False)
    assert not RULES["adam"].update(zero, m, second, c).direction.any()
    assert torch.equal(RULES["adam_weight_units"].update(zero, m, second, c).first, m * c.keep1)
    assert torch.equal(RULES["adam_update_units"].update(zero, m, second, c).first, m + (zero - m) * c.rate1)


def test_a_momentum_survives_the_first_gradient_of_its_weight():
    """Where v was zero there is nothing to carry over from: u is kept, not scaled by eps over a root."""
    u, g, c = torch.full((4,), 1e-3), torch.full((4,), 0.5), numbers()
    update = RULES["adam_weight_units"].update(g, u, SecondMoment(torch.zeros(4), False, c, False), c)
    step = c.rate1 * 0.5 / (math.sqrt(c.rate2) * 0.5 * c.bias2)
    assert torch.allclose(update.first, u * c.keep1 + step, rtol=3 * ERROR)


@pytest.mark.parametrize("exp_avg_sq", ["fp32", "bf16", "log4"])
def test_only_coarse_second_moments_are_approximated(exp_avg_sq):
    """Adam's first step is lr, exactly: an unquantized optimizer is torch's."""
    p = Parameter(torch.zeros(2, 128))
    p.grad = torch.full_like(p, 0.3)
    ml.AdamW([p], lr=1e-2, weight_decay=0.0, exp_avg_sq=exp_avg_sq).step()
    error = (p.detach() / -1e-2 - 1).abs().max()
    assert error < 1e-6 if exp_avg_sq != "log4" else 1e-5 < error < ERROR
