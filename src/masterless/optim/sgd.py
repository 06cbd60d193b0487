"""SGD with momentum, RMSprop and Lion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.optim.adam import check_betas
from masterless.optim.base import LowBitOptimizer, require
from masterless.optim.options import Options, common, refuse
from masterless.step.rules import RULES, Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGD(LowBitOptimizer):
    """Stochastic gradient descent whose momentum buffer lives in a few bits.

    ``buf <- momentum * buf + (1 - dampening) * g``, ``W <- W - lr * buf``; the leading arguments are those of
    `torch.optim.SGD`.

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate.
        momentum: 0 for plain SGD, which stores nothing.
        dampening: of the momentum.
        weight_decay: coupled (L2).
        nesterov: look-ahead momentum; needs a momentum and no dampening.
        momentum_buffer: format of the buffer.
        **options: see `masterless.optim.options.Options`.

    >>> model = torch.nn.Linear(64, 64)
    >>> opt = SGD(model.named_parameters(), lr=0.1, momentum=0.9, momentum_buffer="int4")
    """

    torch_twin = torch.optim.SGD
    first_name = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        momentum_buffer: str | Format = "int8",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "momentum_buffer": momentum_buffer,
                **common(options),
            },
        )

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """SGD or its Nesterov form, with error compensation in weight units."""
        name = "sgd_nesterov" if group["nesterov"] else "sgd"
        return RULES[f"{name}_weight_units" if compensated else name]

    def momentum(self, group: dict[str, Any]) -> float:
        """The momentum."""
        return float(group["momentum"])

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Momentum in [0, 1); Nesterov needs momentum and no dampening."""
        momentum = group["momentum"]
        require(0.0 <= momentum < 1.0, "momentum", momentum, "must lie in [0, 1)")
        nesterov_ok = not group["nesterov"] or (momentum > 0.0 and group["dampening"] == 0.0)
        require(nesterov_ok, "nesterov", True, "Nesterov momentum requires a momentum and zero dampening")


class RMSprop(LowBitOptimizer):
    """RMSprop, with or without momentum, whose averages live in a few bits.

    ``v <- alpha * v + (1-alpha) * g^2``, ``buf <- momentum * buf + g / (sqrt(v) + eps)``, ``W <- W - lr * buf``;
    the leading arguments are those of `torch.optim.RMSprop`.

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate.
        alpha: decay rate of the average of squares.
        eps: added to the denominator.
        weight_decay: coupled (L2).
        momentum: 0 for none, which stores no buffer.
        centered: refused.
        square_avg: format of the average of squares.
        momentum_buffer: format of the momentum buffer.
        **options: see `masterless.optim.options.Options`.

    >>> model = torch.nn.Linear(64, 64)
    >>> opt = RMSprop(model.named_parameters(), lr=1e-3, square_avg="log4")
    """

    torch_twin = torch.optim.RMSprop
    first_name = "momentum_buffer"
    second_name = "square_avg"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        square_avg: str | Format = "log8",
        momentum_buffer: str | Format = "int8",
        **options: Unpack[Options],
    ) -> None:
        refuse(centered=centered)
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "square_avg": square_avg,
                "momentum_buffer": momentum_buffer,
                **common(options),
            },
        )

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """RMSprop, with error compensation in weight units."""
        return RULES["rmsprop_weight_units" if compensated else "rmsprop"]

    def momentum(self, group: dict[str, Any]) -> float:
        """The momentum."""
        return float(group["momentum"])

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Alpha and momentum in [0, 1), eps not negative."""
        require(0.0 <= group["alpha"] < 1.0, "alpha", group["alpha"], "must lie in [0, 1)")
        require(0.0 <= group["momentum"] < 1.0, "momentum", group["momentum"], "must lie in [0, 1)")
        require(group["eps"] >= 0.0, "eps", group["eps"], "must not be negative")


class Lion(LowBitOptimizer):
    """Lion (Chen et al. 2023): steps by a sign, with one momentum buffer in a few bits.

    ``W <- (1 - lr * wd) W - lr * sign(b1 m + (1-b1) g)``, ``m <- b2 m + (1-b2) g``. Its step has no size that an
    error could be injected through: quantized parameters need ``error_compensation=False``.

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate, three to ten times smaller than Adam's.
        betas: of the step's interpolation and of the buffer's decay.
        weight_decay: decoupled, three to ten times larger than Adam's.
        exp_avg: format of the buffer.
        **options: see `masterless.optim.options.Options`.

    >>> model = torch.nn.Linear(64, 64)
    >>> opt = Lion(model.named_parameters(), lr=1e-4, exp_avg="int4")
    """

    first_name = "exp_avg"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        exp_avg: str | Format = "int8",
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "exp_avg": exp_avg}
        super().__init__(params, {**defaults, **common(options)})

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """Lion."""
        return RULES["lion"]

    def momentum(self, group: dict[str, Any]) -> float:
        """Beta2, the decay of the buffer."""
        return float(group["betas"][1])

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Betas in [0, 1)."""
        check_betas(group)
