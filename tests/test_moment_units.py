"""Units of the first moment: into weight units and out of them, through files, other optimizers and changed options."""

import pytest
import torch
from backends import every_backend  # noqa: F401
from test_state_dict import assert_same, steps, through_a_file
from torch import nn

import masterless as ml
from masterless.tensor.quantized import QuantizedTensor

pytestmark = pytest.mark.usefixtures("every_backend")

COMPENSATED = {
    "AdamW": (ml.AdamW, {"betas": (0.9, 0.99), "exp_avg": "fp32", "exp_avg_sq": "fp32"}),
    "SGD": (ml.SGD, {"momentum": 0.9, "momentum_buffer": "fp32"}),
    "RMSprop": (ml.RMSprop, {"momentum": 0.9, "momentum_buffer": "fp32", "square_avg": "fp32"}),
    "Adafactor": (ml.Adafactor, {"beta1": 0.9, "exp_avg": "fp32", "exp_avg_sq": "fp32"}),
}


def quantized(seed=0):
    dense = torch.randn(6, 130, generator=torch.Generator().manual_seed(seed))
    return [("matrix", nn.Parameter(QuantizedTensor.from_dense(dense, "int8:row")))]


def size_of_a_step(cls, p, lr, t):
    if cls is ml.AdamW:
        return lr / (1 - 0.9**t)
    weight = p.detach().stored.decode().double()
    return lr if cls is not ml.Adafactor else float(weight.square().mean().sqrt()) * min(lr, t**-0.5)


@pytest.mark.parametrize("units", ["gradient", "update"])
@pytest.mark.parametrize("name", COMPENSATED)
def test_a_compensated_momentum_of_the_first_version_is_brought_into_weight_units(name, units):
    """There m was in gradient or update units; what a step does with it is the same: u = lr / (1 - b^t) * m/d."""
    cls, options = COMPENSATED[name]
    params = quantized()
    saver = cls(params, lr=1e-2, error_compensation=False, **options)  # whose momentum is as it was then
    steps(saver, params, 4)
    saved = through_a_file(saver.state_dict())
    group, p = saved["param_groups"][0], params[0][1]
    group.update(masterless_version=1, error_compensation=True, next_lr=None)
    m = saved["state"][0][cls.first_name].double()
    if cls is ml.AdamW:
        group["moment_units"] = units
        m = m / ((saved["state"][0]["exp_avg_sq"].double() / (1 - 0.99**4)).sqrt() + 1e-8) if units == "gradient" else m
    loader_params = quantized()
    loader_params[0][1].detach().copy_(p.detach())
    loader = cls(loader_params, lr=0.3, **options)
    loader.load_state_dict(saved)
    state = loader.state[loader_params[0][1]]
    u = size_of_a_step(cls, p, 1e-2, 4) * m
    torch.testing.assert_close(state[cls.first_name].double(), u, rtol=8 * 2.0**-24, atol=0)
    assert f"{cls.first_name}.in_weight_units" in state
    assert loader.param_groups[0]["masterless_version"] == 2 and "next_lr" not in loader.param_groups[0]
    steps(loader, loader_params, 1, first=4)


@pytest.mark.parametrize("name", COMPENSATED)
def test_weight_units_come_back_from_a_file_and_leave_for_other_optimizers(name):
    cls, options = COMPENSATED[name]
    params = quantized()
    saver = cls(params, lr=1e-2, **options)
    steps(saver, params, 4)
    saved = through_a_file(saver.state_dict())
    p, u = params[0][1], saver.state[params[0][1]][cls.first_name]
    again = cls(quantized(), lr=1e-2, **options)
    again.load_state_dict(saved)
    assert_same(again.state_dict(), saver.state_dict())
    dense = cls([("matrix", nn.Parameter(p.detach().dequantize()))], lr=1e-2, **options)
    dense.load_state_dict(saved)  # no residue to carry: torch's units
    (state,) = dense.state.values()
    size = size_of_a_step(cls, p, 1e-2, 4)
    d = (state["exp_avg_sq"].double() / (1 - 0.99**4)).sqrt() + 1e-8 if cls is ml.AdamW else 1.0
    torch.testing.assert_close(state[cls.first_name].double(), u.double() * d / size, rtol=8 * 2.0**-24, atol=0)
    assert f"{cls.first_name}.in_weight_units" not in state
    if cls.torch_twin:
        exported = saver.torch_state_dict()["state"][0][cls.first_name]
        torch.testing.assert_close(exported, state[cls.first_name], rtol=8 * 2.0**-24, atol=0)


