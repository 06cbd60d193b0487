"""Resident memory of this process, by phase.

Contract:
    * A phase's peak is the kernel's own (``VmHWM``, set back at the phase's beginning), so nothing is missed between
      two samples. The samples are for the plot.
    * Resident memory is anonymous memory and mapped files, as the system counts it against the process.
    * The C library keeps much of what is freed for later. `return_freed_memory` makes it give large blocks back at
      once: then resident memory is what is in use, and the peak is that of the program.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_RESET_PEAK = "5"  # what the kernel documents for clear_refs


class ProfileError(ValueError):
    """Memory that cannot be measured on this system."""


@dataclass(frozen=True)
class Phase:
    """What was measured of one phase, in bytes and seconds."""

    name: str
    before: int
    after: int
    peak: int
    seconds: float
    began: float = 0.0  # seconds after the recorder was made


def _field(name: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise ProfileError("resident memory is read from /proc/self/status, which this system lacks; measure on Linux")


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """The most that has been in memory since `reset_peak`."""
    return _field("VmHWM")


def mapped_file_bytes() -> int:
    """Bytes of mapped files (code, mostly) that are in memory now: what the system may drop from it at any time."""
    return _field("RssFile")


def reset_peak() -> None:
    """Lets the peak start again from what is in memory now."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError as error:
        raise ProfileError(f"the peak of a phase needs a writable {_CLEAR} ({error}); measure on Linux") from error


def return_freed_memory(threshold: int = 1 << 20) -> bool:
    """Makes the C library return freed blocks above a size to the system at once; False where it cannot be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return False
    settings = ((_M_MMAP_THRESHOLD, threshold), (_M_TRIM_THRESHOLD, threshold), (_M_ARENA_MAX, 1))
    return all([mallopt(option, value) for option, value in settings])


def give_back_freed_memory() -> None:
    """Makes the C library return what it keeps of freed memory, once; where it cannot be told, nothing happens."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # no glibc
        pass


class Recorder:
    """Measures phases, and samples the memory all the while.

    >>> recorder = Recorder(every=0.001)
    >>> with recorder, recorder.phase("fill"):
    ...     block = bytearray(b"1") * (1 << 24)
    >>> [(phase.name, phase.peak >= 1 << 24) for phase in recorder.phases]  # of the whole process
    [('fill', True)]

    Args:
        every: seconds between two samples.
    """

    def __init__(self, every: float = 0.02) -> None:
        self.phases: list[Phase] = []
        self.samples: list[tuple[float, int]] = []
        self._every, self._stop, self._began = every, threading.Event(), time.perf_counter()
        self._thread: threading.Thread | None = None

    @property
    def peak(self) -> int:
        """The most that was resident in any phase."""
        return max((phase.peak for phase in self.phases), default=0)

    @property
    def elapsed(self) -> float:
        """Seconds since the recorder was made."""
        return time.perf_counter() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what happens inside; a name may come several times. Phases do not nest."""
        reset_peak()
        before, began = resident_bytes(), self.elapsed
        try:
            yield
        finally:
            seconds = self.elapsed - began
            self.phases.append(Phase(name, before, resident_bytes(), peak_bytes(), seconds, began))

    def __enter__(self) -> Recorder:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self.samples.append((self.elapsed, resident_bytes()))
