"""The optimizers: drop-in for torch.optim, with states of a few bits."""

from masterless.optim.adafactor import Adafactor
from masterless.optim.adam import AdaBelief, Adam, AdamW
from masterless.optim.base import LowBitOptimizer
from masterless.optim.beta import beta_for_bits
from masterless.optim.errors import LossyUpdateWarning, NonFiniteGradientError
from masterless.optim.muon import Muon, muon_groups
from masterless.optim.sgd import SGD, Lion, RMSprop

__all__ = [
    "SGD",
    "AdaBelief",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "LossyUpdateWarning",
    "LowBitOptimizer",
    "Muon",
    "NonFiniteGradientError",
    "RMSprop",
    "beta_for_bits",
    "muon_groups",
]
