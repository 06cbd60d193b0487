"""The unquantized configuration is torch.optim: 200 steps side by side, and papers' rules against fp64.

Gradients are ``noise_t + (p - goal) / 10``: they depend on the parameters, as in training, but contract, so what
is measured is the rounding of the steps and not the chaos of a model.

Tolerance, in units of 2^-24 of the largest weight plus the largest update of a step:
    * Against torch: both sides work in fp32 with the same fp32 scalars, and ours rounds sums of products once, torch's
      twice. In a step the weights then differ by three roundings more, half a unit rms; over 200 contracting steps
      these add up like a random walk to 7 units, and the largest of 700 coordinates is four times as far: `WALK` = 32.
      (Measured: up to 22.)
    * Against an fp64 reference: our scalars (step size, decay) are rounded to fp32 once and err the same way at
      every step, half a unit each: 200 steps of one unit, `DRIFT` = 200. (Measured: up to 88.)
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from backends import reference_backend  # noqa: F401
from torch import Tensor

import masterless as ml

pytestmark = pytest.mark.usefixtures("reference_backend")

STEPS = 200
WALK = 32
DRIFT = STEPS
SHAPES = [(3, 130), (2, 5, 33), (7,)]


@dataclass(frozen=True)
class Twin:
    """An optimizer of ours in fp32 and the torch.optim class it must follow."""

    ours: type
    torchs: type
    hyperparameters: dict[str, Any]
    formats: dict[str, str] = field(default_factory=dict)


FULL = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
BUFFER = {"momentum_buffer": "fp32"}
TWINS = {
    "adamw": Twin(ml.AdamW, torch.optim.AdamW, {"lr": 1e-2}, FULL),
    "adamw-decay": Twin(ml.AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.95)}, FULL),
    "adamw-eps": Twin(ml.AdamW, torch.optim.AdamW, {"lr": 1e-2, "eps": 0.1}, FULL),
    "adamw-no-momentum": Twin(ml.AdamW, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.0, 0.99)}, FULL),
    "adam": Twin(ml.Adam, torch.optim.Adam, {"lr": 1e-2}, FULL),
    "adam-decay": Twin(ml.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.5, 0.9)}, FULL),
    "sgd": Twin(ml.SGD, torch.optim.SGD, {"lr": 0.05}),
    "sgd-decay": Twin(ml.SGD, torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.1}),
    "sgd-momentum": Twin(ml.SGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, BUFFER),
    "sgd-dampening": Twin(ml.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}, BUFFER),
    "sgd-nesterov": Twin(
        ml.SGD, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, BUFFER
    ),
    "rmsprop": Twin(ml.RMSprop, torch.optim.RMSprop, {"lr": 1e-2}, {"square_avg": "fp32"}),
    "rmsprop-decay": Twin(
        ml.RMSprop, torch.optim.RMSprop, {"lr": 1e-2, "weight_decay": 0.1, "alpha": 0.9}, {"square_avg": "fp32"}
    ),
    "rmsprop-momentum": Twin(
        ml.RMSprop,
        torch.optim.RMSprop,
        {"lr": 2e-3, "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-3},
        {"square_avg": "fp32", **BUFFER},
    ),
    "adafactor": Twin(ml.Adafactor, torch.optim.Adafactor, {"lr": 0.05}),
    "adafactor-decay": Twin(
        ml.Adafactor, torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1, "d": 1.5, "beta2_decay": -0.6}
    ),
    "adafactor-eps": Twin(ml.Adafactor, torch.optim.Adafactor, {"lr": 0.05, "eps": (1e-2, 0.5)}),
}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(params: list[Tensor], step: int, sign: float = 1.0) -> list[Tensor]:
    """What every side is given at its own parameters; `sign` turns it into an ascent direction."""
    generator = torch.Generator().manual_seed(1000 + step)
    noise = [torch.randn(p.shape, generator=generator) for p in params]
    return [sign * (n.to(p.dtype) + p.detach() / 10) for n, p in zip(noise, params, strict=True)]


def run(optimizer, params: list[torch.nn.Parameter], sign: float = 1.0) -> float:
    """200 steps; returns the largest update of any coordinate in a step."""
    largest = 0.0
    for step in range(STEPS):
        for p, g in zip(params, gradients(params, step, sign), strict=True):
            p.grad = g
        before = [p.detach().clone() for p in params]
        optimizer.step()
        largest = max(largest, *((p.detach() - b).abs().max().item() for p, b in zip(params, before, strict=True)))
    return largest


def assert_close(ours: list[Tensor], truth: list[Tensor], largest_update: float, units: int) -> None:
    for a, b in zip(ours, truth, strict=True):
        bound = units * 2.0**-24 * (b.abs().max().item() + largest_update)
        assert (a.detach().double() - b.detach().double()).abs().max().item() <= bound


MAXIMIZED = ["adamw-decay", "adam-decay", "sgd-decay", "sgd-nesterov", "rmsprop-momentum", "adafactor-decay"]


@pytest.mark.parametrize(
    ("name", "maximize"), [*((name, False) for name in TWINS), *((name, True) for name in MAXIMIZED)]
)
def test_fp32_follows_torch_optim(name, maximize):
    twin = TWINS[name]
    ours, theirs = parameters(), parameters()
    sign = -1.0 if maximize else 1.0
    optimizer = twin.ours(ours, **twin.hyperparameters, **twin.formats, maximize=maximize)
    reference = twin.torchs(theirs, **twin.hyperparameters, maximize=maximize)
    run(optimizer, ours, sign)
    largest = run(reference, theirs, sign)
    assert_close(ours, theirs, largest, WALK)
    # the comparison is of runs that went somewhere
    assert all((p - q).abs().max() > 0.1 for p, q in zip(theirs, parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "adam-decay", "sgd-momentum", "rmsprop-momentum"])
def test_fp32_moments_follow_torch_optim(name):
    """Not only the weights: the stored averages are torch's too, under torch's names."""
    twin = TWINS[name]
    ours, theirs = parameters(), parameters()
    optimizer = twin.ours(ours, **twin.hyperparameters, **twin.formats)
    reference = twin.torchs(theirs, **twin.hyperparameters)
    run(optimizer, ours)
    run(reference, theirs)
    for p, q in zip(ours, theirs, strict=True):
        for key, value in reference.state[q].items():
            if isinstance(value, Tensor) and key != "step":
                # the walk above, once more: an average is of gradients, which differ as the weights do
                bound = 2 * WALK * 2.0**-24 * (value.abs().max().item() + q.detach().abs().max().item())
                assert (optimizer.state[p][key] - value).abs().max().item() <= bound
        assert int(optimizer.state[p]["step"]) == STEPS


def test_defaults_are_torchs():
    """Same leading arguments, same order, same defaults."""
    for ours, theirs in (
        (ml.AdamW, torch.optim.AdamW),
        (ml.Adam, torch.optim.Adam),
        (ml.SGD, torch.optim.SGD),
        (ml.RMSprop, torch.optim.RMSprop),
        (ml.Adafactor, torch.optim.Adafactor),
    ):
        leading = [
            p
            for p in inspect.signature(ours.__init__).parameters.values()
            if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        theirs_by_name = inspect.signature(theirs.__init__).parameters
        torchs_order = [n for n in theirs_by_name if n in {p.name for p in leading}]
        assert [p.name for p in leading] == torchs_order
        for p in leading[2:]:
            assert p.default == theirs_by_name[p.name].default, f"{ours.__name__} {p.name}"


# --- rules that torch has not: short fp64 references, straight from the papers ------------------------------


def adabelief_fp64(params, lr, betas, eps, weight_decay):
    """Zhuang et al. 2020, algorithm 2, with decoupled weight decay; eps under the root as in the paper's s_t."""
    m, s = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for t in range(1, STEPS + 1):
        for i, g in enumerate(gradients(params, t - 1)):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            s[i] = betas[1] * s[i] + (1 - betas[1]) * (g - m[i]) ** 2
            denominator = ((s[i] + eps) / (1 - betas[1] ** t)).sqrt() + eps
            params[i] = (1 - lr * weight_decay) * params[i] - lr * (m[i] / (1 - betas[0] ** t)) / denominator
    return params


