"""Scaled and plain formats: idempotent, nearest by brute force, unbiased by exhaustion, finite everywhere.

The logarithmic code has a file of its own, `test_log_code.py`.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from masterless.formats import MASTER, SCALE_BITS, Format, codec, names, parse
from masterless.formats.format import Granularity
from masterless.formats.packing import unpack
from masterless.formats.rounding import dither

SCALED = [n for n in names() if parse(n).kind in ("linear", "codebook") and parse(n).hidden != MASTER]
SMALL = [n for n in SCALED if parse(n).code_bits <= 4]
WIDE = [n for n in SCALED if n not in SMALL]
UNSIGNED = [n for n in SCALED if not parse(n).signed]
MASTERS = [n for n in names() if parse(n).hidden == MASTER]
ALL_DITHERS = torch.arange(2**16, dtype=torch.int32).view(1, -1)
TINY, HUGE = 2.0**-149, torch.finfo(torch.float32).max


def with_scale(name: str, granularity: Granularity, kind: str = "bf16") -> Format:
    """Any family with any block and scale, those that a specification fixes included: the codec does not mind."""
    return replace(parse(name), granularity=granularity, scale=kind)


def one_scale(name: str, kind: str = "bf16") -> Format:
    return with_scale(name, "row", kind)


def codes_of(parts: codec.Parts, cols: int, fmt: Format) -> Tensor:
    """The codes on the finest grid, int32."""
    codes = unpack(parts["codes"], cols, fmt.bits, fmt.adjacent)
    return codes if not fmt.fine_bits else (codes << fmt.fine_bits) + unpack(parts["hidden"], cols, fmt.fine_bits)


def levels_of(fmt: Format) -> Tensor:
    """The levels as the fp32 numbers that the codec uses."""
    return torch.tensor(fmt.levels, dtype=torch.float64).float()


def some_scales(fmt: Format, count: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scales = torch.cat([torch.tensor([1.0, 3e-20, 5e20]), torch.rand(count - 3, generator=generator)])
    return codec.round_scale_up(scales, fmt)


# --- idempotence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCALE_BITS)
@pytest.mark.parametrize("name", SCALED)
def test_a_decoded_number_encodes_to_its_own_code_under_the_same_scale(name, kind):
    """Every code, under nearest and under every dither.

    Whether a number goes up is monotone in the dither, so its two ends stand for all 65536 (and some are added).
    The levels of the dynamic maps are decimal fractions, so level * scale is rounded; where 256 of them lie close, that
    half ulp exceeds 2^-17 of a gap, the distance of the two extreme dithers: the contract leaves those two out.
    """
    fmt = one_scale(name, kind)
    u = torch.tensor([0, 1, 2, 777, 32768, 65533, 65534, 65535]).view(-1, 1)
    u = u[1:-1] if name in ("dynamic8", "udynamic8") else u
    codes = torch.tensor(fmt.table[1])
    for scale in some_scales(fmt, 24):
        column = scale.view(1, 1)
        values = (levels_of(fmt) * scale).view(1, -1)
        assert torch.equal(codes_of(codec.encode(values, fmt, None, scale=column), len(codes), fmt)[0], codes)
        repeated = values.expand(len(u), -1)
        again = codec.encode(repeated, fmt, u.expand_as(repeated), scale=column.expand(len(u), 1))
        assert torch.equal(codes_of(again, len(codes), fmt), codes.expand(len(u), -1).int())


@settings(max_examples=60, deadline=None)  # the first call of an op is slow
@given(
    name=st.sampled_from([n for n in SCALED if n != "udynamic8"]),  # that one: see the test above
    rows=st.integers(1, 3),
    cols=st.integers(1, 300),
    seed=st.integers(0, 1000),
    stochastic=st.booleans(),
)
def test_a_decoded_tensor_encodes_to_the_very_same_bytes(name, rows, cols, seed, stochastic):
    fmt = parse(name)
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    x = x if fmt.signed else x.abs()
    first = codec.encode(x, fmt, dither(seed, rows, cols) if stochastic else None)
    values = codec.decode(first, cols, fmt)
    for key in range(5):
        u = dither(key, rows, cols) if stochastic else None
        again = codec.encode(values, fmt, u, scale=codec.read_scale(first, fmt), tensor_scale=first.get("tensor_scale"))
        assert all(torch.equal(again[part], first[part]) for part in first)


# --- nearest ----------------------------------------------------------------------------------------------


def points_around(levels: Tensor) -> Tensor:
    """Every level, every midpoint, the floats beside both, what lies between, and what lies outside."""
    middle = ((levels[1:].double() + levels[:-1].double()) / 2).float()
    centres = torch.cat([levels, middle])
    up, down = torch.full_like(centres, math.inf), torch.full_like(centres, -math.inf)
    span = levels[-1] - levels[0]
    between = levels[0] + span * torch.rand(2000, generator=torch.Generator().manual_seed(1))
    outside = torch.stack([levels[0] - span, levels[-1] + span, levels[-1] * 1.01, levels[0] * 1.01])
    return torch.cat([centres, torch.nextafter(centres, up), torch.nextafter(centres, down), between, outside])


@pytest.mark.parametrize("name", SCALED)
def test_nearest_is_nearest_by_brute_force(name):
    """Over all codes, with scale 1 so that the only rounding is the format's; a tie goes to the even code."""
    fmt = one_scale(name)
    levels, codes = levels_of(fmt).double(), torch.tensor(fmt.table[1])
    x = points_around(levels_of(fmt))
    x = x if fmt.signed else x.abs()
    found = codes_of(codec.encode(x.view(1, -1), fmt, scale=torch.ones(1, 1)), len(x), fmt)[0]
    distance = (x.double().view(-1, 1) - levels).abs()
    best = distance.min(1).values
    # Linear and floating levels have exact midpoints in fp32. Those of the dynamic map are decimal fractions:
    # their midpoint is rounded to fp32, so a number within that half ulp (2^-24) of it may go either way, and its
    # two distances then differ by twice as much.
    slack = 2.0**-23 * x.double().abs() if "dynamic" in name else torch.zeros(len(x), dtype=torch.float64)
    candidates = distance <= (best + slack).view(-1, 1)
    if not fmt.signed:  # a positive number never becomes zero, near as it may be
        candidates[(x > 0) & (levels[distance.argmin(1)] == 0), 1] = True
        candidates[x > 0, 0] = False
    chosen = codes.view(1, -1) == found.view(-1, 1)
    assert (chosen.sum(1) == 1).all()  # a code of the table, and no other
    assert (chosen & candidates).any(1).all()
    ties = (candidates.sum(1) == 2) & (slack == 0)
    assert int(ties.sum()) >= (len(levels) - 2 if "dynamic" not in name else 0)
    assert (found[ties] % 2 == 0).all()


