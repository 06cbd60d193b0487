"""Jobs: distributed checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from zoo import SIZES, configurations, differences, inside, mesh_of, quantized_zoo, same, set_gradients, shard

from masterless.distributed import checkpoint
from masterless.tensor.quantized import local_of

PLAIN = 0  # in place of a number of ranks: one process, nothing sharded
TRIPS = ((2, 1), (2, 3), (4, 2), (1, 4), (PLAIN, 3), (3, PLAIN))


def _build(name: str, n: int) -> tuple[nn.Module, Any]:
    weights, dtype, build = configurations()[name]
    model: nn.Module = quantized_zoo(weights, dtype)
    if n != PLAIN:
        shard(model, n)
    return model, build(model.named_parameters())


def _advance(model: Any, opt: Any, gradients: Any, steps: range) -> None:
    for i in steps:
        set_gradients(model, gradients(i))
        opt.step()


def _unlike(model: nn.Module, opt: Any, whole: nn.Module, whole_opt: Any, n: int) -> list[str]:
    if n != PLAIN:
        return list(differences(model, opt, whole, whole_opt))
    mine, theirs = checkpoint.plain_state_dict(model.state_dict()), checkpoint.plain_state_dict(whole.state_dict())
    found = [name for name in theirs if not same(mine[name], theirs[name])]
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        found += [key for key, value in whole_opt.state[q].items() if not same(opt.state[p][key], value)]
    return found


def trips(rank: int, world: int, directory: str, name: str) -> list[str]:
    """Save at N after three steps, load at M into a run that went elsewhere, go on for two."""
    for n in SIZES:
        mesh_of(n)
    middle, end = _build(name, PLAIN), _build(name, PLAIN)
    gradients = middle[0].gradients
    _advance(*middle, gradients, range(3))
    _advance(*end, gradients, range(5))
    found = []
    for source in sorted({source for source, _ in TRIPS}):
        if inside(source or 1):
            model, opt = _build(name, source)
            _advance(model, opt, gradients, range(3))
            group = mesh_of(source or 1).get_group()
            checkpoint.save(f"{directory}/{source}", 3, model, opt, extra={"position": 17}, process_group=group)
    for source, target in TRIPS:
        # A later group must not read before an earlier one has written.
        mesh_of(4).get_group()
        torch.distributed.barrier()
        if not inside(target or 1):
            continue
        model, opt = _build(name, target)
        if source == 2:  # into an optimizer that has gone elsewhere; the others are fresh
            _advance(model, opt, lambda i: gradients(50 + i), range(1))
        where = checkpoint.latest(f"{directory}/{source}")
        assert where is not None
        extra = checkpoint.load(where, model, opt, process_group=mesh_of(target or 1).get_group())
        assert extra == {"position": 17}, extra
        found += [f"{name} {source} -> {target}: {d}" for d in _unlike(model, opt, *middle, target)]
        _advance(model, opt, gradients, range(3, 5))
        found += [f"{name} {source} -> {target}, two steps on: {d}" for d in _unlike(model, opt, *end, target)]
    return found


def stock_state_dicts(rank: int, world: int) -> list[str]:
    """get_state_dict and set_state_dict on a fresh optimizer change nothing; neither do they on a used one."""
    found = []
    for name in ("2-byte-int4", "1-byte-int4", "reset"):
        for n in (PLAIN, 2, 4):
            if not inside(n or 1):
                continue
            model, opt = _build(name, n)
            untouched = _build(name, PLAIN)
            before = {k: local_of(v).clone() for k, v in checkpoint.plain_state_dict(model.state_dict()).items()}
            model_state, optim_state = get_state_dict(model, opt)
            set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=optim_state)
            after = checkpoint.plain_state_dict(model.state_dict())
            found += [f"{name}, {n}: {k}" for k, v in before.items() if not same(local_of(after[k]), v)]
            gradients = untouched[0].gradients
            _advance(*untouched, gradients, range(3))
            _advance(model, opt, gradients, range(3))
            found += [f"{name}, {n}, after a fresh trip: {d}" for d in _unlike(model, opt, *untouched, n)]
            model_state, optim_state = get_state_dict(model, opt)
            set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=optim_state)
            found += [f"{name}, {n}, after a trip: {d}" for d in _unlike(model, opt, *untouched, n)]
    return found


def whole_files(rank: int, world: int) -> list[str]:
    """A state dict of one process, as torch.load gives it, into sharded runs."""
    found = []
    for name in ("2-byte-int4", "1-byte"):
        whole = _build(name, PLAIN)
        _advance(*whole, whole[0].gradients, range(3))
        for n in (1, 3):
            if inside(n):
                model, opt = _build(name, n)
                checkpoint.load_whole_(model, whole[0].state_dict())
                opt.load_state_dict(whole[1].state_dict())
                found += [f"{name}, {n}: {d}" for d in differences(model, opt, *whole)]
    return found


def asynchronous(rank: int, world: int, directory: str) -> list[str]:
    """What is saved is the moment of the call, although training goes on meanwhile."""
    name = "2-byte-int4"
    whole = _build(name, PLAIN)
    gradients = whole[0].gradients
    _advance(*whole, gradients, range(2))
    model, opt = _build(name, 4)
    _advance(model, opt, gradients, range(2))
    pending = checkpoint.async_save(directory, 2, model, opt)
    _advance(model, opt, gradients, range(2, 5))
    where = pending.wait(60)
    assert where == checkpoint.latest(directory), where
    model, opt = _build(name, 4)
    checkpoint.load(where, model, opt)
    return list(differences(model, opt, *whole))


def gathered_states(rank: int, world: int) -> list[str]:
    """Whole optimizer states from shards: every stored tensor has a dtype that collectives carry."""
    name = "1.8-byte"
    model, opt = _build(name, world)
    whole, whole_opt = _build(name, PLAIN)
    for m, o in ((model, opt), (whole, whole_opt)):
        _advance(m, o, whole.gradients, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    gathered = get_optimizer_state_dict(model, opt, options=options)["state"]
    found = []
    for (key, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        for part, value in whole_opt.state[q].items():
            if not same(gathered[key][part], value):
                found.append(f"{key}.{part} gathered")
            live = opt.state[p][part]
            if isinstance(live, DTensor) and not same(live.full_tensor(), value):
                found.append(f"{key}.{part} full_tensor")
    return found
