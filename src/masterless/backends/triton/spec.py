"""What a kernel is compiled for, as frozen values: how each storage is coded, and the kind of a step.

Contract:
    * Triton takes a value of this module as one compile-time constant. A kernel asks it by attribute, so codecs and
      rules are composed by branches that the compiler resolves: codecs plus rules, never codecs times rules.
    * Every number is computed here from the specification (`formats/`); a kernel derives no constant of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from masterless.formats import Format, minifloat
from masterless.formats.codec import _SCALE_LOW_BITS, _WHOLE, linear_fraction, round_scale_up
from masterless.formats.layout import CHUNK
from masterless.formats.log_code import LOG_LOW_RANK
from masterless.formats.scaling import HEADROOM, WASTE, overflow_level
from masterless.step.task import Task

# What `rules` (the kernels' one) computes; a rule that is not here is the reference's.
KNOWN_RULES = frozenset(
    f"{rule}{units}"
    for rule, all_units in {
        "adam": ("", "_update_units", "_weight_units"),
        "adabelief": ("",),
        "rmsprop": ("", "_weight_units"),
        "sgd": ("", "_weight_units"),
        "sgd_nesterov": ("", "_weight_units"),
        "lion": ("",),
        "adafactor": ("", "_weight_units"),
    }.items()
    for units in all_units
)
# Chunks of a program, as many as its threads have registers for; a longer tile is walked in pieces. `lean` steps have
# 32 elements for each of 128 threads, others 16 for each of 256, `wide` ones 8; half as many where chunks may be cut.
_PROGRAM = 32

SHORT = (16, 32, 64)  # block lengths below that of a chunk
ROW = 0  # as a block length: the whole row
TENSOR = -1  # as a block length: one scale for everything


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


class _Constant:
    """A value that Triton may build into a kernel: it names kernels by their constants."""

    def mangle(self) -> str:
        """Letters and digits that differ for different values."""
        return "_" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in repr(self))


@dataclass(frozen=True)
class Codec(_Constant):
    """How one storage is coded, and rounded when it is written.

    Attributes:
        kind: "none", "factored", "float32", "bfloat16", "linear", "codebook" (by a table), "minifloat" or
            "log".
        bits: of the packed code.
        hidden: finer bits that are packed apart.
        master: whether an fp32 copy is kept beside the code.
        signed: whether there are negative levels.
        zero_code: the code of zero on the finest grid.
        block: elements that share a scale; `ROW` and `TENSOR`.
        scale: how the scale is stored: "bf16", "pow2" (as bf16), "fp32", "e8m0" or "e4m3".
        adjacent: whether neighbouring codes share a byte.
        scale_low: bits that rounding a scale up clears.
        scale_limit: the largest scale that may be stored.
        max_level: the largest magnitude of a level; a fresh scale is absmax over this.
        limit: the same on the finest grid.
        negative: how much further the positive levels reach than the negative ones.
        overflow: a held scale gives way above this many scales ...
        waste: ... and below this many, ...
        fresh: ... to absmax times this.
        levels: of a codebook: how many; of small floats: how many magnitudes, or 0 if every code is a number.
        mantissa: of small floats: stored bits of it.
        lowest: of small floats: the exponent of the smallest normal number, biased as in fp32.
        sign: of small floats: the code's sign bit.
        low_rank: of the log code: which of the sorted lane minima is the lowest level.
        rounding: "nearest", "stochastic", "stochastic-log" or "stochastic-value".
    """

    kind: str = "none"
    bits: int = 0
    hidden: int = 0
    master: bool = False
    signed: bool = True
    zero_code: int = 0
    block: int = CHUNK
    scale: str = "bf16"
    adjacent: bool = False
    scale_low: int = 0
    scale_limit: float = 0.0
    max_level: float = 1.0
    limit: float = 1.0
    negative: float = 1.0
    overflow: float = 1.0
    waste: float = 1.0
    fresh: float = 1.0
    levels: int = 0
    mantissa: int = 0
    lowest: int = 0
    sign: int = 0
    low_rank: int = 0
    rounding: str = "nearest"

    @property
    def scaled(self) -> bool:
        """Whether blocks carry a scale."""
        return self.kind in ("linear", "codebook", "minifloat")

    @property
    def stored(self) -> bool:
        """Whether anything is stored element by element."""
        return self.kind not in ("none", "factored")

    @property
    def random(self) -> bool:
        """Whether rounding draws random bits; a master copy loses nothing, so its visible code is the nearest."""
        return self.rounding != "nearest" and not self.master and self.kind not in ("none", "factored", "float32")

    @property
    def exact(self) -> bool:
        """Whether it is floating point, fp32 or bf16: as a second moment one whose root is taken exactly."""
        return self.kind in ("float32", "bfloat16")

    @property
    def two_bit_log(self) -> bool:
        """Whether it is a log code whose four levels are looked at as a whole."""
        return self.kind == "log" and self.bits == 2

    @property
    def wide(self) -> bool:
        """Whether it takes many registers: searches in a table, scales of a few elements."""
        return self.kind == "codebook" or self.adjacent

    @property
    def lean(self) -> bool:
        """Whether it takes few: codes of 2, 4 or 8 bits in blocks of a chunk or longer, and what has no code."""
        coded = self.kind in ("linear", "log") and self.bits in (2, 4, 8) and self.hidden in (0, 4)
        return self.kind in ("none", "factored", "bfloat16") or (coded and self.block not in SHORT and not self.master)

    @property
    def fraction(self) -> int:
        """Of linear grids: to how many bits stochastic rounding looks at a fraction; nearest to none."""
        return linear_fraction(self.limit) if self.random else 0

    @property
    def base(self) -> float:
        """What is added for that: a number that leaves a float so many bits, and the code of zero."""
        return (2.0 ** (23 - self.fraction) if self.random else _WHOLE) + self.zero_code

    @property
    def base_bits(self) -> int:
        """The bits of it."""
        return _bits(self.base)

    @property
    def lowest_bits(self) -> int:
        """The bits of what the lowest level becomes by that ..."""
        return _bits(self.base - (self.limit if self.signed else 0.0))

    @property
    def highest_bits(self) -> int:
        """... and the highest one."""
        return _bits(self.base + self.limit)

    @property
    def whole_bytes(self) -> bool:
        """Whether codes share bytes as they are, uncut: then nothing need be cleared above a byte."""
        return self.bits in (2, 4, 8) and not self.hidden

    @property
    def offset(self) -> int:
        """The code of zero as the forward pass sees it."""
        return 1 << (self.bits - 1) if self.hidden else self.zero_code


@dataclass(frozen=True)
class Step(_Constant):
    """A kind of step: everything but addresses, sizes and numbers.

    Attributes:
        rule: name of the rule.
        weight: how the weight is coded.
        first: and the first moment.
        second: and the second moment.
        inject: whether what rounding takes from the weight enters the first moment.
        pays_back: whether the weight gets what of the first moment is too large for a momentum.
        maximize: whether the gradient is ascended.
        grad_bf16: whether the gradient is bf16 and not fp32.
        l2: whether there is coupled weight decay.
        eps: whether eps is above zero, so that nothing is divided by zero.
        held: whether the scales of the weight are held.
        indivisible: whether one bad gradient keeps the whole parameter from moving.
        tile: chunks of a row that stand or fall together, a power of two; 0: more than a program holds.
        chunks: chunks of a program, a multiple of `tile`.
        walk: what the programs of a launch go through: "tiles" (all of a row but the last, if that has gaps), "tails"
            (the last ones), "rows" (each is one long tile), "chunks" (all of them) or "columns" (one of chunks, and
            as many rows as a program has chunks).
        ragged: 0: all elements of all tiles are there; 1: whole chunks may be missing; 2: parts of chunks, too.
        aligned: whether all addresses are multiples of 16 bytes, chunk by chunk.
    """

    rule: str
    weight: Codec
    first: Codec
    second: Codec
    inject: bool
    pays_back: bool
    maximize: bool
    grad_bf16: bool
    l2: bool
    eps: bool
    held: bool
    indivisible: bool
    tile: int
    chunks: int
    walk: str
    ragged: int
    aligned: bool

    @property
    def run(self) -> int:
        """Chunks of a program that belong to one tile."""
        return self.tile or self.chunks

    @property
    def warps(self) -> int:
        """Warps of a program: as many as keep all its numbers in registers."""
        return 4 if self.lean and self.walk not in ("tails", "rows") else 8

    @property
    def lean(self) -> bool:
        """Whether few registers do: what presets use."""
        usual = self.weight.kind == "minifloat" and self.weight.block not in SHORT and not self.weight.master
        return self.rule != "adabelief" and (usual or self.weight.lean) and self.first.lean and self.second.lean

    @property
    def decodes_late(self) -> bool:
        """Whether the weight is decoded after the rule: until then its codes take fewer registers."""
        return self.lean and not self.l2

    @property
    def wide(self) -> bool:
        """Whether it takes many registers."""
        return any(codec.wide for codec in (self.weight, self.first, self.second))

    @property
    def piece(self) -> int:
        """Chunks of a program where they may be cut, and of a piece of a tile that is walked."""
        return _PROGRAM // 4 if self.wide else _PROGRAM // 2

    @property
    def weight_units(self) -> bool:
        """Whether the momentum is in units of the weight: nothing of it is stored while nothing moves."""
        return self.rule.endswith("_weight_units")

    @property
    def carries(self) -> bool:
        """Whether the momentum is carried over from one second moment to the next."""
        return self.rule == "adam_weight_units" and self.first.stored and self.second.kind != "factored"

    @property
    def family(self) -> str:
        """The rule without its units where only the numbers differ."""
        return (
            self.rule
            if self.rule in ("adam_weight_units", "adafactor_weight_units")
            else self.rule.removesuffix("_weight_units")
        )

    @property
    def adafactor(self) -> bool:
        """Whether the step size needs statistics of the whole parameter."""
        return self.rule.startswith("adafactor")


@cache
def codec_of(format: Format | None, rounding: str = "nearest") -> Codec:
    """The constants of a format that is written with this rounding."""
    if format is None or format.kind in ("none", "factored"):
        return Codec("none" if format is None else format.kind)
    if not format.scaled:
        return Codec(format.kind, format.bits, rounding=rounding)
    block = {"row": ROW, "tensor": TENSOR}.get(str(format.granularity), format.granularity)
    assert isinstance(block, int)
    if format.kind == "log":
        low = LOG_LOW_RANK[format.bits]
        return Codec("log", format.bits, signed=False, block=block, low_rank=low, rounding=rounding)
    top = format.max_level
    options: dict[str, Any] = {"kind": format.kind, **_of_levels(format)}
    return Codec(
        bits=format.bits,
        hidden=format.fine_bits,
        master=format.master,
        signed=format.signed,
        zero_code=format.zero_code,
        block=block,
        scale=format.scale,
        adjacent=format.adjacent and format.bits == 4,
        scale_low=_SCALE_LOW_BITS.get(format.scale, 0),
        scale_limit=round_scale_up(torch.tensor(float("inf")), format).item(),
        max_level=top,
        limit=top * 2.0**format.fine_bits,
        negative=format.negative_factor,
        overflow=overflow_level(format),
        waste=WASTE * top,
        fresh=HEADROOM / top,
        rounding=rounding,
        **options,
    )


def _of_levels(format: Format) -> dict[str, Any]:
    """What only codecs with a list of levels have: a table, or small floats that are made of their bits."""
    if format.kind != "codebook":
        return {}
    small = minifloat(format)
    if small is None:
        return {"levels": len(format.levels)}
    exponent_bits, mantissa_bits, sign = small
    magnitudes = sum(level >= 0.0 for level in format.levels)
    every = magnitudes == (sign or 1 << format.bits)
    lowest = 127 + 1 - (2 ** (exponent_bits - 1) - 1)
    levels = 0 if every else magnitudes
    return {"kind": "minifloat", "levels": levels, "mantissa": mantissa_bits, "lowest": lowest, "sign": sign}


def step_of(task: Task) -> Step:
    """The kind of a task's step, but for what differs from step to step and from tile to tile (`at`)."""
    storages = {"weight": task.weight, "first": task.first, "second": task.second}
    purposes = {"weight": "weight", "first": "exp_avg", "second": "exp_avg_sq"}
    codecs = {k: codec_of(s.format if s else None, task.rounding[purposes[k]]) for k, s in storages.items()}
    chunks = -(-task.weight.layout.cols // CHUNK)
    tile = 1 << (min(task.chunks_per_tile, max(chunks, 1)) - 1).bit_length()
    step = Step(
        rule=task.rule.name,
        **codecs,
        inject=task.inject and codecs["first"].stored,
        pays_back=task.pays_back and codecs["first"].stored,
        maximize=task.maximize,
        grad_bf16=task.grad.dtype == torch.bfloat16,
        l2=False,
        eps=False,
        held=True,
        indivisible=task.indivisible,
        tile=tile,
        chunks=_PROGRAM,
        walk="tiles",
        ragged=2,
        aligned=False,
    )
    room = _PROGRAM // 2 if step.wide else _PROGRAM
    if tile <= (step.piece if task.weight.layout.cols % (tile * CHUNK) else room):
        return replace(step, chunks=room)
    return replace(step, tile=0, chunks=step.piece, walk="rows")


def at(step: Step, policy: str, l2: bool, eps: bool) -> Step:
    """The kind of a step under this scale policy, with or without coupled weight decay and eps."""
    return replace(step, held=policy != "recompute", l2=l2, eps=eps)
