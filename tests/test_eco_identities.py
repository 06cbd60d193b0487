"""Error compensation: the identities that hold exactly, and the stationary variances that follow from them.

Notation: b momentum, W the stored weight, q its rounding, W~ the weight before it, e = W~ - q(W~), u~ the momentum
after the rule's own update, u the one that is stored, with the injection in it; both in units of the weight.

EMA form ``u~ = b u + (1-b) lr g; W~ = W - u~; u' = u~ + (1 - 1/b) e``: with ``theta = W - b/(1-b) u`` the errors
cancel, ``theta' = theta - lr g``. In torch's form, ``u~ = b u + r lr g`` with r = 1 - dampening, the same theta moves
by ``lr r/(1-b) g``. Nesterov steps by ``lr g + b u~`` and injects 1/b as much; its ``theta = W - b^2/(1-b) u`` again
moves by ``lr/(1-b) g``. Nothing in theta depends on lr: `test_eco_schedules.py` holds it to that.
"""

import math
import warnings

import pytest
import torch
from torch import nn

import masterless as ml
from masterless.formats import codec
from masterless.formats.rounding import dither
from masterless.optim.errors import LossyUpdateWarning
from masterless.tensor.quantized import QuantizedTensor

HALF_ULP = 2.0**-24  # largest relative error of one fp32 operation


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def quantized(dense, format):
    return nn.Parameter(QuantizedTensor.from_dense(dense, format))


def build(cls, p, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossyUpdateWarning)  # nearest rounding is part of what is tested
        return cls([("p", p)], **{"backend": "reference", **options})


def step(optimizer, p, grad):
    p.grad = grad
    optimizer.step()


def weight(p):
    """What the optimizer sees, hidden bits included."""
    return p.detach().stored.decode().double()


def buffer(optimizer, p, name="momentum_buffer"):
    return optimizer.state[p][name].double()


# --- the exact rule -----------------------------------------------------------------------------------------


class Quantizer:
    """q of the library's codec under one fixed scale, for fp64 values; every call has its own random bits."""

    def __init__(self, p, rounding):
        stored = p.detach().stored
        self.format, self.scale = stored.format, stored.tensors["scale"].float()
        self.rounding = rounding

    def __call__(self, x, step):
        u = dither(step, *x.shape) if self.rounding == "stochastic" else None
        parts = codec.encode(x.float(), self.format, u, scale=self.scale)
        return codec.decode(parts, x.shape[1], self.format).double()


def learning_rates(kind, steps):
    if kind == "constant":
        return [0.05] * (steps + 1)
    return [0.05 * (0.55 + 0.45 * math.cos(math.pi * t / steps)) for t in range(steps + 1)]


def sgdm(start, q, rates, b, curvature, rule, minimum=1.0):
    """EMA-form SGDM on ``f = curvature/2 (W - minimum)^2`` in fp64; yields (stored weight, what it stands for)."""
    w, stored = start.clone(), start.clone()  # `w` is the master weight; the other rules do not use it
    m, previous = torch.zeros_like(w), torch.zeros_like(w)
    for t, lr in enumerate(rates[:-1]):
        g = curvature * (stored - minimum)
        m = b * m + (1 - b) * g
        target = (w if rule == "master" else stored) - lr * m
        stored = q(target, t)
        error = target - stored
        if rule == "master":
            w = target
        elif rule == "exact":
            m = m + previous / lr - error / (b * rates[t + 1])
        elif rule == "eco":
            m = m + (1 - 1 / b) / lr * error
        previous = error
        yield stored, target


def trajectory(start, q, rates, b, curvature, rule):
    stored, target = zip(*sgdm(start, q, rates, b, curvature, rule), strict=True)
    return torch.stack(stored), torch.stack(target)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("format", "b"), [("int4", 0.9), ("fp8", 0.9), ("int4", 0.35)])
def test_the_exact_rule_is_training_with_master_weights(format, b, schedule, rounding):
    p = quantized(random(4, 128), format)
    start, curvature = weight(p), random(4, 128, seed=1).abs().double() + 0.1
    rates = learning_rates(schedule, 120)
    q = Quantizer(p, rounding)
    stored, master = trajectory(start, q, rates, b, curvature, "master")
    exact_stored, exact = trajectory(start, q, rates, b, curvature, "exact")
    # fp64 throughout; an error e enters m as e / (b lr), up to 1e3, and comes back times lr, over 120 steps
    torch.testing.assert_close(exact, master, rtol=0, atol=120 * 1e3 * 2.0**-52)
    assert torch.equal(exact_stored, stored)
    assert (stored[-1] - start).abs().max() > 0.2, "the run must go somewhere"
    _, eco = trajectory(start, q, rates, b, curvature, "eco")
    assert (eco - master).abs().max() > 1e-3, "e_{t+1} in the place of e_t is another trajectory"


