"""LoRA on a quantized base: merge adapters into it, and extract adapters from a full training.

    model, report = merge_lora_(peft_model)             # print the report: it says what rounding took
    adapted, report = extract_lora(trained, base, rank=16)
    adapted.save_pretrained("adapter")                  # peft's own files

Contract:
    * Merging: each matrix becomes ``base + B A * scaling`` (hidden bits and master copies of the base included),
      rounded to nearest in its format. A block keeps its scale unless a weight no longer fits or the grid is wasted
      (`formats.scaling`), so that what an adapter does not touch keeps its code. The report gives, per matrix, the
      share of the adapter that rounding took from what the forward pass sees. On INT4 that is most of a small
      adapter: merge into a finer `format`, or serve the adapter beside the base.
    * Extracting: the difference of what two models compute with, matrix by matrix, as the best product of the given
      rank (singular values). What differs and is no matrix of a linear layer cannot be in an adapter: it is listed.
    * peft is used when it is there, and never imported before.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from masterless.formats import Format
from masterless.formats.scaling import next_scale
from masterless.formats.storage import Storage
from masterless.tensor.quantize import replace_parameter
from masterless.tensor.quantized import QuantizedTensor, as_weight
from masterless.tensor.selection import owned_parameters

_EXACT = 2048  # sides up to this: all singular values; beyond, the leading ones by a randomized method


@dataclass(frozen=True)
class Merged:
    """One matrix with its adapter inside.

    Attributes:
        name: of the parameter in the base model.
        format: in which it is stored; None: dense.
        change: root mean square of the adapter's contribution.
        lost: norm of what rounding took from it, relative to the norm of the contribution.
    """

    name: str
    format: str | None
    change: float
    lost: float


@dataclass
class MergeReport:
    """What `merge_lora_` did; `print` it."""

    merged: list[Merged] = field(default_factory=list)

    def __str__(self) -> str:
        width = max((len(m.name) for m in self.merged), default=4)
        lines = [
            f"{m.name:{width}}  {m.format or 'dense':10}  change {m.change:.2e}, lost to rounding {100 * m.lost:.1f}%"
            for m in self.merged
        ]
        return "\n".join([*lines, f"{len(self.merged)} adapters merged"])


@torch.no_grad()
def merge_lora_(model: Any, format: str | Format | None = None) -> tuple[nn.Module, MergeReport]:
    """Adds a peft model's LoRA adapters to its base, quantized or not, in place, and takes them off.

    Args:
        model: a peft model with LoRA adapters; its active adapters are merged.
        format: of the merged matrices; by default each keeps its own.

    Returns:
        The base model, and a report of what rounding took from every adapter.
    """
    from peft.tuners.lora import LoraLayer

    wanted = None if format is None else as_weight(format)
    layers: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRA adapters; merge_lora_ takes what get_peft_model returned")
    for name, layer in layers:
        _refuse(name, layer)
    report = MergeReport()
    for name, layer in layers:
        p = layer.get_base_layer().weight
        shown = f"{name.removeprefix('base_model.model.')}.weight"
        delta = torch.stack([layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters]).sum(0)
        if not isinstance(p, QuantizedTensor):
            layer.merge()
            report.merged.append(Merged(shown, None, _rms(delta), 0.0))
            continue
        seen = p.detach().dequantize().float()
        new = _rounded(p, p.stored.decode() + delta, wanted or p.format)
        replace_parameter(layer.get_base_layer(), "weight", nn.Parameter(new, requires_grad=p.requires_grad))
        norm = float(torch.linalg.vector_norm(delta))
        error = float(torch.linalg.vector_norm(new.dequantize().float() - seen - delta))
        report.merged.append(Merged(shown, str(new.format), _rms(delta), error / norm if norm else 0.0))
    return model.unload(), report


def _refuse(name: str, layer: Any) -> None:
    if layer.merged:
        raise ValueError(f"the adapters of {name!r} are merged already; unmerge them first")
    for adapter in layer.active_adapters:
        if layer.use_dora.get(adapter) or layer.lora_bias.get(adapter):
            raise ValueError(
                f"adapter {adapter!r} of {name!r} has more than a low-rank product (DoRA or a bias), which cannot be "
                f"added to codes; decode the base with dequantize_(model) and use peft's merge_and_unload (nothing "
                f"was changed)"
            )


def _rounded(old: QuantizedTensor, values: Tensor, format: Format) -> QuantizedTensor:
    """Values in a format, under the scales of the old tensor where these still serve."""
    storage = Storage.zeros(format, old.shape, old.device)
    rows = values.reshape(storage.layout.rows, -1)
    scale = None
    if format == old.format:
        scale = next_scale(format, "held", rows, old.stored.slab(0, storage.layout.rows))
        if format.two_level:
            storage.tensors["tensor_scale"].copy_(old.stored.tensors["tensor_scale"])
    return QuantizedTensor(storage.encode_(values, scale=scale), old.dtype)


def _rms(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


# --- extraction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extracted:
    """One matrix's difference as an adapter: its root mean square, and the share of its square that is kept."""

    name: str
    change: float
    kept: float


