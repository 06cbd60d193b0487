"""What a person or a script sees of a run while it goes on: a live line, plain lines, or JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        step: steps done.
        steps: steps of the whole run.
        loss: training loss of the last step.
        validation_loss: of the last evaluation, if there was one; `evaluated` says whether it was this step.
        tokens_per_second: of this session.
        bytes_per_parameter: measured, weights and states of the inner matrices.
        stalled: share of stored averages that the last sampled step left unchanged; None if not measured.
        seconds_left: estimated.
    """

    step: int
    steps: int
    loss: float
    validation_loss: float | None
    evaluated: bool
    tokens_per_second: float
    bytes_per_parameter: float
    stalled: float | None
    seconds_left: float


class Display:
    """A display that shows nothing; the others derive from it."""

    def start(self, header: str) -> None:
        """The run begins."""

    def update(self, status: Status) -> None:
        """A step was taken."""

    def stop(self) -> None:
        """No more updates will come; leaves the terminal clean."""


class PlainDisplay(Display):
    """One line per evaluation, for files and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def start(self, header: str) -> None:
        """Prints what is about to be trained."""
        print(header, file=self._stream, flush=True)

    def update(self, status: Status) -> None:
        """Prints a line if there was an evaluation."""
        if not status.evaluated:
            return
        stalled = "" if status.stalled is None else f"  stalled {status.stalled:.0%}"
        print(
            f"step {status.step:>{len(str(status.steps))}}/{status.steps}  loss {status.loss:.4f}  "
            f"validation {status.validation_loss:.4f}  {status.tokens_per_second:,.0f} tokens/s  "
            f"{status.bytes_per_parameter:.2f} bytes/parameter{stalled}  {clock(status.seconds_left)} left",
            file=self._stream,
            flush=True,
        )


class JsonDisplay(Display):
    """One JSON object per evaluation on stdout."""

    def update(self, status: Status) -> None:
        """Prints an object if there was an evaluation."""
        if status.evaluated:
            names = ("step", "loss", "validation_loss", "tokens_per_second", "bytes_per_parameter", "stalled")
            record = {name: getattr(status, name) for name in names}
            print(json.dumps({"event": "evaluation", **record, "seconds_left": status.seconds_left}), flush=True)


class LiveDisplay(Display):
    """A progress bar that is redrawn in place; evaluations stay as lines above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(highlight=False)
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/]"),
            TextColumn("{task.fields[speed]} tok/s"),
            TextColumn("{task.fields[size]} B/param"),
            TextColumn("{task.fields[stalled]}"),
            TextColumn("[dim]{task.fields[left]}[/]"),
            console=self._console,
            refresh_per_second=8,
        )
        self._task: Any = None

    def start(self, header: str) -> None:
        """Prints the header; the bar appears with the first step."""
        self._console.print(header, markup=False)

    def update(self, status: Status) -> None:
        """Redraws the bar."""
        fields: dict[str, Any] = {
            "loss": f"{status.loss:.3f}",
            "speed": f"{status.tokens_per_second:,.0f}",
            "size": f"{status.bytes_per_parameter:.2f}",
            "stalled": "" if status.stalled is None else f"stalled {status.stalled:.0%}",
            "left": f"{clock(status.seconds_left)} left",
        }
        if self._task is None:
            self._task = self._progress.add_task("", total=status.steps, **fields)
            self._progress.start()
        self._progress.update(self._task, completed=status.step, **fields)
        if status.evaluated:
            line = f"step {status.step:>{len(str(status.steps))}}  loss {status.loss:.4f}  validation "
            self._progress.console.print(f"[dim]{line}[/][bold]{status.validation_loss:.4f}[/]")

    def stop(self) -> None:
        """Removes the bar."""
        if self._task is not None:
            self._progress.stop()


def choose(as_json: bool) -> Display:
    """JSON if asked for, a live bar on a terminal, plain lines otherwise."""
    if as_json:
        return JsonDisplay()
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


def summary_line(final: dict[str, Any]) -> str:
    """The result of a run in one line."""
    loss = final["validation_loss"]
    return (
        f"{final['status']} after {final['step']} steps: validation loss "
        f"{'not evaluated' if loss is None else f'{loss:.4f}'}, {final['bytes_per_parameter']:.4f} bytes/parameter "
        f"(predicted {final['predicted_bytes_per_parameter']:.4f}), peak memory {final['peak_bytes'] / 2**20:.0f} MiB"
    )


def clock(seconds: float) -> str:
    """A duration as h:mm:ss or m:ss."""
    total = max(0, round(seconds))
    hours, rest = divmod(total, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Speed:
    """Tokens per second of this session.

    The first steps allocate and warm up; they are left out as soon as there are others.
    """

    _WARM = 3

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._began = self._warm_since = time.monotonic()
        self._steps = 0

    def step(self) -> None:
        """Another step was taken."""
        self._steps += 1
        if self._steps == self._WARM:
            self._warm_since = time.monotonic()

    @property
    def seconds_per_step(self) -> float:
        """Mean over the session."""
        warm = self._steps > self._WARM
        since, steps = (self._warm_since, self._steps - self._WARM) if warm else (self._began, self._steps)
        return (time.monotonic() - since) / max(1, steps)

    @property
    def tokens_per_second(self) -> float:
        """Mean over the session."""
        return self._tokens / max(1e-9, self.seconds_per_step)
