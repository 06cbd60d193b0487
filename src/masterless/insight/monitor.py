"""What really happens in a running optimizer: stalls, lost updates, injected residue, beside what was predicted.

Contract:
    * Attaches by step hooks, reads and never writes, and can be removed. On steps that are not sampled a hook counts
      and returns.
    * A sampled step copies the stored bytes of the rows it looks at and recomputes their update in fp32; `sample`
      bounds how many elements of a parameter that is.
    * Definitions of live, stalled and lost are those of `insight.effects`; totals weigh parameters by live elements.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masterless.insight.effects import Snapshot, measure, take_snapshot
from masterless.optim.base import LowBitOptimizer, require

if TYPE_CHECKING:
    from rich.table import Table

_PREDICTIONS = ("predicted", "predicted_here")
_FRACTIONS = ("stalled_codes", "stalled_values", *_PREDICTIONS, "lost", "clipped", "rounding_error", "injected")


class Monitor:
    """Samples an optimizer's steps and reports what rounding did in them.

    Works on the optimizers of this library, and as a diagnostic on any torch.optim optimizer whose weights and states
    are bf16 or fp32.

    Args:
        optimizer: the optimizer to watch; hooks are attached at once.
        every: sample the n-th, 2n-th, ... step from here on.
        sample: the most elements looked at per parameter, in evenly spaced whole rows.
        histogram: keep the histogram of codes in the samples.
        jsonl: append every sample as a line to this file.
        writer: an object with ``add_scalar(tag, value, step)``, e.g. TensorBoard's SummaryWriter.
        tag: prefix of the writer's tags.

    Attributes:
        samples: one dict a sampled step: ``step``, ``total`` and ``parameters``, the latter by the parameter's name;
            both hold an entry for ``weight`` (``lost``, ``clipped``, ``injected``) and one for every state
            (``stalled_codes``, ``stalled_values``, ``predicted``, ``predicted_here``, ``clipped``, ``rounding_error``).

    >>> import torch
    >>> from masterless import AdamW
    >>> layer = torch.nn.Linear(64, 64)
    >>> opt = AdamW(layer.named_parameters(), exp_avg_sq="fp8", rounding="nearest")
    >>> with Monitor(opt, every=10) as monitor:
    ...     for _ in range(20):
    ...         layer(torch.randn(8, 64)).square().mean().backward()
    ...         opt.step()
    ...         opt.zero_grad()
    >>> [sample["step"] for sample in monitor.samples]
    [10, 20]
    """

    samples: list[dict[str, Any]]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int = 50,
        *,
        sample: int = 1 << 16,
        histogram: bool = True,
        jsonl: str | Path | None = None,
        writer: Any = None,
        tag: str = "masterless",
    ) -> None:
        require(every >= 1, "every", every, "steps between samples count from 1; pass 1 for every step")
        require(sample >= 1, "sample", sample, "at least one element is needed; pass for instance 65536")
        scalar = getattr(writer, "add_scalar", None)
        require(writer is None or callable(scalar), "writer", writer, "has no add_scalar(); pass a SummaryWriter")
        sharded = [name for _, p, name in _parameters(optimizer) if hasattr(p, "device_mesh")]
        require(not sharded, "optimizer", sharded[:1], "is sharded (DTensor); watch a run on one process")
        self.samples = []
        self._optimizer, self._every, self._sample, self._histogram = optimizer, every, sample, histogram
        self._jsonl = None if jsonl is None else Path(jsonl)
        self._writer, self._tag = writer, tag
        self._calls = 0
        self._before: list[Snapshot] | None = None
        self._handles = [optimizer.register_step_pre_hook(self._pre), optimizer.register_step_post_hook(self._post)]

    def remove(self) -> None:
        """Detaches from the optimizer; the samples stay."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._before = [], None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # --- hooks --------------------------------------------------------------------------------------------

    def _pre(self, *_: Any) -> None:
        self._calls += 1
        if self._calls % self._every:
            return
        with torch.no_grad():
            taken = (
                take_snapshot(self._optimizer, group, p, name, self._sample)
                for group, p, name in _parameters(self._optimizer)
            )
            self._before = [snapshot for snapshot in taken if snapshot is not None]

    def _post(self, *_: Any) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        with torch.no_grad():
            measured = {s.name: measure(self._optimizer, s, self._histogram) for s in before}
        parameters = {name: entries for name, entries in measured.items() if entries is not None}
        if not parameters:  # nothing was stepped, or there was no state yet
            return
        step = max(int(self._optimizer.state[s.p].get("step", self._calls)) for s in before)
        sample = {"step": step, "total": totals(parameters), "parameters": parameters}
        self.samples.append(sample)
        if self._jsonl is not None:
            with self._jsonl.open("a") as file:
                file.write(json.dumps(sample) + "\n")
        self._write_scalars(sample)

    def _write_scalars(self, sample: dict[str, Any]) -> None:
        if self._writer is None:
            return
        for name, entries in {"total": sample["total"], **sample["parameters"]}.items():
            for key, entry in entries.items():
                for field in _FRACTIONS:
                    if entry.get(field) is not None:
                        self._writer.add_scalar(f"{self._tag}/{name}/{key}/{field}", entry[field], sample["step"])

    # --- results ------------------------------------------------------------------------------------------

    def table(self, index: int = -1) -> Table:
        """One sample (the last, unless said otherwise) as a rich table: ``rich.print(monitor.table())``."""
        from rich.table import Table

        require(bool(self.samples), "samples", 0, "no step was sampled yet; take `every` steps first")
        sample = self.samples[index]
        table = Table(title=f"step {sample['step']}")
        for column in ("parameter", "tensor", "format"):
            table.add_column(column)
        for column in ("stalled codes", "values", "predicted", "here", "lost", "clipped", "rounding", "injected"):
            table.add_column(column, justify="right")
        for name, entries in {**sample["parameters"], "total": sample["total"]}.items():
            for key, entry in entries.items():
                numbers = ("" if entry.get(f) is None else f"{entry[f]:.3f}" for f in _FRACTIONS)
                table.add_row(name, key, entry.get("format", ""), *numbers)
        return table

    def series(self, key: str, field: str) -> tuple[list[int], list[float]]:
        """Steps and totals of one quantity, e.g. ``series("exp_avg_sq", "stalled_codes")``; gaps left out."""
        pairs = [(s["step"], s["total"].get(key, {}).get(field)) for s in self.samples]
        kept = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in kept], [value for _, value in kept]

    def write_jsonl(self, path: str | Path) -> None:
        """Writes all samples to a file, one JSON object per line."""
        Path(path).write_text("".join(json.dumps(sample) + "\n" for sample in self.samples))

    def plot(self, path: str | Path) -> None:
        """Draws measured and predicted stalls and lost updates over steps, and writes them to a file."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Monitor.plot needs matplotlib; pip install 'masterless[plot]'") from error
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot()
        keys = dict.fromkeys(key for sample in self.samples for key in sample["total"])
        for color, key in enumerate(keys):
            for field, style in (("stalled_codes", "-"), ("stalled_values", ":"), ("predicted", "--"), ("lost", "-")):
                steps, values = self.series(key, field)
                if values:
                    label = f"{key}: {field.replace('_', ' ')}"
                    axes.plot(steps, values, style, color=f"C{color}", marker=".", label=label)
        axes.set(xlabel="step", ylabel="share of live elements", ylim=(-0.02, 1.02))
        if axes.lines:
            axes.legend(fontsize="small")
        figure.savefig(path, dpi=150)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
    if isinstance(optimizer, LowBitOptimizer):
        yield from optimizer.parameters()
        return
    position = 0
    for group in optimizer.param_groups:
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            yield group, p, names[i] if names else f"#{position}"
            position += 1


def totals(parameters: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over parameters, weighted by their live elements."""
    total: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for entries in parameters.values() for key in entries):
        entries = [e[key] for e in parameters.values() if key in e]
        total[key] = {"elements": sum(e["elements"] for e in entries)}
        for field in ("live", *_FRACTIONS):
            rated = [
                (e[field], e["elements"] * (1.0 if field == "live" else e["live"]))
                for e in entries
                if e.get(field) is not None and e.get("live")
            ]
            weight = sum(w for _, w in rated)
            # A prediction of a part (the vectors, say) is not one of the whole.
            whole = sum(e["elements"] * (e.get("live") or 0.0) for e in entries)
            if weight > (0.99 * whole if field in _PREDICTIONS else 0.0):
                total[key][field] = sum(value * w for value, w in rated) / weight
    return total
