"""The rows of the frontier study: which formats really train, at what cost. `docs/frontier.md` asks the questions.

A *part* answers one question with one table. Rows that several parts share are run once: a run is known by everything
that can change its result, not by its label. Sizes (parameters in the inner matrices): 98k, 393k, 1.04M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from masterless.lab.train.experiment import Experiment

SMALL, MEDIUM, LARGE = {"d_model": 64}, {}, {"d_model": 208}
STANDARD = {"steps": 1500, "betas": (0.9, 0.95), "eval_batches": 128}
BETA2 = 0.95
FP32_STATES = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
DROP = {"error_compensation": False}
NEAREST = {"weight_rounding": "nearest"}
# Rows of quantized weights that name the units were measured when error compensation allowed any; it refuses them now.
GRADIENT_UNITS = {"moment_units": "gradient"}


@dataclass(frozen=True)
class Recipe:
    """Formats and options of a run, with the learning rate that part "learning-rate" found for its family."""

    label: str
    weights: str | None
    options: Mapping[str, Any]
    lr: float = 1e-3
    optimizer: str = "AdamW"

    def at(self, label: str = "", *, model: Mapping[str, Any] = MEDIUM, seed: int = 0, **settings: Any) -> Experiment:
        """This recipe at the standard settings, or others."""
        return Experiment(
            label or self.label,
            weights=self.weights,
            optimizer=self.optimizer,
            options=self.options,
            model=model,
            settings={**STANDARD, "lr": self.lr, **settings},
            seed=seed,
        )


def states(first: str, second: str, beta1: float, **options: Any) -> dict[str, Any]:
    """Options of AdamW: two state formats and beta1."""
    # 0.9 is the settings' beta1 already; said twice, a run of `study.py` would count as another one.
    betas = {} if beta1 == 0.9 else {"betas": (beta1, BETA2)}
    return {"exp_avg": first, "exp_avg_sq": second, **betas, **options}


def low_bit(weights: str, first: str, beta1: float, second: str, note: str = "", **options: Any) -> Recipe:
    """A recipe labelled by its formats: weights, first moment with its beta1, second moment."""
    moment = "no m" if first == "none" else f"{first} m (b1 {beta1:.2g})"
    label = ", ".join(filter(None, (weights, moment, f"{second} v", note)))
    dithered = first != "none" and options.get("weight_rounding") != "nearest"
    return Recipe(label, weights, states(first, second, beta1, **options), lr=2e-3 if dithered else 1e-3)


def full(beta1: float) -> Recipe:
    """fp32 AdamW."""
    if beta1 == 0:
        return Recipe("fp32, no m", None, states("none", "fp32", 0.0))
    return Recipe(f"fp32, b1 {beta1:.2g}", None, states("fp32", "fp32", beta1))


def exact_states(weights: str, note: str, beta1: float, **options: Any) -> Recipe:
    """Quantized weights, fp32 states."""
    return Recipe(f"{weights}, b1 {beta1:.2g}, {note}", weights, {**states("fp32", "fp32", beta1), **options})


def dropped(weights: str, first: str, beta1: float, second: str) -> Recipe:
    """Stochastic rounding of the weight under a held scale, its error neither injected nor kept."""
    return low_bit(weights, first, beta1, second, "error dropped", **DROP)


FP32, FP32_BEST = full(0.9), full(0.527)
QAT_BEST = Recipe("int4 master weights (QAT), b1 .53", "int4+32", states("fp32", "fp32", 0.527))
ONE_BYTE = low_bit("int8", "none", 0.0, "factored", **DROP)
ONE_BYTE_INT4 = low_bit("int4+4", "none", 0.0, "factored", **DROP)
SIX_TWO = dropped("int6", "int2", 0.527, "factored")
VISIBLE4_TWO = dropped("int4+2", "int2", 0.527, "factored")
FOUR_FOUR = low_bit("int4", "int4", 0.35, "factored", "nearest weights", **NEAREST)
EIGHT_TWO = low_bit("int8", "int2", 0.527, "factored")
EIGHT_TWO_DROPPED = dropped("int8", "int2", 0.527, "factored")
VISIBLE4_4_TWO = dropped("int4+4", "int2", 0.527, "factored")
VISIBLE4_6_TWO = dropped("int4+6", "int2", 0.527, "log2")
EIGHT_TWO_FOUR = dropped("int8", "int2", 0.527, "log4")
INT4_NEAREST = low_bit("int4", "int4", 0.35, "log2", "nearest weights", **NEAREST)
INT4_DROPPED = dropped("int4", "int4", 0.82, "log2")
FP8 = low_bit("fp8", "int4", 0.82, "log2")
FP8_DROPPED = dropped("fp8", "int4", 0.82, "log2")
VISIBLE4_4 = low_bit("int4+4", "int4", 0.82, "log2")
TWO_BYTES = low_bit("int8", "int8", 0.82, "log2", moment_units="update")


# What others store, in our formats: the formats and rounding are theirs, the kernel and the rest of the step are ours.
PEERS = (
    Recipe(
        "bitsandbytes-like: 8-bit states",
        None,
        {"exp_avg": "dynamic8:256", "exp_avg_sq": "udynamic8:256", "rounding": "nearest", **GRADIENT_UNITS},
    ),
    Recipe(
        "torchao-like: 4-bit states",
        None,
        {"exp_avg": "dynamic4", "exp_avg_sq": "uint4", "rounding": "nearest", **GRADIENT_UNITS},
    ),
    Recipe(
        "SOLO: 4-bit m, 2-bit v",
        None,
        {"exp_avg": "dynamic4", "exp_avg_sq": "log2", "rounding": "stochastic-log", **GRADIENT_UNITS},
    ),
    Recipe("ECO as published: FP8 weights", "fp8", {**FP32_STATES, "scale_policy": "recompute"}),
)


def learning_rate() -> list[Experiment]:
    """Which learning rate and beta1 does each family like best, one seed?"""
    grid: list[tuple[Recipe, tuple[float, ...]]] = [
        (FP32, (5e-4, 1e-3, 2e-3, 4e-3)),
        (full(0.82), (1e-3, 2e-3)),
        (full(0.527), (1e-3, 2e-3)),
        (full(0.35), (1e-3, 2e-3)),
        (full(0.0), (1e-3, 2e-3)),
        *((recipe, (1e-3, 2e-3)) for recipe in (ONE_BYTE, EIGHT_TWO, INT4_NEAREST)),
        (FP8, (5e-4, 1e-3, 2e-3)),
    ]
    rows = [recipe.at(f"{recipe.label}, lr {lr:g}", lr=lr) for recipe, rates in grid for lr in rates]
    wide = [FP32, TWO_BYTES, FP8, VISIBLE4_4, EIGHT_TWO_DROPPED]
    return rows + [
        recipe.at(f"{recipe.label}, lr {lr:g}, 1.04M, 3000 steps", model=LARGE, steps=3000, lr=lr)
        for recipe in wide
        for lr in (1e-3, 2e-3)
        if recipe is not FP32 or lr == 1e-3
    ]


def one_byte() -> list[Experiment]:
    """What is the best use of 8 bits per parameter? Weights plus first moment, with a factored second moment."""
    rows = [
        FP32,
        FP32_BEST,
        full(0.0),
        ONE_BYTE,
        SIX_TWO,
        low_bit("int6", "int2", 0.527, "factored"),
        FOUR_FOUR,
        dropped("int4", "int4", 0.82, "factored"),
        ONE_BYTE_INT4,
        VISIBLE4_TWO,
        dropped("int4", "int2", 0.527, "factored"),
    ]
    lion = [
        Recipe("Lion, int4, int4 m", "int4", {"exp_avg": "int4", "betas": (0.9, 0.99), **DROP}, 0.0, "Lion").at(
            f"Lion: int4, int4 m, no v, lr {lr:g}", lr=lr
        )
        for lr in (3e-4, 6e-4)
    ]
    return [recipe.at(seed=seed) for seed in (0, 1) for recipe in rows] + lion


def nearest() -> list[Experiment]:
    """Around the best one-byte row: weights rounded to nearest, their error injected into a short momentum."""

    def recipe(weights: str, first: str, beta1: float, second: str = "factored") -> Recipe:
        return low_bit(weights, first, beta1, second, "nearest weights", **NEAREST)

    rows = [
        FP32,
        FP32_BEST,
        FOUR_FOUR,
        recipe("int4", "int4", 0.2),
        recipe("int4", "int4", 0.5),
        recipe("int4", "int8", 0.35),
        recipe("int4", "int3", 0.35),
        recipe("int4", "int2", 0.35),
        recipe("int3", "int4", 0.35),
        recipe("int4:64", "int4", 0.35),
        recipe("int6", "int2", 0.35),
        recipe("int6", "int4", 0.35),
        recipe("int8", "int4", 0.35),
        recipe("int8", "int2", 0.35),
        recipe("fp8", "int4", 0.35),
    ]
    return [recipe.at() for recipe in rows]


def combinations() -> list[Experiment]:
    """Weights x first moment x second moment, first moment in raw and in update units (one seed)."""
    rows = [
        FP32,
        FP32_BEST,
        low_bit("int8", "int8", 0.9, "log8"),
        low_bit("int8", "int8", 0.9, "log2", "m in gradient units", **GRADIENT_UNITS),
        low_bit("int8", "int8", 0.82, "log2", "m in gradient units", **GRADIENT_UNITS),
        TWO_BYTES,
        low_bit("int8", "int4", 0.82, "log2"),
        low_bit("int8", "int4", 0.82, "factored"),
        low_bit("int8", "int2", 0.527, "log2"),
        EIGHT_TWO,
        EIGHT_TWO_DROPPED,
        low_bit("int8", "int2", 0.527, "factored", "m in gradient units", **GRADIENT_UNITS),
        FP8,
        FP8_DROPPED,
        low_bit("fp8", "int4", 0.82, "log2", "m in gradient units", **GRADIENT_UNITS),
        low_bit("fp8", "int2", 0.527, "factored"),
        INT4_NEAREST,
        low_bit("int4", "int4", 0.35, "log2", "nearest weights, m in gradient units", **NEAREST, **GRADIENT_UNITS),
        INT4_DROPPED,
        low_bit("int4", "int4", 0.82, "log2"),
        low_bit("int4", "int4", 0.82, "log2", "m in gradient units", **GRADIENT_UNITS),
        VISIBLE4_4,
        VISIBLE4_4_TWO,
    ]
    return [recipe.at() for recipe in rows]


def moments() -> list[Experiment]:
    """The first and second moment in few bits, dense fp32 weights: bits, block length, rounding (one seed)."""
    rows: list[tuple[str, dict[str, Any]]] = [
        ("fp32 / fp32", FP32_STATES),
        ("int8 / fp32", {"exp_avg": "int8", "exp_avg_sq": "fp32"}),
        ("int4 / fp32", {"exp_avg": "int4", "exp_avg_sq": "fp32"}),
        ("int3 / fp32", {"exp_avg": "int3", "exp_avg_sq": "fp32"}),
        ("int2 / fp32", {"exp_avg": "int2", "exp_avg_sq": "fp32"}),
        ("int3 / fp32, b1 .71", {"exp_avg": "int3", "exp_avg_sq": "fp32", "betas": (0.71, BETA2)}),
        ("fp32 / fp32, b1 .53", {**FP32_STATES, "betas": (0.527, BETA2)}),
        ("int2 / fp32, b1 .53", {"exp_avg": "int2", "exp_avg_sq": "fp32", "betas": (0.527, BETA2)}),
        ("fp32 / log8", {"exp_avg": "fp32", "exp_avg_sq": "log8"}),
        ("fp32 / log4", {"exp_avg": "fp32", "exp_avg_sq": "log4"}),
        ("fp32 / log3", {"exp_avg": "fp32", "exp_avg_sq": "log3"}),
        ("fp32 / log2", {"exp_avg": "fp32", "exp_avg_sq": "log2"}),
        ("fp32 / factored", {"exp_avg": "fp32", "exp_avg_sq": "factored"}),
        ("int4 / log2", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
        ("int4 / log2, nearest", {"exp_avg": "int4", "exp_avg_sq": "log2", "rounding": "nearest"}),
        ("int4 / log2, blocks of 64", {"exp_avg": "int4:64", "exp_avg_sq": "log2:64"}),
        ("int4 / log2, blocks of 256", {"exp_avg": "int4:256", "exp_avg_sq": "log2:256"}),
    ]
    return [Recipe(label, None, options).at() for label, options in rows]


def hidden_bits() -> list[Experiment]:
    """Keep k hidden bits, inject the rest, both, or neither: INT4 seen by the forward pass, fp32 states, b1 .9."""
    rows = [FP32.at(), exact_states("int4+32", "master weights (QAT)", 0.9).at()]
    for kept in (0, 2, 4, 6):
        for rest, options in (("dropped", DROP), ("injected", {})):
            recipe = exact_states(f"int4+{kept}" if kept else "int4", "", 0.9, **options)
            rows.append(recipe.at(f"{kept} bits kept, the rest {rest}"))
    return rows


def momentum() -> list[Experiment]:
    """Beta1 against the rounding of INT4 weights under error compensation, fp32 states (one seed)."""
    rows = [FP32, full(0.6), full(0.35)]
    for beta1 in (0.9, 0.6, 0.35):
        rows.append(exact_states("int4+32", "master weights (QAT)", beta1))
        rows.append(exact_states("int4", "ECO stochastic", beta1))
        rows.append(exact_states("int4", "ECO nearest", beta1, **NEAREST))
        rows.append(exact_states("int4", "stochastic, error dropped", beta1, **DROP))
    return [recipe.at() for recipe in rows]


def batch() -> list[Experiment]:
    """Does a small or no momentum survive a batch 8 times as large? 400 steps of 4096 tokens."""
    exact = [FP32, FP32_BEST, full(0.35), full(0.0)]
    # Fewer and larger batches want a larger learning rate, and fp32 must have it as well.
    rows = [(recipe, 2e-3) for recipe in (*exact, ONE_BYTE, FOUR_FOUR, EIGHT_TWO_DROPPED, INT4_NEAREST, FP8)]
    rows += [(recipe, 1e-3) for recipe in (*exact, ONE_BYTE, FOUR_FOUR, INT4_NEAREST)]
    return [
        recipe.at(f"{recipe.label}, lr {lr:g}", steps=400, batch_size=32, eval_batches=16, lr=lr) for recipe, lr in rows
    ]


TREND = (FP32, FP32_BEST, ONE_BYTE, FOUR_FOUR, EIGHT_TWO_DROPPED, VISIBLE4_4_TWO, FP8)


def length() -> list[Experiment]:
    """How the gap moves with the length of the run (one seed)."""
    return [r.at(f"{r.label}, {steps} steps", steps=steps) for steps in (750, 1500, 3000) for r in TREND]


def size() -> list[Experiment]:
    """How the gap moves with the size of the model: 98k, 393k, 1.04M parameters, 3000 steps (one seed)."""
    sizes = {"98k": SMALL, "393k": MEDIUM, "1.04M": LARGE}
    return [
        r.at(f"{r.label}, {name}", model=model, steps=3000, lr=1e-3) for name, model in sizes.items() for r in TREND
    ]


def presets() -> list[Experiment]:
    """The rows that decide: 1.04M parameters in the inner matrices, 3000 steps, 2 seeds (others' formats: one)."""
    rows = [
        FP32,
        FP32_BEST,
        QAT_BEST,
        TWO_BYTES,
        FP8,
        VISIBLE4_4,
        EIGHT_TWO_DROPPED,
        VISIBLE4_4_TWO,
        INT4_NEAREST,
        ONE_BYTE,
        FOUR_FOUR,
    ]
    # A wider model wants a smaller learning rate: what 2e-3 costs here is in part "learning-rate".
    deciding = [recipe.at(model=LARGE, seed=seed, steps=3000, lr=1e-3) for seed in (0, 1) for recipe in rows]
    return [*deciding, *(recipe.at(model=LARGE, steps=3000, lr=1e-3) for recipe in PEERS)]


def seeds() -> list[Experiment]:
    """The presets over three seeds at 393k parameters: which differences are real?"""
    rows = [
        FP32,
        FP32_BEST,
        QAT_BEST,
        FOUR_FOUR,
        ONE_BYTE,
        INT4_NEAREST,
        EIGHT_TWO_DROPPED,
        VISIBLE4_4_TWO,
        FP8,
        low_bit("int8", "int4", 0.527, "log2"),
        VISIBLE4_4,
        TWO_BYTES,
    ]
    return [recipe.at(seed=seed) for seed in range(3) for recipe in rows]


def candidates() -> list[Experiment]:
    """Do the presets get closer to fp32 at fp32's best beta1, with finer groups, or by dropping the error?"""
    rows = [
        FP32_BEST,
        FP8,
        low_bit("fp8", "int4", 0.527, "log2"),
        low_bit("int8", "int4", 0.527, "log2"),
        dropped("int8", "int4", 0.527, "log2"),
        low_bit("int8", "int4", 0.527, "log2", "nearest weights", **NEAREST),
        low_bit("int4+4", "int4", 0.527, "log2"),
        EIGHT_TWO_DROPPED,
        INT4_NEAREST,
        low_bit("int4:64", "int4", 0.35, "log2", "nearest weights", **NEAREST),
        FOUR_FOUR,
        low_bit("int4:64", "int4", 0.35, "factored", "nearest weights", **NEAREST),
        low_bit("int8", "int8", 0.527, "log2", moment_units="update"),
        dropped("int8", "int4", 0.527, "factored"),
        dropped("fp8", "int4", 0.527, "factored"),
        dropped("int8", "int8", 0.527, "factored"),
        VISIBLE4_4_TWO,
        dropped("int4+4", "int4", 0.527, "factored"),
        dropped("int4+6", "int4", 0.527, "factored"),
        dropped("int4+4", "int4", 0.527, "log2"),
        VISIBLE4_6_TWO,
        EIGHT_TWO_FOUR,
    ]
    return [recipe.at(model=LARGE, steps=3000, lr=1e-3) for recipe in rows]


PARTS = {
    "learning-rate": learning_rate,
    "one-byte": one_byte,
    "frontier": presets,
    "seeds": seeds,
    "nearest": nearest,
    "candidates": candidates,
    "combinations": combinations,
    "moments": moments,
    "hidden-bits": hidden_bits,
    "momentum": momentum,
    "batch": batch,
    "length": length,
    "size": size,
}
