"""What all targets share: the model, its matrices under the names of its published checkpoints, the report."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from masterless.formats import Format
from masterless.formats.codec import level_table, read_scale
from masterless.formats.packing import unpack
from masterless.tensor import state
from masterless.tensor.quantize import replace_parameter
from masterless.tensor.quantized import QuantizedTensor, as_weight
from masterless.tensor.selection import owned_parameters

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
# Why a matrix cannot be written without loss; empty if it can.
Obstacle = Callable[[str, nn.Module, QuantizedTensor], str]


@dataclass
class Report:
    """What `export` wrote.

    Attributes:
        to: the target.
        path: the folder.
        exported: formats by the matrix's name in the model.
        rounded: names of matrices that were rounded anew because `requantize` asked for it.
        notes: what a server may refuse, though the files are right.
    """

    to: str
    path: Path
    exported: dict[str, str] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        formats = sorted(set(self.exported.values()))
        lines = [f"{self.path}: {len(self.exported)} matrices as {self.to} ({', '.join(formats) or 'dense'})"]
        if self.rounded:
            lines.append(f"rounded anew: {len(self.rounded)} matrices, for instance {self.rounded[0]}")
        return "\n".join([*lines, *self.notes])


def load_folder(folder: Path) -> Any:
    """The model that `save_pretrained` wrote."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(
            f"{folder} has no config.json: export takes what save_pretrained of a transformers model wrote; for a run "
            f"of `masterless train` use masterless.interop.save_safetensors, its model has no server"
        )
    import transformers

    import masterless.integrations.transformers  # noqa: F401 - registers the method that reads the folder

    names = json.loads(config.read_text()).get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise ValueError(f"{config} names the architecture {names or None}, which transformers does not have")
    return kind.from_pretrained(folder)


def requantized(model: Any, obstacle: Obstacle, format: str | None, report: Report) -> Any:
    """The model as it can be exported: itself, or a copy in which what does not fit is rounded to `format`."""
    wanted = None if format is None else as_weight(format)
    misfits = {
        name: why
        for name, module, _, p in owned_parameters(model)
        if isinstance(p, QuantizedTensor) and (why := _shows_hidden_bits(p) or obstacle(name, module, p))
    }
    if misfits and wanted is None:
        name, why = next(iter(misfits.items()))
        others = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
        raise ValueError(
            f"{name!r}{others} cannot be exported as {report.to} without loss: {why}. Round it on purpose with "
            f"requantize='int8' or another format that fits, or export it dense"
        )
    if not misfits:
        return model
    model = copy.deepcopy(model)
    for name, module, key, p in list(owned_parameters(model)):
        if name in misfits and isinstance(p, QuantizedTensor):
            assert wanted is not None
            value = p.stored.decode().to(p.dtype) if p.format.hidden else p.decode()
            fresh = nn.Parameter(QuantizedTensor.from_dense(value, wanted), requires_grad=p.requires_grad)
            why = obstacle(name, module, fresh)  # type: ignore[arg-type]
            if why:
                raise ValueError(f"{name!r} cannot be exported as {report.to} in format '{wanted}' either: {why}")
            replace_parameter(module, key, fresh)
            report.rounded.append(name)
    return model


def _shows_hidden_bits(q: QuantizedTensor) -> str:
    if not q.format.shown:
        return ""
    return (
        f"the model was trained on all bits of '{q.format}', and only the first {q.format.bits} are exported; train "
        f"the last part of the run after show_hidden_bits_(model, False)"
    )


# --- matrices ------------------------------------------------------------------------------------------------------


def codes_of(q: QuantizedTensor) -> Tensor:
    """The visible codes as integers (offset binary, or the bits of a minifloat), in the shape of the parameter."""
    layout = q.stored.layout
    codes = unpack(q.stored.rows_of("codes"), layout.cols, q.format.bits, q.format.adjacent)
    return codes.to(torch.uint8).view(q.shape)


def scales_of(q: QuantizedTensor) -> Tensor:
    """The scales, fp32, ``[..., blocks of a row]``; one scale for all is repeated for every row."""
    layout = q.stored.layout
    scales = read_scale(q.stored.slab(0, layout.rows), q.format)
    return scales.expand(layout.rows, -1).reshape(*q.shape[:-1], -1)


def group_of(q: QuantizedTensor) -> int | None:
    """Elements that share a scale; None: a whole row."""
    group = q.format.granularity
    return group if isinstance(group, int) and (group < q.shape[-1] or q.format.fixed) else None


@dataclass(frozen=True)
class Matrix:
    """One matrix of a checkpoint, as it is stored."""

    codes: Tensor
    scales: Tensor
    format: Format
    group: int | None


def published(model: Any) -> dict[str, Matrix | Tensor]:
    """The model's tensors under the names and in the shapes of its published checkpoints: experts one by one.

    Codes and scales go the way that transformers takes weights when it saves, which is renaming, splitting and
    stacking; what comes out is compared with the decoded weights that went the same way.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain = state.joined(model.state_dict())
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if source in plain:
            plain.pop(name, None)
    conversions = model.__dict__.pop("_weight_conversions", None)  # ours say: as in memory
    try:
        quantized = {name: q for name, q in plain.items() if isinstance(q, QuantizedTensor)}
        codes, scales, values = (
            revert_weight_conversion(model, {name: part(q) for name, q in quantized.items()})
            for part in (codes_of, _wide_scales, lambda q: q.decode())
        )
        formats = _formats(model, quantized)
        left = {name: value for name, value in plain.items() if name not in quantized}
        result: dict[str, Matrix | Tensor] = dict(revert_weight_conversion(model, left))
    finally:
        if conversions is not None:
            model._weight_conversions = conversions
    for name, value in values.items():
        format, group = formats[name]
        blocks = 1 if group is None else -(-value.shape[-1] // group)
        matrix = Matrix(codes[name].contiguous(), scales[name][..., :blocks].contiguous(), format, group)
        if value.dim() != 2 or not torch.equal(decoded(matrix, value.dtype), value):
            raise ValueError(
                f"{name!r} of the published checkpoint is not a matrix with the grid that the model was trained on: "
                f"transformers rearranges it on the way. Export it dense"
            )
        result[name] = matrix
    return result


def _wide_scales(q: QuantizedTensor) -> Tensor:
    """The scales, two columns at least: transformers squeezes whatever has a dimension of one."""
    scales = scales_of(q)
    return scales.expand(*scales.shape[:-1], 2) if scales.shape[-1] == 1 else scales


def _formats(model: Any, quantized: Mapping[str, QuantizedTensor]) -> dict[str, tuple[Format, int | None]]:
    """Format and group of every published matrix, found by sending markers the way of the weights."""
    from transformers.core_model_loading import revert_weight_conversion

    kinds = list(dict.fromkeys((q.format, group_of(q)) for q in quantized.values()))
    markers = {
        name: torch.full((*q.shape[:-1], 2), kinds.index((q.format, group_of(q))), dtype=torch.int32)
        for name, q in quantized.items()
    }
    return {name: kinds[int(t.flatten()[0])] for name, t in revert_weight_conversion(model, markers).items()}


def decoded(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """What a reader makes of a matrix: codes times scales in fp32, rounded once."""
    if matrix.format.kind == "codebook":
        levels = level_table(matrix.format)[matrix.codes.int()]
    else:
        levels = matrix.codes.float() - 2 ** (matrix.format.bits - 1)
    scales = matrix.scales.repeat_interleave(matrix.group or levels.shape[-1], dim=-1)[..., : levels.shape[-1]]
    return (levels * scales).to(dtype)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files."""
    for pattern in TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target / file.name)
