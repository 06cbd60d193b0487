"""What a stored number looks like: formats are frozen values with a name.

Contract:
    * A `Format` is data: kind, bits, sign, granularity, scale. Nothing in the library has a class per width.
    * A scaled format stores ``value = level * scale``; its levels are a property of the format, in units of
      the scale, and are what every codec, test and predictor is derived from.
    * A name says everything: ``parse(str(f)) == f``. Granularity and scale kind follow after colons, for
      instance ``int4``, ``int4:64``, ``int8:row``, ``int4:tensor``, ``int8:128:fp32``, ``int4+4:row:pow2``.
    * The formats of a hardware specification (``mxfp8``, ``mxfp4``: OCP MX 1.0; ``nvfp4``: NVIDIA's) have its block,
      its scale and its order of codes in memory, and take no options.
    * An unsigned format never stores a positive number as zero: it is for second moments, where a zero
      under a non-zero momentum would turn into a division by epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Literal, cast

Kind = Literal["float32", "bfloat16", "linear", "codebook", "log", "factored", "none"]
Granularity = int | Literal["row", "tensor"]
ScaleKind = Literal["bf16", "fp32", "pow2", "e8m0", "e4m3"]

DEFAULT_BLOCK = 128
MASTER = 32  # this many hidden bits are an fp32 copy of the weight
SCALE_BITS = {"bf16": 16, "fp32": 32, "pow2": 16, "e8m0": 8}  # the kinds that can be asked for by name


class FormatError(ValueError):
    """A format name that does not exist, or a format used where it cannot be."""


@dataclass(frozen=True)
class Format:
    """How one tensor's numbers are stored.

    Attributes:
        family: the name without granularity and scale, e.g. ``"int4"`` or ``"log2"``.
        kind: which codec reads and writes it.
        bits: bits of the code that a forward pass (or a rule) reads.
        signed: whether negative numbers can be stored.
        granularity: elements that share a scale: a block length along the row, a whole row or the tensor.
        scale: how the scale itself is stored.
        hidden: further bits below the code that only the optimizer sees (weights only).
        shown: whether the forward pass sees the hidden bits, too (``int4++4``, which has the bytes of ``int4+4``).
        adjacent: whether neighbouring codes share a byte, as hardware reads them (`packing`).
        fixed: whether a specification fixes granularity and scale.
    """

    family: str
    kind: Kind
    bits: int
    signed: bool = True
    granularity: Granularity = DEFAULT_BLOCK
    scale: ScaleKind = "bf16"
    hidden: int = 0
    shown: bool = False
    adjacent: bool = False
    fixed: bool = False

    @property
    def scaled(self) -> bool:
        """Whether blocks carry metadata (a scale, or the log code's top and step)."""
        return self.kind in ("linear", "codebook", "log")

    @property
    def master(self) -> bool:
        """Whether a full fp32 copy of the weight is kept beside the code."""
        return self.hidden == MASTER

    @property
    def fine_bits(self) -> int:
        """Hidden bits that refine the code's own grid (a master copy is stored apart)."""
        return 0 if self.master else self.hidden

    def showing(self, shown: bool) -> Format:
        """The same format with its hidden bits shown to the forward pass, or not."""
        if not self.fine_bits or shown == self.shown:
            return self
        return replace(self, family=f"int{self.bits}{'++' if shown else '+'}{self.hidden}", shown=shown)

    @property
    def code_bits(self) -> int:
        """Bits of one element's code on its finest grid."""
        return self.bits + self.fine_bits

    @property
    def metadata_bits(self) -> int:
        """Bits of metadata one block carries."""
        if not self.scaled:
            return 0
        return 32 if self.kind == "log" else SCALE_BITS.get(self.scale, 8)

    @property
    def two_level(self) -> bool:
        """Whether block scales are in units of a scale of the whole tensor, of which every row keeps a copy."""
        return self.scaled and self.scale == "e4m3"

    @property
    def bits_per_element(self) -> float:
        """Bits an element takes in a long row, metadata included (rows and tensors: metadata tends to 0)."""
        block = self.granularity if isinstance(self.granularity, int) else math.inf
        return self.bits + self.hidden + (self.metadata_bits / block if self.scaled else 0.0)

    @cached_property
    def table(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """The levels in rising order, in units of the scale, and the code of each."""
        return _table(self.family.removesuffix("+32"), self.kind, self.bits, self.signed, self.fine_bits)

    @property
    def levels(self) -> tuple[float, ...]:
        """The representable values in rising order, in units of the scale."""
        return self.table[0]

    @property
    def max_level(self) -> float:
        """The largest magnitude of a level: a block's scale is its absmax divided by this."""
        return 1.0 if self.kind == "log" else max(abs(self.levels[0]), abs(self.levels[-1]))

    @property
    def negative_factor(self) -> float:
        """How much further the positive levels reach than the negative ones: above 1 for the dynamic maps."""
        return self.levels[-1] / -self.levels[0] if self.signed and self.kind == "codebook" else 1.0

    @property
    def zero_code(self) -> int:
        """The code of exact zero."""
        return 0 if self.kind == "log" else self.table[1][self.levels.index(0.0)]

    def __str__(self) -> str:
        if not self.scaled:
            return self.family
        default = _FAMILIES[self.family]
        name = self.family
        if self.granularity != default.granularity or self.scale != default.scale:
            name += f":{self.granularity}"
        if self.scale != default.scale:
            name += f":{self.scale}"
        return name


def _dynamic_levels(bits: int, signed: bool) -> list[float]:
    """Dynamic-exponent map: decades of finer and finer fractions (Dettmers' map at any width; SOLO, table 1)."""
    decades = bits - 1
    positive = []
    for e in range(decades):
        edges = 2**e if signed else 2 ** (e + 1)  # the freed sign bit doubles the fractions of every decade
        bounds = [0.1 + 0.9 * i / edges for i in range(edges + 1)]
        positive += [(a + b) / 2 * 10.0 ** (e - decades + 1) for a, b in pairwise(bounds)]
    negative = [-p for p in positive] if signed else []
    return sorted([*negative, 0.0, *positive, 1.0])


def _minifloat_levels(exponent_bits: int, mantissa_bits: int, reserved: int) -> list[float]:
    """Non-negative values by code, but for the last `reserved`: subnormals, then binades; bias 2**(e-1) - 1."""
    bias = 2 ** (exponent_bits - 1) - 1
    levels = []
    for code in range(2 ** (exponent_bits + mantissa_bits) - reserved):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits + (exponent > 0)
        levels.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return levels


@cache
def _table(family: str, kind: Kind, bits: int, signed: bool, hidden: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    if kind == "linear":
        if signed:
            # Offset binary. With hidden bits the visible code is the upper part of the fine code, so the
            # offset also centres the hidden part: fine code = (q + 2^(b-1)) * 2^k + (h + 2^(k-1)).
            zero = 2 ** (bits + hidden - 1) + (2 ** (hidden - 1) if hidden else 0)
            top = (2 ** (bits - 1) - 1) * 2**hidden + (2 ** (hidden - 1) - 1 if hidden else 0)
            fine = range(-top, top + 1)
        else:
            zero, fine = 0, range(2**bits)
        return tuple(f / 2**hidden for f in fine), tuple(f + zero for f in fine)
    if kind == "codebook" and family in MINIFLOATS:
        exponent_bits, mantissa_bits, sign_code = MINIFLOATS[family]
        levels = _minifloat_levels(exponent_bits, mantissa_bits, _NOT_FINITE.get((exponent_bits, mantissa_bits), 0))
        table = [(level, code) for code, level in enumerate(levels)]
        if signed:
            table += [(-level, code | sign_code) for level, code in table if level > 0]
        table.sort()
        return tuple(level for level, _ in table), tuple(code for _, code in table)
    if kind == "codebook":
        levels = _dynamic_levels(bits, signed)
        return tuple(levels), tuple(range(len(levels)))
    raise FormatError(f"format {family!r} has no fixed levels: they depend on the block it stores")


# family -> exponent bits, mantissa bits, code of the sign bit
MINIFLOATS = {
    "fp8": (4, 3, 0x80),
    "ufp8": (4, 3, 0),
    "fp4": (2, 1, 0x8),
    "ufp4": (2, 2, 0),
    "mxfp8": (4, 3, 0x80),
    "mxfp8-e5m2": (5, 2, 0x80),
    "mxfp4": (2, 1, 0x8),
    "nvfp4": (2, 1, 0x8),
}


def minifloat(format: Format) -> tuple[int, int, int] | None:
    """Exponent bits, mantissa bits and the code of the sign bit of a format whose levels are small floats."""
    return MINIFLOATS.get(format.family.removesuffix("+32"))


_NOT_FINITE = {(4, 3): 1, (5, 2): 4}  # the last codes of E4M3 (a NaN) and of E5M2 (infinity and NaNs)

_FAMILIES: dict[str, Format] = {
    f.family: f
    for f in (
        Format("fp32", "float32", 32),
        Format("bf16", "bfloat16", 16),
        Format("fp8", "codebook", 8),
        Format("fp4", "codebook", 4),
        *(Format(f"int{b}", "linear", b) for b in (8, 6, 4, 3, 2)),
        *(Format(f"dynamic{b}", "codebook", b) for b in (8, 4, 3, 2)),
        *(Format(f"log{b}", "log", b, signed=False) for b in (8, 4, 3, 2)),
        # Unsigned twins, for second moments. `uint` and `udynamic` are there to be measured (they freeze).
        Format("ufp8", "codebook", 8, signed=False),
        Format("ufp4", "codebook", 4, signed=False),
        *(Format(f"uint{b}", "linear", b, signed=False) for b in (8, 4, 3, 2)),
        *(Format(f"udynamic{b}", "codebook", b, signed=False) for b in (8, 4, 3, 2)),
        # Weights with hidden bits: the forward pass sees the first number of bits, the optimizer all.
        *(Format(f"int4+{k}", "linear", 4, hidden=k) for k in (2, 4, 6)),
        # The same with all bits shown, for the first part of a run (`show_hidden_bits_`).
        *(Format(f"int4++{k}", "linear", 4, hidden=k, shown=True) for k in (2, 4, 6)),
        # All 32 bits kept: a master weight, the oracle that the others are measured against.
        *(Format(f"int{b}+32", "linear", b, hidden=MASTER) for b in (8, 4)),
        Format("fp8+32", "codebook", 8, hidden=MASTER),
        # What Blackwell and MI350 multiply: blocks of 32 with a power of two, blocks of 16 with an E4M3 scale.
        Format("mxfp8", "codebook", 8, granularity=32, scale="e8m0", fixed=True),
        Format("mxfp8-e5m2", "codebook", 8, granularity=32, scale="e8m0", fixed=True),
        Format("mxfp4", "codebook", 4, granularity=32, scale="e8m0", adjacent=True, fixed=True),
        Format("nvfp4", "codebook", 4, granularity=16, scale="e4m3", adjacent=True, fixed=True),
        Format("factored", "factored", 0, signed=False),
        Format("none", "none", 0),
    )
}


def names() -> list[str]:
    """All format families, in the order of the documentation."""
    return list(_FAMILIES)


@cache
def _parse(name: str) -> Format:
    family, *options = name.split(":")
    if family not in _FAMILIES:
        raise FormatError(f"unknown format {name!r}; known formats: {', '.join(names())}")
    fmt = _FAMILIES[family]
    if options and not fmt.scaled:
        raise FormatError(f"format {name!r}: {family} has no scale, so it takes no granularity; use {family!r}")
    if options and fmt.fixed:
        similar = "fp8" if fmt.bits == 8 else "fp4"
        raise FormatError(
            f"format {name!r}: the specification of {family} fixes blocks of {fmt.granularity} and their scale; use "
            f"{family!r}, or {similar!r} with the block and the scale that you like"
        )
    for option in options:
        if option in SCALE_BITS:
            if fmt.kind == "log":
                raise FormatError(f"format {name!r}: the log code has its own metadata; drop {option!r}")
            fmt = replace(fmt, scale=cast(ScaleKind, option))
        elif option in ("row", "tensor"):
            fmt = replace(fmt, granularity=cast(Granularity, option))
        elif option.isascii() and option.isdigit() and int(option) in (32, 64, 128, 256, 512, 1024):
            fmt = replace(fmt, granularity=int(option))
        else:
            raise FormatError(
                f"format {name!r}: {option!r} is neither a block length (32, 64, 128, 256, 512, 1024), "
                f"'row', 'tensor', nor a scale kind ({', '.join(SCALE_BITS)})"
            )
    if sum(option in SCALE_BITS for option in options) > 1 or sum(option not in SCALE_BITS for option in options) > 1:
        raise FormatError(f"format {name!r} names two granularities or two scale kinds; keep one of each")
    return fmt


def parse(format: str | Format) -> Format:
    """The `Format` of a name such as ``"int4"``, ``"log2"`` or ``"int8:row:fp32"``.

    Args:
        format: a name, or a `Format`, which is returned unchanged.

    Raises:
        FormatError: if there is no such format.

    >>> parse("int4").bits_per_element
    4.125
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        raise FormatError(
            f"a format is a name or a Format, not {format!r} ({type(format).__name__}); "
            f"known formats: {', '.join(names())}"
        )
    return _parse(format.strip().lower())


def as_first_moment(format: str | Format) -> Format:
    """The format in which a first moment is stored under this name, or an error that says why it cannot be."""
    fmt = parse(format)
    if not fmt.signed:
        signed = f"int{fmt.bits}" if fmt.kind in ("log", "factored") else fmt.family.lstrip("u")
        raise FormatError(
            f"format {str(fmt)!r} cannot hold negative values and a first moment has them; "
            f"use {signed if signed in _FAMILIES else 'int8'!r}"
        )
    return _as_state(fmt)


def as_second_moment(format: str | Format) -> Format:
    """The format in which a second moment is stored under this name, or an error that says why it cannot be.

    The floating formats resolve to their unsigned twins (``fp4`` then has two fraction bits).
    """
    fmt = parse(format)
    if fmt.family in ("fp8", "fp4"):
        fmt = replace(_FAMILIES[f"u{fmt.family}"], granularity=fmt.granularity, scale=fmt.scale)
    if fmt.kind == "none":
        raise FormatError("format 'none': this rule divides by its second moment, it cannot do without; use 'factored'")
    if fmt.signed and fmt.scaled:
        raise FormatError(
            f"format {str(fmt)!r} spends a level in two on negative values, which a second moment has not, and "
            f"loses the small ones to zero; use 'log{min(fmt.bits, 8) if fmt.bits != 6 else 8}'"
        )
    return _as_state(fmt)


def _as_state(fmt: Format) -> Format:
    if fmt.hidden:
        raise FormatError(f"format {str(fmt)!r}: hidden bits are for weights; use 'int8' or 'int{fmt.bits}'")
    if fmt.two_level:
        raise FormatError(
            f"format {str(fmt)!r}: its tensor scale is fixed when a weight is made, and a moment's size is not known "
            f"then; use 'mxfp4' or 'int4'"
        )
    if fmt.granularity == "tensor" and fmt.scaled:
        raise FormatError(
            f"format {str(fmt)!r}: one scale for a whole tensor would make the codes depend on how the tensor "
            f"is sharded; use '{fmt.family}' or '{fmt.family}:row'"
        )
    return fmt
