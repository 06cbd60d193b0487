"""Train neural networks in one to two bytes per parameter, with nothing full-precision kept on the side."""

from masterless.formats import Format, FormatError
from masterless.formats import parse as format
from masterless.optim import (
    SGD,
    AdaBelief,
    Adafactor,
    Adam,
    AdamW,
    Lion,
    NonFiniteGradientError,
    RMSprop,
    beta_for_bits,
)

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdaBelief",
    "Adafactor",
    "Adam",
    "AdamW",
    "Format",
    "FormatError",
    "Lion",
    "NonFiniteGradientError",
    "RMSprop",
    "beta_for_bits",
    "format",
]
