"""What a run measures of itself: its metrics file, what rounding does in sampled steps, the process's memory."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from masterless.formats import parse
from masterless.insight.monitor import Monitor
from masterless.interop.files import read_json_lines, reason_of
from masterless.optim import LowBitOptimizer

from .build import is_inner
from .run_files import CheckpointError, remedy_for

_SAMPLE = 1 << 14  # elements of a parameter that a sampled step looks at


class MetricsFile:
    """``metrics.jsonl``: one line per step, functions of the step alone, no clock in it.

    Args:
        path: the file; what lies behind `size` is cut off.
        size: bytes to keep.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self._path, self._pending = path, []  # type: ignore[var-annotated]
        self.size = size
        try:
            # Unbuffered: a full disk is then met here, and not once more when the file is closed.
            self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)
            if os.fstat(self._file.fileno()).st_size < size:
                raise CheckpointError(
                    f"{path}: shorter than the {size:,} bytes it had at the checkpoint; restore it, or start a new run"
                )
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise self._failed(error) from error

    def append(self, row: dict[str, Any]) -> None:
        """Adds a line; it reaches the file with the next `flush`."""
        self._pending.append(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")
        if len(self._pending) >= 64:
            self.flush()

    def flush(self, sync: bool = False) -> None:
        """Writes what is pending, and with `sync` waits until the disk has it."""
        data = "".join(self._pending).encode()
        self._pending = []
        try:
            while data:
                written = self._file.write(data)
                data = data[written:]
                self.size += written
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Writes what is pending and closes the file."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path}: cannot be written ({reason_of(error)}); {remedy_for(error)}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics; a damaged line, which no report can show, is left out."""
    return [row for row in read_json_lines(path) if _is_metric(row)]


def _is_metric(row: dict[str, Any]) -> bool:
    stalls = row.get("stalls", {})
    if type(row.get("step")) is not int or not isinstance(stalls, dict) or not {"loss", "lr"} <= row.keys():
        return False
    numbers = [row.get(key, 0.0) for key in ("loss", "lr", "grad_norm", "validation_loss")]
    for entry in stalls.values():
        numbers += entry.values() if isinstance(entry, dict) else [entry]
    return all(isinstance(entry, dict) for entry in stalls.values()) and all(n is None or is_number(n) for n in numbers)


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number that a report can show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


class Stalls:
    """Samples what rounding does in every n-th step, counted from the start of the run and not of the session.

    Args:
        optimizer: the optimizer; it is only read.
        every: steps between samples; 0 samples nothing.
    """

    def __init__(self, optimizer: LowBitOptimizer, every: int) -> None:
        self._optimizer, self._every = optimizer, every
        self._monitor: Monitor | None = None
        self.histograms: dict[str, dict[str, Any]] | None = None
        self._inner = {name for _, p, name in optimizer.parameters() if is_inner(name, p)}

    def before(self, step: int) -> None:
        """Step number `step` (from 1) is about to be taken."""
        if self._every and step % self._every == 0:
            self._monitor = Monitor(self._optimizer, every=1, sample=_SAMPLE)

    def after(self) -> dict[str, dict[str, float]] | None:
        """The step was taken: shares of stalled and lost updates in the inner matrices, if it was sampled."""
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return None
        monitor.remove()
        if not monitor.samples:
            return None
        sample = monitor.samples[-1]
        self.histograms = self._histograms(sample["parameters"])
        return _shares([entries for name, entries in sample["parameters"].items() if name in self._inner])

    def _histograms(self, parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Counts of codes by tensor, over the inner matrices."""
        found: dict[str, dict[str, Any]] = {}
        for name, entries in parameters.items():
            for key, entry in entries.items():
                counts = entry.get("histogram")
                if name not in self._inner or not counts:
                    continue
                total = found.setdefault(key, {"format": entry["format"], "counts": [0] * len(counts)})
                total["counts"] = [a + b for a, b in zip(total["counts"], counts, strict=True)]
        return {key: {**entry, "counts": _by_level(entry)} for key, entry in found.items()}


def _shares(parameters: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over parameters by tensor (the weight, each moment), weighted by live elements."""
    result: dict[str, dict[str, float]] = {}
    for key in dict.fromkeys(key for entries in parameters for key in entries):
        for field in ("stalled_codes", "predicted", "lost"):
            rated = [
                (entries[key][field], entries[key]["elements"] * entries[key]["live"])
                for entries in parameters
                if entries.get(key, {}).get(field) is not None
            ]
            if weight := sum(w for _, w in rated):
                result.setdefault(key, {})[field] = sum(value * w for value, w in rated) / weight
    return result


def _by_level(entry: dict[str, Any]) -> list[int]:
    """Counts in the order of the levels that the codes stand for, smallest first."""
    format, counts = parse(entry["format"]), entry["counts"]
    if format.kind == "log":  # code 0 is a block's largest value
        return counts[::-1]
    if format.fine_bits:  # what is counted is the visible code, an offset binary number
        return counts
    return [counts[code] for code in format.table[1]]


def stalled_share(stalls: dict[str, dict[str, float]] | None) -> float | None:
    """The one number for a progress line: of the second moment, or of the first if that is all there is."""
    for key, entry in sorted((stalls or {}).items(), key=lambda item: "sq" not in item[0]):
        if key != "weight" and "stalled_codes" in entry:
            return entry["stalled_codes"]
    return None


def peak_memory() -> int:
    """The most memory this process has had resident, in bytes."""
    try:
        # Unlike ru_maxrss it does not start at the size of the process that started this one.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