@pytest.mark.parametrize("kind", SCALE_BITS)
@pytest.mark.parametrize("name", SCALED)
def test_nearest_under_any_scale(name, kind):
    """The error of every element is the distance to the nearest level, up to the rounding of x / scale."""
    fmt = one_scale(name, kind)
    x = torch.randn(4, 500, generator=torch.Generator().manual_seed(2)) * torch.tensor([[1e-30], [1e-3], [1], [1e30]])
    x = x if fmt.signed else x.abs()
    parts = codec.encode(x, fmt)
    scale = codec.read_scale(parts, fmt).double()
    decoded = codec.decode(parts, 500, fmt).double()
    error = (decoded - x.double()).abs()
    levels = levels_of(fmt).double()
    levels = levels if fmt.signed else levels[1:]  # a positive number never becomes zero
    best = (x.double().unsqueeze(-1) - levels * scale.unsqueeze(-1)).abs().amin(-1)
    # x / scale is rounded (2^-24), which near a midpoint shows in two distances; level * scale is rounded once more
    assert (error <= best + 2.0**-23 * x.double().abs() + 2.0**-24 * decoded.abs()).all()


# --- stochastic: the random bits exhausted ----------------------------------------------------------------


def exhaust(x: float, fmt: Format, scale: Tensor) -> Tensor:
    """The decoded values of x under all 65536 dithers, fp64, in units of the scale."""
    values = torch.full((1, 2**16), x)
    parts = codec.encode(values, fmt, ALL_DITHERS, scale=scale)
    table = torch.full((2**fmt.code_bits,), math.nan, dtype=torch.float64)
    table[torch.tensor(fmt.table[1])] = levels_of(fmt).double()
    return table[codes_of(parts, 2**16, fmt)[0]]


