"""Optimizer state to and from files: plain tensors, other formats, and torch.optim's own state dicts.

Contract:
    * A state dict holds tensors in their own dtypes and Python scalars: it loads with ``weights_only=True``.
    * Resuming is bit for bit. The stock `load_state_dict` casts every state tensor to the parameter's dtype,
      which would destroy codes and, with bf16 parameters, moments: ours keeps each tensor as it was saved.
    * A moment saved in another format (torch.optim's fp32 included) is decoded and rounded to nearest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masterless.formats import Format, parse
from masterless.formats.storage import COUNTERS, Storage, StorageError, missing_memory, state_key, tensor_specs
from masterless.optim import resets, units
from masterless.tensor.quantized import local_of

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer

VERSION = 2  # 2: counters are integers, log metadata is bf16 and bytes, compensated momentum is in units of the weight
# Of torch's param groups: what changes the mathematics is refused, how torch loops over tensors is not ours to know.
REFUSED = ("amsgrad", "centered")
IGNORED = (*REFUSED, "foreach", "fused", "capturable", "differentiable")


class _Sealed:
    """Carries one parameter's state through the stock loader, which would cast bare tensors."""

    def __init__(self, state: dict[str, Any], saved_group: dict[str, Any]) -> None:
        self.state = state
        self.saved_group = saved_group


def prepare_for_load(optimizer: LowBitOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict as the stock loader may see it: groups completed with our options, states sealed."""
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the state dict has {len(groups)} param groups, this {type(optimizer).__name__} has "
            f"{len(optimizer.param_groups)}; build the optimizer with the same groups"
        )
    formats = {name for name in (optimizer.first_name, optimizer.second_name) if name}
    merged = []
    owner: dict[Any, dict[str, Any]] = {}
    for saved, own in zip(groups, optimizer.param_groups, strict=True):
        version = saved.get("masterless_version", 1)  # torch's have the units of our first version
        if version > VERSION:
            raise ValueError(
                f"the state dict has version {version}, this masterless reads up to {VERSION}; upgrade masterless"
            )
        for option in REFUSED:
            if saved.get(option):
                raise ValueError(
                    f"the state dict was saved with {option}=True, a third average that masterless has no place for; "
                    f"train on with torch.optim, or start from the weights alone"
                )
        # Everything else is kept, what LR schedulers write into a group ("initial_lr") included.
        dropped = {*formats, *IGNORED, "masterless_version", "next_lr"}
        if version < 2:  # there "auto" was saved as what it stood for
            dropped.add("moment_units")
        keep = {k: v for k, v in saved.items() if k not in dropped}
        own_options = {k: v for k, v in own.items() if k not in ("params", "param_names")}
        entry = {**own_options, **keep, "params": saved["params"]}
        if "param_names" in saved:
            entry["param_names"] = saved["param_names"]
        optimizer._check_group(entry)  # loaded hyperparameters must go with this optimizer's formats
        merged.append(entry)
        owner.update(dict.fromkeys(saved["params"], saved))
    states = {k: _Sealed(v, owner[k]) if k in owner else v for k, v in state_dict["state"].items()}
    return {**state_dict, "state": states, "param_groups": merged}


def finish_load(optimizer: LowBitOptimizer) -> None:
    """Unseals the states and brings each moment into this optimizer's format."""
    for group, p, name in optimizer.parameters():
        sealed = optimizer.state.get(p)
        if isinstance(sealed, _Sealed):
            adopt = _adopt if local_of(p) is p else _adopt_shard
            optimizer.state[p] = adopt(optimizer, group, p, name, sealed)


def is_rehearsal(optimizer: LowBitOptimizer, parameters: list[tuple[dict[str, Any], Tensor, str]]) -> bool:
    """Whether a fresh optimizer's first step is that of ``get_optimizer_state_dict``: to see which states there are.

    It sets lr = 0 and all gradients to zero. Such a step allocates, and counts for nothing.
    """
    if any(float(group["lr"]) != 0.0 for group in optimizer.param_groups):
        return False
    zero = not any(bool(local_of(p.grad).any()) for _, p, _ in parameters if p.grad is not None)
    if all(local_of(p) is p for _, p, _ in parameters):
        return zero
    from masterless.sharding import agreement

    return agreement.everywhere(zero, [p for _, p, _ in parameters])


def _adopt(optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, name: str, sealed: _Sealed) -> dict[str, Any]:
    for key, value in sealed.state.items():
        if isinstance(value, Tensor) and missing_memory(value):
            raise ValueError(
                f"the state dict's {key} of parameter {name} {missing_memory(value)}: it was freed or resized"
            )
    saved = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in sealed.state.items()}
    wanted = optimizer.state_formats(p, group)
    _refuse_foreign(optimizer, name, saved)
    # torch's SGD counts no steps; a buffer in its state says that there was one, which is all that SGD asks.
    step = saved.get("step", float(any(isinstance(v, Tensor) for v in saved.values())))
    state: dict[str, Any] = {"step": _integer(step)}
    state.update({k: _integer(v) if k.endswith(".reset_step") else v for k, v in saved.items() if k.endswith(COUNTERS)})
    units.mark(optimizer, group, p, state)
    for moment, fmt in wanted.items():
        found = _saved_storage(moment, saved, sealed.saved_group, p, fmt)
        if found is None:
            if fmt.kind != "none" and int(state["step"]) > 0:
                raise ValueError(
                    f"the state dict has no {moment!r} for parameter {name} (its keys: {sorted(saved)}); it was saved "
                    f"by another kind of optimizer"
                )
            continue
        values = None if found.format == fmt else found.decode()
        if moment == optimizer.first_name:
            values = _in_own_units(optimizer, group, p, found, saved, sealed.saved_group, values)
        if values is not None:
            found = Storage.zeros(fmt, p.shape, p.device).encode_(values)
        state.update({state_key(moment, part): t.to(p.device) for part, t in found.tensors.items()})
    return state


