"""One whole optimizer step in plain torch: the oracle of every kernel, and the fallback without one.

Contract, for one parameter, row by row::

    g, W, m, v      decoded to fp32 (hidden bits of W included)
    m~, v~, u, d    the rule, from g + l2 * W
    W~              = decay * W - step_size * (u / d)
    W^              = the stored weight: W~ rounded under its scale policy
    m'              = m~ + inject * (W~ - W^)               if the error is injected
    m', v~          encoded with new block scales

    * A step that moves nothing (lr = 0) does not store the weight anew, nor a momentum in its units.

    * A gradient that is not finite (or whose square is not) never touches anything stored: its tile, the
      smallest run of whole chunks and whole blocks of the row, keeps every byte it had. A weight with one
      scale a tensor and a factored second moment make the whole parameter one tile.
    * No temporary is larger than a slab of rows (about `SLAB` elements), however large the parameter.
    * Slabs, shards and threads do not show in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from masterless.formats import codec, scaling
from masterless.formats.layout import CHUNK
from masterless.formats.packing import chunk_bytes
from masterless.formats.rounding import dither
from masterless.formats.storage import Storage, factored_estimate, sum_unit
from masterless.step.rules import Rule, Scalars, Update

SLAB = 1 << 19


@dataclass
class Task:
    """Everything one parameter's step needs: where numbers lie, what to do, and the keys of its random bits."""

    name: str
    rule: Rule
    scalars: Scalars
    group: Mapping[str, Any]
    grad: Tensor
    weight: Storage
    first: Storage | None
    second: Storage | None
    rounding: dict[str, str]  # purpose -> rounding
    keys: dict[str, int]  # purpose -> key of `rounding.dither`
    inject: bool = False
    maximize: bool = False
    scale_policy: str = "held"
    first_row: int = 0  # this shard's first row in the whole parameter
    first_col: int | None = None  # of a shard of a vector: its first element in the whole
    across: Any = None  # of a shard: what the ranks agree on (`masterless.sharding.agreement.Across`)
    tensor_scale: Tensor | None = None  # the scale of a weight that has only one, once it is known
    storages: list[Storage] = field(init=False)

    def __post_init__(self) -> None:
        self.storages = [s for s in (self.weight, self.first, self.second) if s is not None]

    @property
    def indivisible(self) -> bool:
        """Whether one bad gradient must keep the whole parameter from moving."""
        factored = self.second is not None and self.second.format.kind == "factored"
        one_scale = self.weight.format.scaled and self.weight.format.granularity == "tensor"
        return factored or one_scale or self.rule.finish is not None

    @property
    def keeps_first(self) -> bool:
        """Whether the first moment stays as it is stored: in units of the weight, while nothing moves."""
        return self.rule.units == "weight" and self.scalars.step_size == 0.0

    @property
    def collective(self) -> bool:
        """Whether a shard's step needs the other ranks: statistics of the whole, or a tile that two of them share."""
        return self.across is not None and (self.indivisible or self.first_col is not None)

    @property
    def chunks_per_tile(self) -> int:
        """Chunks of a row that stand or fall together: the longest block of any storage; 0: given by element."""
        if self.first_col is not None:
            return 0
        blocks = [s.layout.block(s.format) for s in self.storages if s.format.scaled]
        return max(1, *(-(-b // CHUNK) for b in blocks)) if blocks else 1


def step(task: Task) -> int:
    """Performs one parameter's step in place; returns how many gradient elements were not finite."""
    rows, cols = task.weight.layout.rows, task.weight.layout.cols
    if rows * cols == 0:
        return 0 if task.across is None else task.across.idle(task)
    grad = task.grad.detach().reshape(rows, cols)
    if task.across is None:
        if task.indivisible:
            count = sum(int(_bad_elements(grad[a:b]).sum()) for a, b in _slabs(rows, cols))
            if count:
                return count
            task = _with_parameter_statistics(task, grad)
        count = sum(_step_slab(task, grad[a:b], _bad_elements(grad[a:b]), a, b) for a, b in _slabs(rows, cols))
        if task.tensor_scale is not None:  # only now: until here slabs were decoded under the scale they had
            task.weight.tensors["scale"].copy_(task.tensor_scale)
        return count
    bad = _bad_elements(grad)
    count = int(bad.sum())
    bad, blocked = task.across.agree(task, bad, count)
    if task.indivisible:
        if blocked:
            return count
        task = _with_parameter_statistics(task, grad)
    for start, stop in _slabs(rows, cols):
        _step_slab(task, grad[start:stop], bad[start:stop], start, stop)
    return count


def _slabs(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    height = max(1, SLAB // cols)
    return ((start, min(rows, start + height)) for start in range(0, rows, height))


def _bad_elements(grad: Tensor) -> Tensor:
    wide = grad.to(torch.float32)
    return ~(wide * wide).isfinite()


def _gradient(task: Task, grad: Tensor, w: Tensor) -> Tensor:
    g = grad.to(torch.float32)
    g = -g if task.maximize else g
    return g + w * task.scalars.l2 if task.scalars.l2 else g


def _decode_first(task: Task, start: int, stop: int) -> Tensor | None:
    first = task.first
    if first is None or first.format.kind == "none":
        return None
    return codec.decode(first.slab(start, stop), first.layout.cols, first.format)


def _second_moment(task: Task, start: int, stop: int) -> Any:
    """The rule's view of its second moment: this step's innovation to the updated average."""
    second, c = task.second, task.scalars
    if second is None:
        return None
    if second.format.kind == "factored":
        estimate = factored_estimate if task.across is None else task.across.factored_estimate
        return lambda innovation: estimate(second, start, stop)
    old = codec.decode(second.slab(start, stop), second.layout.cols, second.format)
    return lambda innovation: old * c.keep2 + innovation * c.rate2


def _target(task: Task, grad: Tensor, start: int, stop: int) -> tuple[Tensor, Update]:
    """Where the weights of some rows should go, and the rule's update that says so."""
    c, weight = task.scalars, task.weight
    w = codec.decode(weight.slab(start, stop), weight.layout.cols, weight.format)
    g = _gradient(task, grad, w)
    update = task.rule.update(g, _decode_first(task, start, stop), _second_moment(task, start, stop), c)
    moved = update.direction if update.denominator is None else update.direction / update.denominator
    return w * c.decay - moved * c.step_size, update


def _step_slab(task: Task, grad: Tensor, bad: Tensor, start: int, stop: int) -> int:
    """Steps some rows, but for the tiles with bad gradients; returns how many gradients are bad."""
    weight, c = task.weight, task.scalars
    cols = weight.layout.cols
    count = int(bad.sum())
    if count:
        grad = torch.where(bad, 0.0, grad)
    target, update = _target(task, grad, start, stop)

    def random_bits(purpose: str) -> Tensor | None:
        if task.rounding[purpose] == "nearest":
            return None
        skip = task.first_col or 0
        u = dither(task.keys[purpose], stop - start, skip + cols, task.first_row + start, target.device)
        return u[:, skip:]

    scale = task.tensor_scale
    if scale is None:
        held = weight.slab(start, stop).get("scale")
        scale = scaling.next_scale(weight.format, task.scale_policy, target, held)
    # A master copy loses nothing, so its visible code is simply the nearest.
    u = None if weight.format.master else random_bits("weight")
    new_weight = codec.encode(target, weight.format, u, scale=scale)

    first = update.first
    if task.inject and first is not None:
        error = target - codec.decode(new_weight, cols, weight.format)
        first = first + error * c.inject

    if task.tensor_scale is not None:
        del new_weight["scale"]
    writes = [] if task.scale_policy == scaling.FROZEN else [(weight, new_weight)]
    for storage, value, purpose in (
        (task.first, None if task.keeps_first else first, "exp_avg"),
        (task.second, update.second, "exp_avg_sq"),
    ):
        if storage is not None and value is not None and storage.format.kind not in ("none", "factored"):
            log_dither = task.rounding[purpose] == "stochastic-log"
            new = codec.encode(value, storage.format, random_bits(purpose), log_dither=log_dither)
            writes.append((storage, new))
    for storage, new in writes:
        if count:
            new = _keep_bad_tiles(storage, new, bad, task.chunks_per_tile, start, stop)
        storage.write(start, stop, new)
    return count


def _keep_bad_tiles(
    storage: Storage, new: codec.Parts, bad: Tensor, chunks_per_tile: int, start: int, stop: int
) -> codec.Parts:
    """The new parts, with every tile that has a bad gradient replaced by what is stored now."""
    if chunks_per_tile == 0:
        old = storage.slab(start, stop)
        return {name: torch.where(bad, old[name], value) for name, value in new.items()}
    rows, cols = bad.shape
    tile = chunks_per_tile * CHUNK
    padded = torch.nn.functional.pad(bad, (0, -cols % tile))
    chunks = padded.view(rows, -1, tile).any(-1).repeat_interleave(chunks_per_tile, dim=1)
    old = storage.slab(start, stop)
    kept = {}
    for name, value in new.items():
        if name in ("codes", "hidden"):
            bits = storage.format.bits if name == "codes" else storage.format.fine_bits
            mask = chunks.repeat_interleave(chunk_bytes(CHUNK, bits), dim=1)
        elif name in ("values", "master"):
            mask = chunks.repeat_interleave(CHUNK, dim=1)
        else:  # metadata of blocks, which are whole tiles or parts of a chunk
            block = storage.layout.block(storage.format)
            mask = chunks.repeat_interleave(max(1, CHUNK // block), dim=1)[:, :: max(1, -(-block // CHUNK))]
        kept[name] = torch.where(mask[:, : value.shape[1]], old[name], value)
    return kept


# --- what needs the whole parameter before any of it moves ---------------------------------------------


def _with_parameter_statistics(task: Task, grad: Tensor) -> Task:
    """Updates a factored second moment, fixes the scale of a whole tensor, and Adafactor's step size."""
    rows, cols = grad.shape
    if task.second is not None and task.second.format.kind == "factored":
        _update_factored(task, grad)
    if task.rule.finish is not None:
        task = replace(task, scalars=_adafactor_scalars(task, grad))
    if task.weight.format.scaled and task.weight.format.granularity == "tensor":
        peaks = [_target(task, grad[a:b], a, b)[0].abs().amax() for a, b in _slabs(rows, cols)]
        absmax = torch.stack(peaks).amax().view(1, 1)
        held = task.weight.tensors["scale"]
        scale = scaling.scale_from_absmax(task.weight.format, task.scale_policy, absmax, held)
        task = replace(task, tensor_scale=scale)
    return task


def _update_factored(task: Task, grad: Tensor) -> None:
    second, c = task.second, task.scalars
    assert second is not None
    layout = second.layout
    if task.across is not None and task.across.splits_matrix:
        w = codec.decode(task.weight.slab(0, layout.rows), layout.cols, task.weight.format)
        return task.across.update_factored(task, _gradient(task, grad, w).to(torch.float64).square())
    for i in range(layout.matrices):
        first = i * layout.matrix_rows
        slabs = [(first + a, first + b) for a, b in _slabs(layout.matrix_rows, layout.cols)]
        unit = sum_unit(_peak(_squares(task, grad, *slab) for slab in slabs), max(layout.matrix_rows, layout.cols))
        col_sum = torch.zeros(layout.cols, dtype=torch.float64, device=grad.device)
        for a, b in slabs:
            counted = (_squares(task, grad, a, b) / unit).round()
            col_sum += counted.sum(0)
            row = second.tensors["row"].view(-1)[a:b]
            row.copy_(row * c.keep2 + (counted.sum(1) * unit / layout.cols).to(torch.float32) * c.rate2)
        col = second.tensors["col"][i]
        col.copy_(col * c.keep2 + (col_sum * unit / layout.matrix_rows).to(torch.float32) * c.rate2)


def _squares(task: Task, grad: Tensor, start: int, stop: int) -> Tensor:
    """The squared gradient of some rows, as the rule sees it, exact in fp64."""
    w = codec.decode(task.weight.slab(start, stop), task.weight.layout.cols, task.weight.format)
    return _gradient(task, grad[start:stop], w).to(torch.float64).square()


def _peak(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.amax() for part in parts]).amax()


def _rms(parts: Callable[[], Iterable[Tensor]], count: int) -> float:
    """The root mean square of `count` numbers that come in parts, in an order that does not matter."""
    unit = sum_unit(_peak(part.to(torch.float64).square() for part in parts()), count)
    total = sum(float((part.to(torch.float64).square() / unit).round().sum()) for part in parts())
    return math.sqrt(total * float(unit) / count)


def _adafactor_scalars(task: Task, grad: Tensor) -> Scalars:
    rows, cols = grad.shape
    raw = task.scalars._replace(clip=1.0)

    def weights(a: int, b: int) -> Tensor:
        return codec.decode(task.weight.slab(a, b), cols, task.weight.format)

    def updates(a: int, b: int) -> Tensor:
        g = _gradient(task, grad[a:b], weights(a, b))
        update = task.rule.update(g, None, _second_moment(task, a, b), raw)
        assert update.denominator is not None
        return update.direction / update.denominator

    def rms(numbers: Callable[[int, int], Tensor]) -> float:
        if task.across is not None:
            return task.across.rms(numbers(0, rows))
        return _rms(lambda: (numbers(a, b) for a, b in _slabs(rows, cols)), rows * cols)

    assert task.rule.finish is not None
    return task.rule.finish(raw, task.group, rms(weights), rms(updates))
