"""Packing: every code of every width, every length, and the byte layout of the contract spelled out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from masterless.formats.packing import chunk_bytes, pack, planes, row_bytes, unpack

WIDTHS = range(1, 9)
PLANES = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}


def pack_by_the_contract(codes: list[int], bits: int) -> list[int]:
    """The module's contract in Python integers, one code at a time."""
    packed = []
    for start in range(0, len(codes), 128):
        chunk = codes[start : start + 128]
        low = bits
        for width in PLANES[bits]:
            low -= width
            height = math.ceil(len(chunk) / (8 // width))
            plane = [0] * height
            for k, code in enumerate(chunk):
                plane[k % height] |= (code >> low & (2**width - 1)) << (width * (k // height))
            packed += plane
    return packed


def random_codes(rows: int, cols: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**bits, (rows, cols), generator=generator, dtype=torch.int32)


def test_planes_take_the_highest_bits_first():
    assert {bits: planes(bits) for bits in WIDTHS} == PLANES


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"1 to 8 bits, not {bits}"):
        planes(bits)


def test_three_bits_spelled_out():
    """Ten codes of 3 bits: a 2-bit plane of 3 bytes, then a 1-bit plane of 2 bytes."""
    codes = [7, 0, 1, 2, 3, 4, 5, 6, 7, 1]
    # upper two bits: 3 0 0 | 1 1 2 | 2 3 3 | 0, column by column, the first row in the lowest bits
    upper = [3 | 1 << 2 | 2 << 4 | 0 << 6, 0 | 1 << 2 | 3 << 4, 0 | 2 << 2 | 3 << 4]
    # lowest bits: 1 0 / 1 0 / 1 0 / 1 0 / 1 1 in two bytes: even places in byte 0, odd places in byte 1
    lower = [0b11111, 0b10000]
    assert pack(torch.tensor([codes]), 3).tolist() == [upper + lower]
    assert unpack(torch.tensor([upper + lower], dtype=torch.uint8), 10, 3).tolist() == [codes]


def test_neighbouring_codes_lie_in_neighbouring_bytes():
    """Codes 0..127 of 4 bits: byte i of a full chunk holds codes i and i + 64."""
    codes = torch.arange(128).view(1, -1) % 16
    expected = [(i % 16) | ((i + 64) % 16) << 4 for i in range(64)]
    assert pack(codes, 4).tolist() == [expected]


def test_eight_bit_codes_are_the_bytes_themselves():
    codes = torch.arange(256, dtype=torch.int32).view(1, -1)
    assert pack(codes, 8).tolist() == codes.tolist()


def test_eight_codes_of_three_bits_take_three_bytes():
    assert row_bytes(8, 3) == chunk_bytes(8, 3) == 3
    assert pack(torch.arange(8).view(1, -1), 3).shape == (1, 3)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_round_trips_in_every_place_of_a_byte(bits):
    codes = torch.arange(2**bits, dtype=torch.int32)
    table = torch.stack([codes.roll(shift) for shift in range(2**bits)])  # all codes in all places
    assert torch.equal(unpack(pack(table, bits), 2**bits, bits), table)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_length_round_trips_as_the_contract_says(bits):
    for cols in range(1, 301):
        codes = random_codes(2, cols, bits, seed=cols)
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8
        assert packed.shape == (2, row_bytes(cols, bits))
        assert packed[0].tolist() == pack_by_the_contract(codes[0].tolist(), bits)
        back = unpack(packed, cols, bits)
        assert back.dtype == torch.int32
        assert torch.equal(back, codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_byte_counts(bits):
    """A chunk takes ``sum over planes of ceil(n * width / 8)``, a full one exactly 16 bytes a bit."""
    assert chunk_bytes(128, bits) == 16 * bits
    for cols in range(1, 301):
        full, tail = divmod(cols, 128)
        expected = full * 16 * bits + sum(math.ceil(tail * width / 8) for width in PLANES[bits])
        assert row_bytes(cols, bits) == expected
        # never more than one byte a plane above the information itself
        assert cols * bits / 8 <= expected < cols * bits / 8 + len(PLANES[bits])
    assert row_bytes(0, bits) == 0


@pytest.mark.parametrize("bits", WIDTHS)
def test_unused_bits_are_zero(bits):
    """Of a row of all-ones codes exactly ``cols * bits`` bits are set."""
    for cols in range(1, 301):
        packed = pack(torch.full((1, cols), 2**bits - 1, dtype=torch.int32), bits)
        assert sum(byte.bit_count() for byte in packed.flatten().tolist()) == cols * bits


@settings(max_examples=200, deadline=None)  # the first call of an op is slow
@given(bits=st.integers(1, 8), rows=st.integers(0, 5), cols=st.integers(0, 700), seed=st.integers(0, 2**31 - 1))
def test_any_matrix_round_trips_row_by_row(bits, rows, cols, seed):
    codes = random_codes(rows, cols, bits, seed)
    packed = pack(codes, bits)
    assert packed.shape == (rows, row_bytes(cols, bits))
    assert torch.equal(unpack(packed, cols, bits), codes)
    for row in range(rows):  # rows do not share bytes: a shard of rows is a slice
        assert torch.equal(pack(codes[row : row + 1], bits)[0], packed[row])


@settings(max_examples=50, deadline=None)
@given(bits=st.integers(1, 8), chunks=st.integers(1, 4), tail=st.integers(0, 127))
def test_chunks_do_not_share_bytes(bits, chunks, tail):
    codes = random_codes(1, chunks * 128 + tail, bits)
    packed = pack(codes, bits)[0]
    for i in range(chunks):
        alone = pack(codes[:, i * 128 : (i + 1) * 128], bits)[0]
        assert torch.equal(packed[i * 16 * bits : (i + 1) * 16 * bits], alone)
