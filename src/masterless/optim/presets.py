"""Presets: points on the frontier of loss against bytes, named by what they really cost.

A preset is data: the format of the weights and the options of AdamW that go with it. The figures behind them are in
`docs/presets.md`; `masterless compare` measures them on your own data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from masterless.insight.memory import predict
from masterless.optim import AdamW
from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor


@dataclass(frozen=True)
class Preset:
    """A named choice of formats and the options that go with them.

    Attributes:
        name: what to ask for.
        weights: format of the inner matrices; None leaves them as they are.
        options: keyword arguments of `masterless.AdamW`.
        summary: one line for tables.
    """

    name: str
    weights: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""

    @property
    def bytes_per_parameter(self) -> float:
        """Weight and states of a large matrix, metadata included."""
        return predict(
            (4096, 4096), self.weights or "fp32", self.options["exp_avg"], self.options["exp_avg_sq"]
        ).per_parameter


def _preset(name: str, weights: str | None, summary: str, **options: Any) -> Preset:
    return Preset(name, weights, MappingProxyType(options), summary)


PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        _preset("fp32", None, "torch's AdamW", exp_avg="fp32", exp_avg_sq="fp32", betas=(0.9, 0.95)),
        _preset(
            "states-8bit", None, "fp32 weights, 8-bit states", exp_avg="int8", exp_avg_sq="log8", betas=(0.9, 0.95)
        ),
        _preset(
            "1-byte",
            "int8",
            "INT8 weights, no first moment, factored second",
            exp_avg="none",
            exp_avg_sq="factored",
            betas=(0.0, 0.95),
            error_compensation=False,
        ),
        _preset(
            "1-byte-int4",
            "int4",
            "INT4 weights, 4-bit first moment, factored second",
            exp_avg="int4",
            exp_avg_sq="factored",
            betas=(0.35, 0.95),
            weight_rounding="nearest",
        ),
        # Two bits of momentum are too coarse to carry the weights' residue as well: it is dropped.
        _preset(
            "1.3-byte",
            "int8",
            "INT8 weights, 2-bit first moment, factored second",
            exp_avg="int2",
            exp_avg_sq="factored",
            betas=(0.527, 0.95),
            error_compensation=False,
        ),
        _preset(
            "1.3-byte-int4",
            "int4+4",
            "INT4 in the forward pass, 4 hidden bits, 2-bit first moment, factored second",
            exp_avg="int2",
            exp_avg_sq="factored",
            betas=(0.527, 0.95),
            error_compensation=False,
        ),
        _preset(
            "1.8-byte",
            "fp8",
            "FP8 weights, 4-bit first moment, 2-bit second",
            exp_avg="int4",
            exp_avg_sq="log2",
            betas=(0.82, 0.95),
        ),
        _preset(
            "1.8-byte-int4",
            "int4+4",
            "INT4 in the forward pass, 4 hidden bits, 4-bit first moment, 2-bit second",
            exp_avg="int4",
            exp_avg_sq="log2",
            betas=(0.82, 0.95),
        ),
        _preset(
            "2.3-byte",
            "int8",
            "INT8 weights, 8-bit first moment, 2-bit second",
            exp_avg="int8",
            exp_avg_sq="log2",
            betas=(0.82, 0.95),
        ),
    )
}


def get_preset(name: str) -> Preset:
    """The preset of this name, or an error that lists them."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def prepare(model: nn.Module, preset: str = "1.8-byte", lr: float | Tensor = 1e-3, **overrides: Any) -> AdamW:
    """Applies a preset to a model and returns the optimizer.

    Quantizes the model's inner matrices in place (unless they are quantized already) and builds AdamW over its named
    parameters with the preset's options.

    Args:
        model: any module.
        preset: a name of `PRESETS`.
        lr: learning rate.
        **overrides: any argument of `AdamW`, in place of the preset's.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> opt = prepare(model, preset="1.3-byte", lr=3e-4, weight_decay=0.1)
    """
    chosen = get_preset(preset)
    already = any(isinstance(p, QuantizedTensor) for p in model.parameters())
    if chosen.weights is not None and not already:
        quantize_(model, chosen.weights)
    return AdamW(model.named_parameters(), lr=lr, **{**chosen.options, **overrides})
