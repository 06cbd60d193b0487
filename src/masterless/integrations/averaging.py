"""Averages of a quantized model's weights (SWA, EMA) that really move.

An average moves by a small part of the difference at every update: 0.001 of it for a decay of 0.999. On a grid of few
bits rounding to nearest loses all of that, which is why `torch.optim.swa_utils.AveragedModel` over a quantized model is
refused. Rounding at random does not help: its noise adds up to ``1 / sqrt(12 (1 - decay))`` quanta, 9 for 0.999. So the
average is kept in fp32, outside of the model, on a device of your choice.

Contract:
    * `AveragedModel` is torch's, with its arguments; its module is dense fp32.
    * What is averaged is what the optimizer holds: hidden bits count.
    * Parameters are decoded one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from masterless.tensor.quantize import dequantize_, quantize_
from masterless.tensor.quantized import QuantizedTensor


class AveragedModel(swa_utils.AveragedModel):
    """`torch.optim.swa_utils.AveragedModel` for a model with quantized parameters: the average is dense fp32.

    Args:
        model: the model that trains.
        device: of the average; the model's by default.
        avg_fn: ``avg_fn(average, value, count)`` gives the next average; None is the plain mean (SWA).
        multi_avg_fn: as `avg_fn` over lists and in place, for instance `swa_utils.get_ema_multi_avg_fn(0.999)`.
        use_buffers: average buffers, too.

    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> report = quantize_(model, "int4")
    >>> ema = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
    >>> ema.update_parameters(model)
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[..., None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)  # type: ignore[arg-type]
        self.formats = {name: str(p.format) for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
        held = [_value(p) if isinstance(p, QuantizedTensor) else None for p in self.module.parameters()]
        dequantize_(self.module).float()  # all of it: bf16 could not hold an average either
        with torch.no_grad():
            for p, value in zip(self.module.parameters(), held, strict=True):
                if value is not None:
                    p.data = value

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Takes the model's present weights into the average."""
        own, new = _averaged(self.module, self.use_buffers), _averaged(model, self.use_buffers)
        count = self.n_averaged.to(next(iter(self.module.parameters())).device)
        for average, current in zip(own, new, strict=True):
            value = _value(current).to(average.device)
            if int(self.n_averaged) == 0 or not average.dtype.is_floating_point:
                average.copy_(value)
            elif self.multi_avg_fn is not None:
                self.multi_avg_fn([average], [value.to(average.dtype)], count)
            else:
                step = self.avg_fn or swa_utils.get_swa_avg_fn()
                average.copy_(step(average, value, count))
        if not self.use_buffers:
            for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
                mine.copy_(theirs)
        self.n_averaged += 1

    def quantized(self) -> nn.Module:
        """A copy of the averaged model in the formats of the trained one: rounded to nearest, once."""
        model = copy.deepcopy(self.module)
        if self.formats:
            quantize_(model, rules={**{_literal(name): f for name, f in self.formats.items()}, "*": None})
        return model


def _averaged(model: nn.Module, use_buffers: bool) -> list[Tensor]:
    tensors: Any = chain(model.parameters(), model.buffers()) if use_buffers else model.parameters()
    return [tensor.detach() for tensor in tensors]


def _value(p: Tensor) -> Tensor:
    """What a parameter stands for, hidden bits included: fp32 if it is quantized."""
    return p.stored.decode() if isinstance(p, QuantizedTensor) else p.detach()


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