@dataclass
class ExtractionReport:
    """What `extract_lora` did; `print` it.

    Attributes:
        extracted: the matrices that have an adapter.
        left: parameters that differ and cannot be in an adapter: norms, embeddings, stacks of experts.
    """

    extracted: list[Extracted] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        width = max((len(e.name) for e in self.extracted), default=4)
        lines = [f"{e.name:{width}}  change {e.change:.2e}, kept {100 * e.kept:.1f}%" for e in self.extracted]
        lines += [f"{name:{width}}  differs, and cannot be in an adapter" for name in self.left]
        return "\n".join(lines)


@torch.no_grad()
def extract_lora(trained: nn.Module, base: Any, rank: int) -> tuple[Any, ExtractionReport]:
    """The difference between a trained model and the one it started from, as LoRA adapters on the latter.

    Args:
        trained: the model after training, quantized or dense.
        base: the model before, quantized or dense; it becomes the base of the peft model that is returned.
        rank: of the adapters.

    Returns:
        A peft model over `base`, ready for its ``save_pretrained``, and a report of how much of the difference the
        rank keeps.
    """
    import peft

    if rank < 1:
        raise ValueError(f"rank={rank!r}: an adapter has a rank of at least 1")
    before = {name: (module, p) for name, module, _, p in owned_parameters(base)}
    after = {name: p for name, _, _, p in owned_parameters(trained)}
    if before.keys() != after.keys():
        name = sorted(before.keys() ^ after.keys())[0]
        raise ValueError(f"{name!r} is in one of the two models only: extract_lora compares a model with its start")
    report, factors = ExtractionReport(), {}
    for name, (module, p) in before.items():
        difference = _values(after[name]) - _values(p)
        if not bool(difference.any()):
            continue
        owner = name.removesuffix(".weight")
        if p.dim() == 2 and name.endswith(".weight") and _takes_adapter(module):
            transposed = not isinstance(module, nn.Linear)  # Conv1D: [in, out]
            factors[owner], kept = _factors(difference.T if transposed else difference, rank)
            report.extracted.append(Extracted(name, _rms(difference), kept))
        else:
            report.left.append(name)
    if not factors:
        raise ValueError("no matrix of a linear layer differs between the two models: there is nothing to extract")
    if report.left:
        warnings.warn(
            f"{len(report.left)} parameters differ and cannot be in an adapter, for instance {report.left[0]!r}: base "
            f"and adapter together are not the trained model",
            stacklevel=2,
        )
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(factors), lora_dropout=0.0)
    adapted: Any = peft.get_peft_model(base, config)
    for owner, (b, a) in factors.items():
        layer = adapted.base_model.model.get_submodule(owner)
        for adapter, value in ((layer.lora_A, a), (layer.lora_B, b)):
            weight = adapter["default"].weight
            weight.zero_()
            rows, columns = value.shape  # fewer singular values than the rank: the rest stays zero
            weight[:rows, :columns] = value.to(weight.dtype)
    return adapted, report


def _takes_adapter(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _values(p: Tensor) -> Tensor:
    """What the forward pass computes with, fp32."""
    value = p.detach()
    return (value.dequantize() if isinstance(value, QuantizedTensor) else value).float()


def _factors(difference: Tensor, rank: int) -> tuple[tuple[Tensor, Tensor], float]:
    """``(B, A)`` with ``B A`` the best approximation of this rank, and the share of the square that it keeps."""
    if max(difference.shape) <= _EXACT:
        u, s, vt = torch.linalg.svd(difference, full_matrices=False)
    else:
        u, s, v = torch.svd_lowrank(difference, q=min(rank + 16, *difference.shape), niter=4)
        vt = v.T
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    root = s.sqrt()
    return (u * root, root[:, None] * vt), float(s.square().sum() / difference.square().sum())
