"""The recipes, by the question they answer and in the order of importance; `plan` makes runs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import masterless as ml

from .plan import Cell
from .recipe import BETA2, Recipe, Setting, recipe

Options = dict[str, Any]

SMALL, SMALL_LONG = Setting("37k", 20), Setting("37k", 100)
MIDDLE, MIDDLE_LONG = Setting("150k", 20), Setting("150k", 100)
LARGE = Setting("600k", 20)

DROP: Options = {"error_compensation": False}
NEAREST: Options = {"weight_rounding": "nearest"}
RECOMPUTE: Options = {"scale_policy": "recompute"}
UPDATE: Options = {"moment_units": "update"}
GRADIENT: Options = {"moment_units": "gradient"}
BETAS = (0.9, 0.95, 0.8, 0.53)
MUON_LRS = (16e-3, 32e-3, 64e-3)


def full(beta1: float = 0.9) -> Recipe:
    """fp32 AdamW."""
    return recipe(f"fp32, b1 {beta1:g}", beta1=beta1)


TWO = recipe("int8, int4 m .9, log4 v", "int8", "int4", "log4")
INT8_DROP = recipe("int8, error dropped", "int8", **DROP)
INT4_QAT = recipe("int4 with master weights", "int4+32")


def forward_formats() -> list[Recipe]:
    """What the forward pass sees, with master weights and exact states."""
    formats = ["int4", "int8", "fp8", "int4:32", "int4:64", "int4:row", "int4:tensor", "int8:32", "int8:row", "fp8:32"]
    names = [f.replace(":", "+32:") if ":" in f else f"{f}+32" for f in formats]
    return [recipe(f"{f} with master weights", name) for f, name in zip(formats, names, strict=True)]


def dropped() -> list[Recipe]:
    """Weights stored without a master copy, rounded stochastically, the error dropped or kept in part."""
    rows = [INT8_DROP]
    rows += [recipe(f"{f}, error dropped", f, **DROP) for f in ("int4+4", "fp8", "int4+6", "int6", "int4+2", "int8:32")]
    rows += [
        recipe("int8, error dropped, scale recomputed", "int8", **DROP, **RECOMPUTE),
        recipe("int8:row, error dropped", "int8:row", **DROP),
        recipe("int8, error dropped, power-of-two scale", "int8:128:pow2", **DROP),
        recipe("int4, error dropped", "int4", **DROP),
    ]
    return rows


def first_moments() -> list[Recipe]:
    """The first moment alone in few bits; weights and v in fp32."""
    rows = []
    for m, beta1, units in (
        *(("int4", beta1, units) for beta1 in (0.9, 0.8, 0.53) for units in (UPDATE, GRADIENT)),
        *(("int2", beta1, units) for beta1 in (0.53, 0.8, 0.9) for units in (UPDATE, GRADIENT)),
        *(("int3", beta1, UPDATE) for beta1 in (0.9, 0.8, 0.53)),
        *(("int8", 0.9, units) for units in (UPDATE, GRADIENT)),
        *(("fp32", beta1, UPDATE) for beta1 in (0.9, 0.53)),
        *(("dynamic4", beta1, UPDATE) for beta1 in (0.9, 0.8)),
        *((m, 0.9, UPDATE) for m in ("int4:32", "int4:64", "int3:32")),
    ):
        name = "" if units is UPDATE else ", gradient units"
        rows.append(recipe(f"{m} m .{f'{beta1:g}'[2:]}{name}", m=m, beta1=beta1, **units))
    rows.append(recipe("int4 m .9, nearest", m="int4", rounding="nearest", **UPDATE))
    return rows


def second_moments() -> list[Recipe]:
    """The second moment alone, but for log codes."""
    rows = [recipe("factored v", v="factored"), recipe("factored v, b1 .53", v="factored", beta1=0.53)]
    rows += [recipe("no m, fp32 v", m="none", beta1=0.0), recipe("no m, factored v", m="none", v="factored", beta1=0.0)]
    return rows


def log_moments() -> list[Recipe]:
    """The second moment alone in log codes."""
    rows = [recipe(f"log{bits} v", v=f"log{bits}") for bits in (4, 2, 3, 8)]
    return [*rows, recipe("log2 v, dither of the logarithm", v="log2", rounding="stochastic-log")]


def injected() -> list[Recipe]:
    """Weights stored without a master copy, the error put into an exact momentum."""
    return [recipe(f"{f}, injected", f) for f in ("int8", "fp8", "int4", "int4+4", "int6", "int4+2")]


def candidates() -> list[Recipe]:
    """What might become presets, by bytes."""
    return [
        TWO,
        recipe("int8, int4 m .9, log2 v", "int8", "int4", "log2"),
        recipe("int8, int4 m .9, factored v", "int8", "int4", "factored"),
        recipe("int6, int4 m .9, factored v", "int6", "int4", "factored"),
        recipe("int8, int2 m .53, factored v, dropped", "int8", "int2", "factored", 0.53, **DROP),
        recipe("int4, int4 m .9, factored v", "int4", "int4", "factored"),
        recipe("int8, no m, factored v", "int8", "none", "factored", 0.0, **DROP),
        recipe("int4+4, int4 m .9, log4 v", "int4+4", "int4", "log4"),
        recipe("int8, int4 m .9, log4 v, dropped", "int8", "int4", "log4", **DROP),
        recipe("int8, int4 m .9, log3 v", "int8", "int4", "log3"),
        recipe("int4+4, int4 m .9, factored v", "int4+4", "int4", "factored"),
        recipe("int4+2, int4 m .9, factored v", "int4+2", "int4", "factored"),
        recipe("int8, int3 m .8, factored v", "int8", "int3", "factored", 0.8),
        recipe("int4, int4 m .9, log2 v", "int4", "int4", "log2"),
        recipe("int6, int2 m .53, factored v, dropped", "int6", "int2", "factored", 0.53, **DROP),
        recipe("int4+2, int2 m .53, factored v, dropped", "int4+2", "int2", "factored", 0.53, **DROP),
        recipe("int8, int8 m .9, log4 v", "int8", "int8", "log4"),
    ]


def presets() -> list[Recipe]:
    """The presets as they are."""
    chosen = [p for p in ml.PRESETS.values() if p.name not in ("fp32", "states-8bit")]
    usual: dict[str, Any] = {"betas": (0.9, BETA2)}
    return [Recipe(f"preset {p.name}", p.weights, {**usual, **p.options}) for p in chosen]


def eco() -> list[Recipe]:
    """The ECO paper's table: FP8 by rows and INT4, exact states, the scale recomputed as there, and held as here."""
    rows = []
    for fmt in ("fp8", "int4"):
        rows.append(recipe(f"{fmt} with master weights", f"{fmt}+32"))
        for scale, policy in (("", {}), (", scale recomputed", RECOMPUTE)):
            for how, rounding in (("stochastic", {}), ("nearest", NEAREST)):
                naive, compensated = f"{fmt} naive {how}{scale}", f"{fmt} ECO {how}{scale}"
                rows.append(recipe(compensated, fmt, **rounding, **policy))
                rows.append(recipe(naive, fmt, **rounding, **policy, **DROP))
    return rows


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
    ]


