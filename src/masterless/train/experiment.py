"""Training runs as data: described by a frozen value, run once, remembered as a line of JSON.

Contract:
    * A run is identified by everything that can change its result (model, formats, options, settings, seed), not by
      its label. A result file never holds a run twice, and a run that is already there is not repeated.
    * Lines are appended as runs finish and flushed to disk: a study that is killed goes on where it was.
    * One thread a run, two runs side by side by default: on a small machine that is the most work an hour.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import masterless
from masterless.models import GPT, GPTConfig
from masterless.optim import LowBitOptimizer, NonFiniteGradientError
from masterless.quantize import quantize_
from masterless.train.corpus import Corpus, stdlib_corpus
from masterless.train.loop import TrainSettings, train
from masterless.weight import QuantizedTensor


@dataclass(frozen=True)
class Experiment:
    """One training run.

    Attributes:
        label: what tables call it; runs that differ only in their seed share it.
        weights: format of the quantized matrices; None leaves the model dense.
        optimizer: name of a class of `masterless`.
        options: keyword arguments of that class, besides lr and weight decay.
        model: keyword arguments of `GPTConfig`.
        settings: keyword arguments of `TrainSettings`, besides the seed.
        seed: of the model's initialisation, the batches and the rounding.
    """

    label: str
    weights: str | None = None
    optimizer: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def identity(self) -> str:
        """A digest of all that can change the result."""
        described = {k: v for k, v in asdict(self).items() if k != "label"}
        canonical = json.dumps(described, sort_keys=True, default=list)
        return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()

    def build(self) -> tuple[GPT, LowBitOptimizer, TrainSettings]:
        """The model, its optimizer and the settings of the run."""
        generator = torch.Generator().manual_seed(self.seed)
        model = GPT(GPTConfig(**self.model), generator)
        if self.weights is not None:
            quantize_(model, self.weights)
        settings = TrainSettings(**self.settings, seed=self.seed)
        options = {"betas": settings.betas, "seed": self.seed, **self.options}
        kind: type[LowBitOptimizer] = getattr(masterless, self.optimizer)
        optimizer = kind(model.named_parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **options)  # type: ignore[call-arg]
        return model, optimizer, settings


def bytes_per_matrix_parameter(model: torch.nn.Module, optimizer: LowBitOptimizer) -> float:
    """Measured bytes of weights and states, metadata included, per parameter of the inner matrices.

    The inner matrices are the ones `quantize_` would choose; embeddings, head and vectors are left out.
    """
    total = count = 0
    for _, p, name in optimizer.parameters():
        inner = isinstance(p, QuantizedTensor) or (name.startswith("blocks.") and p.dim() >= 2 and "router" not in name)
        if not inner:
            continue
        count += p.numel()
        total += p.stored_bytes if isinstance(p, QuantizedTensor) else p.numel() * p.itemsize
        total += sum(v.numel() * v.itemsize for v in optimizer.state[p].values() if torch.is_tensor(v) and v.dim())
    return total / count


def run(
    experiment: Experiment, corpus: Corpus | None = None, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Runs one experiment and returns its result row."""
    model, optimizer, settings = experiment.build()
    row: dict[str, Any] = {"id": experiment.identity, **asdict(experiment)}
    curve: list[tuple[int, float]] = []

    def note(report: Any) -> None:
        if report.step % 50 == 49:
            curve.append((report.step + 1, round(report.loss, 4)))
        if progress is not None:
            progress(report.step + 1)

    try:
        result = train(model, optimizer, corpus or stdlib_corpus(), settings, note)
        row["loss"] = result.final_validation_loss
        row["validation"] = result.validation_losses
        row["seconds"] = round(result.seconds, 1)
    except NonFiniteGradientError as error:
        row["loss"] = None
        row["diverged"] = str(error).split(".")[0]
    row["bytes_per_parameter"] = round(bytes_per_matrix_parameter(model, optimizer), 4)
    row["curve"] = curve
    row["versions"] = {
        "masterless": masterless.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    return row


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file; an unfinished last line (a killed run) is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def _worker(experiment: Experiment) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run(experiment)


def run_all(experiments: Iterable[Experiment], path: Path, workers: int = 2) -> Iterator[dict[str, Any]]:
    """Runs what is not yet in the result file and appends it there, row by row; yields the new rows as they come."""
    known = {row["id"] for row in load_rows(path)}
    todo: dict[str, Experiment] = {}
    for experiment in experiments:
        if experiment.identity not in known:
            todo.setdefault(experiment.identity, experiment)
    path.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        futures = [pool.submit(_worker, experiment) for experiment in todo.values()]
        for future in as_completed(futures):
            row = future.result()
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            yield row


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
