"""What optimizers raise and warn of."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from masterless.formats import Format

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer


class LossyUpdateWarning(UserWarning):
    """A combination of format, rounding and momentum that is known to lose much of the training."""


class NonFiniteGradientError(RuntimeError):
    """A gradient held NaN or infinity; what it touched was left exactly as it was."""


def require(condition: bool, name: str, value: Any, reason: str) -> None:
    """Raises a ValueError that names the option, its value and what is allowed."""
    if not condition:
        raise ValueError(f"{name}={value!r}: {reason}")


def warn_of_losses(optimizer: LowBitOptimizer, format: Format, group: dict[str, Any]) -> None:
    """Warns of weights in a format that nearest rounding would keep from moving, or let lag far behind."""
    if group["weight_rounding"] != "nearest" or format.fine_bits >= 4:
        return
    momentum, rule = optimizer.momentum(group), optimizer.rule(group, True)
    able = rule.compensable and optimizer.has_momentum(group)
    if group["error_compensation"] is False or not able:
        warnings.warn(
            f"weights stored as '{format}' with weight_rounding='nearest' and no error compensation lose every "
            f"update below half a quantum, which is most of them; use weight_rounding='stochastic'",
            LossyUpdateWarning,
            stacklevel=6,
        )
    elif format.bits <= 4 and momentum > 0.7 and not rule.pays_back(format, group["weight_rounding"]):
        warnings.warn(
            f"with weight_rounding='nearest' and a momentum of {momentum} the stored weight can lag "
            f"{1 / (2 * (1 - momentum)):.1f} quanta behind, and a quantum of '{format}' is large; use "
            f"weight_rounding='stochastic', or a momentum of about 0.35",
            LossyUpdateWarning,
            stacklevel=6,
        )
