"""``torchrun -m masterless train --parallel fsdp ...``: the command-line training run on several ranks.

Contract:
    * ``--batch`` is the whole step's: each rank takes its rows of the batch that one process would have seen.
    * The first rank writes the run directory: ``config.toml``, ``metrics.jsonl``, ``summary.json``. Checkpoints are
      distributed ones, in ``distributed/`` (`masterless.distributed.checkpoint`): ``--resume`` works with any number of
      ranks and either kind of parallelism.
    * A rank that fails ends the job; torchrun says which. What was saved stays.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from masterless.distributed import checkpoint
from masterless.distributed.ddp import replicate
from masterless.lab.models import GPT
from masterless.lab.train.build import build_corpus, build_model, build_optimizer, build_settings, load_initial
from masterless.lab.train.build import quantize_model as quantized
from masterless.lab.train.config import RunConfig, read_toml, refuse_existing, resolve, to_toml
from masterless.lab.train.loop import StepReport, train
from masterless.lab.train.observe import MetricsFile
from masterless.lab.train.run_files import write_atomically
from masterless.optim.backward import step_in_backward
from masterless.tensor.quantized import local_bytes

MODES = ("ddp", "fsdp")


class RankShare(nn.Module):
    """A model that computes this rank's rows of every batch, and reports the loss of all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of this rank's rows; the mean loss of all rows, with the gradient of these."""
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = len(inputs) // world
        mine = slice(rank * rows, (rank + 1) * rows)
        logits, loss = self.model(inputs[mine], targets[mine])
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return logits, loss + (mean / world - loss.detach())


def is_first() -> bool:
    """Whether this process is the job's first rank, the one that reports."""
    return os.environ.get("RANK", "0") == "0"


def parallelize(model: GPT, mode: str) -> nn.Module:
    """The model sharded (every block and the rest) or replicated."""
    if mode == "ddp":
        return replicate(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def run(
    mode: str,
    flags: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    out: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Trains on all ranks of the job; returns the summary. Arguments are those of ``masterless train``."""
    if mode not in MODES:
        raise ValueError(f"--parallel {mode!r}: no such parallelism; choose {' or '.join(MODES)}")
    if "RANK" not in os.environ:
        raise ValueError(
            f"--parallel {mode}: this process is no rank of a job; start it with "
            f"torchrun --nproc-per-node 2 -m masterless train ..."
        )
    folder = resume or out
    if folder is None:
        raise ValueError("--parallel needs --out: all ranks must name the same run directory")
    config = resolve({}, read_toml(resume / "config.toml")) if resume else resolve(flags, file)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    try:
        return _run(mode, config, folder, resume is not None)
    finally:
        dist.destroy_process_group()


def _run(mode: str, config: RunConfig, folder: Path, resumed: bool) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if config.batch % world:
        raise ValueError(f"--batch {config.batch}: {world} ranks cannot share it evenly; use a multiple of {world}")
    if not resumed:
        refuse_existing(folder)
    dist.barrier()  # all have looked before one makes it
    torch.set_num_threads(config.threads or torch.get_num_threads())
    config = dataclasses.replace(config, threads=torch.get_num_threads())

    corpus = build_corpus(config)
    model = quantized(build_model(config, corpus.vocab_size), config)
    if config.init is not None and not resumed:
        load_initial(model, Path(config.init))
    parallel = parallelize(model, mode)
    optimizer = build_optimizer(model, config)
    stepper = step_in_backward(parallel, optimizer, clip_norm=config.clip or None) if config.step_in_backward else None
    start = {"step": 0, "metrics_bytes": 0}
    if (found := checkpoint.latest(folder / "distributed")) is not None:
        start = checkpoint.load(found, model, optimizer)
    metrics = None
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.toml", lambda stream: stream.write(to_toml(config).encode()))
        metrics = MetricsFile(folder / "metrics.jsonl", start["metrics_bytes"])

    def on_step(report: StepReport) -> None:
        done = report.step + 1
        if metrics is not None:
            row = {"step": done, "loss": report.loss, "lr": report.lr}
            row |= {} if report.grad_norm is None else {"grad_norm": report.grad_norm}
            row |= {} if report.validation_loss is None else {"validation_loss": report.validation_loss}
            metrics.append(row)
        if done == config.steps or (config.save_every and done % config.save_every == 0):
            size = torch.zeros((), dtype=torch.int64)
            if metrics is not None:
                metrics.flush(sync=True)
                size.fill_(metrics.size)
            dist.broadcast(size, 0)
            extra = {"step": done, "metrics_bytes": int(size)}
            checkpoint.save(folder / "distributed", done, model, optimizer, extra=extra, keep=config.keep)

    result = train(RankShare(parallel), optimizer, corpus, build_settings(config), on_step, start["step"])
    if stepper is not None:
        stepper.remove()
    held = torch.tensor([local_bytes(*model.parameters()), optimizer.state_bytes()])
    dist.all_reduce(held, dist.ReduceOp.MAX)
    summary = {
        "status": "finished",
        "run": str(folder),
        "parallel": mode,
        "ranks": world,
        "step": config.steps,
        "validation_loss": result.final_validation_loss,
        "weight_bytes_per_rank": int(held[0]),
        "state_bytes_per_rank": int(held[1]),
        "seconds": round(result.seconds, 2),
    }
    if metrics is not None:
        metrics.close()
        write_atomically(folder / "summary.json", lambda stream: stream.write(json.dumps(summary, indent=1).encode()))
    return summary
