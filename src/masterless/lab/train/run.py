"""A run and its directory: started, interrupted, resumed, finished.

Contract:
    * The directory is made first, so that nobody else can, and taken back if text, model and optimizer cannot be built
      or the disk has no space for the first files: wrong input leaves no trace.
    * ``config.toml`` is the resolved configuration, ``metrics.jsonl`` has a line per step, ``checkpoints/`` the last
      few (`masterless.lab.train.run_files`), ``report.html`` and ``summary.json`` are written when a session ends.
    * A run that was interrupted, or killed at any moment, and is resumed ends with the metrics, byte for byte, and the
      weights of the uninterrupted one (same machine, torch version and number of threads).
    * One process writes to a run directory at a time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import masterless
from masterless.interop.files import FileError, read_json, reason_of
from masterless.lab.models import GPT
from masterless.optim import LowBitOptimizer
from masterless.optim.trade import trade_momentum_

from .build import build, build_corpus, build_settings
from .config import MODEL_KEYS, ConfigError, RunConfig, read_toml, resolve, to_toml
from .corpus import END_OF_DOCUMENT, Corpus
from .display import Display
from .loop import show_hidden_bits_at
from .observe import is_number
from .run_files import (
    CHECKPOINTS,
    CONFIG,
    DISTRIBUTED,
    TOKENIZER,
    CheckpointError,
    Checkpoints,
    RunFolder,
    origin_of,
    remedy_for,
    write_text,
)
from .session import Session
from .signals import StopFlag


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
    _held: RunFolder | None = None

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
    """Makes the directory of a new run and builds the run."""
    held = RunFolder.claim(folder)
    try:
        config = set_threads(config)
        tokenizer = None if config.init is None else _run_folder(Path(config.init), TOKENIZER)
        built = build(config, build_corpus(config, tokenizer))
        checkpoints = Checkpoints(folder / CHECKPOINTS, config.keep)
        record_start(folder, config, built.corpus, checkpoints)
    except BaseException:
        held.abandon()
        raise
    return Run(folder, config, *built, checkpoints, _held=held)


def record_start(folder: Path, config: RunConfig, corpus: Corpus, checkpoints: Checkpoints) -> None:
    """Writes the first files of a run; the configuration last, which makes the directory a run."""
    try:
        if corpus.tokenizer is not None:
            write_text(folder / TOKENIZER, corpus.tokenizer.to_str())
        checkpoints.create(**facts_of(corpus))
        write_text(folder / CONFIG, to_toml(config))
    except (OSError, CheckpointError) as error:
        origin = origin_of(error)
        raise CheckpointError(
            f"{folder}: cannot be made ({reason_of(origin)}); {remedy_for(origin, begun=False)}"
        ) from error


def facts_of(corpus: Corpus) -> dict[str, Any]:
    """What a resumed run is compared with."""
    return {"text": corpus.fingerprint, "torch": torch.__version__, "masterless": masterless.__version__}


def stored_config(folder: Path) -> RunConfig:
    """The configuration of a run that has begun."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: not a run directory, it has no config.toml; pass one that masterless train made")
    return resolve({}, read_toml(folder / CONFIG))


def compare_facts(folder: Path, then: Mapping[str, Any], corpus: Corpus) -> list[str]:
    """Refuses another text than the run was begun with; returns notes about lesser differences."""
    now = facts_of(corpus)
    if then.get("text") != now["text"]:
        raise ConfigError(
            f"{folder}: the text is not what this run was trained on (it changed, or Python did); restore it, or start "
            f"a new run from these weights with --init {folder}"
        )
    if then.get("torch") == now["torch"]:
        return []
    return [f"begun with torch {then.get('torch')}, now {now['torch']}: the last bits of the losses may differ"]


def resume(folder: Path, from_step: int | None = None) -> Run:
    """Rebuilds a run where its newest checkpoint, or the one of `from_step`, left it."""
    config = set_threads(stored_config(folder))
    if (folder / DISTRIBUTED).exists():
        raise ConfigError(f"{folder}: a run of several ranks; resume it with torchrun and --parallel")
    held = RunFolder.hold(folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS, config.keep)
    checkpoints.open()
    entry = checkpoints.entry(from_step)
    content = None if entry is None else checkpoints.load(entry)
    built = build(config, build_corpus(config, folder / TOKENIZER), initial=content is None)
    run = Run(folder, config, *built, checkpoints, _held=held)
    run.notes += compare_facts(folder, checkpoints.manifest, built.corpus)
    if entry is not None and content is not None:
        try:
            settings = build_settings(config)  # as it was saved:
            show_hidden_bits_at(entry["step"] - 1, settings, built.model)
            if settings.first_traded_step is not None and entry["step"] > settings.first_traded_step:
                trade_momentum_(built.optimizer, settings.trade_for)  # type: ignore[arg-type]
            built.model.load_state_dict(content["model"])
            built.optimizer.load_state_dict(content["optimizer"])
            run.seconds = float(content["seconds"])
        except Exception as error:  # whatever a file of the right checksum may hold
            raise CheckpointError(
                f"{folder / CHECKPOINTS / entry['file']}: does not fit config.toml ({reason_of(error)}); restore the "
                f"config.toml that it was made with"
            ) from error
        run.step, run.metrics_bytes = entry["step"], entry["metrics_bytes"]
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
    write_text(run.folder / "summary.json", json.dumps(summary, indent=1))
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


def _earlier_summary(folder: Path) -> dict[str, Any]:
    """The measurements of an earlier session, as far as they are numbers."""
    try:
        found = read_json(folder / "summary.json")
    except FileError:
        return {}
    kept = ("tokens_per_second", "stalled", "validation_loss")
    return {key: found[key] for key in kept if is_number(found.get(key))} if isinstance(found, dict) else {}


def set_threads(config: RunConfig) -> RunConfig:
    """Fixes the number of threads: sums split differently among them round differently."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return dataclasses.replace(config, threads=torch.get_num_threads())