@pytest.mark.parametrize("name", SMALL + WIDE)
def test_stochastic_rounding_is_unbiased_by_exhaustion(name):
    """In every gap (a sample of them for wide formats): only the two neighbours occur, and their mean is right.

    Bound: 2^-16 of the gap. The contract's own is 2^-17 (thresholds are spaced by 2^-16, and centred); fp32
    rounds x / scale and the threshold's product with the gap, 2^-24 each relative to a level: the rest.
    """
    fmt = one_scale(name)
    levels = levels_of(fmt)
    gaps = range(len(levels) - 1) if name in SMALL else range(0, len(levels) - 1, 13)
    scales = [torch.ones(1, 1), torch.full((1, 1), 0.376953125)]  # a power of two, and another bf16 number
    for i in gaps if fmt.signed else [g for g in gaps if g > 0]:
        lower, upper = levels[i].double().item(), levels[i + 1].double().item()
        for fraction, scale in zip((0.5, 0.0371), scales, strict=True):
            x = torch.tensor((lower + fraction * (upper - lower)) * scale.item(), dtype=torch.float32)
            got = exhaust(x.item(), fmt, scale)
            assert set(got.unique().tolist()) == {lower, upper}
            mean = x.double().item() / scale.double().item()
            assert abs(got.mean().item() - mean) <= 2.0**-16 * (upper - lower)


@pytest.mark.parametrize("name", SMALL)
def test_probabilities_are_right_from_the_first_to_the_last_random_number(name):
    """A fraction of (k + 1/2) / 2^16 of the gap goes up for k or k + 1 of 65536 dithers, k = 0 and 65535 too."""
    fmt = one_scale(name)
    levels = levels_of(fmt).double()
    lower, upper = levels[-2].item(), levels[-1].item()
    for k in (0, 1, 1000, 65534, 65535):
        x = torch.tensor(lower + (k + 0.5) / 2**16 * (upper - lower), dtype=torch.float32)
        ups = int((exhaust(x.item(), fmt, torch.ones(1, 1)) == upper).sum())
        assert ups in (k, k + 1)


@pytest.mark.parametrize("name", SCALED)
def test_out_of_range_goes_to_the_outermost_level_under_every_dither(name):
    fmt = one_scale(name)
    levels = levels_of(fmt).double()
    for x in (1.5 * levels[-1].item(), 1e30, HUGE):
        assert (exhaust(x, fmt, torch.ones(1, 1)) == levels[-1]).all()
        if fmt.signed:
            assert (exhaust(-x, fmt, torch.ones(1, 1)) == levels[0]).all()


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(SCALED),
    values=st.lists(st.floats(-HUGE, HUGE, width=32), min_size=1, max_size=140),
    seed=st.integers(0, 2**32),
)
def test_the_result_is_always_a_neighbour(name, values, seed):
    """Whatever the block, a stored number is one of the two levels around it (or the outermost)."""
    fmt = parse(name)
    x = torch.tensor([values], dtype=torch.float32)
    x = x if fmt.signed else x.abs()
    parts = codec.encode(x, fmt, dither(seed, 1, x.shape[1]))
    scale = codec.read_scale(parts, fmt).repeat_interleave(fmt.granularity, 1)[:, : x.shape[1]]
    levels = levels_of(fmt)
    t = (x / torch.where(scale > 0, scale, 1.0))[0]
    index = (torch.searchsorted(levels, t, right=True) - 1).clamp(0, len(levels) - 2)
    codes = torch.tensor(fmt.table[1])
    found = codes_of(parts, x.shape[1], fmt)[0]
    assert ((found == codes[index]) | (found == codes[index + 1])).all()
    assert codec.decode(parts, x.shape[1], fmt).isfinite().all()


