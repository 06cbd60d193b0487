"""A start from trained weights with less of a jump: scales and rounding that know the data.

Rounding a trained matrix to nearest under absmax scales costs a language model 0.45 nats in INT4. Here a block's scale
minimises the squared error of the output, and what rounding one input's weight does to the output is repaired by the
weights of later inputs (GPTQ, arXiv 2210.17323). That takes a few batches; the squared error of the weights alone is no
substitute (measured: such scales are worse than absmax, because they clip the outliers that matter).

Contract:
    * Formats are those of `quantize_`, and so is everything that follows: codes and scales are chosen better, no more.
    * A scale is one of `GRID` fractions of absmax / max_level, rounded as the format rounds scales: the one with the
      least squared error, in which input j counts by its second moment ``E[x_j^2]``.
    * Matrices of `nn.Linear` are rounded input by input, those with the largest second moment first: the error of
      column j, divided by ``U_jj``, is taken off the later columns by row j of U, the Cholesky factor of the inverse of
      ``H = E[x x^T] + damping``. All else, and a layer that no batch reaches, is quantized as `quantize_` does it.
    * Hidden bits hold the residue of the true weight, as far as they reach (half a quantum); master copies all of it.
    * The model runs without gradients; passes are repeated if the matrices H of all layers at once take more than
      `memory` bytes, and later passes see the layers before them quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from masterless.formats import Format, codec
from masterless.formats.blocks import by_block, spread
from masterless.formats.packing import pack
from masterless.formats.storage import Storage, tensor_specs
from masterless.tensor.gather import visible_format
from masterless.tensor.quantize import QuantizationReport, quantize_
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.selection import Selection, owned_parameters

GRID = tuple(1.0 - 0.025 * i for i in range(21))  # of the absmax scale: 1 ... 0.5
DAMPING = 0.01
_COLUMNS = 128
_CACHED = 1 << 16  # elements worked on at a time


def calibrate_(
    model: nn.Module,
    batches: Sequence[Any],
    format: str | Format = "int4",
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    memory: int = 1 << 30,
    **selection: Any,
) -> QuantizationReport:
    """As `quantize_`, for a trained model and a few batches: chooses scales by the output's error, rounds with GPTQ.

    Args:
        model: any module; dense.
        batches: a few inputs of the kind that the model will see; some thousand tokens are enough.
        format: of the quantized parameters.
        forward: how a batch goes through the model; by default ``model(**batch)`` for a dict, ``model(*batch)`` for a
            tuple or list, else ``model(batch)``.
        memory: bytes for second moments of inputs at a time.
        **selection: `include`, `exclude` and `rules` of `quantize_`.

    Returns:
        The report of `quantize_`.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> report = calibrate_(model, [torch.randn(32, 64)], "int4")
    """
    if not batches:
        raise ValueError("batches is empty: calibration needs inputs; without any use quantize_(model, format)")
    select = Selection(model, format, **selection)
    chosen = {}
    for name, module, key, p in owned_parameters(model):
        wanted = select(name, module, p)[0]
        if wanted is not None and p.device.type != "meta":
            if not bool(torch.isfinite(p).all()):
                raise ValueError(f"{name!r} holds NaN or infinity and cannot be quantized (nothing was changed)")
            chosen[name] = (module, key, p, wanted)
    linear = [name for name, (module, key, *_) in chosen.items() if isinstance(module, nn.Linear) and key == "weight"]
    groups = _in_groups(linear, {name: chosen[name][2].shape[1] ** 2 * 4 for name in linear}, memory)
    values: dict[int, QuantizedTensor] = {}
    for names in groups:
        moments = _second_moments(model, {chosen[name][0] for name in names}, batches, forward or _call)
        for name in names:
            module, _, p, wanted = chosen[name]
            if id(p) not in values and module in moments:
                values[id(p)] = quantized_weight(p.detach(), wanted, moments[module])
                with torch.no_grad():
                    p.copy_(values[id(p)].decode(p.dtype))  # later layers see what this one will really give
    return _with_values(model, values, format, selection)


def _with_values(model: nn.Module, values: dict[int, QuantizedTensor], format: Any, selection: Any) -> Any:
    """`quantize_`, with the tensors that were made beforehand in place of those that it would make."""
    by_name = {name: values[id(p)] for name, _, _, p in owned_parameters(model) if id(p) in values}
    report = quantize_(model, format, **selection)
    with torch.no_grad():
        for name, _, _, p in owned_parameters(model):
            if name in by_name:
                p.copy_(by_name[name])
    return report


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _in_groups(names: list[str], sizes: dict[str, int], memory: int) -> list[list[str]]:
    groups: list[list[str]] = []
    used = memory + 1
    for name in names:
        if used + sizes[name] > memory:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += sizes[name]
    return groups


@torch.no_grad()
def _second_moments(
    model: nn.Module, modules: Iterable[nn.Module], batches: Iterable[Any], forward: Callable[..., Any]
) -> dict[nn.Module, Tensor]:
    """``E[x x^T]`` of what each module reads, fp32; a module that no batch reaches is left out."""
    sums: dict[nn.Module, Tensor] = {}
    counts: dict[nn.Module, int] = {}
    last: list[Tensor] = []  # an input and its product: queries, keys and values read the same

    def watch(module: nn.Module, inputs: Any) -> None:
        if not last or last[0] is not inputs[0]:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()
            last[:] = inputs[0], x.T @ x
        sums[module] = sums[module] + last[1] if module in sums else last[1].clone()
        counts[module] = counts.get(module, 0) + inputs[0].numel() // inputs[0].shape[-1]

    handles = [module.register_forward_pre_hook(watch) for module in modules]
    training = model.training
    model.eval()
    try:
        for batch in batches:
            forward(model, batch)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return {module: total / counts[module] for module, total in sums.items()}


# --- one matrix -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantized_weight(dense: Tensor, format: Format, moment: Tensor) -> QuantizedTensor:
    """A dense matrix with the best scales of the grid, rounded by GPTQ for inputs of this second moment."""
    storage = Storage.zeros(format, dense.shape, dense.device)
    rows = storage.layout.rows
    values = dense.to(torch.float32).reshape(rows, -1)
    if not values.numel():
        return QuantizedTensor(storage, dense.dtype)
    tensor_scale = codec.tensor_scale_for(values) if format.two_level else None
    scale = best_scales(values, format, moment.diagonal(), tensor_scale)
    parts = codec.encode(_repaired(values, scale, format, moment), format, scale=scale, tensor_scale=tensor_scale)
    parts.update(_residues(values, parts, format, scale))
    specs = tensor_specs(format, dense.shape)
    tensors = {name: part.reshape(specs[name][0]).to(specs[name][1]).contiguous() for name, part in parts.items()}
    return QuantizedTensor(Storage(format, tuple(dense.shape), tensors), dense.dtype)


def best_scales(values: Tensor, format: Format, weight: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
    """Of every block the scale of the grid with the least squared error, weighted by column, of the visible code."""
    absmax = codec.block_peak(values, format)
    if format.granularity == "tensor":
        return _best_of_grid(values, absmax, format, weight, None)
    # Some rows at a time, so that the passes over the grid stay in the cache.
    step = max(1, _CACHED // values.shape[1])
    starts = range(0, len(values), step)
    unit = None if tensor_scale is None else tensor_scale[:1]  # the same for all rows
    return torch.cat([_best_of_grid(values[i : i + step], absmax[i : i + step], format, weight, unit) for i in starts])


def _best_of_grid(
    values: Tensor, absmax: Tensor, format: Format, weight: Tensor, tensor_scale: Tensor | None
) -> Tensor:
    visible = visible_format(format)
    levels = torch.tensor(visible.levels, dtype=torch.float32)
    best, least = torch.zeros_like(absmax), torch.full_like(absmax, torch.inf)
    for fraction in GRID:
        scale = codec.scale_for(absmax * fraction, visible, tensor_scale)  # the grid that the forward pass sees
        divisor = spread(torch.where(scale > 0, scale, 1.0), values.shape[1], format)
        squares = (_on_grid(values / divisor, levels, visible) * divisor - values).square_() * weight
        if format.granularity == "tensor":
            error = squares.sum().view(1, 1)
        else:
            error = by_block(lambda blocks: blocks.sum(-1), squares, format)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _on_grid(t: Tensor, levels: Tensor, format: Format) -> Tensor:
    """The nearest level of every number, in units of the scale."""
    if format.kind == "linear":
        return t.round().clamp(float(levels[0]), float(levels[-1]))
    middles = (levels[1:] + levels[:-1]) / 2
    return levels[torch.searchsorted(middles, t.contiguous())]


def _repaired(values: Tensor, scale: Tensor, format: Format, moment: Tensor) -> Tensor:
    """Values that round to the codes of GPTQ: on the visible grid, input by input, the strongest first."""
    visible = visible_format(format)
    order = moment.diagonal().argsort(descending=True, stable=True)
    upper = _repairs(moment[order][:, order])
    levels = torch.tensor(visible.levels, dtype=torch.float32)
    divisor = spread(torch.where(scale > 0, scale, 1.0), values.shape[1], visible).expand(values.shape)
    # Inputs as rows: each is worked on as one stretch of memory.
    left, divisor = values.T[order].contiguous(), divisor.T[order].contiguous()
    result = torch.empty_like(left)
    for start in range(0, len(left), _COLUMNS):
        stop = min(start + _COLUMNS, len(left))
        errors = torch.empty_like(left[start:stop])
        for j in range(start, stop):
            result[j] = _on_grid(left[j] / divisor[j], levels, visible) * divisor[j]
            errors[j - start] = (left[j] - result[j]) / upper[j, j]
            left[j:stop].addr_(upper[j, j:stop], errors[j - start], alpha=-1.0)
        left[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1.0)
    return result[order.argsort()].T


def _repairs(moment: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped second moment: row j says who repairs input j's error."""
    moment = moment.clone()
    moment.diagonal()[moment.diagonal() == 0] = 1.0  # an input that was always zero
    moment.diagonal().add_(DAMPING * moment.diagonal().mean())
    lower = torch.linalg.cholesky(moment.double())
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()


def _residues(values: Tensor, parts: codec.Parts, format: Format, scale: Tensor) -> codec.Parts:
    """What lies below the visible code, of the true weight: hidden bits as far as they reach, a master copy whole."""
    if format.master:
        return {"master": values.clone()}
    if not format.fine_bits:
        return {}
    half = 2 ** (format.fine_bits - 1)
    divisor = spread(torch.where(scale > 0, scale, 1.0), values.shape[1], format)
    seen = codec.decode(parts, values.shape[1], format, visible=True)
    below = ((values - seen) / divisor * 2**format.fine_bits).round().clamp(-half, half - 1)
    lowest = seen <= -(2.0 ** (format.bits - 1) - 1) * divisor  # the grid is symmetric: this code has one residue less
    below = torch.where(lowest, below.clamp(min=1 - half), below)
    return {"hidden": pack((below + half).to(torch.int32), format.fine_bits)}
