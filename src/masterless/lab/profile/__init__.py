"""Memory of a training step, measured: what the process holds, phase by phase."""

from __future__ import annotations

from .resident import Phase, Recorder, resident_bytes, return_freed_memory

__all__ = ["Phase", "Recorder", "resident_bytes", "return_freed_memory"]
