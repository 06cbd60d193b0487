"""The training loop: the schedule, that it learns, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import Corpus, DocumentCounts, TrainSettings, evaluate, lr_at, train, validation_batches

CONFIG = GPTConfig(vocab_size=32, n_layer=1, n_head=2, d_model=32, seq_len=16)
SETTINGS = TrainSettings(steps=12, batch_size=4, seq_len=16, lr=1e-2, warmup=2, eval_every=5, eval_batches=2)


@pytest.fixture
def corpus():
    """A sequence with a rule, so that there is something to learn: each token is the last one plus seven."""
    tokens = (torch.arange(2000) * 7 % 32).to(torch.uint8)
    return Corpus(tokens[:1500], tokens[1500:], DocumentCounts(1, 1), 32, "multiples of seven")


def build(settings=SETTINGS, **changes):
    model = GPT(dataclasses.replace(CONFIG, **changes), torch.Generator().manual_seed(0))
    return model, torch.optim.AdamW(model.parameters(), **settings.optimizer_arguments())


def test_schedule():
    settings = TrainSettings(steps=110, warmup=10, lr=2.0, min_lr_ratio=0.1)
    assert [lr_at(step, settings) for step in (0, 4, 9, 10)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert lr_at(60, settings) == pytest.approx(1.1)  # half way: the mean of 2.0 and 0.2
    assert lr_at(110, settings) == pytest.approx(0.2) == lr_at(500, settings)
    rates = [lr_at(step, settings) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    flat = TrainSettings(steps=10, warmup=0, lr=1.0, min_lr_ratio=1.0)
    assert {lr_at(step, flat) for step in range(10)} == {1.0}
    assert lr_at(9, TrainSettings(steps=10, warmup=10, lr=1.0)) == 1.0


@pytest.mark.parametrize("changes", [{}, {"n_experts": 4, "d_ff": 32}], ids=["dense", "moe"])
def test_learning_happens(corpus, changes):
    settings = dataclasses.replace(SETTINGS, steps=80, eval_every=0)
    model, optimizer = build(settings, **changes)
    result = train(model, optimizer, corpus, settings)
    assert result.train_losses[0] == pytest.approx(math.log(32), abs=0.2)
    # The next token is certain given the last one, so the loss falls towards zero.
    assert result.final_validation_loss < 0.1
    assert result.seconds > 0


def test_result_and_reports(corpus):
    model, optimizer = build()
    reports = []
    result = train(model, optimizer, corpus, SETTINGS, on_step=reports.append)
    assert len(result.train_losses) == 12
    assert [step for step, _ in result.validation_losses] == [5, 10, 12]
    assert result.final_validation_loss == result.validation_losses[-1][1]
    batches = validation_batches(corpus.validation, 2, 4, 16)
    assert result.final_validation_loss == evaluate(model, batches)
    assert [report.step for report in reports] == list(range(12))
    assert [report.loss for report in reports] == result.train_losses
    assert [report.lr for report in reports] == [lr_at(step, SETTINGS) for step in range(12)]
    assert [report.step for report in reports if report.validation_loss is not None] == [4, 9, 11]
    assert all(report.grad_norm > 0 for report in reports)
    assert optimizer.param_groups[0]["lr"] == lr_at(11, SETTINGS)
    assert model.training


def test_resumed_run_is_the_uninterrupted_one(corpus):
    model, optimizer = build()
    whole = train(model, optimizer, corpus, SETTINGS)

    first, optimizer = build()
    begun = train(first, optimizer, corpus, SETTINGS, on_step=lambda report: report.step == 6)
    assert begun.validation_losses[-1][0] == 7  # an early end is evaluated too
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second, optimizer = build()
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.manual_seed(12345)  # whatever the global generator holds is of no consequence
    ended = train(second, optimizer, corpus, SETTINGS, start_step=7)

    assert begun.train_losses + ended.train_losses == whole.train_losses
    assert ended.final_validation_loss == whole.final_validation_loss
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True))


def test_nothing_left_to_do(corpus):
    model, optimizer = build()
    result = train(model, optimizer, corpus, SETTINGS, start_step=12)
    assert result.train_losses == [] and result.validation_losses[0][0] == 12


def test_clipping_is_optional(corpus):
    settings = dataclasses.replace(SETTINGS, grad_clip=None, steps=2)
    model, optimizer = build(settings)
    reports = []
    train(model, optimizer, corpus, settings, on_step=reports.append)
    assert [report.grad_norm for report in reports] == [None, None]
    clipped = dataclasses.replace(settings, grad_clip=1e-3)
    model, optimizer = build(clipped)
    norms = []

    def record(_):
        norms.append(torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))

    train(model, optimizer, corpus, clipped, on_step=record)
    assert all(norm.item() == pytest.approx(1e-3, rel=1e-2) for norm in norms) and len(norms) == 2


def test_evaluation_leaves_the_model_alone(corpus):
    model, _ = build(n_experts=4)
    batches = validation_batches(corpus.validation, 2, 4, 16)
    assert evaluate(model, batches) == evaluate(model.eval(), batches)
    assert not model.training  # whichever mode it was in
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"warmup": 2000}, "warmup=2000.*steps=1500"),
        ({"min_lr_ratio": 2.0}, r"min_lr_ratio=2\.0"),
        ({"eval_every": -1}, "eval_every=-1"),
        ({"grad_clip": 0.0}, r"grad_clip=0\.0.*None"),
    ],
)
def test_settings_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**changes)


def test_train_errors(corpus):
    model, optimizer = build()
    with pytest.raises(ValueError, match="start_step=13"):
        train(model, optimizer, corpus, SETTINGS, start_step=13)
    groups = [{"params": [model.head.weight], "lr": 1e-3}, {"params": [model.embed.weight], "lr": 1e-4}]
    with pytest.raises(ValueError, match=r"\[0.0001, 0.001\]"):
        train(model, torch.optim.AdamW(groups), corpus, SETTINGS)
