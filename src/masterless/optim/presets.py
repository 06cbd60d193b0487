"""Presets: points on the frontier of loss against bytes, named by what they really cost.

A preset is data: the format of the weights and the options of AdamW that go with it. The figures behind them are in
`docs/presets.md`; `masterless compare` measures them on your own data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from masterless.formats import as_first_moment, as_second_moment, parse
from masterless.formats.storage import predicted_bytes
from masterless.optim import AdamW, LossyUpdateWarning
from masterless.tensor.quantize import QuantizationReport, quantize_
from masterless.tensor.quantized import QuantizedTensor, as_weight, local_of
from masterless.tensor.selection import vocabulary_parameters

VOCABULARY_WEIGHTS = "int8"
TRADED_WEIGHTS = "int8"  # what needs no INT4 stage for weights that are trained already
LARGE_STEP = 4096  # tokens: presets were measured with 2048 per step and with 8192


@dataclass(frozen=True)
class Preset:
    """A named choice of formats and the options that go with them.

    Attributes:
        name: what to ask for.
        weights: format of the inner matrices; None leaves them as they are.
        options: keyword arguments of `masterless.AdamW`.
        summary: one line for tables.
        pretrained: options that differ for trained weights.
        large_steps: options that differ with `LARGE_STEP` tokens per step and more.
        trade_last: the share of a run, at its end, that is meant to be trained after `trade_momentum_`; 0: none.
        trade_for: the weights' format then.
    """

    name: str
    weights: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    trade_last: float = 0.0
    trade_for: str | None = None
    large_steps: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocabulary(self) -> str | None:
        """Format of embeddings and output heads where a preset is for the whole model; None leaves them dense."""
        return None if self.weights is None else VOCABULARY_WEIGHTS

    @property
    def vocabulary_options(self) -> dict[str, Any]:
        """What differs for the group of embeddings and output heads of a whole model.

        Row and column means say little of a table whose rows are mostly not in the batch, and they would keep it from
        being stepped slice by slice: 4-bit codes take the place of a factored second moment.
        """
        return {"exp_avg_sq": "log4"} if self.options["exp_avg_sq"] == "factored" else {}

    @property
    def traded(self) -> Preset:
        """What it becomes when its momentum is traded for bits of the weights; itself if that is not meant."""
        if self.trade_for is None:
            return self
        options = {key: value for key, value in self.options.items() if key != "weight_rounding"}
        options |= {"exp_avg": "none", "betas": (0.0, self.options["betas"][1])}
        return replace(self, weights=self.trade_for, options=options, pretrained={}, trade_last=0.0, trade_for=None)

    def for_trained_weights(self) -> Preset:
        """What it is for weights that are trained already; what it would become late in a run, it is at once."""
        if self.trade_for == TRADED_WEIGHTS:
            return self.traded
        return replace(self, options={**self.options, **self.pretrained}, pretrained={})

    def for_steps_of(self, tokens: int | None) -> Preset:
        """What it is for steps of so many tokens: the less noise in a gradient, the longer a momentum should be."""
        if tokens is None or tokens < LARGE_STEP:
            return self
        return replace(self, options={**self.options, **self.large_steps}, large_steps={})

    @property
    def bytes_per_parameter(self) -> float:
        """Weight and states of a large matrix, metadata included."""
        shape = (4096, 4096)
        formats = [
            as_weight(self.weights) if self.weights else parse("fp32"),
            as_first_moment(self.options["exp_avg"]),
            as_second_moment(self.options["exp_avg_sq"]),
        ]
        return sum(predicted_bytes(fmt, shape) for fmt in formats) / math.prod(shape)


def _preset(
    name: str,
    weights: str | None,
    summary: str,
    trade_last: float = 0.0,
    trade_for: str | None = None,
    large_steps: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Preset:
    # At learning rates of fine-tuning, far below a quantum, weights that are rounded to nearest hardly move.
    pretrained = {"weight_rounding": "stochastic"} if options.get("weight_rounding") == "nearest" else {}
    frozen = MappingProxyType(options), summary, MappingProxyType(pretrained)
    return Preset(name, weights, *frozen, trade_last, trade_for, large_steps)


# Measured with 8192 tokens per step for the presets that have it (docs/recipes.md).
_LONGER_MOMENTUM = MappingProxyType({"betas": (0.8, 0.95)})

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        _preset("fp32", None, "torch's AdamW", exp_avg="fp32", exp_avg_sq="fp32", betas=(0.9, 0.95)),
        _preset(
            "states-8bit", None, "fp32 weights, 8-bit states", exp_avg="int8", exp_avg_sq="log8", betas=(0.9, 0.95)
        ),
        # Two bits of momentum are too coarse to carry the weights' residue as well: it is dropped.
        _preset(
            "1-byte",
            "int6",
            "INT6 weights, 2-bit first moment, factored second",
            exp_avg="int2",
            exp_avg_sq="factored",
            betas=(0.53, 0.95),
            error_compensation=False,
        ),
        # INT4 and INT6 to nearest: the error, which is injected, is half as large as under stochastic rounding, and so
        # is the quantum of the momentum that has to hold it. When the learning rate has fallen so far that the momentum
        # holds hardly more than rounding errors, its bits go to the weights (`trade_momentum_`).
        _preset(
            "1-byte-int4",
            "int4",
            "INT4 weights, 4-bit first moment (at the end four hidden bits instead), factored second",
            trade_last=0.15,
            trade_for="int4+4",
            exp_avg="int4",
            exp_avg_sq="factored",
            betas=(0.8, 0.95),
            weight_rounding="nearest",
        ),
        _preset(
            "1-byte-int8",
            "int4",
            "INT4 weights, 4-bit first moment (at the end INT8 weights, no first), factored second",
            trade_last=0.15,
            trade_for=TRADED_WEIGHTS,
            exp_avg="int4",
            exp_avg_sq="factored",
            betas=(0.8, 0.95),
            weight_rounding="nearest",
        ),
        _preset(
            "1.3-byte",
            "int6",
            "INT6 weights, 4-bit first moment, factored second",
            large_steps=_LONGER_MOMENTUM,
            exp_avg="int4",
            exp_avg_sq="factored",
            betas=(0.7, 0.95),
            weight_rounding="nearest",
        ),
        _preset(
            "1.6-byte",
            "int6",
            "INT6 weights, 4-bit first moment, 2-bit second",
            large_steps=_LONGER_MOMENTUM,
            exp_avg="int4",
            exp_avg_sq="log2",
            betas=(0.7, 0.95),
            weight_rounding="nearest",
        ),
        _preset(
            "1.8-byte",
            "int8",
            "INT8 weights, 4-bit first moment, 2-bit second",
            large_steps=_LONGER_MOMENTUM,
            exp_avg="int4",
            exp_avg_sq="log2",
            betas=(0.7, 0.95),
        ),
        # The one to start with; what it costs against fp32 is in docs/presets.md. Rounding a 4-bit momentum shakes the
        # weights by beta1 / (1 - beta1) of its quantum: 2.3 at 0.7, 9 at 0.9.
        _preset(
            "2-byte",
            "int8",
            "INT8 weights, 4-bit first moment, 4-bit second",
            large_steps=_LONGER_MOMENTUM,
            exp_avg="int4",
            exp_avg_sq="log4",
            betas=(0.7, 0.95),
        ),
        _preset(
            "2-byte-int4",
            "int4+4",
            "INT4 in the forward pass, 4 hidden bits, 4-bit first moment, 4-bit second",
            exp_avg="int4",
            exp_avg_sq="log4",
            betas=(0.7, 0.95),
        ),
        # INT4 in groups of 32 is the grid of served INT4 checkpoints (Kimi-K2-Thinking's, GGUF's Q4_0): nothing is
        # rounded on the way out.
        _preset(
            "2.1-byte-int4-32",
            "int4+4:32",
            "INT4 in groups of 32 in the forward pass, 4 hidden bits, 4-bit first moment, 4-bit second",
            exp_avg="int4",
            exp_avg_sq="log4",
            betas=(0.7, 0.95),
        ),
    )
}


def get_preset(name: str) -> Preset:
    """The preset of this name, or an error that lists them."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def prepare(
    model: nn.Module,
    preset: str = "2-byte",
    lr: float | Tensor = 1e-3,
    *,
    whole_model: bool = False,
    pretrained: bool | None = None,
    tokens_per_step: int | None = None,
    **overrides: Any,
) -> AdamW:
    """Applies a preset to a model and returns the optimizer.

    Quantizes the model's inner matrices in place and builds AdamW over its named parameters with the preset's options.
    Vectors (biases and norms) are in a group without weight decay. A model that is quantized already stays as it is if
    it has the preset's format. What cannot be honoured is refused before anything is changed. A preset with a
    ``trade_last`` ("1-byte-int8", "1-byte-int4") wants ``trade_momentum_(optimizer, preset.trade_for)`` when that share
    of the steps is left.

    Args:
        model: any module, in float32 or bfloat16.
        preset: a name of `PRESETS`.
        lr: learning rate.
        whole_model: also quantize embeddings and output heads (INT8), whatever the format of the matrices; their second
            moment is 4-bit where the preset's is factored.
        pretrained: whether the weights are trained, for which some presets differ
            (``PRESETS[name].for_trained_weights()``). None asks the model: one of transformers that has a
            ``name_or_path`` is taken for pretrained, and a warning says what that changes.
        tokens_per_step: how many tokens the gradient of a step is of, over all batches and ranks. With 4096 and more
            some presets have a longer momentum (``PRESETS[name].for_steps_of(tokens)``); None takes them as they are.
        **overrides: any argument of `AdamW`, in place of the preset's.

    Returns:
        The optimizer. Its attribute ``quantization_report`` says what was quantized, what was left and why: print it.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> opt = prepare(model, preset="1.3-byte", lr=3e-4, weight_decay=0.1)
    >>> [d.name for d in opt.quantization_report.quantized]
    ['0.weight', '2.weight']
    """
    if tokens_per_step is not None and (not isinstance(tokens_per_step, int) or tokens_per_step < 1):
        raise ValueError(
            f"tokens_per_step={tokens_per_step!r}: is no number of tokens; pass sequences * their length, over all "
            f"batches and ranks of a step, or None (nothing was changed)"
        )
    usual = get_preset(preset).for_steps_of(tokens_per_step)
    source = getattr(getattr(model, "config", None), "name_or_path", "") if pretrained is None else ""
    chosen = _variant(usual, model, bool(pretrained or source))
    options = {**chosen.options, **overrides}
    changes = {key: value for key, value in chosen.options.items() if usual.options.get(key) != value}
    _refuse_dtypes(model)
    _refuse_other_formats(model, chosen, whole_model)
    _rehearse(chosen, lr, options)
    if source and not changes.keys() <= overrides.keys():
        said = ", ".join(f"{key}={options[key]!r}" for key in changes)
        said += f" and {chosen.weights} weights" if chosen.weights != usual.weights else ""
        warnings.warn(
            f"this model comes from {source!r}, so preset {preset!r} is taken with {said}, as suits trained weights; "
            f"pass pretrained=True to say so yourself, or pretrained=False to train from scratch",
            stacklevel=2,
        )
    if pretrained or source:
        _warn_of_jump(model, chosen, source or "a pretrained model")
    report = QuantizationReport()
    already = any(isinstance(local_of(p), QuantizedTensor) for p in model.parameters())
    if chosen.weights is not None and not already:
        report = quantize_(model, chosen.weights, vocabulary=chosen.vocabulary if whole_model else None)
    # A trade ends the momentum of the group with the inner matrices only.
    kept = {} if chosen.weights == usual.weights else {k: usual.options[k] for k in ("exp_avg", "betas")}
    kept = {key: value for key, value in kept.items() if key not in overrides}
    groups = decay_groups(model, {**chosen.vocabulary_options, **overrides} if whole_model else None, kept)
    optimizer = AdamW(groups, lr=lr, **options)
    optimizer.quantization_report = report  # type: ignore[attr-defined]
    return optimizer


