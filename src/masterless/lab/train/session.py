"""One sitting of a run: from the step where it stands to the end, or until somebody stops it.

Contract:
    * Every step is a line of the metrics before it is shown; a checkpoint follows only when that is on disk.
    * Stopping saves first. What was opened is closed however the sitting ends.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import masterless

from .build import build_settings, build_stepper, memory_of
from .display import Display, Speed, Status
from .loop import StepReport, train
from .observe import MetricsFile, Stalls, load_metrics, peak_memory, stalled_share
from .signals import StopFlag

if TYPE_CHECKING:
    from .run import Run


class _Interrupted(Exception):
    """Ends the training loop after the state was saved."""


class Session:
    """Trains a run and keeps what is known about it.

    Attributes:
        done: steps done, those of earlier sittings included.
    """

    def __init__(self, run: Run, display: Display, stop: StopFlag, tensorboard: bool = False) -> None:
        self._run, self._display, self._stop = run, display, stop
        self._settings = build_settings(run.config)
        self._writer = _summary_writer(run.folder / "tensorboard", run.step) if tensorboard else None
        self._metrics = MetricsFile(run.folder / "metrics.jsonl", run.metrics_bytes)
        earlier = load_metrics(run.folder / "metrics.jsonl")
        evaluations = (row["validation_loss"] for row in reversed(earlier) if row.get("validation_loss") is not None)
        self._validation: float | None = next(evaluations, None)
        self._stalled = next((stalled_share(row["stalls"]) for row in reversed(earlier) if "stalls" in row), None)
        # With a step in every backward pass there is no step() to sample: the monitor would see no gradients.
        sampled_every = 0 if run.config.step_in_backward else self._settings.eval_every or self._settings.steps
        self._stalls = Stalls(run.optimizer, sampled_every)
        self._speed = Speed(run.config.batch * run.config.accumulate * run.config.seq_len)
        self._bytes_per_parameter = memory_of(run.optimizer)["predicted_per_parameter"]
        self._began = time.monotonic()
        self.done = run.step

    def train(self) -> str:
        """Trains; returns "finished" or "interrupted"."""
        run = self._run
        stepper = build_stepper(run.config, run.model, run.optimizer)
        self._display.start(run.header)
        try:
            self._stalls.before(run.step + 1)
            result = train(run.model, run.optimizer, run.corpus, self._settings, self._on_step, run.step)
            self._validation = result.final_validation_loss
        except _Interrupted:
            return "interrupted"
        finally:
            self._display.stop()
            if stepper is not None:
                stepper.remove()
            if self._writer is not None:
                self._writer.close()
            self._metrics.close()
        return "finished"

    def summary(self, status: str) -> dict[str, Any]:
        """What `summary.json` says."""
        memory = memory_of(self._run.optimizer)
        progressed = self.done > self._run.step
        return {
            "status": status,
            "run": str(self._run.folder),
            "step": self.done,
            "steps": self._settings.steps,
            "validation_loss": self._validation,
            "bytes_per_parameter": memory["measured_per_parameter"],
            "predicted_bytes_per_parameter": memory["predicted_per_parameter"],
            "memory": memory,
            "peak_bytes": peak_memory(),
            "tokens_per_second": round(self._speed.tokens_per_second, 1) if progressed else None,
            "seconds": round(self._seconds(), 2),
            "stalled": self._stalled,
            "histograms": self._stalls.histograms,
            "text": self._run.corpus.description,
            "versions": {"masterless": masterless.__version__, "torch": torch.__version__},
        }

    def _on_step(self, report: StepReport) -> None:
        self.done = report.step + 1
        self._log(self._row(report))
        self._speed.step()
        self._show(report)
        steps, save_every = self._settings.steps, self._run.config.save_every
        if self.done == steps or self._stop.signal or (save_every and self.done % save_every == 0):
            self._save()
        if self._stop.signal and self.done < steps:
            raise _Interrupted
        self._stalls.before(self.done + 1)

    def _row(self, report: StepReport) -> dict[str, Any]:
        row: dict[str, Any] = {"step": self.done, "loss": report.loss, "lr": report.lr}
        if report.grad_norm is not None:
            row["grad_norm"] = report.grad_norm
        if (sampled := self._stalls.after()) is not None:
            row["stalls"] = sampled
            self._stalled = stalled_share(sampled)
        if report.validation_loss is not None:
            row["validation_loss"] = self._validation = report.validation_loss
            self._bytes_per_parameter = memory_of(self._run.optimizer)["measured_per_parameter"]
        return row

    def _log(self, row: dict[str, Any]) -> None:
        self._metrics.append(row)
        if self._writer is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self._writer.add_scalar(name, value, self.done)

    def _show(self, report: StepReport) -> None:
        self._display.update(
            Status(
                self.done,
                self._settings.steps,
                report.loss,
                self._validation,
                report.validation_loss is not None,
                self._speed.tokens_per_second,
                self._bytes_per_parameter,
                self._stalled,
                (self._settings.steps - self.done) * self._speed.seconds_per_step,
            )
        )

    def _save(self) -> None:
        self._metrics.flush(sync=True)
        content = {
            "model": self._run.model.state_dict(),
            "optimizer": self._run.optimizer.state_dict(),
            "seconds": self._seconds(),
        }
        self._run.checkpoints.save(self.done, self._metrics.size, content)

    def _seconds(self) -> float:
        return self._run.seconds + time.monotonic() - self._began


def _summary_writer(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step)
