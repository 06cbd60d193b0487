"""The shape of the work: chunks in a program, their packed codes, and the blocks that share metadata.

Contract:
    * A program holds N chunks of 128 elements as a tensor ``[N, 32, 2, 2]``: element (i, lo, hi) of a chunk is number
      ``i + 32 lo + 64 hi``. The last two dimensions lie inside one thread, and a packed byte (2, 4 or 8 bits) holds
      elements of the same i only: each byte is made by one thread, from four loads and stores of ``[N, 32]``.
    * A geometry is the tuple ``(row, col, length, present)`` of ``[N]``: where a chunk starts, how many of its elements
      exist, and whether it exists at all.
    * Metadata of blocks has the shape ``[N, 1, 1, 1]`` (a block of a chunk or longer, the same for all its chunks),
      ``[N, 1, 1, 2]`` (64), ``[N, 1, 2, 2]`` (32) or ``[N, 32, 2, 2]`` (16), and broadcasts to the elements.
    * Chunks of one tile, and of one longer block, are next to each other: runs of TILE.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def elements():
    """The number of every element in its chunk: ``[1, 32, 2, 2]``."""
    i = tl.arange(0, 32)[None, :, None, None]
    return i + 32 * tl.arange(0, 2)[None, None, :, None] + 64 * tl.arange(0, 2)[None, None, None, :]


@triton.jit
def joined(a, b, c, d):
    """Four ``[N, 32]`` slices of chunks as one tensor."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def slices(x):
    """The four ``[N, 32]`` slices of a tensor of chunks."""
    low, high = tl.split(x)
    a, b = tl.split(low)
    c, d = tl.split(high)
    return a, b, c, d


@triton.jit
def present_elements(geometry, RAGGED: tl.constexpr):
    """Which elements exist; for tiles without gaps a constant."""
    if RAGGED == 2:
        return elements() < geometry[2][:, None, None, None]
    else:
        return geometry[3][:, None, None, None]


@triton.jit
def where_present(x, other, geometry, RAGGED: tl.constexpr):
    """Elements that exist, or another number. Where no tile has gaps, a tile that does not exist is a copy of one."""
    if RAGGED == 0:
        return x
    else:
        return tl.where(present_elements(geometry, RAGGED), x, other)


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address as a pointer."""
    p = address.to(tl.pointer_type(TYPE), bitcast=True)
    if ALIGNED:
        p = tl.multiple_of(p, 16)
    return p


# --- plain arrays of the tensor's own shape ------------------------------------------------------------------------


@triton.jit
def _load_slice(base, geometry, S: tl.constexpr, RAGGED: tl.constexpr):
    i = tl.arange(0, 32)[None, :] + 32 * S
    at = base[:, None] + i
    if RAGGED == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=i < geometry[2][:, None], other=0)


@triton.jit
def load_plain(p, geometry, cols, STEP: tl.constexpr):
    """The elements of an array of the tensor's own shape; those that do not exist are zero."""
    offset = geometry[0] * cols + geometry[1]
    if STEP.aligned:
        offset = tl.multiple_of(offset, 16)
    base = p + offset
    return joined(
        _load_slice(base, geometry, 0, STEP.ragged),
        _load_slice(base, geometry, 1, STEP.ragged),
        _load_slice(base, geometry, 2, STEP.ragged),
        _load_slice(base, geometry, 3, STEP.ragged),
    )


@triton.jit
def _store_slice(base, x, geometry, allowed, S: tl.constexpr, RAGGED: tl.constexpr):
    i = tl.arange(0, 32)[None, :] + 32 * S
    mask = allowed[:, None]
    if RAGGED == 2:
        mask = mask & (i < geometry[2][:, None])
    tl.store(base[:, None] + i, x, mask=mask)


@triton.jit
def store_plain(p, x, geometry, allowed, cols, STEP: tl.constexpr):
    """Stores elements in an array of the tensor's own shape, of those chunks that are `allowed`."""
    offset = geometry[0] * cols + geometry[1]
    if STEP.aligned:
        offset = tl.multiple_of(offset, 16)
    base = p + offset
    a, b, c, d = slices(x)
    _store_slice(base, a, geometry, allowed, 0, STEP.ragged)
    _store_slice(base, b, geometry, allowed, 1, STEP.ragged)
    _store_slice(base, c, geometry, allowed, 2, STEP.ragged)
    _store_slice(base, d, geometry, allowed, 3, STEP.ragged)