def lion_fp64(params, lr, betas, weight_decay):
    """Chen et al. 2023, algorithm 2."""
    m = [torch.zeros_like(p) for p in params]
    for t in range(1, STEPS + 1):
        for i, g in enumerate(gradients(params, t - 1)):
            update = torch.sign(betas[0] * m[i] + (1 - betas[0]) * g) + weight_decay * params[i]
            params[i] = params[i] - lr * update
            m[i] = betas[1] * m[i] + (1 - betas[1]) * g
    return params


def adam_in_update_units_fp64(params, lr, betas, eps):
    """LaProp (Ziyin et al. 2020): the average of normalised gradients."""
    u, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for t in range(1, STEPS + 1):
        for i, g in enumerate(gradients(params, t - 1)):
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g**2
            u[i] = betas[0] * u[i] + (1 - betas[0]) * g / ((v[i] / (1 - betas[1] ** t)).sqrt() + eps)
            params[i] = params[i] - lr * u[i] / (1 - betas[0] ** t)
    return params


def adafactor_with_momentum_fp64(params, lr, beta1, d):
    """Shazeer and Stern 2018 for vectors (nothing to factor), with the first moment of clipped updates."""
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for t in range(1, STEPS + 1):
        for i, g in enumerate(gradients(params, t - 1)):
            v[i] = v[i] + (g**2 - v[i]) * t**-0.8
            update = g / v[i].sqrt().clamp(min=torch.finfo(torch.float32).eps)
            update = update / max(1.0, update.square().mean().sqrt().item() / d)
            m[i] = beta1 * m[i] + (1 - beta1) * update
            alpha = max(1e-3, params[i].square().mean().sqrt().item()) * min(lr, t**-0.5)
            params[i] = params[i] - alpha * m[i]
    return params