def test_the_exact_rule_is_the_librarys_own_master_weight():
    """`int8+32` under `ml.SGD` in fp32 against the fp64 exact rule, which keeps no master weight."""
    b, lr, steps = 0.9, 0.02, 60
    start = random(4, 128, scale=0.5)
    start[:, 0] = 2.0  # an anchor with no gradient keeps the scale, which the oracle does not change either
    p = quantized(start, "int8+32:128")
    optimizer = build(ml.SGD, p, lr=lr, momentum=b, momentum_buffer="fp32")
    q = Quantizer(quantized(start, "int8:128"), "nearest")
    visible = p.detach().dequantize().double()
    previous = start.double() - visible  # e_0: the master copy starts exact, the stored weight does not
    m = -previous / (b * lr)
    for t in range(steps):
        g = visible - 0.25
        g[:, 0] = 0.0
        step(optimizer, p, g.float())
        m = b * m + g  # torch's form: momentum without dampening
        target = visible - lr * m
        visible = q(target, t)
        m += previous / lr - (target - visible) / (b * lr)
        previous = target - visible
        # an fp32 step rounds the buffer (|lr buf| < 1) and the weight (|W| <= 2) about once each
        torch.testing.assert_close(weight(p), target, rtol=0, atol=(t + 1) * 4 * HALF_ULP)
        assert torch.equal(p.detach().dequantize().double(), visible)


# --- the virtual sequence -----------------------------------------------------------------------------------

FORMATS = ["fp8", "int8", "int4", "int4:tensor", "int2", "int4+4", "fp4"]
ROUNDINGS = [("nearest", "held"), ("stochastic", "held"), ("stochastic", "recompute")]


def virtual_moves(cls, format, coefficient, lr, steps=25, **options):
    """Pairs (move of theta in one step, gradient), and the fp32 rounding error that such a move may have."""
    p = quantized(random(6, 160), format)
    optimizer = build(cls, p, lr=lr, **options)
    step(optimizer, p, random(6, 160, seed=99))  # torch's first step ignores dampening
    for t in range(steps):
        before = weight(p), buffer(optimizer, p)
        g = random(6, 160, seed=t)
        step(optimizer, p, g)
        after = weight(p), buffer(optimizer, p)
        theta = [w - coefficient * m for w, m in (before, after)]
        largest = max(t.abs().max() for t in (*before, *after, *(coefficient * m for _, m in (before, after))))
        # W~: 3 operations on numbers below `largest`; m': 4 on numbers that count `coefficient` times
        yield theta[1] - theta[0], g.double(), 16 * HALF_ULP * float(largest)