# --- packed codes ------------------------------------------------------------------------------------------------


@triton.jit
def _bytes(base, at, geometry, RAGGED: tl.constexpr):
    p = base[:, None] + at
    if RAGGED == 0:
        return tl.load(p).to(tl.int32)
    else:
        return tl.load(p, mask=geometry[3][:, None], other=0).to(tl.int32)


@triton.jit
def _load_whole_plane(base, geometry, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """A plane of codes of chunks that have all their elements."""
    i = tl.arange(0, 32)[None, :]
    if WIDTH == 8:
        a, b = _bytes(base, i, geometry, RAGGED), _bytes(base, i + 32, geometry, RAGGED)
        c, d = _bytes(base, i + 64, geometry, RAGGED), _bytes(base, i + 96, geometry, RAGGED)
        return joined(a, b, c, d)
    elif WIDTH == 4:
        a, b = _bytes(base, i, geometry, RAGGED), _bytes(base, i + 32, geometry, RAGGED)
        return joined(a & 15, b & 15, a >> 4, b >> 4)
    elif WIDTH == 2:
        a = _bytes(base, i, geometry, RAGGED)
        return joined(a & 3, (a >> 2) & 3, (a >> 4) & 3, a >> 6)
    else:
        a = _bytes(base, i % 16, geometry, RAGGED) >> (i // 16)
        return joined(a & 1, (a >> 2) & 1, (a >> 4) & 1, (a >> 6) & 1)


@triton.jit
def _plane_bytes(length, WIDTH: tl.constexpr):
    return (length * WIDTH + 7) // 8


@triton.jit
def _load_cut_slice(base, geometry, S: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.arange(0, 32)[None, :] + 32 * S
    height = _plane_bytes(geometry[2], WIDTH)[:, None]
    slot = tl.zeros_like(i + height)
    for k in tl.static_range(1, 8 // WIDTH):
        slot += (i >= k * height).to(tl.int32)
    byte = tl.load(base[:, None] + (i - slot * height), mask=i < geometry[2][:, None], other=0).to(tl.int32)
    return (byte >> (slot * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _load_plane(base, geometry, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    if RAGGED == 2:
        return joined(
            _load_cut_slice(base, geometry, 0, WIDTH),
            _load_cut_slice(base, geometry, 1, WIDTH),
            _load_cut_slice(base, geometry, 2, WIDTH),
            _load_cut_slice(base, geometry, 3, WIDTH),
        )
    else:
        return _load_whole_plane(base, geometry, WIDTH, RAGGED)


@triton.jit
def _chunk_base(p, geometry, row_bytes, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    offset = geometry[0] * row_bytes + geometry[1] // 8 * BITS
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return p + offset


@triton.jit
def _load_adjacent_slice(base, geometry, S: tl.constexpr):
    i = tl.arange(0, 32)[None, :]
    byte = tl.load(base[:, None] + (i // 2 + 16 * S), mask=i + 32 * S < geometry[2][:, None], other=0).to(tl.int32)
    return (byte >> (i % 2 * 4)) & 15


@triton.jit
def load_codes(p, geometry, row_bytes, BITS: tl.constexpr, ADJACENT: tl.constexpr, STEP: tl.constexpr):
    """Unpacks codes (`formats.packing`), int32."""
    base = _chunk_base(p, geometry, row_bytes, BITS, STEP.aligned)
    if ADJACENT:
        return joined(
            _load_adjacent_slice(base, geometry, 0),
            _load_adjacent_slice(base, geometry, 1),
            _load_adjacent_slice(base, geometry, 2),
            _load_adjacent_slice(base, geometry, 3),
        )
    elif BITS == 3:
        high = _load_plane(base, geometry, 2, STEP.ragged)
        return (high << 1) | _load_plane(base + _plane_bytes(geometry[2], 2), geometry, 1, STEP.ragged)
    elif BITS == 6:
        high = _load_plane(base, geometry, 4, STEP.ragged)
        return (high << 2) | _load_plane(base + _plane_bytes(geometry[2], 4), geometry, 2, STEP.ragged)
    else:
        return _load_plane(base, geometry, BITS, STEP.ragged)


@triton.jit
def _store_byte(base, at, x, allowed):
    tl.store(base[:, None] + at, x.to(tl.uint8), mask=allowed[:, None])


@triton.jit
def _store_whole_plane(base, codes, allowed, WIDTH: tl.constexpr):
    i = tl.arange(0, 32)[None, :]
    a, b, c, d = slices(codes)
    if WIDTH == 8:
        _store_byte(base, i, a, allowed)
        _store_byte(base, i + 32, b, allowed)
        _store_byte(base, i + 64, c, allowed)
        _store_byte(base, i + 96, d, allowed)
    elif WIDTH == 4:
        _store_byte(base, i, a | (c << 4), allowed)
        _store_byte(base, i + 32, b | (d << 4), allowed)
    else:
        packed = a | (b << 2) | (c << 4) | (d << 6)
        if WIDTH == 2:
            _store_byte(base, i, packed, allowed)
        else:  # elements i and i + 16 share a byte: one bit of every second one is free
            halves = tl.reshape(packed, (packed.shape[0], 2, 16)) << tl.arange(0, 2)[None, :, None]
            _store_byte(base, tl.arange(0, 16)[None, :], tl.sum(halves, axis=1), allowed)


@triton.jit
def _store_cut_plane(base, codes, geometry, allowed, WIDTH: tl.constexpr):
    """A plane of codes of chunks that may be cut short: which elements share a byte depends on the length."""
    n: tl.constexpr = codes.shape[0]
    flat = tl.reshape(tl.permute(codes, (0, 3, 2, 1)), (n, 128))
    length = geometry[2][:, None]
    height = _plane_bytes(length, WIDTH)
    byte = tl.arange(0, 16 * WIDTH)[None, :] + tl.zeros_like(height)
    packed = tl.zeros_like(byte)
    for k in tl.static_range(8 // WIDTH):
        at = byte + k * height
        code = tl.gather(flat, tl.minimum(at, 127), 1)
        packed |= tl.where(at < length, code, 0) << (k * WIDTH)
    tl.store(base[:, None] + byte, packed.to(tl.uint8), mask=allowed[:, None] & (byte < height))


@triton.jit
def _store_plane(base, codes, geometry, allowed, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    if RAGGED == 2:
        _store_cut_plane(base, codes, geometry, allowed, WIDTH)
    else:
        _store_whole_plane(base, codes, allowed, WIDTH)


@triton.jit
def _store_adjacent_slice(base, codes, geometry, allowed, S: tl.constexpr):
    i = tl.arange(0, 32)[None, :] + 32 * S
    there = tl.where(i < geometry[2][:, None], codes, 0)
    low, high = tl.split(tl.reshape(there, (codes.shape[0], 16, 2)))
    at = tl.arange(0, 16)[None, :] + 16 * S
    mask = allowed[:, None] & (2 * at < geometry[2][:, None])
    tl.store(base[:, None] + at, (low | (high << 4)).to(tl.uint8), mask=mask)


@triton.jit
def store_codes(p, codes, geometry, allowed, row_bytes, BITS: tl.constexpr, ADJACENT: tl.constexpr, STEP: tl.constexpr):
    """Packs codes (`formats.packing`) of those chunks that are `allowed`."""
    base = _chunk_base(p, geometry, row_bytes, BITS, STEP.aligned)
    if ADJACENT:
        a, b, c, d = slices(codes)
        _store_adjacent_slice(base, a, geometry, allowed, 0)
        _store_adjacent_slice(base, b, geometry, allowed, 1)
        _store_adjacent_slice(base, c, geometry, allowed, 2)
        _store_adjacent_slice(base, d, geometry, allowed, 3)
    elif BITS == 3:
        _store_plane(base, codes >> 1, geometry, allowed, 2, STEP.ragged)
        _store_plane(base + _plane_bytes(geometry[2], 2), codes & 1, geometry, allowed, 1, STEP.ragged)
    elif BITS == 6:
        _store_plane(base, codes >> 2, geometry, allowed, 4, STEP.ragged)
        _store_plane(base + _plane_bytes(geometry[2], 4), codes & 3, geometry, allowed, 2, STEP.ragged)
    else:
        _store_plane(base, codes, geometry, allowed, BITS, STEP.ragged)


# --- blocks ------------------------------------------------------------------------------------------------------


@triton.jit
def over_tile(x, TILE: tl.constexpr, LARGEST: tl.constexpr):
    """The largest (or smallest) of a ``[N]`` tensor over each run of TILE chunks, for every chunk of it."""
    if TILE == 1:
        return x
    elif TILE == x.shape[0]:
        return tl.zeros_like(x) + (tl.max(x, axis=0) if LARGEST else tl.min(x, axis=0))
    else:
        runs = tl.reshape(x, (x.shape[0] // TILE, TILE))
        found = tl.max(runs, axis=1) if LARGEST else tl.min(runs, axis=1)
        # A broadcast would leave each thread with the numbers of all chunks, and compute with every one of them.
        return tl.gather(found, tl.arange(0, x.shape[0]) // TILE, 0)


@triton.jit
def run_of(BLOCK: tl.constexpr, TILE: tl.constexpr):
    """How many chunks of a tile share a block: of rows, and of blocks that are longer than the row, all."""
    if BLOCK <= 0 or BLOCK // 128 > TILE:
        return TILE
    else:
        return BLOCK // 128


@triton.jit
def over_block(x, BLOCK: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr):
    """The largest (or smallest) element of every block, in the shape of metadata."""
    if BLOCK == 16:
        halves = tl.reshape(x, (x.shape[0], 2, 16, 2, 2))
        found = tl.max(halves, axis=2) if LARGEST else tl.min(halves, axis=2)
        spread = tl.broadcast_to(found[:, :, None, :, :], halves.shape)
        return tl.reshape(spread, x.shape)
    elif BLOCK == 32:
        return (tl.max(x, axis=1) if LARGEST else tl.min(x, axis=1))[:, None, :, :]
    elif BLOCK == 64:
        pairs = tl.max(x, axis=2) if LARGEST else tl.min(x, axis=2)
        return (tl.max(pairs, axis=1) if LARGEST else tl.min(pairs, axis=1))[:, None, None, :]
    else:
        threes = tl.max(x, axis=3) if LARGEST else tl.min(x, axis=3)
        pairs = tl.max(threes, axis=2) if LARGEST else tl.min(threes, axis=2)
        chunk = tl.max(pairs, axis=1) if LARGEST else tl.min(pairs, axis=1)
        return over_tile(chunk, run_of(BLOCK, TILE), LARGEST)[:, None, None, None]


@triton.jit
def block_of(geometry, BLOCK: tl.constexpr):
    """The number of every block in its row, in the shape of metadata."""
    col = geometry[1][:, None, None, None]
    if BLOCK == 16:
        return col // 16 + elements() // 16
    elif BLOCK == 32:
        return col // 32 + tl.arange(0, 2)[None, None, :, None] + 2 * tl.arange(0, 2)[None, None, None, :]
    elif BLOCK == 64:
        return col // 64 + tl.arange(0, 2)[None, None, None, :]
    elif BLOCK <= 0:
        return tl.zeros_like(col)
    else:
        return col // BLOCK


@triton.jit
def block_length(geometry, cols, BLOCK: tl.constexpr):
    """How many elements each block has, in the shape of metadata; not above zero: it does not exist."""
    if BLOCK <= 0:
        return tl.zeros_like(geometry[1])[:, None, None, None] + cols
    else:
        return tl.minimum(cols - block_of(geometry, BLOCK) * BLOCK, BLOCK)


@triton.jit
def block_index(geometry, blocks_per_row, BLOCK: tl.constexpr):
    """Where the metadata of every block lies; one scale for everything lies at zero."""
    if BLOCK < 0:
        return tl.zeros_like(geometry[0])[:, None, None, None]
    else:
        return geometry[0][:, None, None, None] * blocks_per_row + block_of(geometry, BLOCK)


@triton.jit
def is_owner(geometry, allowed, cols, BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """Which entries of metadata are stored: of blocks that exist, by the first of their chunks."""
    mask = allowed[:, None, None, None]
    if BLOCK > 128:
        mask = mask & (geometry[1] % BLOCK == 0)[:, None, None, None]
    elif BLOCK <= 0:
        mask = mask & (geometry[1] == 0)[:, None, None, None]
    elif BLOCK == 16:
        mask = mask & (elements() % 16 == 0)
    if BLOCK > 0 and BLOCK < 128:
        if RAGGED == 2:
            mask = mask & (block_length(geometry, cols, BLOCK) > 0)
    return mask
