"""Presets know how many tokens a step has: larger steps want a longer momentum."""

import pytest
import torch
from torch import nn

import masterless as ml
from masterless.lab.commands.compare import entry
from masterless.lab.train.config import resolve
from masterless.optim.presets import LARGE_STEP

LONGER = [name for name, preset in ml.PRESETS.items() if preset.large_steps]


def beta1(options):
    return options["betas"][0]


def test_some_presets_have_a_longer_momentum_for_large_steps():
    assert LONGER == ["1.3-byte", "1.6-byte", "1.8-byte", "2-byte"]
    for name in LONGER:
        preset = ml.PRESETS[name]
        assert beta1(preset.for_steps_of(LARGE_STEP).options) > beta1(preset.options)
        changed = {**preset.for_steps_of(LARGE_STEP).options, "betas": preset.options["betas"]}
        assert changed == dict(preset.options)


@pytest.mark.parametrize("tokens", [None, 1, LARGE_STEP - 1])
def test_small_steps_and_unknown_ones_leave_a_preset_as_it_is(tokens):
    assert all(preset.for_steps_of(tokens) is preset for preset in ml.PRESETS.values())


@pytest.mark.parametrize(("tokens", "expected"), [(None, 0.7), (2048, 0.7), (8192, 0.8)])
def test_prepare_takes_the_preset_for_the_steps(tokens, expected):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = ml.prepare(model, "2-byte", tokens_per_step=tokens)
    assert {beta1(group) for group in optimizer.param_groups} == {expected}


def test_what_a_user_passes_wins_and_trained_weights_keep_their_rounding():
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = ml.prepare(model, "1.6-byte", tokens_per_step=8192, betas=(0.5, 0.9))
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.9)
    trained = ml.prepare(nn.Sequential(nn.Linear(64, 64)), "1.6-byte", pretrained=True, tokens_per_step=8192)
    assert trained.param_groups[0]["weight_rounding"] == "stochastic"
    assert trained.param_groups[0]["betas"] == (0.8, 0.95)


@pytest.mark.parametrize("tokens", [0, -5, 2048.0, "8192"])
def test_what_is_no_number_of_tokens_is_refused_before_anything_changes(tokens):
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"tokens_per_step=.*nothing was changed"):
        ml.prepare(model, "2-byte", tokens_per_step=tokens)
    assert type(model[0].weight.data) is torch.Tensor


def test_train_and_compare_count_the_tokens_of_a_step():
    assert resolve({"preset": "2-byte"}).beta1 == 0.7
    assert resolve({"preset": "2-byte", "batch": 16, "seq_len": 128, "accumulate": 4}).beta1 == 0.8
    assert resolve({"preset": "2-byte", "batch": 64, "seq_len": 128, "beta1": 0.6}).beta1 == 0.6
    assert beta1(entry("2-byte", 512)[1]) == 0.7 and beta1(entry("2-byte", 8192)[1]) == 0.8
