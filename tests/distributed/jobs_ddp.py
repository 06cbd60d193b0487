"""Jobs: replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zoo import inside, mesh_of

import masterless as ml
from masterless.distributed import fingerprint, replicate, synchronize_
from masterless.optim.backward import step_in_backward


def _model(seed: int, format: str = "int4+4") -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(48, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 33))
    model.register_buffer("count", torch.tensor([seed]))
    ml.quantize_(model, format)
    return model


def _optimizer(model: nn.Module) -> Any:
    return ml.AdamW(model.named_parameters(), lr=3e-3, exp_avg="int4", exp_avg_sq="log2", betas=(0.8, 0.95))


def _train(model: nn.Module, opt: Any, steps: range, rank: int) -> None:
    for i in steps:
        x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1000 * i + rank))
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


def _agree(value: str, group: dist.ProcessGroup) -> bool:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return len(set(values)) == 1


def synchronisation(rank: int, world: int) -> list[str]:
    """Every format: all ranks have the first one's bytes, hidden ones too, and the first one's have not changed."""
    found = []
    for format in ("int4", "int4+4", "int8", "fp8", "int8+32", "int4:tensor"):
        model = _model(rank, format)
        expected = fingerprint(_model(0, format))
        synchronize_(model)
        if fingerprint(model) != expected:
            found.append(format)
    return found


def stock_ddp_is_refused(rank: int, world: int) -> str:
    try:
        DistributedDataParallel(_model(0))
    except RuntimeError as error:
        return str(error)
    return "not refused"


def replicas(rank: int, world: int, steps: int, n: int) -> dict[str, Any] | None:
    """Different data on every rank; ordinary steps, and steps in the communication hook."""
    mesh = mesh_of(n)
    if not inside(n):
        return None
    group = mesh.get_group()
    model = replicate(_model(rank), process_group=group)
    opt = _optimizer(model.module)
    alike = []
    for start in range(0, steps, 50):
        _train(model, opt, range(start, min(steps, start + 50)), rank)
        alike.append(_agree(fingerprint(model.module, opt), group))
    hooked = replicate(_model(rank), process_group=group)
    hooked_opt = _optimizer(hooked.module)
    stepper = step_in_backward(hooked, hooked_opt)
    left = 0
    for i in range(0, steps, 50):
        _train(hooked, hooked_opt, range(i, min(steps, i + 50)), rank)
        left += sum(p.grad is not None for p in hooked.parameters())
        alike.append(_agree(fingerprint(hooked.module, hooked_opt), group))
    same_as_ordinary = fingerprint(hooked.module, hooked_opt) == fingerprint(model.module, opt)
    stepper.remove()
    _train(model, opt, range(steps, steps + 5), rank)
    _train(hooked, hooked_opt, range(steps, steps + 5), rank)
    after_removal = fingerprint(hooked.module, hooked_opt) == fingerprint(model.module, opt)
    return {"alike": alike, "left": left, "same": same_as_ordinary, "after removal": after_removal}


def synchronisation_of_kept_copies(rank: int, world: int) -> bool:
    """Decoded weights that a rank keeps do not outlive the bytes that it gets from the first one."""
    model, x = _model(rank), torch.ones(1, 48)
    ml.cache_decoded_(model, "1MB")
    own = model(x).detach()
    synchronize_(model)
    expected = _model(0)(x)
    return torch.equal(model(x), expected) and (rank == 0 or not torch.equal(own, expected))
