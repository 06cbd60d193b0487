"""Formats: names, refusals, levels and bits against the tables of the papers and of torch."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import masterless as ml
from masterless.formats import (
    SCALE_BITS,
    Format,
    FormatError,
    as_first_moment,
    as_second_moment,
    names,
    parse,
)
from masterless.optim.beta import half_gap

GRANULARITIES = (32, 64, 128, 256, 512, 1024, "row", "tensor")
SCALED = [name for name in names() if parse(name).scaled]


# --- names ----------------------------------------------------------------------------------------------


def test_every_format_of_the_design_exists():
    wanted = "fp32 bf16 fp8 fp4 int8 int4 int3 int2 dynamic8 dynamic4 dynamic3 dynamic2 log8 log4 log3 log2"
    assert set(wanted.split()) | {"int4+4", "int4+2", "int4+6", "factored", "none"} <= set(names())


@pytest.mark.parametrize("family", names())
def test_a_name_says_everything(family):
    base = parse(family)
    assert (str(base), base.family) == (family, family)
    if not base.scaled or base.fixed:
        return
    for granularity in GRANULARITIES:
        for scale in [None] if base.kind == "log" else [None, *SCALE_BITS]:
            spelled = f"{family}:{granularity}" + (f":{scale}" if scale else "")
            fmt = parse(spelled)
            assert fmt.granularity == granularity
            assert fmt.scale == (scale or base.scale)
            assert parse(str(fmt)) == fmt
            assert str(parse(str(fmt))) == str(fmt)
            # nothing else changed
            assert (fmt.family, fmt.kind, fmt.bits, fmt.signed, fmt.hidden) == (
                base.family,
                base.kind,
                base.bits,
                base.signed,
                base.hidden,
            )


def test_default_options_are_not_spelled_out():
    assert str(parse("int4:128")) == str(parse("int4:bf16")) == str(parse("int4:128:bf16")) == "int4"
    assert str(parse("int4:fp32")) == "int4:128:fp32"
    assert str(parse("int4:row")) == "int4:row"


def test_case_and_blanks_do_not_matter_and_formats_pass_through():
    assert parse(" INT4:Row ") == parse("int4:row")
    fmt = parse("log2")
    assert parse(fmt) is fmt
    assert ml.parse_format("log2") == fmt


# --- refusals: value, reason, remedy --------------------------------------------------------------------

REFUSED_NAMES = [
    ("int5", "unknown format 'int5'", "int4"),
    ("float32", "unknown format 'float32'", "fp32"),
    ("", "unknown format ''", "fp32"),
    ("log5", "unknown format 'log5'", "log4"),
    ("int4:48", "'48' is neither a block length", "32, 64, 128"),
    ("int4:0", "'0' is neither", "32, 64, 128"),
    ("int4:-128", "'-128' is neither", "32, 64, 128"),
    ("int4:\N{SUPERSCRIPT TWO}", "is neither", "32, 64, 128"),
    ("int4:", "'' is neither", "32, 64, 128"),
    ("int4:column", "'column' is neither", "'row', 'tensor'"),
    ("int8:128:fp16", "'fp16' is neither", "bf16, fp32, pow2"),
    ("log2:fp32", "log code has its own metadata", "drop 'fp32'"),
    ("fp32:128", "fp32 has no scale", "use 'fp32'"),
    ("bf16:row", "bf16 has no scale", "use 'bf16'"),
    ("factored:64", "factored has no scale", "use 'factored'"),
    ("none:row", "none has no scale", "use 'none'"),
    ("mxfp4:64", "the specification of mxfp4 fixes blocks of 32", "use 'mxfp4', or 'fp4' with the block"),
    ("mxfp8:pow2", "the specification of mxfp8 fixes blocks of 32", "or 'fp8' with"),
    ("nvfp4:row", "the specification of nvfp4 fixes blocks of 16", "use 'nvfp4'"),
    ("int8:e4m3", "'e4m3' is neither", "bf16, fp32, pow2, e8m0"),
]


@pytest.mark.parametrize(("name", "reason", "remedy"), REFUSED_NAMES)
def test_a_name_that_cannot_be_is_refused(name, reason, remedy):
    with pytest.raises(FormatError) as caught:
        parse(name)
    message = str(caught.value)
    assert repr(name) in message
    assert reason in message
    assert remedy in message


@pytest.mark.parametrize("name", ["int4:64:row", "int4:64:128", "int4:fp32:bf16"])
def test_contradictory_options_are_refused_not_ignored(name):
    with pytest.raises(FormatError, match=re.escape(repr(name))):
        parse(name)


@pytest.mark.parametrize("value", [4, None, torch.float32, ("int4",)])
def test_what_is_no_name_is_refused(value):
    with pytest.raises(FormatError) as caught:
        parse(value)
    assert repr(value) in str(caught.value)
    assert type(value).__name__ in str(caught.value)
    assert "known formats: fp32, bf16" in str(caught.value)


@given(st.text(alphabet="intfplogdynamicu0123456789+:rowensbf ", max_size=14))
def test_any_text_is_a_format_or_a_format_error(text):
    try:
        fmt = parse(text)
    except FormatError as error:
        assert repr(text.strip().lower()) in str(error)
    else:
        assert parse(str(fmt)) == fmt


def remedies(message: str) -> list[str]:
    """The formats a message recommends: every quoted name after "use"."""
    return re.findall(r"'([^']+)'", message.split("; use ")[1])


def assert_refused(role, name, reason):
    """The message has the value and the reason, and every remedy it names is accepted in the same role."""
    with pytest.raises(FormatError) as caught:
        role(name)
    message = str(caught.value)
    assert repr(str(parse(name))) in message
    assert reason in message
    assert remedies(message)
    for remedy in remedies(message):
        role(remedy)


UNSIGNED = [name for name in names() if not parse(name).signed]
SIGNED_SCALED = [name for name in SCALED if parse(name).signed and name not in ("fp8", "fp4")]
HIDDEN = [name for name in names() if parse(name).hidden]


@pytest.mark.parametrize("name", UNSIGNED)
def test_an_unsigned_format_cannot_be_a_first_moment(name):
    assert_refused(as_first_moment, name, "cannot hold negative values and a first moment has them")


@pytest.mark.parametrize("name", SIGNED_SCALED)
def test_a_signed_format_cannot_be_a_second_moment(name):
    assert_refused(as_second_moment, name, "negative values, which a second moment has not")


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_bits_cannot_be_a_state(name):
    assert_refused(as_first_moment, name, "hidden bits are for weights")


@pytest.mark.parametrize("name", ["int8:tensor", "int2:tensor", "dynamic4:tensor:fp32", "fp8:tensor"])
def test_one_scale_a_tensor_cannot_be_a_first_moment(name):
    assert_refused(as_first_moment, name, "depend on how the tensor is sharded")


@pytest.mark.parametrize("name", ["log2:tensor", "uint8:tensor", "udynamic8:tensor", "ufp8:tensor"])
def test_one_scale_a_tensor_cannot_be_a_second_moment(name):
    assert_refused(as_second_moment, name, "depend on how the tensor is sharded")


def test_a_rule_that_divides_by_its_second_moment_needs_one():
    assert_refused(as_second_moment, "none", "divides by its second moment")


def test_floating_second_moments_are_the_unsigned_twins():
    assert as_second_moment("fp8") == parse("ufp8")
    assert as_second_moment("fp4:64:fp32") == parse("ufp4:64:fp32")
    assert as_first_moment("fp4:64:fp32") == parse("fp4:64:fp32")


# --- levels ---------------------------------------------------------------------------------------------


def test_dynamic_levels_are_solos_tables():
    """science.md section 2; approx only for the decimal fractions' own rounding in fp64."""
    positive4 = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    tables = {
        2: [-0.55, 0, 0.55, 1],
        3: [-0.775, -0.325, -0.055, 0, 0.055, 0.325, 0.775, 1],
        4: sorted([0.0, 1.0, *positive4, *(-x for x in positive4)]),
    }
    for bits, table in tables.items():
        fmt = parse(f"dynamic{bits}")
        assert fmt.levels == pytest.approx(table, rel=1e-14, abs=0)
        assert fmt.table[1] == tuple(range(2**bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_dynamic_levels_use_every_code_and_end_at_one(bits):
    for name in (f"dynamic{bits}", f"udynamic{bits}"):
        levels = parse(name).levels
        assert len(set(levels)) == 2**bits
        assert list(levels) == sorted(levels)
        assert levels[-1] == parse(name).max_level == 1.0
    # the smallest of the seven decades of the 8-bit map: the middle of [0.1, 1] * 10^-6
    assert parse("dynamic8").levels[128] == pytest.approx(0.55e-6)


def test_e4m3_levels_are_torchs_bit_patterns():
    torchs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    fmt = parse("fp8")
    for level, code in zip(*fmt.table, strict=True):
        assert torchs[code].item() == level
    # every code but the two NaNs and minus zero, which has a twin
    assert set(range(256)) - set(fmt.table[1]) == {0x7F, 0xFF, 0x80}
    assert fmt.max_level == 448.0
    unsigned = parse("ufp8")
    assert unsigned.table[1] == tuple(range(127))
    assert list(unsigned.levels) == torchs[:127].tolist()


def test_fp4_levels():
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    by_code = dict(zip(parse("fp4").table[1], parse("fp4").levels, strict=True))
    assert by_code == {**dict(enumerate(positive)), **{8 + c: -positive[c] for c in range(1, 8)}}


def test_unsigned_fp4_has_two_exponent_and_two_fraction_bits():
    subnormal = [0.0, 0.25, 0.5, 0.75]
    normal = [(1 + f / 4) * 2.0**e for e in (0, 1, 2) for f in range(4)]
    assert parse("ufp4").table == (tuple(subnormal + normal), tuple(range(16)))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_integer_levels_are_symmetric_and_offset_binary(bits):
    top = 2 ** (bits - 1) - 1
    levels, codes = parse(f"int{bits}").table
    assert levels == tuple(float(i) for i in range(-top, top + 1))
    assert codes == tuple(i + 2 ** (bits - 1) for i in range(-top, top + 1))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unsigned_integer_levels(bits):
    assert parse(f"uint{bits}").table == (tuple(map(float, range(2**bits))), tuple(range(2**bits)))


@pytest.mark.parametrize("hidden", [2, 4, 6])
def test_hidden_bits_refine_the_visible_grid(hidden):
    """The upper bits of every fine code are the INT4 code nearest to it (halves go up: the hidden offset)."""
    fmt = parse(f"int4+{hidden}")
    levels, codes = fmt.table
    assert {b - a for a, b in itertools.pairwise(levels)} == {2.0**-hidden}
    for level, code in zip(levels, codes, strict=True):
        assert (code >> hidden) - 8 == math.floor(level + 0.5)
    assert fmt.code_bits == 4 + hidden
    assert 0 <= min(codes) and max(codes) < 2**fmt.code_bits


@pytest.mark.parametrize("name", [n for n in SCALED if parse(n).kind != "log"])
def test_every_grid_has_an_exact_zero_and_an_even_zero_code(name):
    fmt = parse(name)
    assert dict(zip(fmt.levels, fmt.table[1], strict=True))[0.0] == fmt.zero_code
    assert fmt.max_level == max(map(abs, fmt.levels))
    if fmt.kind == "linear":  # `round` half to even is then half to the even code
        assert fmt.zero_code % 2 == 0


@pytest.mark.parametrize("name", ["log2", "fp32", "none", "factored"])
def test_formats_without_fixed_levels_say_so(name):
    with pytest.raises(FormatError, match="no fixed levels"):
        _ = parse(name).levels


# --- bits -----------------------------------------------------------------------------------------------

DESIGN_BITS = {
    "fp32": 32,
    "bf16": 16,
    "fp8": 8.125,
    "fp4": 4.125,
    **{f"int{b}": b + 0.125 for b in (8, 4, 3, 2)},
    **{f"dynamic{b}": b + 0.125 for b in (8, 4, 3, 2)},
    **{f"log{b}": b + 0.25 for b in (8, 4, 3, 2)},
    "mxfp8": 8.25,
    "mxfp8-e5m2": 8.25,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
    "int4+4": 8.125,
    "int4+2": 6.125,
    "int4+6": 10.125,
    "factored": 0,
    "none": 0,
}


@pytest.mark.parametrize(("name", "bits"), DESIGN_BITS.items())
def test_bits_with_metadata_are_the_designs(name, bits):
    assert parse(name).bits_per_element == bits


def test_bits_follow_block_length_and_scale_kind():
    assert parse("int4:64").bits_per_element == 4.25
    assert parse("int4:32:fp32").bits_per_element == 5.0
    assert parse("int4:pow2").bits_per_element == 4.125
    assert parse("int4:row").bits_per_element == parse("int4:tensor").bits_per_element == 4.0
    assert parse("log2:64").bits_per_element == 2.5
    assert parse("int8+32").bits_per_element == 40.125


# --- SOLO's beta ----------------------------------------------------------------------------------------

BETAS = {  # reference bits -> beta1 at 4, 3, 2 bits from 0.9 (SOLO; science.md section 2)
    8: (0.350, 0.211, 0.116),
    7: (0.518, 0.348, 0.207),
    6: (0.695, 0.531, 0.357),
    5: (0.820, 0.694, 0.527),
}


@pytest.mark.parametrize("reference_bits", BETAS)
def test_beta_for_bits_reproduces_the_paper(reference_bits):
    found = tuple(round(ml.beta_for_bits(b, 0.9, reference_bits), 3) for b in (4, 3, 2))
    assert found == BETAS[reference_bits]


def test_half_gaps_are_the_papers():
    assert [half_gap(b) for b in range(8, 1, -1)] == [0.004, 0.008, 0.017, 0.034, 0.067, 0.135, 0.275]


def test_beta_for_its_own_width_is_the_reference():
    for bits in range(2, 9):
        for beta in (0.0, 0.5, 0.9, 0.99):
            # three roundings in fp64
            assert ml.beta_for_bits(bits, beta, bits) == pytest.approx(beta, rel=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 1}, "bits=1: .* 2 to 8 bits"),
        ({"bits": 9}, "bits=9: .* 2 to 8 bits"),
        ({"bits": 4, "reference_bits": 16}, "reference_bits=16: .* 2 to 8 bits"),
        ({"bits": 4, "reference_beta": 1.0}, r"reference_beta=1.0: must lie in \[0, 1\)"),
        ({"bits": 4, "reference_beta": -0.1}, r"reference_beta=-0.1: must lie in \[0, 1\)"),
    ],
)
def test_beta_for_bits_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ml.beta_for_bits(**arguments)


def test_formats_are_values():
    assert hash(parse("int4:64")) == hash(parse("int4:64"))
    assert len({parse("int4"), parse("int4:128"), parse("int4:64")}) == 2
    with pytest.raises(AttributeError):
        parse("int4").bits = 5
    assert isinstance(parse("int4"), Format)
