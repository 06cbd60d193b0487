"""A training loop short enough to read, shared by the benchmarks and the command line.

The learning rate, the batches, what the forward pass sees of the weights, when their momentum is traded and the points
of evaluation are functions of the step's number alone. A run that stops after k steps and resumes with
``start_step=k``, its model and optimizer restored, is therefore the uninterrupted run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from masterless.optim.trade import trade_momentum_
from masterless.tensor.hidden import show_hidden_bits_

from .corpus import Corpus, batch, validation_batches


@dataclass(frozen=True)
class TrainSettings:
    """Everything that defines a run besides the model, the optimizer's kind and the text.

    Attributes:
        steps: Number of optimizer steps.
        batch_size: Sequences per backward pass.
        seq_len: Tokens per sequence.
        lr: Peak learning rate.
        min_lr_ratio: Learning rate at the end, as a share of the peak.
        warmup: Steps of linear warm-up.
        weight_decay: For `optimizer_arguments`.
        betas: For `optimizer_arguments`.
        grad_clip: Largest norm of the gradient; ``None`` does not clip.
        seed: Seed of the batches.
        eval_every: Steps between evaluations; 0 evaluates only at the end.
        eval_batches: Validation batches per evaluation.
        accumulate: Backward passes per step; their mean gradient is used.
        show_hidden: Share of the steps in which the forward pass sees the hidden bits of weights such as int4+4.
        trade_last: Share of the steps, at the end, in which the momentum's bits are the weights'; 0 never trades.
        trade_for: The weights' format then; ``None`` has the bits of both.
    """

    steps: int = 1500
    batch_size: int = 4
    seq_len: int = 128
    lr: float = 2e-3
    min_lr_ratio: float = 0.1
    warmup: int = 50
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float | None = 1.0
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 16
    accumulate: int = 1
    show_hidden: float = 0.0
    trade_last: float = 0.0
    trade_for: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "eval_batches", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup={self.warmup}: must lie between 0 and steps={self.steps}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio={self.min_lr_ratio}: a share of the peak; must lie between 0 and 1")
        if not 0 <= self.show_hidden < 1:
            raise ValueError(f"show_hidden={self.show_hidden}: a share of the steps; must be at least 0 and below 1")
        if not 0 <= self.trade_last < 1:
            raise ValueError(f"trade_last={self.trade_last}: a share of the steps; must be at least 0 and below 1")
        if self.eval_every < 0:
            raise ValueError(f"eval_every={self.eval_every}: cannot be negative; pass 0 to evaluate only at the end")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ValueError(f"grad_clip={self.grad_clip}: must be positive; pass None not to clip")

    @property
    def first_traded_step(self) -> int | None:
        """The step, counted from 0, before which the momentum is traded for bits of the weights; None: never."""
        return math.ceil((1 - self.trade_last) * self.steps) if self.trade_last else None

    def optimizer_arguments(self) -> dict[str, Any]:
        """Return ``lr``, ``betas`` and ``weight_decay``, as any optimizer shaped like AdamW takes them."""
        return {"lr": self.lr, "betas": self.betas, "weight_decay": self.weight_decay}


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        step: The step's number, from 0.
        loss: Training loss before the update, in nats per token, auxiliary losses included.
        lr: Learning rate of the update.
        grad_norm: Norm of the gradient before clipping; ``None`` if the run does not clip.
        validation_loss: Validation loss after the update; ``None`` between evaluations.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    validation_loss: float | None


@dataclass
class TrainResult:
    """What a run did.

    Attributes:
        train_losses: Training loss of each step that was run, before its update.
        validation_losses: Pairs (steps completed, validation loss), the last one from the end of the run.
        seconds: Time spent in training steps; evaluation and callbacks are not counted.
    """

    train_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def final_validation_loss(self) -> float:
        """Validation loss at the end of the run."""
        return self.validation_losses[-1][1]


def lr_at(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises linearly to ``lr`` during the warm-up, then follows a cosine down to ``min_lr_ratio * lr``.

    >>> settings = TrainSettings(steps=100, warmup=10, lr=1.0, min_lr_ratio=0.0)
    >>> [round(lr_at(step, settings), 3) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = min(1.0, (step - settings.warmup) / max(1, settings.steps - settings.warmup))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


def show_hidden_bits_at(step: int, settings: TrainSettings, model: nn.Module) -> None:
    """Lets a step's forward pass, counted from 0, see what the schedule of hidden bits says."""
    if settings.show_hidden:
        show_hidden_bits_(model, step < settings.show_hidden * settings.steps)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss of the model over batches of equal size, in evaluation mode, without gradients."""
    was_training = model.training
    model.eval()
    try:
        losses = [float(model(inputs, targets)[1]) for inputs, targets in batches]
    finally:
        model.train(was_training)
    return sum(losses) / len(losses)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    settings: TrainSettings,
    on_step: Callable[[StepReport], bool | None] | None = None,
    start_step: int = 0,
) -> TrainResult:
    """Train a language model, and return its losses.

    A loss that becomes infinite or NaN does not end the run; it is in the result, where a benchmark wants it.

    Args:
        model: A module whose ``forward(inputs, targets)`` returns ``(logits, loss)``, such as
            `masterless.lab.models.GPT`.
        optimizer: Any torch optimizer. The learning rate of its groups is overwritten at each step.
        corpus: The text.
        settings: The run. ``weight_decay`` and ``betas`` are for building the optimizer, not read here.
        on_step: Called with a `StepReport` after each step; returning ``True`` ends the run there.
        start_step: Number of steps already done, for a resumed run.

    Raises:
        ValueError: The optimizer's groups have different learning rates, which one schedule would erase, or
            ``start_step`` is not a step of the run.
    """
    if len(rates := {float(group["lr"]) for group in optimizer.param_groups}) > 1:
        raise ValueError(
            f"learning rates {sorted(rates)}: one schedule would make them equal; give all groups the same"
        )
    if not 0 <= start_step <= settings.steps:
        raise ValueError(f"start_step={start_step}: must lie between 0 and steps={settings.steps}")

    device = next(model.parameters()).device
    tokens = corpus.train.to(device)
    held_out = validation_batches(
        corpus.validation.to(device), settings.eval_batches, settings.batch_size, settings.seq_len
    )
    result = TrainResult()
    done = start_step
    model.train()
    for step in range(start_step, settings.steps):
        started = time.perf_counter()
        lr = lr_at(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = lr
        show_hidden_bits_at(step, settings, model)
        if step == settings.first_traded_step:
            trade_momentum_(optimizer, settings.trade_for)  # type: ignore[arg-type]
        optimizer.zero_grad()
        losses = []
        for part in range(step * settings.accumulate, (step + 1) * settings.accumulate):
            inputs, targets = batch(tokens, settings.seed, part, settings.batch_size, settings.seq_len)
            _, loss = model(inputs, targets)
            (loss / settings.accumulate).backward()
            losses.append(loss.item())
        norm = None
        if settings.grad_clip is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip))
        optimizer.step()
        done = step + 1
        result.train_losses.append(sum(losses) / len(losses))
        result.seconds += time.perf_counter() - started

        validation_loss = None
        if done == settings.steps or (settings.eval_every and done % settings.eval_every == 0):
            validation_loss = evaluate(model, held_out)
            result.validation_losses.append((done, validation_loss))
        report = StepReport(step, result.train_losses[-1], lr, norm, validation_loss)
        if on_step is not None and on_step(report):
            break
    # A run that was ended early, or had nothing left to do, still reports where it stands.
    if not result.validation_losses or result.validation_losses[-1][0] != done:
        result.validation_losses.append((done, evaluate(model, held_out)))
    return result
