"""A checkpoint that GPTQ, AWQ or another method quantized (compressed-tensors) as the start of a training.

    model, report = from_compressed("Llama-3.2-1B-W4A16")
    print(report)

Contract:
    * The codes and scales of the checkpoint become ours, nothing is rounded: what the forward pass computes with is the
      checkpoint's ``code * scale``. Symmetric integers keep their bits and groups, FP8 its rows. Integers with a zero
      point (AWQ) are stored as ``code - zero`` in 8 bits under the same scales, which is exact, too.
    * Other tools use the code -2^(b-1), which our symmetric grids have no use for: it is kept as a start, and the first
      step that touches such a block takes a scale under which the block fits.
    * `hidden` adds hidden bits below integers without a zero point, empty at the start.
    * A matrix whose groups are scattered over the columns (GPTQ's activation order), or that the model holds in a stack
      of experts, is left dense; the report says so, and `calibrate_` or `quantize_` takes it from there.
    * How the checkpoint quantizes activations is not taken over.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from masterless.formats import Format
from masterless.formats.packing import pack
from masterless.formats.storage import Storage, tensor_specs
from masterless.integrations.transformers import adopt
from masterless.tensor.quantize import replace_parameter
from masterless.tensor.quantized import QuantizedTensor, as_weight
from masterless.tensor.selection import owned_parameters


@dataclass
class ImportReport:
    """What `from_compressed` took over; `print` it.

    Attributes:
        imported: formats by the matrix's name.
        left: why a matrix that is quantized in the checkpoint is dense here, by its name.
    """

    imported: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        formats = sorted(set(self.imported.values()))
        lines = [f"{len(self.imported)} matrices with their codes and scales ({', '.join(formats) or 'none'})"]
        return "\n".join([*lines, *(f"{name}: left dense, {why}" for name, why in self.left.items())])


def from_compressed(
    folder: str | Path, *, hidden: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Any, ImportReport]:
    """A transformers model with the quantized weights of a compressed-tensors checkpoint, ready to train.

    Args:
        folder: a local checkpoint with safetensors files.
        hidden: bits to add below each integer code, for instance 4: "int4" becomes "int4+4".
        dtype: of the model: of what is dense, and of what quantized weights decode to.

    Returns:
        The model, and a report.
    """
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = Path(folder)
    found = dict(_matrices(folder))
    if not found:
        raise ValueError(f"{folder} holds no matrices in the formats of compressed-tensors; load it with transformers")
    config = CompressedTensorsConfig(run_compressed=False)
    decompressed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    model = _plain(decompressed, dtype)
    places = {name: (module, key, p) for name, module, key, p in owned_parameters(model)}
    report = ImportReport()
    for name, parts in found.items():
        stored = f"{name}.weight"
        if stored not in places:
            report.left[stored] = "it is part of a stack of experts in the model"
            continue
        module, key, p = places[stored]
        made = _imported(parts, tuple(p.shape), hidden)
        if isinstance(made, str):
            report.left[stored] = made
            continue
        replace_parameter(module, key, nn.Parameter(QuantizedTensor(made, dtype), requires_grad=p.requires_grad))
        report.imported[stored] = str(made.format)
    adopt(model)
    return model, report


def _plain(loaded: Any, dtype: torch.dtype) -> Any:
    """The model without what compressed-tensors has put into it, over the same dense values."""
    config = copy.deepcopy(loaded.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(loaded)(config)
    values = {**dict(loaded.named_parameters(remove_duplicate=False)), **dict(loaded.named_buffers())}
    for name, module, key, _ in owned_parameters(model):
        value = values[name].detach()
        module._parameters[key] = nn.Parameter(value.to(dtype) if value.is_floating_point() else value)
    for name, _ in list(model.named_buffers()):
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = values[name]
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model.eval()


def _matrices(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The quantized matrices of the files: the module's name and its ``weight_*`` tensors."""
    from safetensors import safe_open

    found: dict[str, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                module, _, part = key.rpartition(".")
                if part == "weight" or part.startswith("weight_"):
                    found.setdefault(module, {})[part] = file.get_tensor(key)
    for module, parts in found.items():
        if "weight_scale" in parts and ("weight_packed" in parts or "weight" in parts):
            yield module, parts


def _imported(parts: dict[str, Tensor], shape: tuple[int, ...], hidden: int) -> Storage | str:
    """The storage of one matrix, or why it cannot be taken over."""
    scale = parts["weight_scale"].float()
    rows, columns = shape
    if scale.dim() == 2 and scale.shape[1] > 1 and columns % scale.shape[1]:
        return f"its {scale.shape[1]} scales per row do not divide {columns} columns"
    groups = scale.shape[1] if scale.dim() == 2 else 1
    order = parts.get("weight_g_idx")
    if order is not None and not torch.equal(order.long(), torch.arange(columns) // (columns // groups)):
        return "its groups are scattered over the columns (activation order)"
    granularity = "tensor" if scale.numel() == 1 and rows > 1 else "row" if groups == 1 else str(columns // groups)
    exact = torch.equal(scale.bfloat16().float(), scale)
    suffix = f":{granularity}" + ("" if exact else ":fp32")
    plain = parts.get("weight")
    if plain is not None and plain.dtype == torch.float8_e4m3fn:
        return _storage(as_weight(f"fp8{suffix}"), shape, plain.view(torch.uint8).to(torch.int32), scale)
    codes_dtype = parts.get("weight_packed", plain).dtype  # type: ignore[union-attr]
    if codes_dtype not in (torch.int8, torch.int32):
        return f"its codes are {codes_dtype}: integers and FP8 with one scale per group, row or tensor are taken over"
    bits, codes = _integers(parts, shape)
    zero = parts.get("weight_zero_point")
    if zero is not None and bool(zero.any()):
        codes = codes - _zero_points(zero, bits, (rows, groups)).repeat_interleave(columns // groups, dim=1)
        bits, hidden = 8, 0
    format = as_weight(f"int{bits}{f'+{hidden}' if hidden else ''}{suffix}")
    return _storage(format, shape, codes + 2 ** (bits - 1), scale)


def _integers(parts: dict[str, Tensor], shape: tuple[int, ...]) -> tuple[int, Tensor]:
    """Bits and signed codes of a matrix of integers."""
    if "weight_packed" not in parts:
        return 8, parts["weight"].to(torch.int32)
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    packed = parts["weight_packed"]
    bits = packed.shape[1] * 32 // shape[1]
    return bits, unpack_from_int32(packed, bits, torch.Size(shape)).to(torch.int32)


def _zero_points(zero: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """Of every group: the code that stands for zero; signed, as the codes are."""
    if zero.dtype == torch.int32:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        zero = unpack_from_int32(zero, bits, torch.Size(shape), packed_dim=0)
    return zero.to(torch.int32).expand(shape)


def _storage(format: Format, shape: tuple[int, ...], codes: Tensor, scale: Tensor) -> Storage:
    """Codes (offset binary, or the bits of a minifloat) and scales in the layout of a format."""
    specs = tensor_specs(format, shape)
    parts = {"codes": pack(codes, format.bits), "scale": scale}
    if format.fine_bits:  # the middle: nothing is hidden yet
        parts["hidden"] = pack(torch.full_like(codes, 2 ** (format.fine_bits - 1)), format.fine_bits)
    if format.master:
        levels = codes - 2 ** (format.bits - 1)
        parts["master"] = levels * scale.repeat_interleave(shape[1] // max(1, scale.shape[-1]), dim=-1)
    tensors = {name: part.reshape(specs[name][0]).to(specs[name][1]).contiguous() for name, part in parts.items()}
    return Storage(format, shape, tensors)
