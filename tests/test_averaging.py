"""Averages of quantized models: ours are the true ones, torch's are refused."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from weight_cases import mlp, parts, random

import masterless as ml


def trajectory(format, steps=12):
    """A model in training: yields it after every step."""
    model = mlp(format)
    optimizer = ml.AdamW(model.named_parameters(), lr=3e-2, exp_avg="int8")
    for step in range(steps):
        optimizer.zero_grad()
        (model(random(8, 64, seed=step)) - random(8, 64)).square().mean().backward()
        optimizer.step()
        yield model


def held(model):
    """What the optimizer holds: fp64 copies, hidden bits included."""
    return [(p.detach().stored.decode() if hasattr(p, "stored") else p.detach()).double() for p in model.parameters()]


KINDS = {
    "mean": {},
    "mean, multi": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "ema, multi": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
}


@pytest.mark.parametrize("format", ["int4", "int4+4", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_the_true_one(kind, format):
    average, expected = None, None
    for count, model in enumerate(trajectory(format)):
        average = ml.AveragedModel(model, **KINDS[kind]) if average is None else average
        average.update_parameters(model)
        now = held(model)
        if expected is None:
            expected = now
        elif "mean" in kind:
            expected = [e + (n - e) / (count + 1) for e, n in zip(expected, now, strict=True)]
        else:
            expected = [0.9 * e + 0.1 * n for e, n in zip(expected, now, strict=True)]
    for found, true in zip(average.module.parameters(), expected, strict=True):
        assert type(found) is nn.Parameter and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-6)  # fp32 sums of a dozen terms
    assert average(random(2, 64)).shape == (2, 64)


def test_the_average_goes_back_to_the_formats_of_the_model():
    for model in trajectory("int4+4", 2):
        average = ml.AveragedModel(model)
        average.update_parameters(model)
    rounded = average.quantized()
    assert [str(p.format) for p in rounded.parameters() if p.dim() > 1] == ["int4+4"] * 2
    expected = copy.deepcopy(average.module)
    ml.quantize_(expected, "int4+4")
    for a, b in zip(rounded.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a.dequantize() if a.dim() > 1 else a, b.dequantize() if b.dim() > 1 else b)
    assert rounded.state_dict().keys() == model.state_dict().keys()


def test_a_bf16_model_has_a_float32_average():
    model = mlp().bfloat16()
    average = ml.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)
    average.update_parameters(model)
    assert {p.dtype for p in average.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_of_torch_is_refused_with_the_remedy(kind):
    model = mlp()
    average = swa_utils.AveragedModel(model, **KINDS[kind])
    average.update_parameters(model)  # a copy
    before = parts(average.module[0].weight)
    with pytest.raises(RuntimeError, match=r"(copy_ of a dense tensor|in place)"):
        average.update_parameters(model)
    assert all(torch.equal(before[k], v) for k, v in parts(average.module[0].weight).items())


def test_buffers_are_copied_or_averaged():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    ml.quantize_(model, "int4")
    copied, averaged = ml.AveragedModel(model), ml.AveragedModel(model, use_buffers=True)
    for seed in range(3):
        model(random(8, 64, seed=seed))
        copied.update_parameters(model)
        averaged.update_parameters(model)
    assert torch.equal(copied.module[1].running_mean, model[1].running_mean)
    assert not torch.equal(averaged.module[1].running_mean, model[1].running_mean)
