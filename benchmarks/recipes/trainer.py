"""One run: a byte-level GPT trained by the library's AdamW, one thread, the same arithmetic for every recipe.

Contract (`recipe.REGIME` names it):
    * Warm-up over a tenth of the steps (72 at least, a fifth at most), then linear or cosine to zero;
      weight decay 0.1; gradients clipped to norm 1.
    * The forward and backward pass run on a dense, compiled twin of the model. After each step the twin takes over what
      the stored weights decode to, and its gradients are handed to the stored weights: what the library's own
      forward pass computes, but compiled once for all recipes and with one path through the matrix library.
    * A run that is killed goes on from its last checkpoint, to the bit.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import masterless as ml
from masterless.lab.models import GPT

from .recipe import BETA2, SEQ_LEN, Job, Setting
from .texts import CACHE, Text, load
from .trials import TRIALS, Trial

WARMUP, LEAST_WARMUP, MOST_WARMUP = 0.1, 72, 0.2
WEIGHT_DECAY = 0.1
CLIP = 1.0
EVAL_BATCH = 64
CHECKPOINT_SECONDS = 120.0


def lr_factor(step: int, steps: int, schedule: str) -> float:
    """The learning rate of a step as a share of its peak."""
    warmup = max(1, round(max(WARMUP * steps, min(LEAST_WARMUP, MOST_WARMUP * steps))))
    if step < warmup:
        return (step + 1) / warmup
    done = (step + 1 - warmup) / (steps + 1 - warmup)
    return 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done


@dataclass
class Twin:
    """A dense model of one shape with its compiled loss; lives as long as its process and serves many runs."""

    model: GPT
    loss: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, setting: Setting, compiled: bool) -> Twin:
        """A twin for this setting's shape."""
        model = GPT(setting.model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return model(x, y)[1]  # type: ignore[return-value]

        return cls(model, torch.compile(loss, dynamic=False) if compiled else loss)

    @torch.no_grad()
    def take(self, stored: nn.Module, visible: bool = True, trials: Mapping[nn.Parameter, Trial] = {}) -> None:
        """Takes over what the stored weights decode to, hidden bits left out or not."""
        for own, p in zip(self.model.parameters(), stored.parameters(), strict=True):
            dense = p.detach()
            if isinstance(dense, ml.QuantizedTensor):
                dense = dense.dequantize() if visible else dense.stored.decode()
            own.copy_(trials[p].shown(dense) if p in trials else dense)

    def give(self, stored: nn.Module, trials: Mapping[nn.Parameter, Trial] = {}) -> None:
        """Hands the gradients over to the stored weights."""
        for own, p in zip(self.model.parameters(), stored.parameters(), strict=True):
            p.grad, own.grad = own.grad, None
            if p in trials and p.grad is not None:
                p.grad = trials[p].gradient(p.grad)


_TWINS: dict[tuple[Any, ...], Twin] = {}


def twin_for(setting: Setting, compiled: bool) -> Twin:
    """The twin of this process for a shape."""
    key = (setting.size, setting.batch_tokens, compiled)
    if key not in _TWINS:
        _TWINS[key] = Twin.of(setting, compiled)
    return _TWINS[key]


@torch.no_grad()
def evaluate(twin: Twin, text: Text, windows: int | None = None) -> float:
    """Mean loss on the held-out windows."""
    batches = text.validation_batches(EVAL_BATCH, windows) if windows else text.validation_batches(EVAL_BATCH)
    total = sum(float(twin.loss(x, y)) * len(x) for x, y in batches)
    return total / sum(len(x) for x, _ in batches)


@contextmanager
def _quietly() -> Iterator[None]:
    """Baselines that lose what rounding drops are meant here; the library warns of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(
    job: Job,
    *,
    compiled: bool = True,
    checkpoints: Path | None = CACHE,
    progress: Callable[[int, int], None] | None = None,
    windows: int | None = None,
) -> dict[str, Any]:
    """Runs a job.

    Args:
        job: the run.
        compiled: compile the twin (slow to start, then 1.3 to 1.7 times as fast).
        checkpoints: folder for the state of a long run; None keeps none.
        progress: called with the step and the number of steps.
        windows: validation windows, if fewer than all.

    Returns:
        The row: the job's description and key, validation loss (None: diverged), tokens a second, and so on.
    """
    with _quietly():
        run = _Run(job, compiled, checkpoints)
        return run.go(progress, windows)


def optimizers(job: Job, model: nn.Module) -> list[ml.optim.LowBitOptimizer]:
    """What steps the model: one optimizer, or Muon and, at the same learning rate, fp32 AdamW for the rest."""
    options: dict[str, Any] = {
        "lr": job.lr,
        "weight_decay": WEIGHT_DECAY,
        "seed": job.seed if job.dither is None else job.dither,
    }
    chosen = {**options, **job.recipe.options}
    if job.recipe.optimizer != "muon":
        return [
            getattr(ml, {"adamw": "AdamW", "lion": "Lion"}[job.recipe.optimizer])(model.named_parameters(), **chosen)
        ]
    inner, rest = ml.muon_groups(model)
    # An update of AdamW's size, so that the two can share a learning rate; products in fp32, for the CPU's sake.
    muon = ml.Muon(inner, adjust_lr_fn="match_rms_adamw", ns_dtype="fp32", **chosen)
    return [muon, ml.AdamW(rest, betas=(0.9, BETA2), exp_avg="fp32", exp_avg_sq="fp32", **options)]


class _Run:
    """A run under way."""

    def __init__(self, job: Job, compiled: bool, checkpoints: Path | None) -> None:
        self.job, self.setting = job, job.setting
        self.twin = twin_for(job.setting, compiled)
        self.text = load(job.setting.corpus)
        self.model = GPT(job.setting.model, torch.Generator().manual_seed(job.seed))
        if job.recipe.weights is not None:
            ml.quantize_(self.model, job.recipe.weights)
        self.trials = self._trials()
        self.optimizers = optimizers(job, self.model)
        self.path = None if checkpoints is None else checkpoints / f"{job.key}.pt"
        self.step, self.seconds, self.train_loss, self.traded = 0, 0.0, 0.0, False
        self.curve: list[float] = []  # training loss, the mean of each twentieth of the run

    def _trials(self) -> dict[nn.Parameter, Trial]:
        if not self.job.recipe.trial:
            return {}
        trial, (inner, _) = TRIALS[self.job.recipe.trial], ml.muon_groups(self.model)
        found = {p: trial for _, p in inner[0]["params"]}
        for p in found:
            p.data.copy_(trial.start(p.data))
        return found

    @torch.no_grad()
    def _take_a_step(self) -> None:
        states = self.optimizers[0].state
        forgetful = [p for p, trial in self.trials.items() if not trial.stores_second(self.step, self.setting.steps)]
        before = {p: states[p]["exp_avg_sq"].clone() for p in forgetful}
        for optimizer in self.optimizers:
            optimizer.step()
        for p, v in before.items():
            states[p]["exp_avg_sq"].copy_(v)
        for p, trial in self.trials.items():
            if trial.after is not None:
                trial.after(p.data, states[p], self.job.recipe.beta1, self.step)

    def go(self, progress: Callable[[int, int], None] | None, windows: int | None) -> dict[str, Any]:
        self._resume()
        first, began, cpu = self.step, time.perf_counter(), time.process_time()
        loss: float | None = None
        try:
            self._train(progress)
            self.twin.take(self.model, trials=self.trials)
            loss = evaluate(self.twin, self.text, windows)
        except ml.NonFiniteGradientError:
            pass
        seconds = self.seconds + time.perf_counter() - began
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        tokens = (self.step - first) * self.setting.batch_tokens
        return {
            "key": self.job.key,
            "label": self.job.recipe.label,
            **self.job.described(),
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "steps": self.setting.steps,
            "bytes_per_parameter": round(self.job.recipe.bytes_per_parameter, 4),
            "text": self.text.fingerprint,
            "seconds": round(seconds, 1),
            # A second of the processor, not of the clock: others use this machine, too.
            "tokens_per_second": round(tokens / max(1e-9, time.process_time() - cpu)),
            "curve": [round(x, 4) for x in self.curve],
            "version": ml.__version__,
            "torch": torch.__version__,
        }

    def _train(self, progress: Callable[[int, int], None] | None) -> None:
        setting, steps = self.setting, self.setting.steps
        batch = self.text.order(
            self.job.seed if self.job.order is None else self.job.order, setting.batch_tokens // SEQ_LEN
        )
        part = max(1, steps // 20)
        parameters = list(self.twin.model.parameters())
        self._take()
        saved = began = time.perf_counter()
        while self.step < steps:
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"] = self.job.lr * lr_factor(self.step, steps, setting.schedule)
            loss = self.twin.loss(*batch(self.step))
            loss.backward()
            if not math.isfinite(value := float(loss)):
                raise ml.NonFiniteGradientError("the loss is not finite")
            nn.utils.clip_grad_norm_(parameters, CLIP)
            self.twin.give(self.model, self.trials)
            self._take_a_step()
            self.step += 1
            self._take()
            self.train_loss += value / part
            if self.step % part == 0:
                self.curve.append(self.train_loss)
                self.train_loss = 0.0
            if progress is not None and self.step % 20 == 0:
                progress(self.step, steps)
            now = time.perf_counter()
            if self.path is not None and now - saved > CHECKPOINT_SECONDS:
                self._save(self.seconds + now - began)
                saved = now

    def _take(self) -> None:
        last = self.job.recipe.traded_last
        if last and not self.traded and self.step >= (1 - last) * self.setting.steps:
            ml.trade_momentum_(self.optimizers[0], self.job.recipe.traded_for)  # type: ignore[arg-type]
            self.traded = True
        self.twin.take(
            self.model, visible=self.step >= self.job.recipe.coarse_from * self.setting.steps, trials=self.trials
        )

    def _save(self, seconds: float) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": seconds,
            "curve": self.curve,
            "train_loss": self.train_loss,
            "traded": self.traded,
        }
        unfinished = self.path.with_suffix(f".{os.getpid()}")
        torch.save(state, unfinished)
        unfinished.replace(self.path)

    def _resume(self) -> None:
        if self.path is None or not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        if state.get("traded"):
            ml.trade_momentum_(self.optimizers[0], self.job.recipe.traded_for)  # type: ignore[arg-type]
            self.traded = True
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]
        self.curve, self.train_loss = state["curve"], state["train_loss"]
