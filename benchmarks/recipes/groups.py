"""The recipes, by the question they answer and in the order of importance; `plan` makes runs of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import masterless as ml

from .others import MUON_LRS, lions, muons, muons_at_150k, muons_in_int4, muons_in_parts, muons_in_small_groups
from .plan import Cell
from .recipe import BETA2, Recipe, Setting, recipe
from .trials import TRIALS

Options = dict[str, Any]

SMALL, SMALL_LONG = Setting("37k", 20), Setting("37k", 100)
MIDDLE, MIDDLE_LONG = Setting("150k", 20), Setting("150k", 100)
LARGE = Setting("600k", 20)

DROP: Options = {"error_compensation": False}
NEAREST: Options = {"weight_rounding": "nearest"}
RECOMPUTE: Options = {"scale_policy": "recompute"}
UPDATE: Options = {"moment_units": "update"}
WEIGHT: Options = {"moment_units": "weight"}
BETAS = (0.9, 0.95, 0.8, 0.53)
SMALL_SEEDS: Options = {"sweep": (0, 1), "seeds": range(6)}  # of the cheapest setting


def with_betas(base: Recipe, beta1: float, beta2: float) -> Recipe:
    """The same recipe with other betas."""
    label = f"{base.label}, betas {beta1:g} {beta2:g}"
    return replace(base, label=label, options={**base.options, "betas": (beta1, beta2)})


def full(beta1: float = 0.9) -> Recipe:
    """fp32 AdamW."""
    return recipe(f"fp32, b1 {beta1:g}", beta1=beta1)


# Rounding a 4-bit momentum shakes the weights by b1 / (1 - b1) of its quantum: a shorter one is quieter.
SHORT = 0.7
TWO = recipe("int8, int4 m .7, log4 v", "int8", "int4", "log4", SHORT)
TWO_LONG = recipe("int8, int4 m .9, log4 v", "int8", "int4", "log4")
TWO_FINE = recipe("int8, int4:32 m .9, log4 v", "int8", "int4:32", "log4")
TWO_BETAS = [with_betas(TWO, *betas) for betas in ((0.8, 0.95), (0.6, 0.95), (0.7, 0.99))]
EIGHTEEN = recipe("int8, int4 m .7, log2 v", "int8", "int4", "log2", SHORT)
FIFTEEN = recipe("int6, int4 m .7, log2 v", "int6", "int4", "log2", SHORT)
THIRTEEN = recipe("int6, int4 m .7, factored v", "int6", "int4", "factored", SHORT)
TWO_INT4 = recipe("int4+4, int4 m .7, log4 v", "int4+4", "int4", "log4", SHORT)
THIRTEEN_INT4 = recipe("int4+2, int4 m .7, factored v", "int4+2", "int4", "factored", SHORT)
UPDATE_UNITS = recipe("fp32, m in update units", **UPDATE)
INT8_DROP = recipe("int8, error dropped", "int8", **DROP)
ONE = recipe("int6, int2 m .53, factored v, dropped", "int6", "int2", "factored", 0.53, **DROP)
ONE_INT4 = recipe("int4, int4 m .8, factored v", "int4", "int4", "factored", 0.8)
INT4_QAT = recipe("int4 with master weights", "int4+32")
INT4_QAT_SHORT = recipe("int4 with master weights, b1 .7", "int4+32", beta1=SHORT)


def weight_formats() -> list[Recipe]:
    """The weight alone, exact states: what the forward pass sees, and how it is kept."""

    def alone(label: str, weights: str, **options: Any) -> Recipe:
        return recipe(label, weights, beta1=SHORT, **options)

    rows = [INT4_QAT_SHORT]
    rows += [alone(f"{f} with master weights, b1 .7", f"{f}+32") for f in ("int8", "fp8")]
    rows += [alone(f"{f}, injected", f) for f in ("int8", "int6", "int4", "fp8", "int4+4", "int4+2")]
    rows += [nearest(alone(f"{f}, injected", f)) for f in ("int6", "int4")]
    rows += [alone(f"{f}, error dropped", f, **DROP) for f in ("int8", "int6", "int4", "fp8")]
    rows += [alone("int8, error dropped, scale recomputed", "int8", **DROP, **RECOMPUTE)]
    rows += [alone(f"int4:{g} with master weights, b1 .7", f"int4+32:{g}") for g in ("32", "64", "row")]
    return rows


def moment_formats() -> list[Recipe]:
    """A moment alone, in units of the weight as in the presets; weights and the other moment in fp32."""

    def alone(label: str, m: str = "fp32", v: str = "fp32", beta1: float = SHORT) -> Recipe:
        return recipe(label, None, m, v, beta1, **WEIGHT)

    rows = [alone("fp32, b1 .7, in units of the weight")]
    firsts = (("int4", 0.7), ("int4", 0.8), ("int4", 0.9), ("int2", 0.53), ("int3", 0.7), ("int2", 0.7), ("int8", 0.9))
    rows += [alone(f"{m} m .{f'{beta1:g}'[2:]}", m, beta1=beta1) for m, beta1 in firsts]
    rows += [alone(f"{v} v", v=v) for v in ("log4", "log2", "factored", "log3", "log8")]
    return rows


def parts(whole: Recipe) -> list[Recipe]:
    """What a recipe of AdamW is made of, each part alone with everything else exact: for the test of additivity."""
    m, v = whole.states
    weights = replace(whole, options={**whole.options, "exp_avg": "fp32", "exp_avg_sq": "fp32"})
    moments = [recipe("", None, m, "fp32", whole.beta1, **WEIGHT), recipe("", None, "fp32", v, whole.beta1, **WEIGHT)]
    return [weights, *moments]


def ideas() -> list[Recipe]:
    """What the library does not have, one thing at a time; beside each what it has."""

    def tried(trial: str, beta1: float = SHORT, **options: Any) -> Recipe:
        label = trial if beta1 == SHORT else f"{trial}, b1 {beta1:g}"
        return replace(recipe(f"trial: {label}", beta1=beta1, **options), trial=trial)

    momenta = ("4-bit m", "4-bit m, its error to the weight", "nf4 m")
    others = [tried(name) for name in TRIALS if name not in momenta]
    longer = [tried(name, 0.9, **WEIGHT) for name in momenta[:2]]
    blocks = [recipe(f"{m} m .7", None, m, beta1=SHORT, **WEIGHT) for m in ("int4:32", "int4:64", "dynamic4")]
    return [*others, *(tried(name, **WEIGHT) for name in momenta), *longer, *blocks]


def nearest(base: Recipe) -> Recipe:
    """The same recipe with weights rounded to nearest."""
    return replace(base, label=f"{base.label}, nearest", options={**base.options, **NEAREST})


def traded(base: Recipe, last: float, to: str = "int8") -> Recipe:
    """The same recipe, the momentum's bits being the weights' for the last share of the steps."""
    label = f"{base.label}, traded for {to} in the last {100 * last:.0f}%"
    return replace(base, label=label, traded_last=last, traded_for=to)


def of_larger_steps() -> list[Recipe]:
    """What presets are at 8192 tokens per step, where a longer momentum is better for all of them, fp32 included."""

    def ours(weights: str, v: str) -> Recipe:
        return recipe(f"{weights}, int4 m .8, {v} v", weights, "int4", v, 0.8)

    one = nearest(ONE_INT4)
    return [
        with_betas(TWO, 0.8, BETA2),
        ours("int8", "log2"),
        nearest(ours("int6", "log2")),
        nearest(ours("int6", "factored")),
        traded(one, 0.15),
        traded(one, 0.15, "int4+4"),
        recipe("int4 with master weights, b1 .8", "int4+32", beta1=0.8),
    ]


def deciding() -> list[Recipe]:
    """What presets and sentences rest on: fp32, the presets by falling bytes, INT4 with master weights."""
    ours = [TWO, EIGHTEEN, nearest(FIFTEEN), nearest(THIRTEEN), nearest(ONE_INT4)]
    return [full(0.8), *ours, INT4_QAT_SHORT, TWO_INT4]


def nearest_weights() -> list[Recipe]:
    """Weights rounded to nearest, the error injected: half to a third of the noise that the forward pass sees."""
    int4_log2 = recipe("int4, int4 m .7, log2 v", "int4", "int4", "log2", SHORT)
    more = [
        EIGHTEEN,
        TWO,
        TWO_INT4,
        THIRTEEN_INT4,
        recipe("int6, int2 m .53, factored v", "int6", "int2", "factored", 0.53),
        recipe("int4, int4 m .7, factored v", "int4", "int4", "factored", SHORT),
        recipe("int6, int4 m .8, factored v", "int6", "int4", "factored", 0.8),
        recipe("int4, int4 m .9, factored v", "int4", "int4", "factored"),
        recipe("int4:64, int4 m .8, factored v", "int4:64", "int4", "factored", 0.8),
        recipe("int4, int4 m .5, factored v", "int4", "int4", "factored", 0.5),
        recipe("int6, int4 m .5, factored v", "int6", "int4", "factored", 0.5),
        recipe("int4, int4 m .5, log2 v", "int4", "int4", "log2", 0.5),
    ]
    return [nearest(r) for r in (FIFTEEN, THIRTEEN, ONE_INT4, int4_log2, *more)]


def candidates() -> list[Recipe]:
    """What might become presets, by bytes."""
    return [
        TWO_LONG,
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
        recipe("int4+2, int2 m .53, factored v, dropped", "int4+2", "int2", "factored", 0.53, **DROP),
        recipe("int8, int8 m .9, log4 v", "int8", "int8", "log4"),
        TWO_FINE,
    ]


def late_int4() -> list[Recipe]:
    """The forward pass sees an INT8 grid first and INT4 for the last share of the steps only.

    A published law puts the best share at exp(-6.73 / ln S), S = tokens per parameter / (bits / 8): 16% at 20 tokens.
    """
    rows = [
        TWO_INT4,
        recipe("int4+4, int4 m .9, factored v", "int4+4", "int4", "factored"),
        recipe("int4+32", "int4+32"),
    ]
    return [
        replace(r, label=f"{r.label}, INT4 for the last {100 * share:.0f}%", coarse_from=1 - share)
        for r in rows
        for share in (0.16, 0.4)
    ]


def one_byte() -> list[Recipe]:
    """About one byte: where the last bits are best spent."""
    return [
        ONE,
        ONE_INT4,
        recipe("int6, int2 m .53, factored v", "int6", "int2", "factored", 0.53),
        recipe("int6, int2 m .8, factored v", "int6", "int2", "factored", 0.8),
        recipe("int4+2, int2 m .53, factored v", "int4+2", "int2", "factored", 0.53),
    ]


def presets() -> list[Recipe]:
    """The presets as they are."""
    chosen = [p for p in ml.PRESETS.values() if p.name not in ("fp32", "states-8bit")]
    usual: dict[str, Any] = {"betas": (0.9, BETA2)}
    return [
        Recipe(
            f"preset {p.name}",
            p.weights,
            {**usual, **p.options},
            traded_last=p.trade_last,
            traded_for=p.trade_for,
        )
        for p in chosen
    ]


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


def cells() -> list[Cell]:
    """All cells, the most important first: what decides presets, then what explains them, then what widens them."""
    dithers = [(0, None, dither) for dither in (101, 102, 103, 104)]
    orders = [(0, order, None) for order in (101, 102, 103, 104)]
    pairs = ((full(), orders), (INT8_DROP, dithers), (TWO, dithers))
    earlier = [full(), full(0.8), TWO, EIGHTEEN, FIFTEEN, THIRTEEN, ONE, INT4_QAT, INT4_QAT_SHORT, TWO_INT4]
    middle: Options = {"sweep": (0,), "seeds": range(4)}
    few: Options = {"sweep": (0,), "seeds": range(3)}  # of explanations: three seeds tell one percent
    larger_steps = replace(MIDDLE, batch_tokens=8192)
    once: Options = {"sweep": (0,), "seeds": (0,), "growth": 0}
    second: Options = {"sweep": (0,), "seeds": (1,), "growth": 0}
    # One byte: INT4 and a 4-bit momentum are an eight-bit weight when the learning rate has fallen.
    one_traded = [traded(nearest(ONE_INT4), last, to) for last in (0.15, 0.3) for to in ("int8", "int4+4")]
    # A paired gap scatters by about one percent: 22 seeds bring its standard error down to 0.2. All recipes of a seed
    # run next to each other, so that whatever has run is paired.
    found = _at_150k(range(8, 12), _presets(one_traded) + _int4(one_traded))
    found += _at_150k(range(12, 22), _presets(one_traded))
    # At 0.004 coarse weights were behind; at 20 tokens per parameter 0.008 is their best.
    found += _grid("long", _long(one_traded), (MIDDLE_LONG,), **once, lrs=(4e-3, 8e-3))
    found += _grid("large", [TWO, one_traded[0], nearest(THIRTEEN)], (LARGE,), **second, lrs=(4e-3,))
    found += _at_150k(range(12, 22), _int4(one_traded))
    found += _grid("long", _long(one_traded), (MIDDLE_LONG,), sweep=(0,), seeds=(0, 1), lrs=(4e-3, 8e-3), growth=0)
    # What presets are made of with larger steps. Single runs scatter by one percent there, too.
    found += _grid("batch", [full(0.8)], (larger_steps,), sweep=(0,), seeds=range(6), lrs=(4e-3, 8e-3, 16e-3), growth=0)
    two_lrs: Options = {"sweep": (0,), "lrs": (8e-3, 16e-3), "growth": 0}
    found += _grid("batch", of_larger_steps()[:4], (larger_steps,), seeds=range(6), **two_lrs)
    found += _grid("batch", of_larger_steps()[4:5], (larger_steps,), seeds=range(5), **two_lrs)
    found += _grid("ideas", ideas(), (SMALL,), **few, lrs=(16e-3,), growth=0)
    found += _grid("muon", muons_in_int4(), (SMALL,), **few, lrs=(32e-3, 64e-3), growth=0)
    # Is the longer momentum as good with 2048 tokens per step, at the learning rate that is fp32's best?
    found += _grid("candidates", of_larger_steps()[:3], (MIDDLE,), sweep=(0,), seeds=range(4), lrs=(4e-3,), growth=0)
    found += _grid("muon", muons_at_150k(), (MIDDLE,), sweep=(0,), seeds=range(2), lrs=(16e-3, 32e-3), growth=0)
    found += _grid("muon", muons_in_parts(), (MIDDLE,), sweep=(0,), seeds=range(2), lrs=(16e-3,), growth=0)
    # The largest size, where a run takes a quarter of an hour of a core.
    found += _grid("large", [TWO, one_traded[0], nearest(THIRTEEN)], (LARGE,), **once, lrs=(4e-3,))
    found += _grid("batch", of_larger_steps()[5:], (larger_steps,), seeds=range(6), **two_lrs)
    found += _grid("traded", one_traded, (SMALL,), sweep=(0,), seeds=range(6), lrs=(16e-3,), growth=0)
    found += _grid("traded", one_traded[:2], (MIDDLE,), sweep=(0,), seeds=range(22), lrs=(8e-3,), growth=0)
    found += _grid("traded", one_traded[2:], (MIDDLE,), sweep=(0,), seeds=range(8), lrs=(8e-3,), growth=0)
    # Why `2-byte` fell behind with larger steps: its learning rate, its beta1, its rounding, the bits of v.
    asked = [full(0.8), TWO, EIGHTEEN, nearest(TWO), TWO_LONG, *TWO_BETAS[:1], full()]
    found += _grid("batch", asked, (larger_steps,), sweep=(0,), seeds=(0, 1), lrs=(8e-3, 16e-3), growth=0)
    # It was beta1: 0.8 in place of 0.7. Is that as good with 2048 tokens per step?
    found += _grid("candidates", TWO_BETAS[:1], (MIDDLE,), sweep=(0,), seeds=range(4), lrs=(8e-3,), growth=0)
    # Seeds at learning rates that the sweeps above found best: fp32 at 0.004, ours at 0.008 but for INT6 and row means.
    many: Options = {"sweep": (0,), "seeds": range(22), "growth": 0}
    found += _grid("candidates", [full(0.8)], (MIDDLE,), **many, lrs=(4e-3,))
    found += _grid("candidates", [nearest(FIFTEEN), nearest(ONE_INT4), TWO, EIGHTEEN], (MIDDLE,), **many, lrs=(8e-3,))
    found += _grid("candidates", [nearest(THIRTEEN), INT4_QAT_SHORT], (MIDDLE,), **many, lrs=(4e-3,))
    # The largest size at the learning rates that were best at 150k.
    twice: Options = {"sweep": (0,), "seeds": (0, 1), "growth": 0}
    found += _grid("large", [full(0.8), nearest(FIFTEEN)], (LARGE,), **twice, lrs=(4e-3,))
    found += _grid("large", one_traded[2:3], (LARGE,), **once, lrs=(8e-3,))
    found += _grid("large", [TWO, nearest(THIRTEEN)], (LARGE,), **once, lrs=(4e-3,))
    found += _grid("large", one_traded[:1], (LARGE,), **once, lrs=(4e-3, 8e-3))
    found += _grid("large", [nearest(ONE_INT4)], (LARGE,), **once, lrs=(4e-3, 8e-3))
    # A hundred tokens per parameter, both learning rates that matter there.
    found += _grid("long", [*deciding(), *one_traded[:2]], (SMALL_LONG,), **twice, lrs=(8e-3, 16e-3))
    found += _grid("eco", eco(), (SMALL_LONG,), **once, lrs=(16e-3,))
    # What presets were chosen by.
    found += _grid("candidates", [full()], (MIDDLE,), sweep=(0, 1), seeds=range(4))
    found += _grid("candidates", earlier[1:3], (MIDDLE,), **middle, lrs=(2e-3, 4e-3, 8e-3))
    found += _grid("candidates", [full(), full(0.8), full(SHORT), *earlier[2:]], (SMALL,), **SMALL_SEEDS)
    found += _grid("candidates", [ONE_INT4, THIRTEEN_INT4, *late_int4()[:2]], (SMALL,), **SMALL_SEEDS)
    found += _grid("candidates", [*candidates()[:4], *candidates()[5:8], *candidates()[10:12]], (SMALL,), **SMALL_SEEDS)
    found += [Cell("noise", r, SMALL, extra=extra) for r, extra in pairs]
    found += _grid("one byte", one_byte(), (SMALL,), **SMALL_SEEDS)
    found += _grid("nearest", nearest_weights()[2::-1], (SMALL,), sweep=(0,), seeds=range(6), lrs=(16e-3, 32e-3))
    found += _grid("nearest", nearest_weights()[2::-1], (MIDDLE,), sweep=(0,), seeds=range(2), lrs=(4e-3, 8e-3))
    # Muon's best learning rate stands out by 3% at 37k@20: one seed finds it.
    found += _grid("muon", muons()[:4], (SMALL,), sweep=(0,), lrs=MUON_LRS)
    best = [r for r in muons() if r.label in ("Muon fp32, mu .8", "Muon int8, int4:32 m .8")]
    found += _grid("muon", best, (SMALL,), sweep=(0,), seeds=range(6), lrs=(32e-3, 64e-3))
    found += _grid("muon", muons_in_small_groups(), (SMALL,), sweep=(0,), lrs=(32e-3, 64e-3))
    found += _grid("nearest", nearest_weights()[3:9], (SMALL,), **few, lrs=(16e-3,), growth=0)
    # What explains presets: one thing quantized at a time, at the learning rate that is best for all of them.
    found += _grid("weights", weight_formats(), (SMALL,), **few, lrs=(16e-3,), growth=0)
    found += _grid("moments", moment_formats(), (SMALL,), **few, lrs=(16e-3,), growth=0)
    # What widens them: the largest size, another text, more tokens, larger steps.
    large = [full(0.8), nearest(FIFTEEN), nearest(ONE_INT4), TWO]
    found += _grid("large", large[:2], (LARGE,), sweep=(0,), seeds=(0,), lrs=(4e-3,), growth=0)
    found += _grid("prose", deciding(), (replace(SMALL, corpus="prose"),), **few, lrs=(16e-3,), growth=0)
    found += _grid("long", deciding(), (SMALL_LONG,), sweep=(0,), seeds=(0, 1), lrs=(8e-3,), growth=0)
    found += _grid("eco", eco(), (SMALL,), sweep=(0,), seeds=(0, 1), lrs=(16e-3,), growth=0)
    found += _grid("batch", large, (larger_steps,), sweep=(0,), seeds=(0, 1), lrs=(8e-3,), growth=0)
    found += _grid("large", large[2:], (LARGE,), sweep=(0,), seeds=(0,), lrs=(4e-3,), growth=0)
    found += _grid("muon", best, (MIDDLE,), sweep=(0,), seeds=(0, 1), lrs=(16e-3, 32e-3), growth=0)
    found += _grid("large", large, (LARGE,), sweep=(0,), seeds=(0, 1), lrs=(2e-3, 4e-3))
    found += _grid("nearest", nearest_weights()[:3], (MIDDLE,), sweep=(0,), seeds=range(4), lrs=(4e-3, 8e-3))
    found += _grid("candidates", [full(SHORT), *earlier[3:]], (MIDDLE,), **middle, lrs=(2e-3, 4e-3, 8e-3))
    found += _grid("muon", muons()[:6], (MIDDLE,), sweep=(0,), lrs=(8e-3, 16e-3, 32e-3))
    found += _grid("lion", lions(), (SMALL,), sweep=(0,), lrs=(1e-3, 2e-3, 4e-3))
    found += _grid("muon", [full(), TWO], (SMALL,))
    found += _grid("muon", [muons()[4], *muons()[15:]], (SMALL,), sweep=(0,), lrs=(32e-3, 64e-3))
    found += _grid("muon", muons()[4:8], (SMALL,), sweep=(0,), lrs=MUON_LRS)
    found += _grid("muon", [full(), TWO], (MIDDLE,), sweep=(0,))
    # What injection needs, an average of gradients that are divided already (LaProp), costs by itself at 150k.
    units = [UPDATE_UNITS, TWO_LONG, *TWO_BETAS, with_betas(full(), 0.9, 0.99)]
    found += _grid("units", units, (MIDDLE,), sweep=(0,), seeds=range(2), lrs=(4e-3,))
    # With time: more seeds, more sizes, more tokens.
    found += _grid("candidates", deciding(), (MIDDLE,), sweep=(0, 1), seeds=range(8))
    found += _grid("late int4", late_int4(), (SMALL, MIDDLE), **middle)
    found += _grid("fp32", [full(b) for b in BETAS], (SMALL, MIDDLE), **middle)
    found += _grid("long", deciding(), (SMALL_LONG, MIDDLE_LONG), **middle)
    found += _grid("presets", presets(), (SMALL, MIDDLE), **middle)
    found += _grid("candidates", [*candidates(), TWO_FINE], (SMALL, MIDDLE), **middle)
    found += _grid("eco", eco(), (SMALL, SMALL_LONG), sweep=(0, 1), seeds=(0, 1))
    found += _grid("prose", deciding(), (replace(SMALL, corpus="prose"), replace(MIDDLE, corpus="prose")), **middle)
    found += _grid("batch", deciding(), (larger_steps,), **middle)
    found += _grid("weights", weight_formats(), (SMALL, MIDDLE), **middle)
    found += _grid("moments", moment_formats(), (SMALL, MIDDLE), **middle)
    found += _grid("muon", muons(), (SMALL,), sweep=(0,), seeds=range(4), lrs=MUON_LRS)
    return found


Runs = list[tuple[str, Recipe, float]]  # group, recipe, learning rate: the best that sweeps found for it


def _presets(one_traded: Sequence[Recipe]) -> Runs:
    """fp32, and a preset for each number of bytes."""
    at_4, at_8 = (full(0.8), nearest(THIRTEEN)), (TWO, nearest(FIFTEEN))
    plain = [("candidates", r, 4e-3) for r in at_4] + [("candidates", r, 8e-3) for r in at_8]
    return [*plain, ("traded", one_traded[0], 8e-3)]


def _int4(one_traded: Sequence[Recipe]) -> Runs:
    """An INT4 forward pass with master weights and in one byte; and `1.8-byte`, which costs more than a better one."""
    return [("candidates", INT4_QAT_SHORT, 4e-3), ("traded", one_traded[1], 8e-3), ("candidates", EIGHTEEN, 8e-3)]


def _at_150k(seeds: Iterable[int], runs: Runs) -> list[Cell]:
    return [
        Cell(group, r, MIDDLE, sweep=(0,), seeds=(seed,), lrs=(lr,), growth=0)
        for seed in seeds
        for group, r, lr in runs
    ]


def _long(one_traded: Sequence[Recipe]) -> list[Recipe]:
    """What decides at a hundred tokens per parameter, by the question it answers."""
    return [one_traded[0], nearest(FIFTEEN), INT4_QAT_SHORT, TWO, full(0.8), one_traded[1], nearest(THIRTEEN)]


def _grid(group: str, recipes: Sequence[Recipe], settings: Sequence[Setting], **options: Any) -> list[Cell]:
    return [Cell(group, r, setting, **options) for setting in settings for r in recipes]


def group_names() -> list[str]:
    """The groups in the order in which they first come up."""
    return list(dict.fromkeys(cell.group for cell in cells()))