def fp64(params: list[torch.nn.Parameter]) -> list[Tensor]:
    return [p.detach().double() for p in params]


def test_adabelief_follows_its_paper():
    chosen = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    ours = parameters()
    largest = run(ml.AdaBelief(ours, **chosen, exp_avg="fp32", exp_avg_var="fp32"), ours)
    assert_close(ours, adabelief_fp64(fp64(parameters()), **chosen), largest, DRIFT)


def test_lion_follows_its_paper():
    """Gradients are continuous, so no sign is decided within rounding error of zero at this seed."""
    chosen = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    ours = parameters()
    largest = run(ml.Lion(ours, **chosen, exp_avg="fp32"), ours)
    assert_close(ours, lion_fp64(fp64(parameters()), **chosen), largest, DRIFT)


def test_update_units_follow_laprop():
    chosen = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    ours = parameters()
    largest = run(ml.Adam(ours, **chosen, **FULL, moment_units="update"), ours)
    assert_close(ours, adam_in_update_units_fp64(fp64(parameters()), **chosen), largest, DRIFT)


def test_adafactor_with_momentum_follows_its_paper():
    ours = [torch.nn.Parameter(p.detach().flatten().clone()) for p in parameters()]
    optimizer = ml.Adafactor(ours, lr=0.05, beta1=0.8, d=1.0, exp_avg="fp32")
    truth = adafactor_with_momentum_fp64([p.detach().double() for p in ours], 0.05, 0.8, 1.0)
    largest = run(optimizer, ours)
    assert_close(ours, truth, largest, DRIFT)
