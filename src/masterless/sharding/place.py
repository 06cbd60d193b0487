"""Where a shard of a parameter lies in the whole, and its optimizer state as DTensors.

Contract:
    * A parameter is sharded along dimension 0 over one dimension of the mesh and replicated over the others. Other
      placements (tensor parallelism) are refused.
    * Formats are decided from the whole shape. The stored tensors of a state are DTensors with the parameter's
      placements, because each has the parameter's slices as its dimension 0: a distributed checkpoint can then cut them
      anew for any number of ranks. Only the column means of a matrix that ranks share are replicated.
    * A vector is one row, so a shard of it is a run of columns: its random bits are those of its global columns. Blocks
      of 128 would cross ranks, hence vectors keep plain states (which is the default).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from masterless.formats import Format
from masterless.formats.layout import Layout
from masterless.formats.storage import Storage, refuse_leftovers, state_key, tensor_specs
from masterless.sharding.agreement import Ranks
from masterless.tensor.quantized import local_of


@dataclass(frozen=True)
class Place:
    """Where this process's shard lies in the whole parameter.

    Attributes:
        shape: of the whole.
        start: first slice of the shard.
        slices: slices in the shard.
        mesh: the device mesh of the parameter.
        dim: the dimension of the mesh that shards it; None if every rank has the whole.
    """

    shape: tuple[int, ...]
    start: int
    slices: int
    mesh: DeviceMesh
    dim: int | None

    @classmethod
    def of(cls, p: Tensor) -> Place:
        """The place of a parameter's local shard; the parameter must be a DTensor."""
        assert isinstance(p, DTensor)
        sharded = [i for i, placement in enumerate(p.placements) if not isinstance(placement, Replicate)]
        if len(sharded) > 1 or any(p.placements[i] != Shard(0) for i in sharded):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} has placements {p.placements}: low-bit states follow a "
                f"parameter sharded along dimension 0 of one mesh dimension (FSDP2, HSDP); blocks would be cut in two "
                f"otherwise. Shard with fully_shard alone"
            )
        local, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        whole = (1,) if not p.shape else tuple(p.shape)
        start = offset[0] if offset and local and local[0] else whole[0]
        return cls(tuple(p.shape), start, local[0] if local else 1, p.device_mesh, sharded[0] if sharded else None)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the parameter; None if this one has all of it."""
        if self.dim is None or self.mesh.size(self.dim) == 1:
            return None
        return self.mesh.get_group(self.dim)

    @property
    def vector(self) -> bool:
        """Whether the shard is a run of columns of the only row."""
        return len(self.shape) < 2

    @property
    def splits_matrix(self) -> bool:
        """Whether ranks share the rows of one matrix (not so in a stack of experts, which is cut between matrices)."""
        layout = Layout.of(self.shape)
        return not self.vector and layout.rows == layout.slices == layout.matrix_rows

    def shared(self, part: str) -> bool:
        """Whether every rank holds all of a stored tensor."""
        return part == "col" and self.splits_matrix

    def task_fields(self, device: torch.device) -> dict[str, Any]:
        """What a `Task` must know of its shard."""
        if self.dim is None:
            return {}
        ranks = Ranks(self.group, self.shape, self.splits_matrix, device)
        if self.vector:
            return {"first_col": self.start, "ranks": ranks}
        return {"first_row": self.start * Layout.of(self.shape).rows_per_slice, "ranks": ranks}

    def wrap(self, local: Tensor, part: str, size: tuple[int, ...]) -> DTensor:
        """A local stored tensor as the DTensor of the whole of `size`."""
        placements: list[Any] = [Replicate()] * self.mesh.ndim
        if self.dim is not None and not self.shared(part):
            placements[self.dim] = Shard(0)
            local = local.reshape(self.slices, *size[1:])
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(size), stride=stride)

    def gathered(self, local: Tensor) -> Tensor:
        """The whole tensor of the parameter's shape of which every rank has the slices that it has of the parameter."""
        return self.wrap(local, "values", self.shape).full_tensor()

    def cut(self, value: Tensor, part: str) -> Tensor:
        """This rank's part of a stored tensor that arrives whole, or as a DTensor that is cut like the parameter."""
        if isinstance(value, DTensor):
            return value._local_tensor
        if value.dim() == 0 or self.dim is None or self.shared(part):
            return value
        return value[self.start : self.start + self.slices]


def check(p: Tensor, group: dict[str, Any], formats: dict[str, Format]) -> None:
    """Raises a ValueError for a sharded parameter that the optimizer cannot step."""
    place = Place.of(p)
    if place.dim is None:
        return
    for name, fmt in formats.items():
        if place.vector and fmt.scaled:
            raise ValueError(
                f"{name}='{fmt}' for a sharded vector of shape {place.shape}: its blocks would be cut between ranks; "
                f"pass quantize_states='matrices' for this group, which keeps vectors in fp32"
            )
    if isinstance(group["reset"], str) and group["reset"].startswith("adaptive"):
        raise ValueError(
            f"reset={group['reset']!r} with sharded parameters: each rank would measure the stalls of its own shard, "
            f"and ranks would reset at different steps; pass 'auto' or a number of steps"
        )


def state_storage(p: Tensor, state: dict[str, Any], formats: dict[str, Format]) -> dict[str, Storage]:
    """The storages of a sharded parameter's states: local tensors of the DTensors in `state`, allocated if need be."""
    place, local = Place.of(p), tuple(local_of(p).shape)
    storages = {}
    for name, fmt in formats.items():
        whole = tensor_specs(fmt, place.shape)
        keys = {part: state_key(name, part) for part in whole}
        if any(key not in state for key in keys.values()):
            refuse_leftovers(name, fmt, state)
            fresh = _zeros(fmt, place, local, p.device)
            state.update({keys[part]: place.wrap(t, part, whole[part][0]) for part, t in fresh.items()})
        mine = tensor_specs(fmt, local)
        storages[name] = Storage(
            fmt,
            local,
            {
                part: local_of(state[key]) if place.shared(part) else local_of(state[key]).view(mine[part][0])
                for part, key in keys.items()
            },
        )
    return storages


def _zeros(fmt: Format, place: Place, local: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    tensors = dict(Storage.zeros(fmt, local, device).tensors)
    for part in tensors:
        if place.shared(part):
            size, dtype = tensor_specs(fmt, place.shape)[part]
            tensors[part] = torch.zeros(size, dtype=dtype, device=device)
    return tensors