def _adopt_shard(
    optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor, name: str, sealed: _Sealed
) -> dict[str, Any]:
    """A loaded state, whole or sharded, as this rank's part of it, in this optimizer's formats."""
    from masterless.sharding.place import Place, state_storage

    place, formats = Place.of(p), optimizer.state_formats(p, group)
    whole = {
        state_key(moment, part): (part, size)
        for moment, fmt in formats.items()
        for part, (size, _) in tensor_specs(fmt, place.shape).items()
    }
    saved = {
        key: place.cut(value, key.rpartition(".")[2]) if isinstance(value, Tensor) else value
        for key, value in sealed.state.items()
    }
    if place.splits_matrix:
        _refuse_to_factor(name, whole, saved)
    if place.slices:
        adopted = _adopt(optimizer, group, local_of(p), name, _Sealed(saved, sealed.saved_group))
        return {key: place.wrap(value, *whole[key]) if key in whole else value for key, value in adopted.items()}
    # Nothing to convert, but counters and shared tensors are everybody's.
    counters = {key: value for key, value in saved.items() if not isinstance(value, Tensor) or value.dim() == 0}
    state: dict[str, Any] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in counters.items()}
    state_storage(p, state, formats)
    for key, (part, size) in whole.items():
        if place.shared(part) and key in saved:
            state[key] = place.wrap(saved[key].clone(), part, size)
    return state


def _refuse_to_factor(name: str, whole: dict[str, Any], saved: dict[str, Any]) -> None:
    missing = [key for key, (part, _) in whole.items() if part in ("row", "col") and key not in saved]
    if missing:
        raise ValueError(
            f"the state of {name} was saved without {missing}: row and column means are of the whole matrix, which no "
            f"rank has; load the checkpoint into this optimizer in one process, save it again, and load that one"
        )


def _integer(count: Any) -> Tensor:
    """A counter as we keep it: torch's are fp32 and stop at 2^24, one of the default dtype may stop at 256."""
    return torch.as_tensor(count).to("cpu", torch.int64)


def _refuse_foreign(optimizer: LowBitOptimizer, name: str, saved: dict[str, Any]) -> None:
    own = {optimizer.first_name, optimizer.second_name, "step"}
    foreign = sorted(k for k, v in saved.items() if v is not None and k.split(".")[0] not in own)
    if foreign:
        raise ValueError(
            f"the state dict holds {', '.join(foreign)} for parameter {name}, which {type(optimizer).__name__} does "
            f"not have; it was saved by another kind of optimizer: load it there, or start from the weights alone"
        )