# --- scales -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCALE_BITS)
@pytest.mark.parametrize("name", SCALED)
def test_scales_are_rounded_up_and_no_further_than_to_the_next(name, kind):
    fmt = with_scale(name, 128, kind)
    generator = torch.Generator().manual_seed(3)
    mantissa = 1 + torch.rand(4000, generator=generator)
    absmax = mantissa * torch.exp2(torch.randint(-100, 120, (4000,), generator=generator).float())
    scale = codec.scale_for(absmax, fmt)
    top = scale.double() * fmt.max_level
    # fp32: the quotient absmax / max_level is rounded to nearest, so the top may miss by half an ulp
    assert (top >= absmax.double() * (1 - (2.0**-24 if kind == "fp32" else 0.0))).all()
    step = {"fp32": 2.0**-13, "bf16": 2.0**-7, "pow2": 1.0, "e8m0": 1.0}[kind]  # fp32: 14 significant bits are kept
    assert (top < absmax.double() * (1 + step)).all()
    assert torch.equal(scale if kind == "fp32" else scale.bfloat16().float(), scale)
    if kind in ("pow2", "e8m0"):
        assert (torch.frexp(scale).mantissa == 0.5).all()


@pytest.mark.parametrize("kind", SCALE_BITS)
@pytest.mark.parametrize("name", SCALED)
def test_huge_values_stay_finite_and_large(name, kind):
    """Up to the largest float.

    The scale cannot be rounded up past what overflows, so the top may be clipped: to the scale kind's next
    smaller number (2^-7 for bf16, half for a power of two), plus one gap at the top.
    """
    fmt = one_scale(name, kind)
    x = torch.tensor([[3e38, 1e38, HUGE, 0.0]])
    lost = {"fp32": 2.0**-20, "bf16": 2.0**-7, "pow2": 0.5, "e8m0": 0.5}[kind]
    gap = (fmt.levels[-1] - fmt.levels[-2]) / fmt.max_level
    for u in (None, dither(1, 1, 4)):
        values = codec.decode(codec.encode(x, fmt, u), 4, fmt)
        assert values.isfinite().all()
        assert values[0, 3] == 0
        assert (values[0, 2] >= HUGE * (1 - lost) * (1 - gap)).item()


@pytest.mark.parametrize("name", SCALED)
def test_zeros_are_exact_zeros(name):
    fmt = parse(name)
    for u in (None, dither(1, 2, 200)):
        parts = codec.encode(torch.zeros(2, 200), fmt, u)
        assert (codec.decode(parts, 200, fmt) == 0).all()
        assert (parts["scale"] == 0).all()  # also of the kinds that are bytes: the smallest, if they have no zero
        mixed = torch.zeros(2, 200)
        mixed[:, 7] = 3.0
        decoded = codec.decode(codec.encode(mixed, fmt, u), 200, fmt)
        assert (decoded[mixed == 0] == 0).all()
        assert (decoded[:, 7] > 0).all()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [1.0, 0.3, 1e-38, 7e37])
def test_constant_blocks_decode_to_one_value_within_half_a_gap(name, value):
    fmt = parse(name)
    decoded = codec.decode(codec.encode(torch.full((1, 130), value), fmt), 130, fmt)
    assert len(decoded.unique()) == 1
    gap = max(b - a for a, b in itertools.pairwise(fmt.levels[-3:])) / fmt.max_level
    if fmt.scale in ("e8m0", "e4m3"):  # a scale up to twice too large: the value lies anywhere in the upper half
        upper = [level for level in fmt.levels if level >= fmt.max_level / 2]
        gap = max((b - a) / a for a, b in itertools.pairwise(upper))
    # else it is at most 2^-7 too large (its own rounding up); the value is then at most half a gap off
    assert abs(decoded[0, 0].item() / value - 1) <= gap / 2 * (1 + 2.0**-7)


