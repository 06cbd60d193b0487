"""Adafactor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.optim.base import LowBitOptimizer, require
from masterless.optim.options import Options, common
from masterless.step.rules import RULES, Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adafactor(LowBitOptimizer):
    """Adafactor (Shazeer and Stern 2018), factored by default, with an optional few-bit first moment.

    ``u = g / max(sqrt(v), eps1)`` is clipped to an RMS of `d`, and the step is relative to the weight:
    ``W <- (1 - lr * wd) W - max(eps2, RMS(W)) * min(lr, 1/sqrt(t)) * u``. The leading arguments are those of
    `torch.optim.Adafactor`.

    Args:
        params: parameters, named parameters, or param groups.
        lr: upper bound of the relative step.
        beta2_decay: the second moment's decay is ``1 - t^beta2_decay``.
        eps: (eps1, eps2); eps1 None means the machine epsilon of fp32.
        d: clipping threshold of the update's RMS.
        weight_decay: decoupled.
        exp_avg_sq: format of the second moment ("factored" unless there is a reason).
        beta1: decay of a first moment of the clipped updates (the paper's option; torch has none).
        exp_avg: format of that first moment.
        **options: see `masterless.optim.options.Options`.

    >>> model = torch.nn.Linear(64, 64)
    >>> opt = Adafactor(model.named_parameters(), lr=1e-2, beta1=0.9, exp_avg="int4")
    """

    # No `torch_twin`: torch's Adafactor stores other tensors (row_var, col_var), of every matrix however narrow.
    first_name = "exp_avg"
    second_name = "exp_avg_sq"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        exp_avg_sq: str | Format = "factored",
        beta1: float = 0.0,
        exp_avg: str | Format = "int8",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps": eps,
                "d": d,
                "weight_decay": weight_decay,
                "exp_avg_sq": exp_avg_sq,
                "beta1": beta1,
                "exp_avg": exp_avg,
                **common(options),
            },
        )

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """Adafactor, with error compensation in weight units."""
        return RULES["adafactor_weight_units" if compensated else "adafactor"]

    def momentum(self, group: dict[str, Any]) -> float:
        """Beta1."""
        return float(group["beta1"])

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Decay exponent not positive, thresholds positive, beta1 in [0, 1)."""
        require(group["beta2_decay"] <= 0.0, "beta2_decay", group["beta2_decay"], "must not be positive")
        require(group["d"] >= 1.0, "d", group["d"], "the clipping threshold must be at least 1")
        eps1, eps2 = group["eps"]
        group["eps"] = (torch.finfo(torch.float32).eps if eps1 is None else eps1, eps2)
        require(min(group["eps"]) >= 0.0, "eps", group["eps"], "must not be negative")
        require(0.0 <= group["beta1"] < 1.0, "beta1", group["beta1"], "must lie in [0, 1)")
