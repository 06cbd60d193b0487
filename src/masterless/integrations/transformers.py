"""masterless in transformers: quantize while loading, save, reload and resume to the bit.

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=MasterlessConfig("int8"))
    trainer = Trainer(model, args, ..., optimizer_cls_and_kwargs=(PresetOptimizer, {"preset": "2-byte", "lr": 1e-4}))

Importing this module registers the quantization method "masterless" with transformers.

Contract:
    * `from_pretrained` turns each tensor into codes as it is read: the dense model never exists whole. Chosen is
      what `quantize_` would quantize; the config takes its `include`, `exclude` and `rules`.
    * `save_pretrained` writes the stored tensors and their formats under the names that the model has in memory, and
      `from_pretrained` of that folder gives the same bytes, hidden bits included; nothing is encoded anew.
    * A model that `quantize_` or `prepare` has quantized is saved likewise.
    * A folder of a quantized model that is loaded without this module is an error of transformers (size mismatch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        f"masterless.integrations.transformers needs transformers 5 (tested with 5.22.2): pip install "
        f"'masterless[hf]' ({error})"
    ) from error

from masterless import __version__
from masterless.formats import Format
from masterless.optim.adam import AdamW
from masterless.optim.presets import prepare
from masterless.tensor import state
from masterless.tensor.mapped import unmap_
from masterless.tensor.quantize import dequantize_
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.selection import Selection, owned_parameters

METHOD = "masterless"


@register_quantization_config(METHOD)
class MasterlessConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantizes a model: the arguments of `quantize_`.

    Args:
        format: of the quantized parameters: "int4", "int8", "fp8", "int4+4", ...
        include: also quantize these: patterns of parameter names.
        exclude: leave these alone; wins over `include`.
        rules: from patterns to formats (None: leave alone); the first that matches decides, before everything else.
        **written: what `save_pretrained` has added when it wrote the config.
    """

    def __init__(
        self,
        format: str = "int4",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        rules: Mapping[str, str | None] | None = None,
        **written: Any,
    ) -> None:
        unknown = set(written) - {"quant_method", "version"}
        if unknown:
            raise ValueError(
                f"MasterlessConfig has no option {sorted(unknown)[0]!r}; it takes format, include, exclude and rules"
            )
        for name, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(
                    f"{name}={patterns!r}: the config is written to JSON, so it takes a list of name patterns, for "
                    f"instance ['*.embed_tokens.*']"
                )
        self.quant_method: Any = METHOD
        self.format = str(format)
        self.include, self.exclude = list(include), list(exclude)
        self.rules = dict(rules or {})
        self.version = str(written.get("version", __version__))