@pytest.mark.parametrize("name", SCALED)
def test_denormals_decode_to_finite_numbers_close_by(name):
    """Down to the smallest float: the error is below the largest gap at the stored scale."""
    fmt = parse(name)
    largest_gap = max(b - a for a, b in itertools.pairwise(fmt.levels))
    x = torch.tensor([[TINY, 5 * TINY, 200 * TINY, 1e-42, 1e-40, 1e-38]])
    for length in range(1, 7):
        for u in (None, dither(length, 1, length)):
            parts = codec.encode(x[:, :length], fmt, u)
            decoded = codec.decode(parts, length, fmt)
            assert decoded.isfinite().all()
            # a block whose scale underflows to zero loses less than half a unit of the float grid a level
            allowed = max(largest_gap * codec.read_scale(parts, fmt).item(), fmt.max_level * TINY / 2)
            assert (decoded - x[:, :length]).abs().max().item() <= allowed


@pytest.mark.parametrize("kind", SCALE_BITS)
@pytest.mark.parametrize("name", UNSIGNED)
def test_an_unsigned_format_never_turns_a_positive_number_into_zero(name, kind):
    """Under every dither, however small the number is against its block."""
    fmt = one_scale(name, kind)
    for small in (0.4 / fmt.max_level, 1e-6, 1e-30, 1e-44):
        x = torch.tensor([[1.0, small]])
        for u in (None, torch.tensor([[0, 0]]), torch.tensor([[65535, 65535]])):
            assert (codec.decode(codec.encode(x, fmt, u), 2, fmt) > 0).all()


@pytest.mark.parametrize("name", UNSIGNED)
def test_an_unsigned_format_keeps_positive_denormals_positive(name):
    """The contract has no lower limit: a block whose largest number is denormal is stored as positive too."""
    for units in (2**20, 1000, 100, 2, 1):
        x = torch.tensor([[units * TINY]])
        for kind in SCALE_BITS:
            fmt = one_scale(name, kind)
            assert codec.decode(codec.encode(x, fmt), 1, fmt).item() > 0, f"{units} * 2^-149 in {fmt}"


# --- blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("block", [32, 128, 256])
def test_blocks_and_tails_are_independent(name, block):
    """Every block of a row, the tail included, is stored as if it were alone."""
    fmt = with_scale(name, block)
    for cols in (1, block - 1, block, block + 1, 2 * block + 5):
        x = torch.randn(2, cols, generator=torch.Generator().manual_seed(cols)).abs().pow(3)
        whole = codec.decode(codec.encode(x, fmt), cols, fmt)
        for start in range(0, cols, block):
            part = x[:, start : start + block]
            alone = codec.decode(codec.encode(part, fmt), part.shape[1], fmt)
            assert torch.equal(whole[:, start : start + block], alone)


# --- nothing is clipped ----------------------------------------------------------------------------------------


# (Scales of the hardware formats are powers of two or E4M3: there the largest number is between levels.)
@pytest.mark.parametrize("name", [n for n in SCALED if parse(n).signed and parse(n).scale in ("bf16", "fp32", "pow2")])
def test_the_largest_number_of_a_block_is_not_clipped_whatever_its_sign(name):
    """The dynamic maps have no level at -1: a block of -1 and small numbers used to decode to -0.55 at two bits."""
    fmt = parse(name)
    for sign in (1.0, -1.0):
        for size in (1.0, 3.3e-20, 7e25):
            x = torch.full((1, 128), 0.01 * size)
            x[0, 77] = sign * size
            found = codec.decode(codec.encode(x, fmt), 128, fmt)[0, 77].item()
            assert abs(found / x[0, 77].item() - 1) <= 2.0**-6, f"{x[0, 77]} became {found}"  # the scale is rounded up


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_dynamic_map_uses_all_of_its_levels_on_the_side_that_needs_them(bits):
    fmt = parse(f"dynamic{bits}:row:fp32")
    assert fmt.negative_factor == pytest.approx(1 / -fmt.levels[0])
    for extreme, level in ((1.0, fmt.levels[-1]), (-1.0, fmt.levels[0])):
        parts = codec.encode(torch.tensor([[extreme, 0.0]]), fmt)
        assert parts["scale"].item() == pytest.approx(extreme / level, rel=2.0**-12)
