"""Quantized parameters in a model's state dict: plain tensors, with their format beside them.

Contract:
    * ``state_dict()`` holds a quantized parameter ``w`` as the tensors that store it, ``w.codes``, ``w.scale`` (and
      ``w.hidden``, ``w.master``), shared with the parameter, and under its own name ``w`` what they are: format, shape
      and dtype, JSON text in a uint8 vector. Whatever saves tensors by name can save it: torch, safetensors,
      transformers, accelerate. Whatever loads it into a dense model finds a vector where a matrix should be, and says
      so: also ``strict=False``, and transformers without our plug-in.
    * ``load_state_dict`` puts the parts together and copies bytes. It is exact or refused: a dense tensor for a
      quantized parameter, another format, a dense model, parts that are missing or were cast are errors with a remedy,
      also under ``strict=False``. Nothing is rounded.
    * ``state_dict(keep_vars=True)`` holds the parameters themselves, and a parameter that is sharded over processes
      stays what it is: `masterless.distributed` takes it apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from masterless import formats
from masterless.formats import Format
from masterless.formats.storage import Storage, tensor_specs
from masterless.tensor.quantized import QuantizedTensor, local_of

PARTS = ("codes", "scale", "tensor_scale", "hidden", "master")


@dataclass(frozen=True)
class Description:
    """What a state dict says of one quantized parameter."""

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, q: QuantizedTensor) -> Description:
        """The description of a parameter."""
        return cls(q.format, tuple(q.shape), q.dtype)

    @classmethod
    def parse(cls, text: str) -> Description:
        """The description that `str` wrote."""
        fields = json.loads(text)
        dtype = getattr(torch, fields["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{fields['dtype']!r} is no dtype")
        return cls(formats.parse(fields["format"]), tuple(map(int, fields["shape"])), dtype)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return json.dumps({"format": str(self.format), "shape": list(self.shape), "dtype": dtype})


def split(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """The plain tensors under which a state dict holds a quantized parameter; they share its memory."""
    parts = {f"{name}.{part}": tensor for part, tensor in q.stored.tensors.items()}
    return {name: _described(q), **parts}


def _described(q: QuantizedTensor) -> Tensor:
    """The description as a tensor: always the same one, so that tied names share it as they share the codes."""
    text = str(Description.of(q))
    kept = q.__dict__.get("described")
    if kept is None or kept[0] != text or kept[1].device != q.device:
        tensor = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).to(q.device)
        kept = q.__dict__["described"] = (text, tensor)
    return kept[1]


def names_in(state_dict: Mapping[str, Any]) -> list[str]:
    """The names of the parameters that a state dict holds in parts."""
    with_codes = (key.removesuffix(".codes") for key in state_dict if key.endswith(".codes"))
    return [name for name in with_codes if _describes(state_dict.get(name))]


def _describes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and type(value) is Tensor


def describe(state_dict: Mapping[str, Tensor], name: str) -> Description:
    """What a state dict says of the parameter `name`, which it holds in parts."""
    try:
        return Description.parse(bytes(state_dict[name].cpu().tolist()).decode())
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"the state dict holds {name!r} in parts and does not say in which format ({error}); it is damaged or was "
            f"converted on the way: load it as it was saved"
        ) from error


def join(state_dict: Mapping[str, Tensor], name: str) -> QuantizedTensor:
    """The quantized parameter that a state dict holds in parts; it shares their memory."""
    about = describe(state_dict, name)
    wanted = tensor_specs(about.format, about.shape)
    parts = {part: state_dict.get(f"{name}.{part}") for part in wanted}
    for part, (size, dtype) in wanted.items():
        tensor = parts[part]
        found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if found != (tuple(size), dtype):
            raise ValueError(
                f"{name!r} is stored as '{about.format}', which takes a tensor {name}.{part} of shape {tuple(size)} "
                f"and {dtype}, and the state dict has {found or 'none'}; load it as it was saved, without casting it"
            )
    return QuantizedTensor(Storage(about.format, about.shape, parts), about.dtype)  # type: ignore[arg-type]


def joined(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with every quantized parameter in one piece, as ``state_dict(keep_vars=True)`` has it."""
    whole = set(names_in(state_dict))
    result: dict[str, Any] = {}
    for key, value in state_dict.items():
        name, _, part = key.rpartition(".")
        if key in whole:
            result[key] = join(state_dict, key)
        elif name not in whole or part not in PARTS:
            result[key] = value
    return result


