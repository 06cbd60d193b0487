"""Training runs as data: described by a frozen value, run once, remembered as a line of JSON.

Contract:
    * A run is identified by everything that can change its result (model, formats, options, settings, seed), not by
      its label. A result file never holds a run twice, and a run that is already there is not repeated.
    * Lines are appended as runs finish and flushed to disk: a study that is killed goes on where it was.
    * One thread and one process per run, two runs side by side by default: on a small machine that is the most work per
      hour, and the peak memory of a process is that of one run.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import platform
import queue
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import masterless
from masterless.interop.files import read_json_lines
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train.build import assemble, memory_of
from masterless.lab.train.corpus import Corpus, stdlib_corpus, text_corpus
from masterless.lab.train.loop import TrainSettings, train
from masterless.lab.train.observe import Stalls, is_number, peak_memory
from masterless.optim import LowBitOptimizer, NonFiniteGradientError
from masterless.optim.errors import LossyUpdateWarning


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
        data: the text if it is not the standard library's: "paths", and the "text"'s fingerprint.
    """

    label: str
    weights: str | None = None
    optimizer: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A digest of all that can change the result."""
        # Without a text of its own it is described as before there was this field: finished runs stay known.
        described = {k: v for k, v in asdict(self).items() if k != "label" and (k != "data" or v)}
        canonical = json.dumps(described, sort_keys=True, default=list)
        return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()

    def corpus(self) -> Corpus:
        """The text of the run."""
        if not self.data:
            return stdlib_corpus()
        return text_corpus(self.data["paths"], TrainSettings(**self.settings).seq_len)

    def build(self) -> tuple[GPT, LowBitOptimizer, TrainSettings]:
        """The model, its optimizer and the settings of the run."""
        settings = TrainSettings(**self.settings, seed=self.seed)
        options = {**settings.optimizer_arguments(), **self.options}
        model, optimizer = assemble(GPTConfig(**self.model), self.weights, self.optimizer, options, self.seed)
        return model, optimizer, settings


def load_results(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file that a table can show: not those that are damaged or of an earlier version."""
    return [row for row in read_json_lines(path) if _is_result(row)]


def _is_result(row: dict[str, Any]) -> bool:
    try:
        memory = row["memory"]
        positive = [memory[k] for k in ("measured_per_parameter", "predicted_per_parameter", "inner_parameters")]
        positive += [row["settings"]["steps"], 1.0 if row["loss"] is None else row["loss"]]
        numbers = [row["peak_bytes"], row["seed"], *memory["inner_bytes"].values(), *positive]
        numbers += [] if row["loss"] is None else [row["seconds"]]
        numbers += [n for key in ("validation", "curve") for pair in row.get(key, []) for n in pair]
        for sample in row["stalls"]:
            numbers += [sample["step"], *(n for entry in sample["stalls"].values() for n in entry.values())]
        named = all(isinstance(row[key], str) for key in ("id", "label"))
        return named and all(map(is_number, numbers)) and all(n > 0 for n in positive)
    except (KeyError, TypeError, AttributeError):
        return False


