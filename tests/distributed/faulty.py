"""A training script that can be told to die: run by torchrun in `test_faults.py`.

All ranks see the same batches and their numbers are powers of two, so that the mean of the gradients is exact and a run
that was interrupted and resumed elsewhere must end where the uninterrupted one does, to the bit.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import masterless as ml
from masterless.distributed import fingerprint, latest, load, save


def build(sharded: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.GELU(), nn.Linear(33, 40))
    ml.quantize_(model, "int4")
    if sharded:
        fully_shard(model)
    options: Any = {"lr": 1e-2, "exp_avg": "int4", "exp_avg_sq": "factored", "betas": (0.5, 0.9)}
    return model, ml.AdamW(model.named_parameters(), **options)


def train_step(model: nn.Module, opt: Any, step: int) -> None:
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle_of_the_next_save() -> None:
    original = dcp.FileSystemWriter.write_data

    def write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs).wait()
        die()

    dcp.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("directory")
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--die-in-save", type=int)
    arguments.add_argument("--die-in-training", type=int)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    last = dist.get_rank() == dist.get_world_size() - 1

    model, opt = build(sharded=True)
    found = latest(options.directory)
    start = load(found, model, opt)["step"] if found else 0
    if dist.get_rank() == 0:
        print(f"starts at {start}", flush=True)
    for step in range(start, options.steps):
        if last and step == options.die_in_training:
            die()
        train_step(model, opt, step)
        if (step + 1) % 2 == 0:
            if last and step + 1 == options.die_in_save:
                die_in_the_middle_of_the_next_save()
            save(options.directory, step + 1, model, opt, extra={"step": step + 1})
    if dist.get_world_size() == 1:
        whole, whole_opt = build(sharded=False)
        for step in range(options.steps):
            train_step(whole, whole_opt, step)
        resumed, resumed_opt = build(sharded=False)
        load(latest(options.directory) or "", resumed, resumed_opt)
        same = fingerprint(whole, whole_opt) == fingerprint(resumed, resumed_opt)
        print(f"as uninterrupted: {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
