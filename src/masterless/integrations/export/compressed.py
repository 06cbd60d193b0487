"""compressed-tensors: what vLLM, SGLang and transformers read. Our grids are its grids.

Contract:
    * Integers of b bits (`pack-quantized`): element i of a row takes bits ``i*b ... (i+1)*b - 1`` of the row's stream,
      low end first, as value + 2^(b-1); int32 words. FP8 (`float-quantized`): the E4M3 byte itself.
    * Scales are written in the model's dtype, which must hold them exactly; a row is a whole number of groups.
    * The formats of hardware are written byte by byte: `mxfp8-quantized`, `mxfp4-pack-quantized` (E8M0 scales), and
      `nvfp4-pack-quantized` (E4M3 scales, and the inverse of a power of two as the scale of the matrix).
    * Every matrix is decoded from its codes and scales and compared with the forward pass's before it is written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from masterless.formats import Format
from masterless.formats.codec import stored_scale
from masterless.formats.packing import pack
from masterless.integrations.export.checkpoint import Matrix, Report, group_of, published, scales_of
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.selection import owned_parameters

VLLM_GROUPS = (None, 32, 64, 128)
VLLM_BITS = (4, 8)
# family -> the name there, and the dtype of the scales where they are not the model's
FLOATS = {
    "fp8": ("float-quantized", None),
    "mxfp8": ("mxfp8-quantized", torch.uint8),
    "mxfp4": ("mxfp4-pack-quantized", torch.uint8),
    "nvfp4": ("nvfp4-pack-quantized", torch.float8_e4m3fn),
}


def _family(format: Format) -> str:
    return format.family.partition("+")[0]


def obstacle(name: str, module: nn.Module, q: QuantizedTensor) -> str:
    """Why a matrix cannot be written as compressed-tensors without loss; empty if it can."""
    if type(module).__name__ == "Conv1D":
        return "its weight is [in, out] (Conv1D) and its scales run along the outputs; there they run along the inputs"
    if isinstance(module, nn.Embedding):
        return "it is an embedding, and servers look for quantized linear layers"
    if q.format.kind == "codebook" and _family(q.format) not in FLOATS:
        return f"the format has no grid like '{q.format.family}'"
    if q.dim() not in (2, 3):
        return f"it has {q.dim()} dimensions"
    group = group_of(q)
    if _family(q.format) == "fp8" and group is not None:
        return f"fp8 has one scale a row there, and '{q.format}' one for {group} elements; train with 'fp8:row'"
    if group is not None and q.shape[-1] % group:
        return f"a row of {q.shape[-1]} is not a whole number of groups of {group}; choose a group that divides it"
    if q.format.fixed and q.dtype != torch.bfloat16:
        return f"its readers decode '{q.format}' to bfloat16 and the model is {q.dtype}; convert it with .bfloat16()"
    if not q.format.fixed and not torch.equal(scales_of(q).to(q.dtype).float(), scales_of(q)):
        return f"its scales do not fit the model's {q.dtype}; train with bf16 scales, or export the model in float32"
    return ""


def write(model: Any, folder: Path, report: Report, source: Path | None) -> None:
    """Writes the folder."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    kinds: dict[tuple[Format, int | None], list[str]] = {}
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    for name, value in published(model).items():
        if not isinstance(value, Matrix):
            tensors[name] = value.detach().contiguous()
            continue
        module = name.removesuffix(".weight")
        kinds.setdefault((value.format, value.group), []).append(module)
        tensors.update({f"{module}.{part}": tensor for part, tensor in _parts(value, dtype).items()})
    if not kinds:
        raise ValueError("the model has no quantized parameters; save it with save_pretrained")
    for name, _, _, p in owned_parameters(model):
        if isinstance(p, QuantizedTensor):
            report.exported[name] = str(p.format)
    _note_limits(kinds, tensors, report)
    save_file(_apart(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(model, folder, kinds, list(tensors))


def _parts(matrix: Matrix, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one matrix."""
    if matrix.format.fixed:
        return _parts_of_hardware_format(matrix)
    scales = matrix.scales.to(dtype)
    if matrix.format.kind == "codebook":
        return {"weight": matrix.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    shape = torch.tensor(matrix.codes.shape, dtype=torch.int64)
    return {"weight_packed": packed(matrix.codes, matrix.format.bits), "weight_scale": scales, "weight_shape": shape}


def _parts_of_hardware_format(matrix: Matrix) -> dict[str, Tensor]:
    format = matrix.format
    if format.bits == 8:
        parts = {"weight": matrix.codes.view(torch.float8_e4m3fn)}
    else:
        parts = {"weight_packed": pack(matrix.codes.int(), format.bits, adjacent=True)}
    if not format.two_level:
        return {**parts, "weight_scale": stored_scale(matrix.scales, format)["scale"]}
    # The smallest unit in which all scales are E4M3 numbers; a power of two, so that nothing is rounded.
    _, exponent = torch.frexp(matrix.scales.amax() / 448.0)
    unit = torch.ldexp(torch.ones(1), exponent)
    scales = (matrix.scales / unit).to(torch.float8_e4m3fn)
    if not torch.equal(scales.float() * unit, matrix.scales):
        raise ValueError(
            f"the rows of a matrix in format '{format}' have tensor scales too far apart for one of them to serve all: "
            f"its shards were quantized apart. Export with requantize='{format}'"
        )
    return {**parts, "weight_scale": scales, "weight_global_scale": 1.0 / unit}


def packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as streams of bits in int32 words.

    >>> packed(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8), 4).tolist() == [[-2023406815]]
    True
    """
    rows, cols = codes.shape
    stream = np.unpackbits(codes.numpy().reshape(rows, cols, 1), axis=2, count=bits, bitorder="little")
    stream = stream.reshape(rows, cols * bits)
    words = -(-cols * bits // 32)
    stream = np.pad(stream, ((0, 0), (0, words * 32 - cols * bits)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def _note_limits(kinds: dict[Any, list[str]], tensors: dict[str, Tensor], report: Report) -> None:
    """What vLLM's kernels ask beyond the format itself."""
    for (format, group), modules in kinds.items():
        if format.kind == "codebook":
            continue
        if format.bits not in VLLM_BITS or group not in VLLM_GROUPS:
            report.notes.append(
                f"vLLM runs 4 and 8 bits in groups of 32, 64, 128 or whole rows: only transformers reads '{format}'"
            )
        odd = [m for m in modules if _odd(tensors[f"{m}.weight_shape"].tolist())]
        if odd:
            report.notes.append(
                f"vLLM's Marlin kernel wants inputs in multiples of 128 and outputs of 64: not {odd[0]} and "
                f"{len(odd) - 1} more"
            )


def _odd(shape: list[int]) -> bool:
    return bool(shape[1] % 128 or shape[0] % 64)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result


def _write_config(model: Any, folder: Path, kinds: dict[Any, list[str]], names: list[str]) -> None:
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantized = {module for modules in kinds.values() for module in modules}
    dense = {name.removesuffix(".weight") for name in names if name.endswith(".weight")} - quantized
    single = len(kinds) == 1
    groups = {}
    for i, ((format, group), modules) in enumerate(kinds.items()):
        how, scale = FLOATS.get(_family(format), ("pack-quantized", None))
        kind = "float" if format.kind == "codebook" else "int"
        strategy = "channel" if group is None else "tensor_group" if format.two_level else "group"
        weights: dict[str, Any] = {
            **{"num_bits": format.bits, "type": kind, "symmetric": True, "dynamic": False, "strategy": strategy},
            **({} if group is None else {"group_size": group}),
            **({} if scale is None else {"scale_dtype": str(scale), "zp_dtype": str(scale)}),
        }
        groups[f"group_{i}"] = {
            **{"targets": ["Linear"] if single else sorted(modules), "format": how, "weights": weights},
            **{"input_activations": None, "output_activations": None},
        }
    formats = {group["format"] for group in groups.values()}
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        # A router is no nn.Linear in transformers and is one in vLLM: whatever is dense and could be taken for one.
        "ignore": sorted((linear | dense) - quantized),
        "config_groups": groups,
    }
    saved = model.config.to_dict()
    saved.pop("quantization_config", None)
    saved.pop("_is_quantized", None)
    saved.update(architectures=[type(model).__name__], dtype=str(model.dtype).removeprefix("torch."))
    saved["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(saved, indent=2, sort_keys=True, default=str) + "\n")
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
