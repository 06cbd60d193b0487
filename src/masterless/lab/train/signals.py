"""Signals that ask a run to stop; imports no torch, so that they are heard while torch is being imported."""

from __future__ import annotations

import signal
from types import FrameType


class StopFlag:
    """Notes SIGINT and SIGTERM instead of dying of them; a second one is fatal as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for known in (signal.SIGINT, signal.SIGTERM):
            signal.signal(known, signal.SIG_DFL)