@pytest.mark.parametrize("name", COMPENSATED)
def test_switching_the_compensation_off_and_on_keeps_the_step_that_the_momentum_stands_for(name):
    cls, options = COMPENSATED[name]
    params = quantized()
    optimizer = cls(params, lr=1e-2, weight_rounding="nearest", **options)
    p = params[0][1]
    steps(optimizer, params, 4)
    u = optimizer.state[p][cls.first_name].clone()
    optimizer.param_groups[0]["error_compensation"] = False
    p.grad = torch.zeros(p.shape)
    optimizer.step()
    assert f"{cls.first_name}.in_weight_units" not in optimizer.state[p]
    optimizer.param_groups[0]["error_compensation"] = True
    optimizer.step()
    found = optimizer.state[p][cls.first_name]
    assert f"{cls.first_name}.in_weight_units" in optimizer.state[p]
    # two decays and one injection later it is of the same size, not lr times larger or smaller
    assert 0.2 < float(found.norm() / u.norm()) < 5


def test_a_momentum_in_weight_units_cannot_leave_them_while_the_learning_rate_is_zero():
    params = quantized()
    optimizer = ml.SGD(params, lr=1e-2, momentum=0.9, momentum_buffer="fp32")
    steps(optimizer, params, 2)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.warns(UserWarning, match="while the learning rate is 0"):
        exported = optimizer.torch_state_dict()
    assert not exported["state"][0]["momentum_buffer"].any()


def test_in_weight_units_adam_is_adam_with_a_learning_rate_that_its_bias_correction_undoes():
    """The momentum is carried over to the present v, so the order of averaging and dividing is Adam's own."""
    generator, lr, b1, b2 = torch.Generator().manual_seed(0), 1e-2, 0.9, 0.95
    start = torch.randn(6, 130, generator=generator)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone().double())
    options = {"exp_avg": "fp32", "exp_avg_sq": "fp32", "moment_units": "weight", "quantize_states": "all"}
    opt = ml.Adam([mine], lr=lr, betas=(b1, b2), **options)
    twin = torch.optim.Adam([theirs], lr=lr, betas=(b1, b2))
    for t in range(1, 61):
        # Gradients whose size changes from step to step, single ones most of all: where the two orders differ.
        g = torch.randn(6, 130, generator=generator) ** 3 * (1 + 9 * (t % 7 == 0))
        mine.grad, theirs.grad = g, g.double()
        twin.param_groups[0]["lr"] = lr * (1 - b1**t)
        opt.step()
        twin.step()
    # Some twenty roundings of a step, sixty steps of at most a few lr, and the weight's own.
    torch.testing.assert_close(mine.double(), theirs, rtol=60 * 2.0**-24, atol=60 * 20 * 2.0**-24 * lr)


def test_a_momentum_is_not_carried_over_from_a_second_moment_that_was_zero():
    """Reset to zero, v says nothing of the units that u had; u, and the residue in it, goes on as it is."""
    params = quantized()
    opt = ml.Adam(params, lr=1e-2, exp_avg="fp32", exp_avg_sq="fp32", betas=(0.9, 0.99))
    steps(opt, params, 4)
    p = params[0][1]
    opt.reset_state(states="exp_avg_sq", mode="hard")
    u = opt.state[p]["exp_avg"].clone()
    before = p.detach().stored.decode()
    p.grad = torch.zeros_like(p.grad)
    opt.step()
    error = (before - 0.9 * u) - p.detach().stored.decode()
    torch.testing.assert_close(opt.state[p]["exp_avg"], 0.9 * u + (1 - 1 / 0.9) * error, rtol=1e-5, atol=1e-7)
