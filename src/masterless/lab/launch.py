"""``torchrun -m masterless train --parallel fsdp ...``: the command-line training run on several ranks.

Contract:
    * ``--batch`` is the whole step's: each rank takes its rows of the batch that one process would have seen.
    * The first rank holds and writes the run directory: ``config.toml``, ``metrics.jsonl``, ``summary.json``.
      Checkpoints are distributed ones, in ``distributed/`` (`masterless.distributed.checkpoint`): ``--resume`` works
      with any number of ranks and either kind of parallelism.
    * Before anything is trained the ranks compare everything that decides the result (options, text, versions, the
      checkpoint); what one rank cannot honour, or sees differently, ends all of them with the same line.
    * A rank that fails ends the job; torchrun says which. What was saved stays.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import masterless
from masterless.distributed import checkpoint
from masterless.distributed.ddp import replicate
from masterless.lab.models import GPT
from masterless.lab.train.build import build, build_corpus, build_settings, build_stepper
from masterless.lab.train.config import ConfigError, RunConfig, resolve
from masterless.lab.train.corpus import Corpus
from masterless.lab.train.loop import StepReport, train
from masterless.lab.train.observe import MetricsFile
from masterless.lab.train.run import compare_facts, record_start, set_threads, stored_config
from masterless.lab.train.run_files import (
    CHECKPOINTS,
    DISTRIBUTED,
    MANIFEST,
    TOKENIZER,
    Checkpoints,
    RunFolder,
    write_text,
)
from masterless.tensor.cache import byte_count
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
    trust: bool = False,
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
    config = set_threads(stored_config(resume) if resume else resolve(flags, file))
    if mode == "fsdp" and byte_count(config.decode_cache):
        raise ConfigError(
            f"decode-cache={config.decode_cache}: FSDP2 gathers weights anew in every pass, nothing decoded can be "
            f"kept; leave it out, or pass --parallel ddp"
        )
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    try:
        return _run(mode, config, folder, resume is not None, trust)
    finally:
        if ours:
            dist.destroy_process_group()


def _agree(problem: str | None, facts: Mapping[str, Any]) -> None:
    """Goes on if no rank has a problem and all have the same facts; else raises the same error on all of them."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, dict(facts)))
    for rank, (found, _) in enumerate(everyone):
        if found is not None:
            raise ConfigError(f"rank {rank}: {found}")
    _, first = everyone[0]
    for rank, (_, other) in enumerate(everyone):
        for name in first:
            if other.get(name) != first[name]:
                mine, theirs = f"{first[name]!r} on rank 0", f"{other.get(name)!r} on rank {rank}"
                raise ConfigError(f"{name}: {mine} and {theirs}; start all with the same options, text and versions")


@dataclasses.dataclass
class _Begun:
    """What a rank knows before it trains."""

    manifest: Checkpoints
    held: RunFolder | None = None  # by the first rank
    corpus: Corpus | None = None
    found: Path | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def look(self, config: RunConfig, folder: Path, resumed: bool) -> None:
        """Finds out what there is; the checks are those of a run in one process."""
        world = dist.get_world_size()
        if config.batch % world:
            raise ValueError(f"--batch {config.batch}: {world} ranks cannot share it evenly; use a multiple of {world}")
        if config.show_hidden:
            raise ConfigError(
                f"show-hidden={config.show_hidden:g}: not with --parallel, FSDP2 keeps buffers of what it gathers; "
                f"train the first part with --weights {str(config.weights).replace('+', '++')} and the rest from it "
                f"with --init"
            )
        if config.trade_last:
            raise ConfigError(
                f"trade-last={config.trade_last:g}: not with --parallel, FSDP2 keeps buffers of what it gathers; pass "
                f"--trade-last 0 (the weights stay {config.weights} to the end), or another preset"
            )
        if dist.get_rank() == 0:
            self.held = RunFolder.hold(folder) if resumed else RunFolder.claim(folder)
        if resumed and (folder / CHECKPOINTS).exists():
            raise ConfigError(f"{folder}: a run of one process; resume it without --parallel")
        self.corpus = build_corpus(config, folder / TOKENIZER if resumed else None)
        if resumed and (folder / DISTRIBUTED / MANIFEST).exists():
            self.manifest.open()
            self.notes = compare_facts(folder, self.manifest.manifest, self.corpus)
        elif resumed:
            self.notes = ["begun by an earlier version, which did not record its text: whether it changed is unknown"]
        self.found = checkpoint.latest(folder / DISTRIBUTED) if resumed else None


def _run(mode: str, config: RunConfig, folder: Path, resumed: bool, trust: bool) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    begun, problem = _Begun(Checkpoints(folder / DISTRIBUTED)), None
    facts: dict[str, Any] = dataclasses.asdict(config) | {
        "parallel": mode,
        "resume": resumed,
        "torch": torch.__version__,
    }
    del facts["threads"]  # machines may differ in their cores
    parallel: list[nn.Module] = []
    try:
        try:
            begun.look(config, folder, resumed)
            facts |= {"text": begun.corpus and begun.corpus.fingerprint, "checkpoint": begun.found}
        except (ValueError, OSError) as error:
            problem = str(error)
        versions = {"torch": torch.__version__, "masterless": masterless.__version__}
        _agree(problem, facts | versions | {"run": folder.resolve()})
        assert begun.corpus is not None
        built = build(config, begun.corpus, not resumed, lambda model: parallel.append(parallelize(model, mode)))
        if rank == 0 and not resumed:
            record_start(folder, config, begun.corpus, begun.manifest)
    except BaseException:
        if begun.held is not None and not resumed:
            begun.held.abandon()
        raise
    corpus, model, optimizer = built
    stepper = build_stepper(config, parallel[0], optimizer)
    start = {"step": 0, "metrics_bytes": 0}
    if begun.found is not None:
        start = checkpoint.load(begun.found, model, optimizer, trust=trust)
        if not all(type(start.get(key)) is int and start[key] >= 0 for key in ("step", "metrics_bytes")):
            raise ConfigError(f"{begun.found}: does not say at which step it was saved; resume an earlier checkpoint")
    metrics = None
    if rank == 0:
        for note in begun.notes:
            print(f"masterless: note: {note}", file=sys.stderr)
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
            checkpoint.save(folder / DISTRIBUTED, done, model, optimizer, extra=extra, keep=config.keep)

    result = train(RankShare(parallel[0]), optimizer, corpus, build_settings(config), on_step, start["step"])
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
        write_text(folder / "summary.json", json.dumps(summary, indent=1))
    return summary
