"""Recipes of the other optimizers: Muon, and Lion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .recipe import Recipe

Options = dict[str, Any]

MUON_LRS = (16e-3, 32e-3, 64e-3)


def muon(label: str, weights: str | None = None, m: str = "fp32", momentum: float = 0.95, **options: Any) -> Recipe:
    """A recipe of Muon by its formats."""
    return Recipe(f"Muon {label}", weights, {"momentum_buffer": m, "momentum": momentum, **options}, "muon")


def muons() -> list[Recipe]:
    """Muon by bytes; what rounding takes is dropped unless a row says otherwise."""
    inject: Options = {"error_compensation": True}
    return [
        muon("fp32"),
        muon("int8, int4 m", "int8", "int4"),
        muon("int4+4, int4 m", "int4+4", "int4"),
        muon("int4, int4 m", "int4", "int4"),
        muon("int8, int8 m", "int8", "int8"),
        muon("int6, int2 m", "int6", "int2"),
        muon("int8, int4 m, injected", "int8", "int4", **inject),
        muon("int4, int4 m, injected", "int4", "int4", **inject),
        muon("int8, no m", "int8", "none", 0.0),
        muon("int4 with master weights", "int4+32"),
        muon("int8, int2 m", "int8", "int2"),
        muon("int4+2, int2 m", "int4+2", "int2"),
        muon("int8, int3 m", "int8", "int3"),
        muon("fp8, int4 m", "fp8", "int4"),
        muon("int4+4, int4 m, injected", "int4+4", "int4", **inject),
        # Rounding noise of m piles up over 1 / (1 - mu^2) steps, and orthogonalising raises what is small: shorter
        # averages, smaller blocks and other levels against it.
        muon("fp32, mu .9", momentum=0.9),
        muon("fp32, mu .8", momentum=0.8),
        muon("int8, int4 m .9", "int8", "int4", 0.9),
        muon("int8, int4 m .8", "int8", "int4", 0.8),
        muon("int8, int4:32 m .8", "int8", "int4:32", 0.8),
        replace(muon("int4+4, int4:32 m .8, INT4 for the last 40%", "int4+4", "int4:32", 0.8), coarse_from=0.6),
        muon("int4+4, int4:32 m .8", "int4+4", "int4:32", 0.8),
        *muons_in_small_groups(),
        muon("int4, int4 m .8", "int4", "int4", 0.8),
        muon("int8, int8 m .8", "int8", "int8", 0.8),
        muon("int4 with master weights, mu .8", "int4+32", momentum=0.8),
        muon("int8, dynamic4 m .8", "int8", "dynamic4", 0.8),
        muon("int8, int4 m .8, nearest", "int8", "int4", 0.8, rounding="nearest", weight_rounding="stochastic"),
    ]


def muons_in_small_groups() -> list[Recipe]:
    """INT4 in groups of 32, all along and late, and with master weights: what the forward format costs Muon."""
    small = muon("int4+4:32, int4:32 m .8", "int4+4:32", "int4:32", 0.8)
    late = [
        replace(small, label=f"{small.label}, INT4 for the last {share}%", coarse_from=1 - share / 100)
        for share in (20, 40)
    ]
    return [*late, small, muon("int4:32 with master weights, mu .8", "int4+32:32", momentum=0.8)]


def muons_in_int4() -> list[Recipe]:
    """INT4 in the forward pass: the hidden grid to nearest, so that fewer visible codes flip; how late; masters."""
    base = muon("int4+4, int4:32 m .8, nearest", "int4+4", "int4:32", 0.8, weight_rounding="nearest")
    late = [
        replace(base, label=f"{base.label}, INT4 for the last {share}%", coarse_from=1 - share / 100)
        for share in (20, 40)
    ]
    return [base, *late, muon("int4 with master weights, mu .8", "int4+32", momentum=0.8)]


def muons_at_150k() -> list[Recipe]:
    """What Muon's sentences rest on: fp32, 1.56 bytes, INT4 with hidden bits and with master weights, one byte."""
    wanted = (
        "fp32, mu .8",
        "int8, int4:32 m .8",
        "int4+4, int4:32 m .8",
        "int4 with master weights, mu .8",
        "int4, int4 m .8",
    )
    known = {r.label: r for r in muons()}
    return [known[f"Muon {label}"] for label in wanted]


def muons_in_parts() -> list[Recipe]:
    """What costs what of INT8 weights and a 4-bit momentum: each alone; other ways with what rounding loses."""
    return [
        muon("int8, fp32 m .8", "int8", "fp32", 0.8),
        muon("int8, int4:32 m .8, nearest", "int8", "int4:32", 0.8, weight_rounding="nearest"),
        muon("int8, int4:32 m .8, injected", "int8", "int4:32", 0.8, error_compensation=True),
        muon("fp32 weights, int4:32 m .8", None, "int4:32", 0.8),
    ]


def lions() -> list[Recipe]:
    """Lion: its step is a sign, which carries no error; hidden bits keep it."""
    usual: Options = {"betas": (0.9, 0.99), "error_compensation": False}
    rows = [Recipe("Lion fp32", None, {"exp_avg": "fp32", **usual}, "lion")]
    formats = ("int8", "int4+4", "int4")
    return rows + [Recipe(f"Lion {f}, int4 m", f, {"exp_avg": "int4", **usual}, "lion") for f in formats]
