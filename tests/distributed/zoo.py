"""What the distributed tests share: meshes of the first n ranks, a model of awkward shapes, comparisons of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import masterless as ml
from masterless.optim.presets import PRESETS
from masterless.sharding.place import Place
from masterless.tensor.quantized import QuantizedTensor, local_of

SIZES = (1, 2, 3, 4)


@cache
def mesh_of(n: int) -> DeviceMesh:
    """A mesh of ranks 0 ... n - 1; every rank of the world must ask for it at the same time."""
    return DeviceMesh("cpu", list(range(n)))


def inside(n: int) -> bool:
    return dist.get_rank() < n


class Zoo(nn.Module):
    """Shapes that do not divide: ten rows, two rows (empty shards), experts, a narrow matrix, long vectors."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        shapes = {
            "even": (12, 160),
            "uneven": (10, 130),
            "few": (2, 96),
            "experts": (3, 7, 64),
            "one": (1, 5, 40),
            "narrow": (17, 8),
            "vector": (300,),
            "bias": (5,),
        }
        for name, shape in shapes.items():
            value = (torch.randn(shape, generator=g) * 0.1).to(dtype)
            setattr(self, name, nn.Parameter(value))

    def gradients(self, step: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(100 + step)
        return {
            name: (torch.randn(p.shape, generator=g) * 0.01 * (1 + step)).to(p.dtype)
            for name, p in sorted(self.named_parameters())
        }


def quantized_zoo(weights: str | None, dtype: torch.dtype = torch.float32) -> Zoo:
    model = Zoo(dtype)
    if weights:
        ml.quantize_(model, weights, rules={n: weights for n in ("even", "uneven", "few", "experts", "one")})
    return model


Build = Callable[[Any], Any]


def configurations() -> dict[str, tuple[str | None, torch.dtype, Build]]:
    """Name -> weights, dtype of the rest, and the optimizer."""
    table: dict[str, tuple[str | None, torch.dtype, Build]] = {}
    for name, preset in PRESETS.items():
        table[name] = (preset.weights, torch.float32, _adamw(lr=1e-2, **preset.options))
    f32, bf16 = torch.float32, torch.bfloat16
    table["bf16 weights"] = (None, bf16, _adamw(lr=1e-2))
    table["int4, bf16 rest"] = ("int4", bf16, _adamw(lr=1e-2, exp_avg="int4", exp_avg_sq="log2", betas=(0.4, 0.95)))
    table["bf16 states"] = (None, bf16, _adamw(lr=1e-2, exp_avg="bf16", exp_avg_sq="bf16"))
    table["l2, factored"] = ("int8", f32, lambda p: ml.Adam(p, lr=1e-2, weight_decay=0.1, exp_avg_sq="factored"))
    table["adafactor"] = (None, bf16, lambda p: ml.Adafactor(p, lr=1e-2))
    table["adafactor, int4"] = ("int4", f32, lambda p: ml.Adafactor(p, lr=1e-2, beta1=0.5, exp_avg="int4"))
    table["sgd"] = ("fp8", f32, lambda p: ml.SGD(p, lr=1e-1, momentum=0.9, momentum_buffer="dynamic8"))
    table["lion"] = ("int4+4", f32, lambda p: ml.Lion(p, lr=1e-3, exp_avg="int4", error_compensation=False))
    table["rmsprop"] = ("int4+32", f32, lambda p: ml.RMSprop(p, lr=1e-3, momentum=0.5, square_avg="log3"))
    table["adabelief"] = ("int8:row:pow2", f32, lambda p: ml.AdaBelief(p, lr=1e-3, exp_avg_var="log4"))
    table["muon"] = ("int4+4", f32, _muon(lr=2e-2, momentum_buffer="int4"))
    table["muon, injected"] = (
        "int8",
        f32,
        _muon(lr=2e-2, momentum_buffer="int8", error_compensation=True, ns_dtype="fp32"),
    )
    table["muon, nvfp4"] = ("nvfp4", bf16, _muon(lr=2e-2, momentum_buffer="mxfp8", nesterov=False))
    table["reset"] = ("int8", f32, _adamw(lr=1e-2, exp_avg_sq="log2", reset=2))
    return table


def _adamw(**options: Any) -> Build:
    return lambda p: ml.AdamW(p, **options)


def _muon(**options: Any) -> Build:
    return lambda named: ml.Muon([(name, p) for name, p in named if p.dim() in (2, 3)], **options)


def shard(model: nn.Module, n: int) -> nn.Module:
    fully_shard(model, mesh=mesh_of(n))
    return model


def set_gradients(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Gives every parameter, sharded or not, its part of a whole gradient."""
    for name, p in model.named_parameters():
        whole = gradients[name]
        if isinstance(p, DTensor):
            place = Place.of(p)
            mine = whole[place.start : place.start + place.slices].contiguous()
            p.grad = DTensor.from_local(
                mine, p.device_mesh, p.placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        else:
            p.grad = whole.clone()


def parts(tensor: Tensor) -> dict[str, Tensor]:
    local = local_of(tensor)
    return dict(local.stored.tensors) if isinstance(local, QuantizedTensor) else {"": local}


def differences(sharded: nn.Module, opt: Any, whole: nn.Module, whole_opt: Any) -> Iterator[str]:
    """Every stored tensor of a sharded run that is not, to the bit, its part of the whole run's."""
    wholes = dict(whole.named_parameters())
    for name, p in sharded.named_parameters():
        q = wholes[name]
        place = Place.of(p)
        span = slice(place.start, place.start + place.slices)
        for part, tensor in parts(p).items():
            if not same(tensor, parts(q)[part][span]):
                yield f"{name} weight {part}"
        mine, theirs = opt.state[p], whole_opt.state[q]
        if set(mine) != set(theirs):
            yield f"{name} keys {sorted(mine)} {sorted(theirs)}"
            continue
        for key, value in theirs.items():
            if value.dim() and not isinstance(mine[key], DTensor):
                yield f"{name} {key} is no DTensor"
            elif value.dim() and (mine[key].shape != value.shape or mine[key].dtype != value.dtype):
                yield f"{name} {key} {mine[key].shape} {mine[key].dtype}"
            elif not same(local_of(mine[key]), place.cut(value, key.rpartition(".")[2])):
                yield f"{name} state {key}"


def same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() == 0 or torch.equal(a.reshape(b.shape), b)