def lions() -> list[Recipe]:
    """Lion: its step is a sign, which carries no error; hidden bits keep it."""
    usual: Options = {"betas": (0.9, 0.99), "error_compensation": False}
    rows = [Recipe("Lion fp32", None, {"exp_avg": "fp32", **usual}, "lion")]
    formats = ("int8", "int4+4", "int4")
    return rows + [Recipe(f"Lion {f}, int4 m", f, {"exp_avg": "int4", **usual}, "lion") for f in formats]


def cells() -> list[Cell]:
    """All cells, the most important first."""
    others = [(0, None, dither) for dither in (101, 102, 103, 104)]
    orders = [(0, order, None) for order in (101, 102, 103, 104)]
    key_weights, key_moments = [*forward_formats()[:3], *dropped()[:3]], [*first_moments()[:2], *first_moments()[6:8]]
    key_moments += [*second_moments()[:1], recipe("int4 m .8", m="int4", beta1=0.8, **UPDATE)]
    pairs = ((full(), orders), (INT8_DROP, others), (TWO, others))
    noise = [Cell("noise", r, SMALL, extra=extra) for r, extra in pairs]
    noise += [Cell("noise", r, MIDDLE, extra=e[:3]) for r, e in pairs[:2]]
    found = [*noise, *_grid("fp32", [full(b) for b in BETAS], (SMALL, MIDDLE))]
    found += _grid("weights", key_weights, (MIDDLE,))
    found += _grid("moments", key_moments, (MIDDLE,))
    found += _grid("weights", [*forward_formats(), *dropped()], (SMALL,))
    found += _grid("moments", [*first_moments(), *second_moments()], (SMALL,))
    found += _grid("candidates", [r for r in candidates() if not r.spec], (SMALL, MIDDLE))
    found += _grid("moments", log_moments(), (SMALL,))
    found += _grid("weights", injected(), (SMALL,))
    found += _grid("candidates", candidates(), (SMALL,))
    found += _grid("presets", presets(), (SMALL,))
    found += [Cell("noise", r, replace(SMALL, schedule="cosine"), extra=extra) for r, extra in pairs[:2]]
    found += _grid("candidates", candidates()[:8], (MIDDLE,))
    found += _grid("fp32", [full(b) for b in BETAS], (SMALL_LONG,))
    found += _grid("candidates", [*candidates()[:8], INT4_QAT], (SMALL_LONG,))
    found += _grid("weights", [*forward_formats(), *dropped(), *injected()], (MIDDLE,))
    found += _grid("moments", [*first_moments(), *second_moments(), *log_moments()], (MIDDLE,))
    found += _grid("candidates", candidates(), (MIDDLE,))
    found += _grid("presets", presets(), (MIDDLE,))
    found += _grid("eco", eco(), (SMALL, MIDDLE), sweep=(0, 1), seeds=(0, 1))
    deciding = [full(), *candidates()[:7], INT4_QAT]
    found += _grid("large", deciding, (LARGE,), sweep=(0,), seeds=(0, 1))
    found += _grid("batch", deciding, (replace(MIDDLE, batch_tokens=8192),))
    found += _grid("prose", deciding, (replace(SMALL, corpus="prose"), replace(MIDDLE, corpus="prose")))
    found += _grid("presets", presets(), (SMALL_LONG,))
    found += _grid("eco", eco(), (SMALL_LONG,), sweep=(0, 1), seeds=(0, 1))
    found += _grid("long", deciding, (MIDDLE_LONG,), sweep=(0,), seeds=(0, 1))
    # Muon's best learning rate stands out by 3% at 37k@20: one seed finds it.
    found += _grid("muon", muons()[:4], (SMALL,), sweep=(0,), lrs=MUON_LRS)
    found += _grid("muon", [full(), TWO], (SMALL,))
    found += _grid("muon", muons()[4:8], (SMALL,), sweep=(0,), lrs=MUON_LRS)
    found += _grid("lion", lions(), (SMALL,), sweep=(0,), lrs=(1e-3, 2e-3, 4e-3))
    found += _grid("muon", muons(), (SMALL,), sweep=(0,), seeds=range(4), lrs=MUON_LRS)
    found += _grid("muon", muons()[:6], (MIDDLE,), sweep=(0,), lrs=(8e-3, 16e-3, 32e-3))
    found += _grid("muon", [full(), TWO], (MIDDLE,), sweep=(0,))
    return found


def _grid(group: str, recipes: Sequence[Recipe], settings: Sequence[Setting], **options: Any) -> list[Cell]:
    return [Cell(group, r, setting, **options) for setting in settings for r in recipes]


def group_names() -> list[str]:
    """The groups in the order in which they first come up."""
    return list(dict.fromkeys(cell.group for cell in cells()))
