"""Checkpoints that cannot be loaded: refused with a clear message, and the optimizer stays as it was."""

import copy

import pytest
import torch
from backends import reference_backend  # noqa: F401
from test_state_dict import assert_same, build, clone, parameters, steps

import masterless as ml

pytestmark = pytest.mark.usefixtures("reference_backend")


def saved_by(name: str = "int4/log2", count: int = 2, **options):
    params = parameters()
    optimizer = build(name, params, **options)
    steps(optimizer, params, count)
    return copy.deepcopy(optimizer.state_dict())


def of_torch(cls, count: int = 2, **options):
    params = parameters()
    optimizer = cls(params, lr=1e-2, **options)
    steps(optimizer, params, count)
    return optimizer.state_dict()


def wrong_shape():
    saved = saved_by("fp32")
    saved["state"][0]["exp_avg"] = torch.zeros(3, 3)
    return saved


def wrong_codes():
    saved = saved_by()
    saved["state"][0]["exp_avg.codes"] = torch.zeros(6, 3, dtype=torch.uint8)
    return saved


def missing_part():
    saved = saved_by()
    del saved["state"][1]["exp_avg_sq.top"]
    return saved


def missing_moment():
    saved = saved_by("fp32")
    del saved["state"][1]["exp_avg_sq"]
    return saved


def two_groups():
    saved = saved_by()
    saved["param_groups"] = [saved["param_groups"][0], {**saved["param_groups"][0], "params": []}]
    return saved


def fewer_parameters():
    saved = saved_by()
    saved["param_groups"][0]["params"].pop()
    return saved


def newer_version():
    saved = saved_by()
    saved["param_groups"][0]["masterless_version"] = 7
    return saved


def of_another_width():
    saved = saved_by()
    saved["param_groups"][0]["exp_avg"] = "int8"  # the codes are of 4 bits
    return saved


REFUSED = {
    "wrong shape": (wrong_shape, ["exp_avg has shape (3, 3)", "parameter", "(6, 130)"]),
    "wrong codes": (wrong_codes, ["exp_avg: ", "(6, 130)", "another model or is damaged"]),
    "missing part": (missing_part, ["exp_avg_sq", "another model or is damaged"]),
    "missing moment": (missing_moment, ["no 'exp_avg_sq'", "stack", "another kind of optimizer"]),
    "two groups": (two_groups, ["2 param groups", "AdamW has 1", "same groups"]),
    "fewer parameters": (fewer_parameters, ["doesn't match the size of optimizer's group"]),
    "newer version": (newer_version, ["version 7", "reads up to 2", "upgrade masterless"]),
    "another width": (of_another_width, ["exp_avg: ", "format 'int8'", "another model or is damaged"]),
    "amsgrad": (lambda: of_torch(torch.optim.AdamW, amsgrad=True), ["amsgrad=True", "third", "torch.optim"]),
    "SGD": (lambda: of_torch(torch.optim.SGD, momentum=0.9), ["momentum_buffer", "AdamW", "another kind"]),
    "RMSprop": (lambda: of_torch(torch.optim.RMSprop), ["square_avg", "AdamW", "another kind"]),
    "Adagrad": (lambda: of_torch(torch.optim.Adagrad), ["sum", "AdamW", "another kind"]),
    "ours, SGD": (lambda: saved_by("sgd"), ["momentum_buffer", "AdamW", "another kind"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_dict_leaves_the_optimizer_as_it_was(name):
    make, parts = REFUSED[name]
    params = parameters()
    optimizer = build("int4/log2", params)
    steps(optimizer, params, 1)
    before, groups = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(make())
    for part in parts:
        assert part in str(caught.value)
    assert_same(optimizer.state_dict(), before)
    assert optimizer.param_groups is groups
    twin_params = clone(params)
    twin = build("int4/log2", twin_params)
    twin.load_state_dict(before)
    steps(optimizer, params, 2, first=1)  # and it trains on as if nothing had been
    steps(twin, twin_params, 2, first=1)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, twin_params, strict=True))


def test_a_centered_rmsprop_is_refused():
    params = parameters()
    optimizer = ml.RMSprop(params)
    with pytest.raises(ValueError, match=r"centered=True.*torch\.optim"):
        optimizer.load_state_dict(of_torch(torch.optim.RMSprop, centered=True))


def test_a_loaded_momentum_needs_a_buffer():
    """An optimizer without a first moment refuses hyperparameters that want one, instead of ignoring beta1."""
    params = parameters()
    optimizer = ml.AdamW(params, betas=(0.0, 0.9), exp_avg="none", exp_avg_sq="log2")
    with pytest.raises(ValueError, match=r"exp_avg='none'.*needs a buffer"):
        optimizer.load_state_dict(saved_by())
    assert optimizer.param_groups[0]["betas"] == (0.0, 0.9)


def test_adamw_does_not_silently_start_afresh_from_sgd():
    """PyTorch's SGD saves no step count: its dict must not pass for one of a fresh Adam."""
    params = parameters()
    optimizer = ml.AdamW(params)
    with pytest.raises(ValueError, match="momentum_buffer"):
        optimizer.load_state_dict(of_torch(torch.optim.SGD, momentum=0.9))
    assert not optimizer.state


def test_plain_sgd_refuses_what_it_would_drop():
    params = parameters()
    optimizer = ml.SGD(params)
    with pytest.raises(ValueError, match=r"exp_avg.*SGD"):
        optimizer.load_state_dict(of_torch(torch.optim.AdamW))


def test_a_plain_sgd_of_torch_loads_though_it_has_nothing_to_say():
    params = parameters()
    optimizer = ml.SGD(params, momentum=0.5)
    optimizer.load_state_dict(of_torch(torch.optim.SGD))
    assert optimizer.param_groups[0]["momentum"] == 0.0
    steps(optimizer, params, 1)