def _saved_storage(
    moment: str, saved: dict[str, Any], saved_group: dict[str, Any], p: Tensor, wanted: Format
) -> Storage | None:
    """The stored form of one moment in a saved state, or None if it is not there."""
    plain = saved.get(moment)
    if isinstance(plain, Tensor):
        if plain.shape != p.shape:
            raise ValueError(f"{moment} has shape {tuple(plain.shape)}, its parameter {tuple(p.shape)}")
        fmt = parse("bf16") if plain.dtype == torch.bfloat16 else parse("fp32")
        return Storage(fmt, tuple(p.shape), {"values": plain.to(torch.bfloat16 if fmt.bits == 16 else torch.float32)})
    mine = [key for key in saved if key.startswith(f"{moment}.") and not key.endswith(COUNTERS)]
    named = {key.removeprefix(f"{moment}."): saved[key] for key in mine}
    if named.keys() >= {"top", "step"} and named["top"].dtype == torch.int16:  # as version 1 stored them
        named |= {"top": named["top"].view(torch.bfloat16), "step": named["step"].view(torch.uint8)}
    if not named:
        return None
    fmt = parse(saved_group.get(moment, wanted))
    try:
        return Storage(fmt, tuple(p.shape), named)
    except StorageError as error:
        raise ValueError(f"{moment}: {error}; the checkpoint belongs to another model or is damaged") from None


def _in_own_units(
    optimizer: LowBitOptimizer,
    group: dict[str, Any],
    p: Tensor,
    found: Storage,
    saved: dict[str, Any],
    saved_group: dict[str, Any],
    values: Tensor | None,
) -> Tensor | None:
    """A saved first moment's `values` (None: as it is stored) in the units of this optimizer."""
    version = saved_group.get("masterless_version", 1)
    options = {**group, "moment_units": "gradient", **saved_group}  # torch's have no such option
    source = units.saved(optimizer, options, p, saved, version)
    target = units.wanted(optimizer, group, p)
    if source == target:
        return values
    second = None
    if optimizer.second_name is not None:
        wanted = optimizer.state_formats(p, group)[optimizer.second_name]
        second = _saved_storage(optimizer.second_name, saved, saved_group, p, wanted)
    ages = [resets.local_step(saved, name) for name in (optimizer.first_name, optimizer.second_name)]
    size, d = units.step_parts(optimizer, group, p, second, ages[0], ages[1])
    return units.convert(found.decode() if values is None else values, source, target, size, d)


def export_to_torch(optimizer: LowBitOptimizer) -> dict[str, Any]:
    """A state dict that the optimizer's torch.optim twin loads."""
    twin: Any = optimizer.torch_twin
    if twin is None:
        raise ValueError(
            f"{type(optimizer).__name__} has no counterpart in torch.optim that could load its state; save state_dict()"
        )
    template = twin([torch.nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
    state: dict[int, dict[str, Any]] = {}
    groups = []
    index = 0
    for group in optimizer.param_groups:
        options = {k: group.get(k, v) for k, v in template.items() if k != "params"}
        indices = []
        for p in group["params"]:
            if optimizer.state.get(p):
                state[index] = _exported(optimizer, group, p)
            indices.append(index)
            index += 1
        groups.append({**options, "params": indices})
        if "param_names" in group:
            groups[-1]["param_names"] = list(group["param_names"])
    return {"state": state, "param_groups": groups}


def _exported(optimizer: LowBitOptimizer, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
    storages = optimizer.state_storage(p, group)
    step, plain = optimizer.state[p]["step"], {**group, "moment_units": "gradient"}  # torch's
    out: dict[str, Any] = {"step": step.to(torch.float32)}
    if "betas" in group:  # torch's Adam keeps a first moment also where beta1 = 0 makes it the gradient
        out["exp_avg"] = torch.zeros(p.shape)
    for moment, storage in storages.items():
        values = torch.zeros(p.shape) if storage.format.kind == "none" else storage.decode().clone()
        if moment == optimizer.first_name and storage.format.kind != "none":
            second = storages.get(optimizer.second_name or "")
            ages = [resets.local_step(optimizer.state[p], name) for name in (moment, optimizer.second_name)]
            size, d = units.step_parts(optimizer, group, p, second, ages[0], ages[1])
            values = units.convert(values, units.wanted(optimizer, group, p), optimizer.rule(plain).units, size, d)
        # torch counts all steps, a reset moment only those since: the same estimate under torch's count.
        age = resets.local_step(optimizer.state[p], moment)
        out[moment] = values * resets.recounted(optimizer, plain, moment, age, int(step))
    return out
