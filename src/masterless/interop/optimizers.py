"""Optimizer states of other libraries, read as torch's.

    opt = ml.AdamW(model.named_parameters(), lr=1e-4, exp_avg="int8", exp_avg_sq="log8")
    opt.load_state_dict(torch_state(torch.load("optimizer.pt")))    # saved by bitsandbytes or torchao
    torch_optimizer.load_state_dict(opt.torch_state_dict())         # and back to torch

Contract:
    * What comes out is a state dict of torch.optim: fp32 moments under torch's names, counts of steps. Every
      optimizer of this library loads it, rounding to its own formats once, to nearest.
    * bitsandbytes, 8 bits in blocks: value = map[code] * absmax[block], as its own dequantization computes it to the
      bit. What it keeps in fp32 (small parameters, its 32-bit optimizers) passes as it is.
    * torchao (8-bit, 4-bit, FP8): what the package itself decodes.
    * A state dict of torch, or of this library, passes unchanged.
    * The first format of bitsandbytes (one scale per tensor) and AdEMAMix's second momentum are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_NESTED = "__bnb_optimizer_quant_state__"  # where bitsandbytes hides tensors from FSDP
_BITSANDBYTES_OPTIONS = ("alpha", "t_alpha", "t_beta3")


def torch_state(state_dict: Mapping[str, Any], names: Sequence[str] = ("exp_avg", "exp_avg_sq")) -> dict[str, Any]:
    """The state dict of a bitsandbytes or torchao optimizer as torch's optimizer would have saved it.

    Args:
        state_dict: what their ``optimizer.state_dict()`` gave.
        names: what torch calls the moments, in order; bitsandbytes calls them state1 and state2 and does not say
            which optimizer it was. The default fits Adam, AdamW and Lion; SGD has ``("momentum_buffer",)``, RMSprop
            without momentum ``("square_avg",)``.

    Returns:
        A state dict for ``load_state_dict`` of torch's optimizer, or of this library's.

    >>> dense = {"state": {}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    >>> torch_state(dense) == dense
    True
    """
    groups = []
    for group in state_dict["param_groups"]:
        if group.get("alpha"):
            raise ValueError(
                f"the state dict was saved by bitsandbytes' AdEMAMix (alpha={group['alpha']!r}), whose second momentum "
                f"has no place in Adam; start from the weights alone"
            )
        lr = group["lr"]
        options = {key: value for key, value in group.items() if key not in _BITSANDBYTES_OPTIONS}
        groups.append({**options, "lr": lr.item() if isinstance(lr, Tensor) else lr})  # torchao's is a tensor
    state = {
        index: _of_bitsandbytes(index, {**own.get(_NESTED, {}), **own}, names) if _is_bitsandbytes(own) else _plain(own)
        for index, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def _is_bitsandbytes(own: Mapping[str, Any]) -> bool:
    return _NESTED in own or "state1" in own


def _of_bitsandbytes(index: Any, own: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    found = {key for key in ("state1", "state2") if isinstance(own.get(key), Tensor)}
    if len(found) != len(names) and not (len(found) == 1 and names == ("exp_avg", "exp_avg_sq")):
        raise ValueError(
            f"parameter {index} of the state dict has {len(found)} moments, names={tuple(names)!r} says {len(names)}; "
            f"name them as torch does, for instance names=('momentum_buffer',) for SGD"
        )
    moments = {name: _decoded(index, own, i) for i, name in enumerate(names, 1) if f"state{i}" in found}
    return {"step": torch.tensor(float(own["step"])), **moments}


def _decoded(index: Any, own: Mapping[str, Any], i: int) -> Tensor:
    codes = own[f"state{i}"]
    if codes.dtype != torch.uint8:
        return codes
    absmax, levels = own.get(f"absmax{i}"), own.get(f"qmap{i}")
    if absmax is None or levels is None:
        raise ValueError(
            f"state{i} of parameter {index} has one scale for the whole tensor (block_wise=False of bitsandbytes); "
            f"only states in blocks, its default, are read: start from the weights alone"
        )
    block = _block_length(codes.numel(), absmax.numel())
    if block is None or levels.numel() != 256:
        raise ValueError(
            f"state{i} of parameter {index} has {codes.numel()} codes, {absmax.numel()} scales and a map of "
            f"{levels.numel()}, which is no state of bitsandbytes in 8 bits; the file is damaged"
        )
    scales = absmax.float().repeat_interleave(block)[: codes.numel()].view(codes.shape)
    return levels.float()[codes.long()] * scales


def _block_length(elements: int, blocks: int) -> int | None:
    """Of bitsandbytes: 256, 2048 before version 0.44; None if the numbers go with neither."""
    return next((length for length in (256, 2048) if -(-elements // length) == blocks), None)


def _plain(own: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor decoded that knows how to; torchao's states are tensors of its own classes."""
    return {
        key: value.dequantize() if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") else value
        for key, value in own.items()
    }
