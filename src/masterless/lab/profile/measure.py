"""One training step under the eyes of a `Recorder`, beside what was predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from masterless.insight.memory import measure
from masterless.lab.profile.predict import Prediction, predict_step
from masterless.lab.profile.resident import Recorder, resident_bytes, return_freed_memory
from masterless.lab.train.build import build, build_corpus, build_stepper
from masterless.lab.train.config import RunConfig
from masterless.lab.train.corpus import batch
from masterless.optim.presets import prepare


@dataclass(frozen=True)
class Profile:
    """What was measured and predicted of a step.

    Attributes:
        base: bytes of the process before it has a model: Python, torch, the text.
        parameters: of the model.
        static: bytes of weights and states, measured on the live tensors.
        held: by how much resident memory has grown when weights and states are all there is.
        predicted: the prediction, without `base`.
        recorder: the phases ("load", "forward", "backward", "step"; the last of each counts) and the samples.
    """

    base: int
    parameters: int
    static: int
    held: int
    predicted: Prediction
    recorder: Recorder

    def peak(self, phase: str) -> int:
        """The measured peak of the last phase of this name."""
        return next(p.peak for p in reversed(self.recorder.phases) if p.name == phase)

    @property
    def measured(self) -> int:
        """The measured peak of the last step."""
        return max(self.peak(name) for name in ("forward", "backward", "step"))

    @property
    def expected(self) -> int:
        """The predicted peak, the process included."""
        return self.base + self.predicted.peak


def profile_step(config: RunConfig, steps: int = 2) -> Profile:
    """Builds what a configuration describes and takes a few steps; the first one also allocates the states."""
    return_freed_memory()
    corpus = build_corpus(config)
    _warm_up()
    base = resident_bytes()
    with Recorder(every=0.002) as recorder:
        with recorder.phase("load"):
            built = build(config, corpus)
        model, optimizer = built.model, built.optimizer
        tokens = config.batch * config.seq_len
        predicted = predict_step(model, optimizer, tokens, config.step_in_backward, config.accumulate)
        clip = config.clip or None
        stepper = build_stepper(config, model, optimizer)
        for part in range(steps * config.accumulate):
            inputs, targets = batch(corpus.train, config.seed, part, config.batch, config.seq_len)
            with recorder.phase("forward"):
                output = model(inputs, targets)
            with recorder.phase("backward"):
                (output[1] / config.accumulate).backward()
            del output
            if (part + 1) % config.accumulate:
                continue
            with recorder.phase("step"):
                if clip is not None and stepper is None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            optimizer.zero_grad()
        held = resident_bytes() - base
        if stepper is not None:
            stepper.remove()
    count = sum(p.numel() for p in model.parameters())
    static = sum(part.total for part in measure(optimizer).values())
    return Profile(base, count, static, held, predicted, recorder)


def _warm_up() -> None:
    """Lets torch make its threads and buffers, and load what it loads at the first product, backward pass and step."""
    layer = nn.Linear(512, 512)
    optimizer = prepare(layer)
    layer(torch.ones(512, 512)).square().sum().backward()
    optimizer.step()
