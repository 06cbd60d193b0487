"""Text to train on and a small training loop, shared by the benchmarks, the examples and the command line."""

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