@register_quantizer(METHOD)
class MasterlessQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a quantized model."""

    requires_calibration = False
    quantization_config: MasterlessConfig
    formats: dict[str, Format]
    stored: list[str]

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.formats, self.stored = {}, []

    # --- what can be done with it ---------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        """`save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """All parameters train."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """They do, without adapters: Trainer asks for this one."""
        return True

    @property
    def is_compileable(self) -> bool:
        """`torch.compile` takes quantized parameters."""
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Refuses what the optimizers could not train."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"dtype={dtype}: masterless trains float32 and bfloat16 models and what is quantized from them; pass "
                f"from_pretrained(..., dtype=torch.bfloat16) or torch.float32"
            )
        return dtype

    # --- loading --------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        config = self.quantization_config
        if self.pre_quantized:
            self.stored = _stored_names(checkpoint_files or [])
        else:
            select = Selection(model, config.format, include=config.include, exclude=config.exclude, rules=config.rules)
            chosen = {name: select(name, module, p)[0] for name, module, _, p in owned_parameters(model)}
            self.formats = {name: format for name, format in chosen.items() if format is not None}
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of the checkpoint is quantized as it is read."""
        return param_name in self.formats

    def get_quantize_ops(self) -> ConversionOps:
        """Turns a dense tensor into codes."""
        return _Quantize(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """For each kind of quantized parameter: the names of its parts in a checkpoint."""
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in self.stored)
        first = sorted(kinds, key=lambda kind: kind != "weight")  # "down_proj" would take "down_proj.weight"
        return {kind: [kind, *(f"{kind}.{part}" for part in state.PARTS)] for kind in first}

    def get_load_operations(self) -> dict[str, Any]:
        """Puts the parts of a quantized parameter together."""
        return {"deserialize": _Join}

    def get_weight_conversions(self) -> list[Any]:
        """As `get_load_operations`, for versions of transformers that know only this one."""
        from transformers.core_model_loading import WeightConverter

        if not self.pre_quantized:
            return []
        return [WeightConverter(names, kind, [_Join(self)]) for kind, names in self.serialized_names.items()]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        adopt(model, self)
        unmap_(t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, QuantizedTensor))
        return model

    # --- saving ---------------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The stored tensors and their formats; of tied names one."""
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        whole = state.joined(model.state_dict())
        plain = model.state_dict()
        for name, source in tied.items():
            if source in whole:
                for part in (name, *(f"{name}.{part}" for part in state.PARTS)):
                    plain.pop(part, None)
        return plain, {"masterless_version": __version__}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        return dequantize_(model)


class _Quantize(ConversionOps):
    """One dense tensor (or what a converter has made of several) into codes."""

    def __init__(self, hf_quantizer: MasterlessQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The parameter by its full name."""
        formats = self.hf_quantizer.formats
        converted: dict[str, Any] = {}
        for name, value in input_dict.items():
            dense = value[0] if isinstance(value, list) else value
            target = name if name in formats or len(input_dict) > 1 else full_layer_name or name
            if target in formats:
                dense = nn.Parameter(QuantizedTensor.from_dense(dense, formats[target]))
            converted[target] = dense
        return converted


class _Join(ConversionOps):
    """The parts of one quantized parameter into the parameter; a dense one of the same kind passes."""

    def __init__(self, hf_quantizer: MasterlessQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str | None = None, model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The parameter by its full name."""
        assert full_layer_name is not None
        parts = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        kind = full_layer_name.rpartition(".")[2]
        owner, _, key = full_layer_name.rpartition(".")
        own = getattr(model.get_submodule(owner), key)
        if full_layer_name not in self.hf_quantizer.stored:
            (value,) = parts.values()
            return {full_layer_name: value.to(own.dtype) if value.is_floating_point() else value}
        joined = state.join({name: t if name == kind else t.clone() for name, t in parts.items()}, kind)
        if joined.shape != own.shape:
            raise ValueError(
                f"{full_layer_name!r} has shape {tuple(joined.shape)} in the checkpoint and {tuple(own.shape)} in the "
                f"model; load it with the config that it was saved with"
            )
        return {full_layer_name: nn.Parameter(joined.to(own.dtype))}


def _stored_names(files: Sequence[str]) -> list[str]:
    """The names of the parameters that a checkpoint holds in parts."""
    from safetensors import safe_open

    keys: set[str] = set()
    for path in files:
        if not str(path).endswith(".safetensors"):
            raise ValueError(
                f"{path}: a masterless checkpoint is a safetensors file; save it again with save_pretrained"
            )
        with safe_open(path, framework="pt") as file:
            keys.update(file.keys())
    return sorted(
        name for name in (key.removesuffix(".codes") for key in keys if key.endswith(".codes")) if name in keys
    )


# --- models that are quantized already -------------------------------------------------------------------------


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module, QuantizedTensor]]:
    for name, module, _, p in owned_parameters(model):
        if isinstance(p, QuantizedTensor):
            yield name, module, p


def adopt(model: Any, quantizer: MasterlessQuantizer | None = None) -> None:
    """Makes a transformers model with quantized parameters save them, and say its real size.

    `quantize_` calls it for every model of transformers that it has quantized.
    """
    found = {name: p for name, _, p in _quantized(model)}
    if not found:
        return
    for _, module, _ in _quantized(model):
        state.attach(module)
    if quantizer is None:
        formats = {str(p.format) for p in found.values()}
        mixed = {name: str(p.format) for name, p in found.items()} if len(formats) > 1 else {}
        config = MasterlessConfig(min(formats), rules=mixed)
        quantizer = MasterlessQuantizer(config, pre_quantized=False)
        model.hf_quantizer = quantizer
        model.is_quantized, model.quantization_method = True, METHOD
        model.config.quantization_config = config
        model.config._is_quantized = True
    model.get_memory_footprint = MethodType(_memory_footprint, model)
    # Files hold what the model holds: undoing conversions (experts, prefixes) would take codes for weights.
    model._weight_conversions = []


def _memory_footprint(self: Any, return_buffers: bool = True) -> int:
    """As transformers counts it, with quantized parameters as they are stored."""
    tensors = [*self.parameters(), *(self.buffers() if return_buffers else ())]
    return sum(tensor.nbytes for tensor in tensors)


def release(model: Any) -> None:
    """Takes back what `adopt` did, for a model that is dense again."""
    if isinstance(getattr(model, "hf_quantizer", None), MasterlessQuantizer):
        model.hf_quantizer.remove_quantization_config(model)
        model.config.__dict__.pop("_is_quantized", None)
        for name in ("_weight_conversions", "get_memory_footprint"):
            model.__dict__.pop(name, None)


# --- Trainer ----------------------------------------------------------------------------------------------------


class PresetOptimizer:
    """The optimizer of a preset for Trainer, as ``optimizer_cls_and_kwargs=(PresetOptimizer, {"preset": ..., ...})``.

    Trainer calls it with the model once that is in its place. See `masterless.prepare` for the arguments.
    """

    def __call__(self, model: nn.Module, preset: str = "2-byte", lr: float = 1e-3, **overrides: Any) -> AdamW:
        """Quantizes the model if it is dense, and returns AdamW with the preset's options."""
        return prepare(model, preset, lr, **overrides)
