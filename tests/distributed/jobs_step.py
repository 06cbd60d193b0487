"""Jobs: one optimizer step on shards."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from zoo import SIZES, configurations, differences, inside, mesh_of, quantized_zoo, set_gradients, shard


def parity(rank: int, world: int, names: list[str], steps: int = 4) -> list[str]:
    """Same gradients, 1 to 4 ranks: codes, scales and states against one process."""
    found = []
    table = configurations()
    for n in SIZES:
        mesh_of(n)
    for name in names:
        weights, dtype, build = table[name]
        whole = quantized_zoo(weights, dtype)
        whole_opt = build(whole.named_parameters())
        for i in range(steps):
            set_gradients(whole, whole.gradients(i))
            whole_opt.step()
        for n in SIZES:
            if not inside(n):
                continue
            model = shard(quantized_zoo(weights, dtype), n)
            opt = build(model.named_parameters())
            for i in range(steps):
                set_gradients(model, whole.gradients(i))
                opt.step()
            found += [f"{name}, {n} ranks: {d}" for d in differences(model, opt, whole, whole_opt)]
    return found
