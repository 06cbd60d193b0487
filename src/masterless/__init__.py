"""Train neural networks in one to two bytes per parameter, with nothing full-precision kept on the side."""

from masterless import backends as backends  # registers who performs steps
from masterless.formats import Format, FormatError
from masterless.formats import parse as parse_format
from masterless.insight import memory
from masterless.insight.monitor import Monitor
from masterless.optim import (
    SGD,
    AdaBelief,
    Adafactor,
    Adam,
    AdamW,
    Lion,
    LossyUpdateWarning,
    Muon,
    NonFiniteGradientError,
    RMSprop,
    beta_for_bits,
    muon_groups,
)
from masterless.optim.backward import step_in_backward
from masterless.optim.presets import PRESETS, prepare
from masterless.optim.trade import trade_momentum_
from masterless.step import staleness
from masterless.tensor.build import build_quantized
from masterless.tensor.cache import cache_decoded_
from masterless.tensor.calibrate import calibrate_
from masterless.tensor.head import linear_cross_entropy
from masterless.tensor.hidden import show_hidden_bits_
from masterless.tensor.products import use_products_
from masterless.tensor.quantize import dequantize_, quantize_
from masterless.tensor.quantized import QuantizedTensor

from masterless.integrations.averaging import AveragedModel  # isort: skip  (registers itself with `quantize_`)
from masterless.integrations.export import export  # isort: skip

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SGD",
    "AdaBelief",
    "Adafactor",
    "Adam",
    "AdamW",
    "AveragedModel",
    "Format",
    "FormatError",
    "Lion",
    "LossyUpdateWarning",
    "Monitor",
    "Muon",
    "NonFiniteGradientError",
    "QuantizedTensor",
    "RMSprop",
    "beta_for_bits",
    "build_quantized",
    "cache_decoded_",
    "calibrate_",
    "dequantize_",
    "export",
    "linear_cross_entropy",
    "memory",
    "muon_groups",
    "parse_format",
    "prepare",
    "quantize_",
    "show_hidden_bits_",
    "staleness",
    "step_in_backward",
    "trade_momentum_",
    "use_products_",
]
