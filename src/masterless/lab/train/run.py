"""A run and its directory: started, interrupted, resumed, finished.

Contract:
    * Nothing is written before text, model and optimizer have been built: wrong input leaves no trace, nor does a disk
      without space for the first files.
    * ``config.toml`` is the resolved configuration, ``metrics.jsonl`` has a line a step, ``checkpoints/`` the last few
      (`masterless.lab.train.run_files`), ``report.html`` and ``summary.json`` are written when a session ends.
    * A run that was interrupted, or killed at any moment, and is resumed ends with the metrics, byte for byte, and the
      weights of the uninterrupted one (same machine, torch version and number of threads).
    * One process writes to a run directory at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import masterless
from masterless.lab.models import GPT
from masterless.optim import LowBitOptimizer

from .build import (
    build_corpus,
    build_model,
    build_optimizer,
    load_initial,
    quantize_model,
)
from .config import MODEL_KEYS, ConfigError, RunConfig, read_toml, refuse_existing, resolve, to_toml
from .corpus import END_OF_DOCUMENT, Corpus
from .display import Display
from .run_files import CheckpointError, Checkpoints, origin_of, reason_of, remedy_for, write_atomically
from .session import Session
from .signals import StopFlag

TOKENIZER = "tokenizer.json"


class FolderLock:
    """Holds a run directory for this process until it ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = None
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self._handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process is training here; wait for it or stop it") from None

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


@dataclasses.dataclass
class Run:
    """A run that is ready to train: built by `start` or `resume`.

    Attributes:
        folder: the run directory.
        config: resolved.
        corpus: the text.
        model: with its parameters in their formats.
        optimizer: over the model's parameters.
        checkpoints: of this run.
        step: steps already done.
        seconds: spent in training by earlier sessions.
        metrics_bytes: length of the metrics at `step`.
        notes: what the user should know.
    """

    folder: Path
    config: RunConfig
    corpus: Corpus
    model: GPT
    optimizer: LowBitOptimizer
    checkpoints: Checkpoints
    step: int = 0
    seconds: float = 0.0
    metrics_bytes: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)
    _lock: FolderLock | None = None

    @property
    def header(self) -> str:
        """What is trained on what, and where it is kept."""
        c = self.config
        kind = f"{c.experts} experts, {c.experts_per_token} per token" if c.experts else "dense"
        count = sum(p.numel() for p in self.model.parameters())
        return (
            f"model    GPT, {c.layers} layers of width {c.width}, {kind}, {count:,} parameters\n"
            f"formats  weights {c.weights}, first moment {c.exp_avg}, second moment {c.exp_avg_sq} "
            f"(preset {c.preset}), {c.optimizer}\n"
            f"text     {self.corpus.description}\n"
            f"run      {self.folder}" + (f", resumed at step {self.step}" if self.step else "")
        )


def start(config: RunConfig, folder: Path) -> Run:
    """Builds a new run and makes its directory."""
    refuse_existing(folder)
    config = _set_threads(config)
    tokenizer = None if config.init is None else _run_folder(Path(config.init), TOKENIZER)
    corpus, model, optimizer = _build(config, tokenizer)
    checkpoints = Checkpoints(folder / "checkpoints", config.keep)
    facts = {"text": corpus.fingerprint, "torch": torch.__version__, "masterless": masterless.__version__}
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        write_atomically(folder / "config.toml", lambda file: file.write(to_toml(config).encode()))
        if corpus.tokenizer is not None:
            write_atomically(folder / TOKENIZER, lambda file: file.write(corpus.tokenizer.to_str().encode()))
        checkpoints.create(**facts)
    except (OSError, CheckpointError) as error:
        if lock is not None:  # what is in the folder is ours: neither a new run nor --resume could use it
            shutil.rmtree(folder, ignore_errors=True)
        origin = origin_of(error)
        raise CheckpointError(
            f"{folder}: cannot be made ({reason_of(origin)}); {remedy_for(origin, begun=False)}"
        ) from error
    return Run(folder, config, corpus, model, optimizer, checkpoints, _lock=lock)