def _variant(preset: Preset, model: nn.Module, trained: bool) -> Preset:
    """The preset as it is for this model: of one that is to be traded, what is stored says whether that was done."""
    stored = {str(q.format) for p in model.parameters() if isinstance(q := local_of(p), QuantizedTensor)}
    if preset.weights is not None and preset.trade_for is not None and stored:
        early, late = (str(as_weight(format)) in stored for format in (preset.weights, preset.trade_for))
        return preset.traded if late and not early else preset
    return preset.for_trained_weights() if trained else preset


def decay_groups(
    model: nn.Module, vocabulary: Mapping[str, Any] | None = None, others: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Named parameters in groups: matrices, and vectors (biases, norms) without weight decay.

    With options for them, quantized embeddings and heads are a third group; `others` are options of all groups but the
    matrices'.
    """
    named = list(model.named_parameters())
    apart = set() if vocabulary is None else vocabulary_parameters(model)
    tables = [(name, p) for name, p in named if id(p) in apart and isinstance(p, QuantizedTensor)]
    known = {name for name, _ in tables}
    matrices = [(name, p) for name, p in named if p.dim() > 1 and name not in known]
    vectors = [(name, p) for name, p in named if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": tables, **others, **_group_options(vocabulary or {})},
        {"params": vectors, **others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _group_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("foreach", "fused")}


def _refuse_dtypes(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype.is_floating_point and p.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"parameter {name!r} is {p.dtype}: masterless trains float32 and bfloat16 parameters and what is "
                f"quantized from them; convert the model first with .float() or .bfloat16() (nothing was changed)"
            )


def _refuse_other_formats(model: nn.Module, preset: Preset, whole_model: bool) -> None:
    tables = vocabulary_parameters(model) if whole_model and preset.vocabulary else set()
    for name, whole in model.named_parameters():
        p = local_of(whole)
        format = preset.vocabulary if id(whole) in tables else preset.weights
        wanted = None if format is None else as_weight(format)
        if isinstance(p, QuantizedTensor) and p.format != wanted:
            raise ValueError(
                f"parameter {name!r} is already stored as '{p.format}' and preset {preset.name!r} is for "
                f"{f'{wanted}' if wanted else 'dense weights'!r}; take a preset of its format, call dequantize_(model) "
                f"first (which rounds anew), or build AdamW(model.named_parameters(), **PRESETS[{preset.name!r}]"
                f".options) to mean it"
            )


def _warn_of_jump(model: nn.Module, preset: Preset, source: str) -> None:
    """Warns where rounding trained weights would cost more than training gives back."""
    dense = not any(isinstance(local_of(p), QuantizedTensor) for p in model.parameters())
    if dense and preset.weights is not None and as_weight(preset.weights).bits <= 4:
        warnings.warn(
            f"preset {preset.name!r} rounds the trained weights of {source!r} to 4 bits, to nearest, which costs a "
            f"language model tenths of a nat before the first step; call calibrate_(model, batches, "
            f"{preset.weights!r}) before prepare",
            LossyUpdateWarning,
            stacklevel=3,
        )


def _rehearse(preset: Preset, lr: float | Tensor, options: Mapping[str, Any]) -> None:
    """Builds the optimizer for one small parameter, so that wrong options are refused before a model is changed."""
    dense = torch.zeros(32, 32)
    p = nn.Parameter(dense if preset.weights is None else QuantizedTensor.from_dense(dense, preset.weights))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real one will say it
        AdamW([("rehearsal", p)], lr=lr, **options)
