"""Train neural networks in one to two bytes per parameter, with nothing full-precision kept on the side."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from masterless.formats import Format, FormatError
    from masterless.formats import parse as format
    from masterless.monitor import Monitor
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
    from masterless.quantize import dequantize_, quantize_

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
    "Monitor",
    "NonFiniteGradientError",
    "RMSprop",
    "beta_for_bits",
    "dequantize_",
    "format",
    "quantize_",
]

# Where each name lives, and what it is called there. Nothing is imported before it is used (PEP 562), so that the
# command line answers `--help` without waiting for torch. A new name goes here, into `__all__` and above.
_HOMES = {
    **dict.fromkeys(("Format", "FormatError", "format"), "masterless.formats"),
    **dict.fromkeys(("dequantize_", "quantize_"), "masterless.quantize"),
    "Monitor": "masterless.monitor",
}
_NAMES = {"format": "parse"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(_HOMES.get(name, "masterless.optim")), _NAMES.get(name, name))
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return import_module(f"{__name__}.{name}")  # `import masterless as ml; ml.staleness`
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