def run(
    experiment: Experiment, corpus: Corpus | None = None, progress: Callable[[int, float], None] | None = None
) -> dict[str, Any]:
    """Runs one experiment and returns its result row; `progress` is called with the steps done and the last loss."""
    corpus = corpus or experiment.corpus()
    model, optimizer, settings = experiment.build()
    stalls, sampled = Stalls(optimizer, settings.eval_every), []
    row: dict[str, Any] = {"id": experiment.identity, **asdict(experiment)}
    curve: list[tuple[int, float]] = []

    def note(report: Any) -> None:
        if report.step % 50 == 49:
            curve.append((report.step + 1, round(report.loss, 4)))
        if progress is not None:
            progress(report.step + 1, report.loss)
        if (sample := stalls.after()) is not None:
            sampled.append({"step": report.step + 1, "stalls": sample})
        stalls.before(report.step + 2)

    try:
        result = train(model, optimizer, corpus, settings, note)
        finite = math.isfinite(result.final_validation_loss)
        row["loss"] = result.final_validation_loss if finite else None
        if not finite:
            row["diverged"] = "the loss is not finite"
        row["validation"] = result.validation_losses
        row["seconds"] = round(result.seconds, 3)
    except NonFiniteGradientError as error:
        row["loss"] = None
        row["diverged"] = str(error).split(".")[0]
    row["memory"] = memory_of(optimizer)
    row["bytes_per_parameter"] = round(row["memory"]["measured_per_parameter"], 4)
    row["peak_bytes"] = peak_memory()
    row["stalls"] = sampled
    row["curve"] = curve
    row["versions"] = {
        "masterless": masterless.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    return row


def run_all(
    experiments: Iterable[Experiment],
    path: Path,
    workers: int = 2,
    on_progress: Callable[[Experiment, int, float], None] | None = None,
    threads: int = 1,
) -> Iterator[dict[str, Any]]:
    """Runs what is not yet in the result file and appends it there, row by row; yields the new rows as they come.

    Args:
        experiments: the runs.
        path: the result file.
        workers: runs side by side.
        on_progress: called with a run that is going on, its steps done and its last loss.
        threads: of each run.

    Raises:
        RuntimeError: a run failed; the ones that had finished are in the file.
    """
    known = {row.get("id") for row in read_json_lines(path)}
    todo: dict[str, Experiment] = {}
    for experiment in experiments:
        if experiment.identity not in known:
            todo.setdefault(experiment.identity, experiment)
    path.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    waiting, running = list(todo), {}  # type: ignore[var-annotated]
    warned: set[str] = set()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                identity = waiting.pop(0)
                # Noted before it is started: a signal between the two must not leave it behind.
                running[identity] = context.Process(target=_work, args=(todo[identity], messages, threads))
                _start(running[identity])
            try:
                identity, kind, payload = messages.get(timeout=1.0)
            except queue.Empty:
                for identity, process in running.items():
                    if process.exitcode is not None and messages.empty():
                        label, code = todo[identity].label, process.exitcode
                        raise RuntimeError(
                            f"{label}: its process ended with code {code} and no result (out of memory?); run again "
                            f"with fewer workers, finished runs are kept"
                        ) from None
                continue
            if kind == "progress":
                if on_progress is not None:
                    on_progress(todo[identity], *payload)
                continue
            if kind == "warning":
                if payload not in warned:
                    warnings.warn(payload, stacklevel=2)
                warned.add(payload)
                continue
            running.pop(identity).join()
            if kind == "error":
                raise RuntimeError(f"{todo[identity].label}: the run failed; {payload}")
            with path.open("a") as file:
                file.write(json.dumps(payload) + "\n")
                file.flush()
                os.fsync(file.fileno())
            yield payload
    finally:
        begun = [process for process in running.values() if process.pid is not None]
        for process in begun:
            process.terminate()
        for process in begun:
            process.join(5)


def _start(process: Any) -> None:
    """Starts a process that Ctrl-C does not reach: whoever started it decides what becomes of it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        process.start()
        return
    # A blocked signal stays blocked in the child, and is only delayed here (an ignored one would be lost). Another
    # thread may still take it, so that its handler must not end the start half-way either.
    noted: list[int] = []
    handlers = {n: signal.signal(n, lambda k, _: noted.append(k)) for n in (signal.SIGINT, signal.SIGTERM)}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for caught in noted:
        signal.raise_signal(caught)


def _work(experiment: Experiment, messages: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    parent, identity = os.getppid(), experiment.identity

    def progress(step: int, loss: float) -> None:
        if os.getppid() != parent:  # killed: nobody will take the result
            os._exit(1)
        if step % 10 == 0:
            messages.put((identity, "progress", (step, loss)))

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", LossyUpdateWarning)  # such configurations are here to be compared
            row = run(experiment, progress=progress)
        for warning in {str(w.message) for w in caught}:
            messages.put((identity, "warning", warning))
        messages.put((identity, "row", row))
    except Exception as error:
        detail = traceback.extract_tb(error.__traceback__)[-1]
        messages.put((identity, "error", f"{type(error).__name__}: {error} ({detail.filename}:{detail.lineno})"))