@pytest.mark.parametrize(("rounding", "policy"), ROUNDINGS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("b", "dampening"), [(0.9, 0.9), (0.9, 0.0), (0.3, 0.5)])
def test_virtual_sequence_of_sgd_sees_no_rounding(format, rounding, policy, b, dampening):
    lr = 0.02
    options = {"momentum": b, "dampening": dampening, "weight_rounding": rounding, "scale_policy": policy}
    moves = virtual_moves(ml.SGD, format, b / (1 - b), lr, momentum_buffer="fp32", **options)
    for move, g, tolerance in moves:
        torch.testing.assert_close(move, -lr * (1 - dampening) / (1 - b) * g, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("rounding", "policy"), ROUNDINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_virtual_sequence_of_nesterov_sees_no_rounding(format, rounding, policy):
    lr, b = 0.02, 0.8
    options = {"momentum": b, "nesterov": True, "weight_rounding": rounding, "scale_policy": policy}
    moves = virtual_moves(ml.SGD, format, b**2 / (1 - b), lr, momentum_buffer="fp32", **options)
    for move, g, tolerance in moves:
        torch.testing.assert_close(move, -lr / (1 - b) * g, rtol=0, atol=tolerance)


def test_virtual_sequence_of_rmsprop_moves_by_the_normalised_gradient():
    lr, b, alpha, eps = 0.02, 0.9, 0.9, 1e-8
    options = {"momentum": b, "alpha": alpha, "eps": eps, "momentum_buffer": "fp32", "square_avg": "fp32"}
    v = (1 - alpha) * random(6, 160, seed=99).double() ** 2
    for move, g, tolerance in virtual_moves(ml.RMSprop, "int4", b / (1 - b), lr, **options):
        v = alpha * v + (1 - alpha) * g**2
        normalised = g / (v.sqrt() + eps)
        # v accumulates one fp32 rounding a step, and g/d has it too
        torch.testing.assert_close(move, -lr / (1 - b) * normalised, rtol=40 * HALF_ULP, atol=tolerance)


@pytest.mark.parametrize("compensate", [True, False])
def test_dropping_the_error_breaks_the_virtual_sequence(compensate):
    """The check above must be able to fail: without injection theta is off by whole rounding errors."""
    lr, b = 0.02, 0.9
    coefficient = b / (1 - b) * (1 if compensate else lr)  # the momentum that is not compensated is torch's
    options = {"momentum": b, "momentum_buffer": "fp32", "error_compensation": compensate}
    off = [
        (move + lr / (1 - b) * g).abs().max() / tolerance
        for move, g, tolerance in virtual_moves(ml.SGD, "int4", coefficient, lr, **options)
    ]
    assert (max(off) < 1) if compensate else (min(off) > 1000)


# --- nothing moves ------------------------------------------------------------------------------------------

STILL = {
    "sgd": (ml.SGD, {"momentum": 0.9}, "momentum_buffer", 0.9),
    "adam": (ml.Adam, {"betas": (0.8, 0.99)}, "exp_avg", 0.8),
    "adamw": (ml.AdamW, {"betas": (0.8, 0.99), "weight_decay": 0.0}, "exp_avg", 0.8),
    "rmsprop": (ml.RMSprop, {"momentum": 0.9}, "momentum_buffer", 0.9),
    "adafactor": (ml.Adafactor, {"beta1": 0.9}, "exp_avg", 0.9),
}


@pytest.mark.parametrize("rule", STILL)
def test_where_no_weight_moves_the_momentum_stops_decaying(rule):
    """``e = -u~``, so ``u' = u~ + (1 - 1/b) e = u~ / b`` (wd = 0). Without compensation buffer times step is u~."""
    cls, options, first, b = STILL[rule]
    moments = {first: "fp32", **({cls.second_name: "fp32"} if cls.second_name else {})}
    options = {"weight_rounding": "nearest", **options, **moments}
    p, twin = (quantized(random(4, 128), "int4") for _ in range(2))
    start = p.detach().stored.tensors["codes"].clone()
    lr = 1e-3  # a quantum is about 0.4: five such steps stay below half of it
    with_injection = build(cls, p, lr=lr, **options)
    same_units = {"moment_units": "weight"} if rule.startswith("adam") else {}
    without = build(cls, twin, lr=lr, error_compensation=False, **options, **same_units)
    for t in range(5):
        size = 1.0 if same_units else lr
        if rule == "adafactor":
            size = float(weight(p).square().mean().sqrt()) * lr
        if t:
            for name, value in without.state[twin].items():
                value.copy_(with_injection.state[p][name] / (size if name == first else 1))
        g = random(4, 128, seed=t)
        step(with_injection, p, g)
        step(without, twin, g)
        assert torch.equal(p.detach().stored.tensors["codes"], start)
        expected = size * buffer(without, twin, first) / b
        # e is a small difference of numbers of the weight's size, |W| < 4
        atol = float(weight(p).abs().max() * 2 * HALF_ULP * (1 / b - 1) + 8 * HALF_ULP * expected.abs().max())
        torch.testing.assert_close(buffer(with_injection, p, first), expected, rtol=0, atol=atol)


def test_a_gradient_below_every_threshold_still_arrives():
    """Nearest rounding, a constant gradient, steps of 1/80 quantum: ECO follows theta, dropping stands still."""
    b, lr, quantum, steps = 0.5, 0.0125, 2.0**-4, 400
    start = torch.zeros(1, 128)
    start[0, 0] = 7 * quantum  # an anchor with no gradient: it keeps the scale
    g = torch.full((1, 128), quantum)
    g[0, 0] = 0.0
    options = {"lr": lr, "momentum": b, "dampening": b, "momentum_buffer": "fp32", "weight_rounding": "nearest"}
    moved = {}
    for compensate in (True, False):
        p = quantized(start, "int4")
        optimizer = build(ml.SGD, p, error_compensation=compensate, **options)
        for _ in range(steps):
            step(optimizer, p, g)
        moved[compensate] = weight(p)[0, 1:] / quantum
        assert weight(p)[0, 0] == 7 * quantum
    assert (moved[False] == 0).all()
    theta = -steps * lr  # quanta; the stored weight lags by at most half a quantum over 1 - b
    assert ((moved[True] - theta).abs() <= 0.5 / (1 - b)).all()


# --- the quadratic ------------------------------------------------------------------------------------------

# f = x^2 / 2 with eta = L lr: stationary E[x^2] in units of the mean squared rounding error. Stochastic rounding makes
# the errors uncorrelated with the past, and that is all the formulas need: s2 is measured, not assumed.
CLOSED_FORMS = {
    # AR(2) of the master weight, plus the error of the stored one; tends to 1 with eta
    "master": lambda b, eta: 1 + (1 + b) * eta / (2 * (1 + b) - (1 - b) * eta),
    "naive": lambda b, eta: ((1 - b**2) + 2 * b * eta) / (eta * (2 * (1 - b**2) - eta * (1 - b) ** 2)),
    "eco": lambda b, eta: 2 / (2 * (1 - b**2) - eta * (1 - b) ** 2),
}


def test_closed_forms_are_the_published_numbers():
    table = [(0.9, 0.1, 9.76, 5.28), (0.9, 1.0, 5.38, 5.41)]
    for b, eta, naive, eco in table:
        assert round(CLOSED_FORMS["naive"](b, eta), 2) == naive
        assert round(CLOSED_FORMS["eco"](b, eta), 2) == eco
    assert CLOSED_FORMS["master"](0.9, 1e-6) == pytest.approx(1, abs=1e-6)


ROWS, COLS, QUANTUM = 32, 512, 2.0**-6
# Minima off the grid: a weight at rest on a minimum that is a grid point would never be rounded again.
MINIMA = (torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5) * QUANTUM


def library_run(b, eta, compensate):
    """`ml.SGD` on an int8 parameter: yields (distance from the minimum, rounding error) of every step."""
    start = torch.zeros(ROWS, COLS)
    start[:, 0] = 127 * QUANTUM  # an anchor with no gradient: the scale stays where it is
    p = quantized(start, "int8:row")
    options = {"momentum": b, "dampening": b, "momentum_buffer": "fp32", "error_compensation": compensate}
    optimizer = build(ml.SGD, p, lr=eta, **options)
    m = torch.zeros(ROWS, COLS, dtype=torch.float64)
    while True:
        before, first = weight(p), not optimizer.state
        g = (before - MINIMA).float()
        g[:, 0] = 0.0
        step(optimizer, p, g)
        target = before - ((1 if compensate else eta) * b * m + eta * (1 if first else 1 - b) * g.double())
        m = buffer(optimizer, p)
        yield (weight(p) - MINIMA)[:, 1:], (target - weight(p))[:, 1:]


def master_run(b, eta):
    q = Quantizer(quantized(torch.full((ROWS, COLS), 127 * QUANTUM), "int8:row"), "stochastic")
    start = torch.zeros(ROWS, COLS, dtype=torch.float64)
    for stored, target in sgdm(start, q, [eta] * 1000, b, 1.0, "master", MINIMA):
        yield stored - MINIMA, target - stored


@pytest.mark.parametrize(("b", "eta"), [(0.9, 0.1), (0.9, 1.0), (0.5, 0.2)])
@pytest.mark.parametrize("rule", CLOSED_FORMS)
def test_stationary_variance_on_the_quadratic(rule, b, eta):
    run = master_run(b, eta) if rule == "master" else library_run(b, eta, rule == "eco")
    squares, errors = torch.zeros(ROWS, dtype=torch.float64), torch.zeros(ROWS, dtype=torch.float64)
    burn_in, steps = 120, 240  # the slowest mode decays by 0.95 a step, its variance by 0.9: 1e-5 after 120
    for t, (x, e) in enumerate(run):
        if t >= burn_in:
            squares += x.square().mean(1)
            errors += e.square().mean(1)
        if t == burn_in + steps:
            break
    ratios = squares / errors  # one estimate a row; rows have independent random bits
    found, expected = float(ratios.mean()), CLOSED_FORMS[rule](b, eta)
    standard_error = float(ratios.std()) / math.sqrt(ROWS)
    assert standard_error < 0.01 * expected, "too noisy to tell anything"
    assert abs(found - expected) < 4 * standard_error + 2e-5 * expected  # the burn-in's remainder