@torch.no_grad()
def load_rounded_(model: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Loads a state dict whatever the formats on either side, rounding to nearest: for a start from other weights.

    Returns:
        The names of parameters that are not what the state dict holds: rounded anew, or decoded without hidden bits.
    """
    exact, rounded = dict(model.state_dict(keep_vars=True)), []
    for name, value in joined(state_dict).items():
        own = exact.get(name)
        same = isinstance(own, QuantizedTensor) == isinstance(value, QuantizedTensor)
        if own is None or (same and (not isinstance(own, QuantizedTensor) or own.format == value.format)):
            exact[name] = value
            continue
        if isinstance(own, QuantizedTensor):
            own.encode_(value)
        else:
            own.copy_(value.dequantize())
        rounded.append(name)
    model.load_state_dict(exact)
    return rounded


# --- the hooks of a module ---------------------------------------------------------------------------------


def attach(module: nn.Module) -> None:
    """Makes a module that holds a quantized parameter save and load it in parts; does nothing the second time."""
    if _save not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((key, p) for key, p in module._parameters.items() if p is not None)


def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key, p in _own(module):
        value = state_dict.get(prefix + key)
        if isinstance(value, QuantizedTensor) and value is not p:  # the parameter itself: somebody wants variables
            del state_dict[prefix + key]
            state_dict.update(split(prefix + key, p))  # type: ignore[arg-type]


def _load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Puts the parts of each parameter together before torch looks for it; what cannot be exact becomes an error."""
    held = set(names_in(state_dict))
    for key, p in _own(module):
        name, local = prefix + key, local_of(p)
        value = state_dict.get(name)
        if name in held:
            try:
                value = join(state_dict, name)
            except ValueError as error:
                errors.append(str(error))
                value = p
            for part in PARTS:
                state_dict.pop(f"{name}.{part}", None)
        elif value is None and isinstance(local, QuantizedTensor):
            # By the names that a file has: whoever removed tied tensors from it looks for these.
            missing.extend((name, *(f"{name}.{part}" for part in local.stored.tensors)))
            value = p
        if value is None:
            continue
        reason = _mismatch(name, local, local_of(value))
        if reason:
            errors.append(reason)
        state_dict[name] = p if reason else value


def _mismatch(name: str, own: Tensor, found: Tensor) -> str:
    """Why a loaded tensor cannot become this parameter without rounding; empty if it can."""
    if isinstance(own, QuantizedTensor) and isinstance(found, QuantizedTensor):
        if own.format == found.format or own.shape != found.shape:  # torch has its own word for shapes
            return ""
        return (
            f"{name!r} is stored as '{found.format}' in the state dict and as '{own.format}' in the model: rounding a "
            f"second time would lose more. Quantize the model as the state dict is: quantize_(model, like=state_dict)"
        )
    if isinstance(own, QuantizedTensor):
        return (
            f"{name!r} is dense in the state dict and stored as '{own.format}' in the model: loading would round it. "
            f"Load it into the dense model and quantize that, or round it explicitly: model.get_parameter({name!r})"
            f".encode_(tensor)"
        )
    if isinstance(found, QuantizedTensor):
        return (
            f"{name!r} is stored as '{found.format}' in the state dict and dense in the model. Quantize the model as "
            f"the state dict is before loading: quantize_(model, like=state_dict); dequantize_(model) afterwards if "
            f"it is to be dense"
        )
    return ""
