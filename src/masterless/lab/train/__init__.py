"""Text to train on and a small training loop, shared by the benchmarks, the examples and the command line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corpus import Corpus, CorpusError, DocumentCounts, batch, stdlib_corpus, text_corpus, validation_batches
    from .loop import StepReport, TrainResult, TrainSettings, evaluate, lr_at, train

__all__ = [
    "Corpus",
    "CorpusError",
    "DocumentCounts",
    "StepReport",
    "TrainResult",
    "TrainSettings",
    "batch",
    "evaluate",
    "lr_at",
    "stdlib_corpus",
    "text_corpus",
    "train",
    "validation_batches",
]

_LOOP = {"StepReport", "TrainResult", "TrainSettings", "evaluate", "lr_at", "train"}


def __getattr__(name: str) -> Any:
    # Imported when used, as in `masterless` itself: the command line reads `train.config` without waiting for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{'loop' if name in _LOOP else 'corpus'}"), name)
    globals()[name] = value
    return value
