"""The options that all optimizers share, and the torch.optim arguments that cannot be honoured."""

from __future__ import annotations

from typing import Any, TypedDict

COMMON_DEFAULTS: dict[str, Any] = {
    "maximize": False,
    "rounding": "stochastic",
    "weight_rounding": "stochastic",
    "error_compensation": None,
    "scale_policy": "held",
    "quantize_states": "matrices",
    "nonfinite": "raise",
    "reset": None,
    "seed": 0,
    "backend": "auto",
}


class Options(TypedDict, total=False):
    """Keyword options of every optimizer; each can also be set per param group.

    Attributes:
        maximize: ascend instead of descend.
        rounding: how states are rounded: "stochastic" (unbiased; a log code in what the update uses, 1/sqrt(v)),
            "nearest", "stochastic-value" or "stochastic-log" (a log code is unbiased in v, or in the code as SOLO's;
            other codes as under "stochastic").
        weight_rounding: how weights stored in bf16 or quantized are rounded: "stochastic" or "nearest".
        error_compensation: what rounding a quantized weight loses is injected into the momentum (ECO). None (the
            default): wherever the rule has a momentum that can carry it; True: refuse where it cannot; False: drop it.
        scale_policy: of quantized weights: "held" or "recompute".
        quantize_states: which parameters get low-bit states: "matrices", or "all" (vectors and narrow matrices too).
        nonfinite: on NaN or infinite gradients: "raise", with nothing changed, or "skip" the tile and only count. On a
            GPU the host does not wait for a step: the error is raised by the next call (or `synchronize()`), before it
            does anything; "raise-now" waits, and raises at once.
        reset: when second moments that stall are restarted: None (never), "auto" (the predicted period, where one is
            due), a number of steps, or "adaptive" (measured); see `masterless.optim.resets.ResetSchedule`.
        seed: of the random bits.
        backend: "auto" or "reference".
        foreach: accepted for compatibility: a step is one call over all tensors in any case.
        fused: likewise.
        capturable: refused, as is differentiable.
        differentiable: see there.
    """

    maximize: bool
    rounding: str
    weight_rounding: str
    error_compensation: bool | None
    scale_policy: str
    quantize_states: str
    nonfinite: str
    reset: str | int | None
    seed: int
    backend: str
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


REFUSED = {
    "amsgrad": "it needs a third buffer, and a maximum of rounded numbers only ever rounds up; leave it out",
    "centered": "it needs a third buffer; AdaBelief tracks the variance around the mean with two",
    "capturable": "the step's scalars are computed on the host; leave it out and let a graph hold opt.device_step()",
    "differentiable": "rounding has no derivative; use torch.optim for differentiable steps",
}


def refuse(**arguments: Any) -> None:
    """Raises a ValueError for any torch.optim argument that is switched on and cannot be honoured."""
    for name, value in arguments.items():
        if value:
            raise ValueError(f"{name}={value!r} is not supported: {REFUSED[name]}")


def common(options: Options) -> dict[str, Any]:
    """The shared options of a constructor call, checked for unknown and refused ones."""
    chosen: dict[str, Any] = dict(options)
    for name in ("foreach", "fused"):  # how torch loops over tensors; here it is one fused call
        chosen.pop(name, None)
    refuse(**{name: chosen.pop(name, None) for name in ("capturable", "differentiable")})
    unknown = [name for name in chosen if name not in COMMON_DEFAULTS]
    if unknown:
        raise TypeError(f"unknown options {unknown}; known: {', '.join(COMMON_DEFAULTS)}")
    return chosen
