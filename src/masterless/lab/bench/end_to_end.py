"""A whole training step, forward and backward pass and optimizer, of a small GPT: every preset against torch's AdamW.

Contract:
    * All models compute in fp32 and start from the same numbers; they take turns, and the fastest repeat counts.
    * The baseline is the dense model under torch's fused AdamW, in the same run.
    * A preset is what `masterless.prepare` makes of the model by default: embedding and head stay dense.
    * The optimizer's part is a minimum of its own.
    * Decoded weights are not kept unless asked for; a row says how many bytes of them are.
    * Time is that on the clock, or the processor's: where others compute beside it, a step of a second is never alone,
      and only the time that it was given says something. Threads that wait for each other count, so that is for one.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import masterless as ml
from masterless.lab.bench.entries import ADAMW
from masterless.lab.models.gpt import GPT, GPTConfig
from masterless.tensor.cache import reserved_bytes

CONFIG = GPTConfig(vocab_size=1024, n_layer=4, n_head=6, d_model=384, seq_len=512)
TOKENS = (512, 4096)


@dataclass(frozen=True)
class Row:
    """One model at one number of tokens a step."""

    name: str
    parameters: int
    tokens: int
    threads: int
    milliseconds: float
    ratio: float
    step_milliseconds: float
    processor_time: bool
    decode_cache: int = 0


class _Training:
    """A model with its optimizer, and the best times so far."""

    def __init__(self, name: str, config: GPTConfig, clock: Callable[[], float], decode_cache: int) -> None:
        self.clock = clock
        self.name, self.model = name, GPT(config, torch.Generator().manual_seed(0))
        self.parameters = self.model.num_parameters()
        self.optimizer: torch.optim.Optimizer
        if name == ADAMW:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, weight_decay=0.1, fused=True)
        else:
            with warnings.catch_warnings():  # of presets that do not suit trained weights, which these are not
                warnings.simplefilter("ignore")
                self.optimizer = ml.prepare(self.model, name, lr=1e-4, weight_decay=0.1)
        if decode_cache and any(isinstance(p, ml.QuantizedTensor) for p in self.model.parameters()):
            ml.cache_decoded_(self.model, decode_cache)
        self.kept = reserved_bytes(self.model)
        self.best = self.best_step = math.inf

    def step(self, tokens: Tensor, counts: bool) -> None:
        """One training step; `counts` says whether its time does."""
        start = self.clock()
        _, loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        before = self.clock()
        self.optimizer.step()
        end = self.clock()
        self.optimizer.zero_grad(set_to_none=True)
        if counts:
            self.best = min(self.best, end - start)
            self.best_step = min(self.best_step, end - before)


def end_to_end(
    threads: int,
    repeats: int,
    config: GPTConfig = CONFIG,
    token_counts: Sequence[int] = TOKENS,
    processor_time: bool = False,
    decode_cache: int = 0,
    report: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Measures the dense model and every preset; `decode_cache` is a budget of `ml.cache_decoded_`, in bytes."""
    torch.set_num_threads(threads)
    clock = time.process_time if processor_time else time.perf_counter
    names = (ADAMW, *(name for name in ml.PRESETS if name != "fp32"))
    rows = []
    for count in token_counts:
        trainings = [_Training(name, config, clock, decode_cache) for name in names]
        generator = torch.Generator().manual_seed(1)
        length = min(count, config.seq_len)
        tokens = torch.randint(config.vocab_size, (-(-count // length), length + 1), generator=generator)
        for turn in range(repeats + 1):  # the first allocates
            for training in trainings:
                report(f"{count} tokens, turn {turn} of {repeats}: {training.name}")
                training.step(tokens, counts=turn > 0)
        baseline = trainings[0].best
        rows += [
            Row(
                name=t.name,
                parameters=t.parameters,
                tokens=count,
                threads=threads,
                milliseconds=t.best * 1e3,
                ratio=t.best / baseline,
                step_milliseconds=t.best_step * 1e3,
                processor_time=processor_time,
                decode_cache=t.kept,
            )
            for t in trainings
        ]
    return rows
