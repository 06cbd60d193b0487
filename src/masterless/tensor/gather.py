"""What FSDP2 gathers of a quantized parameter, and the parameter that comes of it.

Contract:
    * The all-gather moves what a forward pass reads and nothing else: visible codes and scales, in one uint8 carrier
      (hidden bits, master weights and moments stay where they are). All ranks hand over carriers of the same size,
      the last ones padded, so that uneven and empty shards and a world of one are the same code.
    * The gathered parameter is itself quantized: a layer decodes it when it computes, as on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.formats.storage import Spec
from masterless.tensor import places
from masterless.tensor.decoding import StoredTensor
from masterless.tensor.pieces import empty_storage, sliced_specs

# Of a gathered parameter: the refill below changes its numbers and counts as no change.
_REFILLED = places.Closed("FSDP2 refills it in every pass")


class Carrier(Tensor):
    """The bytes that one rank hands over; it claims the padded shard's size.

    FSDP2 demands of an uneven shard that its all-gather inputs have the padded shard's shape, to be sure that all ranks
    send the same number of bytes. These do, by construction, but they are fewer than that shape has elements.
    """

    claimed: torch.Size

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The padded shard's size."""
        return self.claimed if dim is None else self.claimed[dim]

    def view(self, *size: Any) -> Tensor:
        """The bytes as a plain tensor."""
        return self.as_subclass(Tensor).view(*size)


def visible_specs(format: Format, shape: Sequence[int], slices: int) -> dict[str, Spec]:
    """The stored tensors of a piece that a forward pass reads, scales first so that they stay aligned."""
    specs = sliced_specs(format, shape, slices)
    names = ("tensor_scale", "scale", "codes", *(("hidden",) if format.shown else ()))
    return {name: specs[name] for name in names if name in specs}


def _nbytes(spec: Spec) -> int:
    return math.prod(spec[0]) * spec[1].itemsize


def carrier_bytes(format: Format, shape: Sequence[int], world_size: int) -> int:
    """Bytes that every rank sends in the all-gather of one parameter of this (whole) shape."""
    padded = -(-shape[0] // world_size)
    payload = sum(map(_nbytes, visible_specs(format, shape, padded).values()))
    row = math.prod(shape[1:])
    return -(-payload // row) * row  # FSDP2 folds what it gathered into rows of the parameter


def pack(q: StoredTensor, world_size: int, outer_size: torch.Size) -> tuple[tuple[Tensor], Any]:
    """`fsdp_pre_all_gather`: this shard's visible bytes, padded to the size that all ranks send."""
    padded = -(-outer_size[0] // world_size)
    buffer = torch.zeros(carrier_bytes(q.format, outer_size, world_size), dtype=torch.uint8, device=q.device)
    offset = 0
    for name, spec in visible_specs(q.format, outer_size, padded).items():
        mine = q.stored.tensors[name].reshape(-1)
        if mine.numel():
            buffer[offset : offset + mine.numel() * mine.itemsize] = mine.view(torch.uint8)
        offset += _nbytes(spec)
    carrier = buffer.as_subclass(Carrier)
    carrier.claimed = torch.Size((padded, *outer_size[1:]))
    return (carrier,), (tuple(outer_size), world_size)


def unpack(
    q: StoredTensor, gathered: Tensor, metadata: Any, dtype: torch.dtype, out: Tensor | None
) -> tuple[StoredTensor, tuple[Tensor, ...]] | None:
    """`fsdp_post_all_gather`: the whole parameter, quantized, from all carriers; or refills `out`."""
    shape, world_size = metadata
    format = visible_format(q.format)
    if out is None:
        whole = q.rewrapped(empty_storage(format, shape, gathered.device), dtype)
        places.assign(whole.stored, _REFILLED)
    else:
        whole = out  # type: ignore[assignment]
    padded = -(-shape[0] // world_size)
    carriers = gathered.reshape(world_size, -1)
    offset = 0
    for name, spec in visible_specs(format, shape, padded).items():
        width = _nbytes(spec)
        target = whole.stored.tensors[name]
        # A refill brings back what was freed after the forward pass: for autograd nothing has changed.
        with torch.autograd._unsafe_preserve_version_counter(target):
            raw, per_slice = target.view(torch.uint8), width // padded
            for rank in range(world_size):
                first, last = min(rank * padded, shape[0]), min((rank + 1) * padded, shape[0])
                if last > first:
                    part = carriers[rank, offset : offset + (last - first) * per_slice]
                    raw[first:last].view(-1).copy_(part)
        offset += width
    return None if out is not None else (whole, tuple(whole.stored.tensors.values()))


def visible_format(format: Format) -> Format:
    """The format of what the all-gather moves: without hidden bits, unless they are shown."""
    if not format.hidden or format.shown:
        return format
    return replace(format, family=format.family.partition("+")[0], hidden=0)
