"""What a run is: a recipe in a setting, at a learning rate, from a seed; and the key it is remembered by.

Contract:
    * The key covers everything that changes the result, and no label.
    * What the library means by injection has changed three times, by a log code once. `SPEC`, `CARRIED` and `PAID_BACK`
      name its meaning; they are in the keys of the runs that depend on it, and of no other: those need not be repeated.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from masterless.formats import parse
from masterless.formats.storage import predicted_bytes
from masterless.lab.models import GPTConfig
from masterless.tensor.quantized import as_weight

SPEC = "v1"  # v0: momentum in gradient or update units, log codes unbiased in v; v1: weight units, unbiased in use
CARRIED = "v2"  # of AdamW that injects, v stored by elements: the momentum is carried over from one v to the next
PAID_BACK = "v3"  # of AdamW that injects the errors of rounding to nearest: what is no momentum is paid back at once
REGIME = 2  # schedule, clipping, batches, validation: see `trainer`
BETA2 = 0.95
SEQ_LEN = 128
LAYERS = 3
WIDTHS = {"37k": (32, 2), "150k": (64, 4), "600k": (128, 4), "tiny": (16, 1)}  # width, heads; "tiny" is for tests


@dataclass(frozen=True)
class Recipe:
    """An ordinary configuration of the library.

    Attributes:
        label: what tables call it.
        weights: format of the inner matrices; None leaves them dense.
        options: arguments of the optimizer, besides lr and weight decay.
        optimizer: "adamw"; "muon" for the inner matrices, with fp32 AdamW for the rest; or "lion".
        coarse_from: share of the steps after which the forward pass sees the visible code only; before, it sees hidden
            bits as well.
        traded_last: share of the steps, at the end, in which the momentum's bits are the weights' (`trade_momentum_`).
        traded_for: the weights' format then, if it is not the usual one.
        trial: an idea that the library does not have (`trials.TRIALS`), or none.
    """

    label: str
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    coarse_from: float = 0.0
    traded_last: float = 0.0
    traded_for: str | None = None
    trial: str = ""

    @property
    def states(self) -> tuple[str, str]:
        """The formats of the first and of the second moment."""
        first = self.options["momentum_buffer" if self.optimizer == "muon" else "exp_avg"]
        return first, self.options["exp_avg_sq"] if self.optimizer == "adamw" else "none"

    @property
    def beta1(self) -> float:
        """Decay of the first moment."""
        return float(self.options["momentum"] if self.optimizer == "muon" else self.options["betas"][0])

    @property
    def is_fp32(self) -> bool:
        """Whether nothing is quantized: a baseline."""
        return not self.trial and self.weights is None and {*self.states} <= {"fp32", "none"}

    @property
    def injects(self) -> bool:
        """Whether what rounding the weight loses goes into the momentum."""
        loses = self.weights is not None and not self.weights.split(":")[0].endswith("+32")
        return loses and self.beta1 > 0 and bool(self.options.get("error_compensation", self.optimizer == "adamw"))

    @property
    def spec(self) -> str:
        """The library's meaning that the result depends on; empty if it does not."""
        if self.injects and self.optimizer == "adamw" and self.options.get("weight_rounding") == "nearest":
            return PAID_BACK
        if self.injects and self.optimizer == "adamw" and self.states[1] != "factored":
            return CARRIED
        return SPEC if self.injects or self.states[1].startswith("log") else ""

    @property
    def bytes_per_parameter(self) -> float:
        """Weight and states of a large matrix, metadata included."""
        shape = (4096, 4096)
        formats = [as_weight(self.weights) if self.weights else parse("fp32"), *map(parse, self.states)]
        return sum(predicted_bytes(f, shape) for f in formats) / math.prod(shape)


def recipe(
    label: str, weights: str | None = None, m: str = "fp32", v: str = "fp32", beta1: float = 0.9, **options: Any
) -> Recipe:
    """A recipe of AdamW by its formats."""
    return Recipe(label, weights, {"exp_avg": m, "exp_avg_sq": v, "betas": (beta1, BETA2), **options})


@dataclass(frozen=True)
class Setting:
    """Where a recipe is tried: rows are compared within a setting only.

    Attributes:
        size: a name of `WIDTHS`.
        tokens_per_parameter: training tokens per parameter of the inner matrices.
        batch_tokens: tokens a step.
        corpus: a name of `texts.CORPORA`.
        schedule: "linear" or "cosine", to zero.
    """

    size: str = "150k"
    tokens_per_parameter: int = 20
    batch_tokens: int = 2048
    corpus: str = "python"
    schedule: str = "linear"

    @property
    def model(self) -> GPTConfig:
        """The model's shape."""
        width, heads = WIDTHS[self.size]
        # GPT-2's 0.02 is far too small at these widths: with it and a warm-up of 5% fp32 was 9% worse at 37k@20.
        return GPTConfig(n_layer=LAYERS, n_head=heads, d_model=width, seq_len=SEQ_LEN, init_std=0.4 * width**-0.5)

    @property
    def inner_parameters(self) -> int:
        """Parameters in the inner matrices, the ones that are quantized."""
        return LAYERS * 12 * WIDTHS[self.size][0] ** 2

    @property
    def steps(self) -> int:
        """Steps that see at least the tokens asked for."""
        return -(-self.tokens_per_parameter * self.inner_parameters // self.batch_tokens)

    @property
    def name(self) -> str:
        """Short and unique: ``150k@20``, with what is unusual added."""
        parts = [f"{self.size}@{self.tokens_per_parameter}"]
        usual = Setting()
        parts += [f"batch {self.batch_tokens}"] if self.batch_tokens != usual.batch_tokens else []
        parts += [self.corpus] if self.corpus != usual.corpus else []
        parts += [self.schedule] if self.schedule != usual.schedule else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        recipe: what is trained with.
        setting: where.
        lr: peak learning rate.
        seed: of the initial weights, and of the two below unless they are given.
        order: seed of the order of the data.
        dither: seed of the random bits of rounding.
    """

    recipe: Recipe
    setting: Setting
    lr: float
    seed: int = 0
    order: int | None = None
    dither: int | None = None

    @property
    def plain(self) -> bool:
        """Whether order and dither follow the seed: only such runs are paired and averaged."""
        return self.order is None and self.dither is None

    def described(self) -> dict[str, Any]:
        """All that changes the result, as plain data."""
        return {
            **({"optimizer": self.recipe.optimizer} if self.recipe.optimizer != "adamw" else {}),
            "weights": self.recipe.weights,
            "options": dict(self.recipe.options),
            "spec": self.recipe.spec,
            **({"coarse_from": self.recipe.coarse_from} if self.recipe.coarse_from else {}),
            **({"traded_last": self.recipe.traded_last} if self.recipe.traded_last else {}),
            **({"traded_for": self.recipe.traded_for} if self.recipe.traded_for else {}),
            **({"trial": self.recipe.trial} if self.recipe.trial else {}),
            "regime": REGIME,
            **asdict(self.setting),
            "lr": self.lr,
            "seed": self.seed,
            "order": self.order,
            "dither": self.dither,
        }

    @property
    def key(self) -> str:
        """A digest of what changes the result."""
        return digest(self.described())

    def at(self, **changes: Any) -> Job:
        """The same run but for these fields."""
        return replace(self, **changes)


def digest(described: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits for a description."""
    text = json.dumps(described, sort_keys=True, default=list)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
