"""One parameter's step in plain torch: the oracle of every kernel.

Contract, row by row::

    g, W, m, v      decoded to fp32 (hidden bits of W included)
    m~, v~, u, d    the rule, from g + l2 * W
    W~              = decay * W - step_size * (u / d)
    W^              = the stored weight: W~ rounded under its scale policy
    m'              = m~ + inject * (W~ - W^)               if the error is injected
    m', v~          encoded with new block scales

    * A step that moves nothing (lr = 0) does not store the weight anew, nor a momentum in its units.

    * A gradient that is not finite (or whose square is not) never touches anything stored: its tile, the
      smallest run of whole chunks and whole blocks of the row, keeps every byte it had. A weight with one
      scale per tensor and a factored second moment make the whole parameter one tile.
    * So does a tile with a target that is not finite, whatever made it so; of a weight with one scale, the whole
      parameter. (A factored second moment is an average of the gradients, which are finite: it goes on.) A moment that
      overflows though the target does not stops at the largest finite number.
    * Every number counts, denormal ones included (`exact_arithmetic`).
    * Slabs of rows and shards of parameters are `backends.reference`'s, which calls `step_rows` for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masterless.formats import codec, scaling
from masterless.formats.arithmetic import exact_arithmetic
from masterless.formats.layout import CHUNK
from masterless.formats.packing import chunk_bytes
from masterless.formats.rounding import dither
from masterless.formats.storage import Storage
from masterless.step import statistics, tile
from masterless.step.statistics import Known
from masterless.step.task import Task as Task


@exact_arithmetic()
def step(task: Task) -> int:
    """Performs one parameter's step in place; returns how many gradients or targets were not finite."""
    rows, cols = task.weight.layout.rows, task.weight.layout.cols
    if rows * cols == 0:
        return 0
    grad = task.grad.detach().reshape(rows, cols)
    bad = statistics.bad_rows(task, grad, 0, rows)
    count = int(bad.sum())
    if count and task.indivisible:
        return count
    known = statistics.collect(task, grad)
    if known.lost:
        return known.lost
    count += step_rows(task, known, grad, bad, 0, rows)
    finish(task, known)
    return count


def finish(task: Task, known: Known) -> None:
    """Stores what all rows were decoded under until now: the scale of a weight that has only one."""
    if known.weight_scale is not None:
        stored = codec.stored_scale(known.weight_scale, task.weight.format)
        task.weight.tensors["scale"].copy_(stored["scale"])


def step_rows(task: Task, known: Known, grad: Tensor, bad: Tensor, start: int, stop: int) -> int:
    """Steps some rows, given their gradient, but for the tiles with bad elements.

    Returns how many targets in the other tiles are not finite.
    """
    weight, c = task.weight, known.scalars
    cols = weight.layout.cols
    any_bad = bool(bad.any())
    if any_bad:
        grad = torch.where(bad, 0.0, grad)
    target, update = statistics.advance_rows(task, known, grad, start, stop)
    lost, count = ~target.isfinite(), 0
    if bool(lost.any()):
        any_bad, lost = True, lost & ~_whole_tiles(bad, task.chunks_per_tile)
        bad, count = bad | lost, int(lost.sum())

    def random_bits(purpose: str) -> Tensor | None:
        if task.rounding[purpose] == "nearest":
            return None
        skip, first_row = task.first_col or 0, task.first_row + start
        u = dither(task.keys[purpose], stop - start, skip + cols, first_row, target.device)
        return u[:, skip:]

    scale = known.weight_scale
    if scale is None:
        scale = scaling.next_scale(weight.format, task.scale_policy, target, weight.slab(start, stop))
    # A master copy loses nothing, so its visible code is simply the nearest.
    u = None if weight.format.master else random_bits("weight")
    tensor_scale = weight.slab(start, stop).get("tensor_scale")
    new_weight = codec.encode(target, weight.format, u, scale=scale, tensor_scale=tensor_scale)
    first = update.first
    if task.inject and first is not None:
        first = tile.injected(first, c, target - codec.decode(new_weight, cols, weight.format))
    if known.weight_scale is not None:
        del new_weight["scale"]
    new_weight.pop("tensor_scale", None)  # stays as it was when the weight was made
    writes = [] if task.scale_policy == scaling.FROZEN else [(weight, new_weight)]
    if tile.keeps_first(task.rule, c):
        first = None
    for storage, value, purpose in ((task.first, first, "exp_avg"), (task.second, update.second, "exp_avg_sq")):
        if storage is not None and value is not None and storage.format.kind not in ("none", "factored"):
            new = codec.encode(
                tile.storable(value), storage.format, random_bits(purpose), rounding=task.rounding[purpose]
            )
            writes.append((storage, new))
    for storage, new in writes:
        if any_bad:
            new = _keep_bad_tiles(storage, new, bad, task.chunks_per_tile, start, stop)
        storage.write(start, stop, new)
    return count


def _bad_chunks(bad: Tensor, chunks_per_tile: int) -> Tensor:
    """``[rows, chunks]``: those whose tile has a bad element."""
    rows, cols = bad.shape
    tile_length = chunks_per_tile * CHUNK
    padded = torch.nn.functional.pad(bad, (0, -cols % tile_length))
    return padded.view(rows, -1, tile_length).any(-1).repeat_interleave(chunks_per_tile, dim=1)


def _whole_tiles(bad: Tensor, chunks_per_tile: int) -> Tensor:
    """All elements of every tile that has a bad one."""
    if chunks_per_tile == 0:
        return bad
    return _bad_chunks(bad, chunks_per_tile).repeat_interleave(CHUNK, dim=1)[:, : bad.shape[1]]


def _keep_bad_tiles(
    storage: Storage, new: codec.Parts, bad: Tensor, chunks_per_tile: int, start: int, stop: int
) -> codec.Parts:
    """The new parts, with every tile that has a bad gradient replaced by what is stored now."""
    old = storage.slab(start, stop)
    if chunks_per_tile == 0:
        return {name: torch.where(bad, old[name], value) for name, value in new.items()}
    chunks = _bad_chunks(bad, chunks_per_tile)
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
            if name == "step":  # two bytes each
                mask = mask.repeat_interleave(2, dim=1)
        kept[name] = torch.where(mask[:, : value.shape[1]], old[name], value)
    return kept
