"""Adam, AdamW and AdaBelief."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from masterless.formats import Format, as_second_moment, parse
from masterless.optim.base import LowBitOptimizer, require
from masterless.optim.options import Options, common, refuse
from masterless.step.rules import RULES, Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adam(LowBitOptimizer):
    """Adam whose moving averages live in a few bits.

    ``m <- b1 m + (1-b1) g``, ``v <- b2 v + (1-b2) g^2``, ``W <- W - lr * mhat / (sqrt(vhat) + eps)``, where m
    and v are stored in the formats `exp_avg` and `exp_avg_sq` between steps. The leading arguments are those of
    `torch.optim.Adam`; for all other options see `masterless.optim.options.Options`.

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate, a float or a one-element tensor.
        betas: decay rates of the two averages. Few bits want a smaller beta1: see `beta_for_bits`. With
            ``beta1 = 0`` there is no first moment; ``exp_avg="none"`` then says so in the checkpoint.
        eps: added to the denominator; its square to v, under the root, where v is neither fp32 nor bf16.
        weight_decay: coupled (L2) in Adam, decoupled in AdamW.
        amsgrad: refused.
        exp_avg: format of the first moment: "int8", "int4", "dynamic4", "fp8", "bf16", "fp32", "none", ...
        exp_avg_sq: format of the second moment: "log8", "log4", "log2", "factored", "fp8", "bf16", "fp32", ...
        moment_units: "gradient"; or "update": the first moment averages ``g / (sqrt(vhat) + eps)`` instead of g
            (LaProp), so that a block's coordinates are of one size, which a coarse code likes; or "weight": it is the
            step itself, ``lr * m / (sqrt(vhat) + eps)`` without bias correction of m. "auto" is "weight" for parameters
            with error compensation, which need it, else "update" for a quantized first moment if either has 4 bits or
            fewer.
        **options: see `masterless.optim.options.Options`.

    >>> model = torch.nn.Linear(64, 64)
    >>> opt = Adam(model.parameters(), lr=1e-3, exp_avg="int4", exp_avg_sq="log2")
    """

    torch_twin: ClassVar[Any] = torch.optim.Adam
    first_name = "exp_avg"
    second_name = "exp_avg_sq"
    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        exp_avg: str | Format = "int8",
        exp_avg_sq: str | Format = "log8",
        moment_units: str = "auto",
        **options: Unpack[Options],
    ) -> None:
        refuse(amsgrad=amsgrad)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "exp_avg": exp_avg,
                "exp_avg_sq": exp_avg_sq,
                "moment_units": moment_units,
                "decoupled_weight_decay": self._decoupled,
                **common(options),
            },
        )

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """Adam, with its momentum in gradient, update or weight units."""
        units = group["moment_units"]
        if units == "auto":
            moments = [parse(group["exp_avg"]), as_second_moment(group["exp_avg_sq"])]
            coarse = moments[0].scaled and any(moment.scaled and moment.bits <= 4 for moment in moments)
            units = "weight" if compensated else "update" if coarse else "gradient"
        return RULES["adam" if units == "gradient" else f"adam_{units}_units"]

    def momentum(self, group: dict[str, Any]) -> float:
        """Beta1."""
        return float(group["betas"][0])

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Betas in [0, 1), eps not negative."""
        check_betas(group)
        require(group["eps"] >= 0.0, "eps", group["eps"], "must not be negative")
        units = group["moment_units"]
        known = ("auto", "gradient", "update", "weight")
        require(units in known, "moment_units", units, "'auto', 'gradient', 'update' or 'weight'")


class AdamW(Adam):
    """AdamW, Adam with decoupled weight decay, whose moving averages live in a few bits.

    As `Adam`, but weight decay multiplies the weight by ``1 - lr * weight_decay`` instead of entering the
    gradient, and defaults to 0.01 as in `torch.optim.AdamW`.

    >>> model = torch.nn.Linear(64, 64)
    >>> opt = AdamW(model.named_parameters(), lr=3e-4, weight_decay=0.1, exp_avg="int4", exp_avg_sq="log2")
    """

    torch_twin = torch.optim.AdamW
    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        exp_avg: str | Format = "int8",
        exp_avg_sq: str | Format = "log8",
        moment_units: str = "auto",
        **options: Unpack[Options],
    ) -> None:
        formats = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "moment_units": moment_units}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **formats, **options)  # type: ignore[arg-type]


class AdaBelief(LowBitOptimizer):
    """AdaBelief (Zhuang et al. 2020): Adam that divides by the gradient's deviation from its average.

    ``s <- b2 s + (1-b2)(g - m)^2`` takes the place of v. Weight decay is decoupled. It would take a rounding error in
    m for a surprise: quantized parameters need ``error_compensation=False``.

    Args:
        params: parameters, named parameters, or param groups.
        lr: learning rate.
        betas: decay rates of the two averages.
        eps: added under the root and to the denominator.
        weight_decay: decoupled weight decay.
        exp_avg: format of the first moment.
        exp_avg_var: format of the average of squared deviations.
        **options: see `masterless.optim.options.Options`.

    >>> model = torch.nn.Linear(64, 64)
    >>> opt = AdaBelief(model.named_parameters(), lr=1e-3, exp_avg="int4", exp_avg_var="log4")
    """

    first_name = "exp_avg"
    second_name = "exp_avg_var"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: float = 0.0,
        *,
        exp_avg: str | Format = "int8",
        exp_avg_var: str | Format = "log8",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "exp_avg": exp_avg,
                "exp_avg_var": exp_avg_var,
                "decoupled_weight_decay": True,
                **common(options),
            },
        )

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """AdaBelief."""
        return RULES["adabelief"]

    def momentum(self, group: dict[str, Any]) -> float:
        """Beta1."""
        return float(group["betas"][0])

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Betas in (0, 1) and [0, 1), eps not negative, and a second moment that is updated element by element."""
        check_betas(group)
        require(group["eps"] >= 0.0, "eps", group["eps"], "must not be negative")
        require(group["betas"][0] > 0.0, "betas", group["betas"], "without beta1 the deviation from m is zero")
        require(
            group["exp_avg_var"] != "factored",
            "exp_avg_var",
            "factored",
            "the deviation is known only while m is decoded, tile by tile; use 'log2' or 'log4'",
        )


def check_betas(group: dict[str, Any]) -> None:
    """Both betas must lie in [0, 1)."""
    betas = group["betas"]
    require(len(betas) == 2, "betas", betas, "two numbers are needed")
    require(
        isinstance(betas[0], Tensor) == isinstance(betas[1], Tensor),
        "betas",
        betas,
        "betas must be either both floats or both Tensors",
    )
    group["betas"] = (float(betas[0]), float(betas[1]))
    require(all(0.0 <= float(b) < 1.0 for b in betas), "betas", betas, "both must lie in [0, 1)")