def resume(folder: Path, from_step: int | None = None) -> Run:
    """Rebuilds a run where its newest checkpoint, or the one of `from_step`, left it."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder}: not a run directory, it has no config.toml; pass one that masterless train made")
    config = _set_threads(resolve({}, read_toml(folder / "config.toml")))
    lock = FolderLock(folder)
    checkpoints = Checkpoints(folder / "checkpoints", config.keep)
    checkpoints.open()
    entry = checkpoints.entry(from_step)
    content = None if entry is None else checkpoints.load(entry)
    corpus, model, optimizer = _build(config, folder / TOKENIZER, initial=content is None)
    if checkpoints.manifest.get("text") != corpus.fingerprint:
        raise ConfigError(
            f"{folder}: the text is not what this run was trained on (it changed, or Python did); restore it, or start "
            f"a new run from these weights with --init {folder}"
        )
    run = Run(folder, config, corpus, model, optimizer, checkpoints, _lock=lock)
    then = checkpoints.manifest.get("torch")
    if then != torch.__version__:
        run.notes.append(f"begun with torch {then}, now {torch.__version__}: the last bits of the losses may differ")
    if entry is not None and content is not None:
        try:
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / 'checkpoints' / entry['file']}: does not fit config.toml ({reason_of(error)}); restore the "
                f"config.toml that it was made with"
            ) from error
        run.step, run.seconds, run.metrics_bytes = entry["step"], content["seconds"], entry["metrics_bytes"]
    return run


def execute(run: Run, display: Display, stop: StopFlag, sample: int = 0, tensorboard: bool = False) -> dict[str, Any]:
    """Trains to the end, or until `stop` is set; returns the summary, which is also written to the directory.

    A run that was stopped has been saved; its summary has the status "interrupted".
    """
    session = Session(run, display, stop, tensorboard)
    status = session.train()
    summary = session.summary(status)
    if session.done == run.step:  # it was finished already: what an earlier session measured still holds
        summary.update({k: v for k, v in _earlier_summary(run.folder).items() if summary.get(k, v) is None})
    if sample and status == "finished":
        summary["sample"] = sample_text(run, sample)
    write_atomically(run.folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
    return summary


def sample_text(run: Run, tokens: int) -> str:
    """Text that the model writes as the beginning of a document."""
    prompt = torch.tensor([[END_OF_DOCUMENT]])
    generator = torch.Generator().manual_seed(run.config.seed)
    return run.corpus.decode(run.model.generate(prompt, tokens, temperature=0.8, generator=generator)[0, 1:])


def inherited(path: Path) -> dict[str, Any]:
    """The model's shape and vocabulary of the run that a checkpoint belongs to; empty if it belongs to none."""
    found = _run_folder(path, "config.toml")
    stored = {} if found is None else read_toml(found)
    return {key: value for key, value in stored.items() if key in MODEL_KEYS or key == "vocab"}


def _run_folder(path: Path, name: str) -> Path | None:
    """A file of the run that `path` (its directory, or one of its checkpoints) belongs to."""
    for folder in (path, path.parent.parent):
        if (folder / name).is_file() and (folder / "config.toml").is_file():
            return folder / name
    return None


def _build(config: RunConfig, tokenizer: Path | None, initial: bool = True) -> tuple[Corpus, GPT, LowBitOptimizer]:
    corpus = build_corpus(config, tokenizer)
    model = quantize_model(build_model(config, corpus.vocab_size), config)
    if config.init is not None and initial:
        load_initial(model, Path(config.init))
    return corpus, model, build_optimizer(model, config)


def _earlier_summary(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}


def _set_threads(config: RunConfig) -> RunConfig:
    """Fixes the number of threads: sums split differently among them round differently."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return dataclasses.replace(config, threads=torch.get_num_threads())
