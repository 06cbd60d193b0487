"""Train neural networks in one to two bytes per parameter, with nothing full-precision kept on the side."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from masterless.backward import step_in_backward
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
        LossyUpdateWarning,
        NonFiniteGradientError,
        RMSprop,
        beta_for_bits,
    )
    from masterless.presets import PRESETS, prepare
    from masterless.quantize import dequantize_, quantize_
    from masterless.weight import QuantizedTensor

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SGD",
    "AdaBelief",
    "Adafactor",
    "Adam",
    "AdamW",
    "Format",
    "FormatError",
    "Lion",
    "LossyUpdateWarning",
    "Monitor",
    "NonFiniteGradientError",
    "QuantizedTensor",
    "RMSprop",
    "beta_for_bits",
    "dequantize_",
    "format",
    "prepare",
    "quantize_",
    "step_in_backward",
]

# Where each name lives, and what it is called there. Nothing is imported before it is used (PEP 562), so that the
# command line answers `--help` without waiting for torch. A new name goes here, into `__all__` and above.
_HOMES = {
    **dict.fromkeys(("Format", "FormatError", "format"), "masterless.formats"),
    **dict.fromkeys(("dequantize_", "quantize_"), "masterless.quantize"),
    **dict.fromkeys(("PRESETS", "prepare"), "masterless.presets"),
    "Monitor": "masterless.monitor",
    "QuantizedTensor": "masterless.weight",
    "step_in_backward": "masterless.backward",
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


if "torch" in sys.modules:  # then nothing is saved by waiting, and torch.load must know the quantized tensors
    import_module("masterless.weight")
