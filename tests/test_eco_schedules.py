"""Error compensation under any schedule of the learning rate: the virtual iterate is conserved, and training goes on.

With the momentum u in units of the weight, ``theta = W - k u`` moves by this step's gradient alone, whatever the
rounding and the learning rate do: ``theta' = theta - lr wd W - gain lr g/d`` with ``k = b/(1-b)`` (Nesterov:
``b^2/(1-b)``), d the rule's denominator. Adam's momentum is carried over from the last d to this one, ``u d'/d``, which
moves theta by ``-k (d'/d - 1) u``, rounding or not. At lr = 0 neither W nor u moves.
"""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import masterless as ml
from masterless.optim.errors import LossyUpdateWarning
from masterless.tensor.quantized import QuantizedTensor

HALF_ULP = 2.0**-24
STEPS = 72
B, B2, LR, WD, EPS = 0.8, 0.9, 0.02, 0.1, 1e-8


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Everything here is small: a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factor(function):
    return lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, function)


SCHEDULES = {
    "warm-up from 0": factor(lambda t: min(1.0, t / 30)),
    "one-cycle": lambda o, steps: lr_scheduler.OneCycleLR(
        o, max_lr=o.defaults["lr"], total_steps=steps + 1, cycle_momentum=False
    ),
    "warm restarts": lambda o, steps: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=steps // 6),
    "cyclic": lambda o, steps: lr_scheduler.CyclicLR(
        o, 1e-8, o.defaults["lr"], step_size_up=steps // 12, cycle_momentum=False
    ),
    "cosine to zero": lambda o, steps: lr_scheduler.CosineAnnealingLR(o, steps),
    "100 times up and down": factor(lambda t: 0.01 if t // 9 % 2 else 1.0),
    "stretches of zero": factor(lambda t: 0.0 if t // 9 % 2 else 1.0),
}


# --- the virtual iterate --------------------------------------------------------------------------------------


class Rule:
    """What theta does under one rule, in fp64 and from the rule's definition."""

    coefficient = B / (1 - B)

    def __init__(self):
        self.v, self.t = 0.0, 0

    def average(self, g):
        self.t += 1
        self.v = B2 * self.v + (1 - B2) * g**2
        return self.v

    def move(self, w, g, lr):
        raise NotImplementedError

    def carried(self):
        """By what factor the momentum was carried over to this step's d."""
        return 1.0


class AdamW(Rule):
    cls, options = ml.AdamW, {"betas": (B, B2), "eps": EPS, "weight_decay": WD}

    def divisor(self, g):
        self.before = self.d if self.t else None
        self.d = (self.average(g) / (1 - B2**self.t)).sqrt() + EPS
        return self.d

    def move(self, w, g, lr):
        return -lr * WD * w - lr * g / self.divisor(g)

    def carried(self):
        return 1.0 if self.before is None else self.before / self.d


class Adam(AdamW):
    cls = ml.Adam

    def move(self, w, g, lr):
        g = g + WD * w
        return -lr * g / self.divisor(g)


class SGD(Rule):
    cls, options = ml.SGD, {"momentum": B, "dampening": 0.3, "weight_decay": WD}

    def move(self, w, g, lr):
        self.t += 1
        return -lr * (1.0 if self.t == 1 else 0.7) / (1 - B) * (g + WD * w)


class Nesterov(Rule):
    cls, options, coefficient = ml.SGD, {"momentum": B, "nesterov": True}, B**2 / (1 - B)

    def move(self, w, g, lr):
        return -lr / (1 - B) * g


class RMSprop(Rule):
    cls, options = ml.RMSprop, {"momentum": B, "alpha": B2, "eps": EPS}

    def move(self, w, g, lr):
        return -lr / (1 - B) * g / (self.average(g).sqrt() + EPS)


class Adafactor(Rule):
    cls, options = ml.Adafactor, {"beta1": B, "weight_decay": WD}

    def move(self, w, g, lr):
        self.t += 1
        share = self.t**-0.8
        self.v = (1 - share) * self.v + share * g**2
        update = g / self.v.sqrt().clamp(min=2.0**-23)
        update = update / max(1.0, float(update.square().mean().sqrt()))
        alpha = max(1e-3, float(w.square().mean().sqrt())) * min(lr, 1 / math.sqrt(self.t))
        return -lr * WD * w - alpha * update


def weight(p):
    return p.detach().stored.decode().double()


CASES = [
    *((rule, schedule, "int4") for rule in (AdamW, Adam, SGD, Nesterov, RMSprop, Adafactor) for schedule in SCHEDULES),
    *((AdamW, schedule, format) for schedule in SCHEDULES for format in ("fp8", "int4+2")),
]


@pytest.mark.parametrize(("rule", "schedule", "format"), CASES)
def test_the_virtual_iterate_is_conserved_under_every_schedule(rule, schedule, format):
    oracle = rule()
    first, second = rule.cls.first_name, rule.cls.second_name
    states = {name: "fp32" for name in (first, second) if name}
    p = nn.Parameter(QuantizedTensor.from_dense(random(4, 160), format))
    optimizer = rule.cls([("p", p)], lr=LR, backend="reference", **rule.options, **states)
    scheduler = SCHEDULES[schedule](optimizer, STEPS)
    w, u = weight(p), torch.zeros(4, 160, dtype=torch.float64)
    rates = set()
    for t in range(STEPS):
        lr = optimizer.param_groups[0]["lr"]
        rates.add(lr)
        g = random(4, 160, seed=t)
        p.grad = g
        optimizer.step()
        scheduler.step()
        new_w, new_u = weight(p), optimizer.state[p][first].double()
        move = oracle.move(w, g.double(), lr)
        if lr == 0.0:
            assert torch.equal(new_w, w) and torch.equal(new_u, u)
        else:
            move = move - oracle.coefficient * (oracle.carried() - 1) * u
        found = (new_w - oracle.coefficient * new_u) - (w - oracle.coefficient * u)
        largest = max(float(x.abs().max()) for x in (w, new_w, oracle.coefficient * u, oracle.coefficient * new_u))
        # W~: three fp32 operations on numbers below `largest`; u': four; d has the roundings of the second moment
        torch.testing.assert_close(found, move, rtol=60 * HALF_ULP, atol=16 * HALF_ULP * largest)
        w, u = new_w, new_u
    assert len(rates) > 1 or schedule == "constant"


# --- training -------------------------------------------------------------------------------------------------


def task():
    generator = torch.Generator().manual_seed(0)
    x, hidden, out = (torch.randn(*s, generator=generator) for s in ((512, 64), (64, 64), (64, 8)))
    y = (x @ hidden / 8).tanh() @ out / 4
    return x, y + 0.3 * torch.randn(512, 8, generator=generator)


def trained(schedule, build, weights=None, steps=300):
    """The loss of a small network after some steps, a run of mini-batches that is the same for all."""
    x, y = task()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    if weights:
        ml.quantize_(model, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossyUpdateWarning)
        optimizer = build(model.named_parameters())
    scheduler = SCHEDULES[schedule](optimizer, steps)
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        rows = torch.randint(0, 512, (128,), generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


FULL = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
LOW = {"exp_avg": "int4", "exp_avg_sq": "log2"}
# weights, states -> the largest ratio of its loss to that of the same network in fp32. Measured: int8 1.00 ... 1.03,
# fp8 1.03 ... 1.41, the same in low-bit states 0.95 ... 1.72, int4 1.1 ... 2.6 (the largest where the loss is the
# smallest); in units of the gradient the residue made them diverge under restarts and cycles.
RUNS = {
    "int8": ("int8", FULL, 1.06),
    "fp8": ("fp8", FULL, 1.6),
    "fp8 int4/log2": ("fp8", LOW, 2.0),
    "int4": ("int4", FULL, 3.5),
}


@pytest.fixture(scope="module")
def dense(one_thread):
    """Losses of the dense network, uncompensated, with its momentum in the same units."""

    def build(named):
        return ml.AdamW(named, lr=3e-3, moment_units="weight", **FULL)

    return {schedule: trained(schedule, build) for schedule in SCHEDULES}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_is_as_good_as_that_of_the_dense_network(schedule, run, dense):
    weights, states, ratio = RUNS[run]
    found = trained(schedule, lambda named: ml.AdamW(named, lr=3e-3, **states), weights)
    assert found < ratio * dense[schedule]
