"""What optimizers raise and warn of."""

from __future__ import annotations

from typing import Any


class LossyUpdateWarning(UserWarning):
    """A combination of format, rounding and momentum that is known to lose much of the training."""


class NonFiniteGradientError(RuntimeError):
    """A gradient held NaN or infinity; what it touched was left exactly as it was."""


def require(condition: bool, name: str, value: Any, reason: str) -> None:
    """Raises a ValueError that names the option, its value and what is allowed."""
    if not condition:
        raise ValueError(f"{name}={value!r}: {reason}")
