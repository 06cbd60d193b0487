"""The fused step and the decoder: a program for some tiles of some task, one launch for all tasks of a kind.

Contract, as `step.reference`:
    * A tile with a gradient or a target that is not finite keeps every byte it had, and is counted.
    * Nothing is written if the step was stopped (a gradient that must be finite is not), nor of an indivisible
      parameter in which the survey found something (`statistics`).
    * All of a tile is read before any of it is written: a barrier stands between, and no two programs share a tile.
    * A row that is one tile and longer than a program is walked several times: to know its metadata, then to store it.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton import codecs, log_code
from masterless.backends.triton.codecs import storage
from masterless.backends.triton.numbers import (
    INFINITE_BITS,
    LARGEST_ROOT_BITS,
    chunk_words,
    dither,
    fma,
    from_bits,
    magnitude_bits,
    negative,
    next_scale,
    scale_of,
    storable,
    widened,
)
from masterless.backends.triton.record import (
    FIRST,
    FIRST_KEY,
    FIRST_ROW,
    GRAD,
    MATRIX_ROWS,
    MEANS,
    ROWS,
    SECOND,
    SECOND_KEY,
    TARGET_PEAK,
    WEIGHT,
    WEIGHT_KEY,
    WORKSPACE,
)
from masterless.backends.triton.rules import descent_gradient, root_before, update
from masterless.backends.triton.tiles import (
    elements,
    load_codes,
    load_plain,
    over_block,
    pointer,
    present_elements,
    where_present,
)


@triton.jit
def owner_of(owners):
    """The task of this program, and the program's number in the task."""
    p = owners + 2 * tl.program_id(0).to(tl.int64)
    return tl.load(p).to(tl.int64), tl.load(p + 1).to(tl.int64)


@triton.jit
def geometry_of(place, piece, record, cols, STEP: tl.constexpr):
    """Where the chunks of a program lie; `place` is its number in its task, `piece` that of a long row's piece."""
    rows = tl.load(record + ROWS)
    chunk = tl.arange(0, STEP.chunks)
    if STEP.walk == "rows":
        row = place + tl.zeros_like(chunk).to(tl.int64)
        col = (piece * STEP.chunks + chunk) * 128
    elif STEP.walk == "columns":
        # Programs do not cross matrices: each has as many as its rows need.
        matrix_rows = tl.load(record + MATRIX_ROWS)
        chunks_per_row = (cols + 127) // 128
        strip = place // chunks_per_row
        strips = (matrix_rows + STEP.chunks - 1) // STEP.chunks
        inside = strip % strips * STEP.chunks + chunk
        row = tl.where(inside < matrix_rows, strip // strips * matrix_rows + inside, rows)
        col = tl.zeros_like(chunk) + (place % chunks_per_row).to(tl.int32) * 128
    else:
        number = place.to(tl.int32) * (STEP.chunks // STEP.tile) + chunk // STEP.tile
        if STEP.walk == "tails":
            row, last = number, (cols - 1) // (128 * STEP.tile)
            number = tl.zeros_like(chunk) + last
        else:
            per_row = cols // (128 * STEP.tile) if STEP.walk == "tiles" else (cols + 127) // 128
            row = number // per_row
            number = number - row * per_row
        row = row.to(tl.int64)
        col = (number * STEP.tile + chunk % STEP.tile) * 128
    length = tl.minimum(tl.maximum(cols - col, 0), 128)
    present = (row < rows) & (length > 0)
    # What does not exist is read where something does.
    return tl.where(present, row, 0), tl.where(present, col, 0), tl.where(present, length, 0), present


@triton.jit
def load_gradient(record, geometry, cols, STEP: tl.constexpr):
    """The gradient as it came, fp32."""
    address = tl.load(record + GRAD)
    if STEP.grad_bf16:
        return widened(load_plain(pointer(address, tl.uint16, STEP.aligned), geometry, cols, STEP))
    else:
        return load_plain(pointer(address, tl.float32, STEP.aligned), geometry, cols, STEP)


@triton.jit
def bad_gradients(g):
    """Where a gradient, or its square, is not finite."""
    return magnitude_bits(g) > LARGEST_ROOT_BITS


@triton.jit
def decode_second(record, s, geometry, cols, STEP: tl.constexpr):
    """The second moment: as stored, or estimated from factors (``row_i / mean(row) * col_j``)."""
    if STEP.second.kind == "factored":
        matrix = geometry[0] // tl.load(record + MATRIX_ROWS)
        mean = tl.load(pointer(tl.load(record + MEANS), tl.float32, False) + matrix)
        row = tl.load(pointer(s[2], tl.float32, False) + geometry[0])
        ratio = tl.where(mean > 0.0, tl.div_rn(row, tl.where(mean > 0.0, mean, 1.0)), 0.0)
        by_matrix = (matrix, geometry[1], geometry[2], geometry[3])
        col = load_plain(pointer(s[3], tl.float32, STEP.aligned), by_matrix, cols, STEP)
        return ratio[:, None, None, None] * col
    else:
        return codecs.decode(s, geometry, cols, STEP.second, STEP, False)


@triton.jit
def _level_before(level, c):
    """The `root_before` of a level, and NaN of zero: then the second moment is not needed to know where it was zero."""
    return tl.where(level > 0.0, root_before(level, c), float("nan"))


@triton.jit
def decode_two_bits(s, geometry, c, STEP: tl.constexpr):
    """The second moment in a two-bit log code, and its `_level_before`: a root for each level, not element."""
    codes = load_codes(pointer(s[0], tl.uint8, STEP.aligned), geometry, s[5], 2, False, STEP)
    levels = log_code.two_bit_levels(log_code.load_log_metadata(s, geometry, STEP.second))
    first, second = _level_before(levels[0], c), _level_before(levels[1], c)
    third, last = _level_before(levels[2], c), _level_before(levels[3], c)
    v = log_code.picked(codes, levels)
    return v, log_code.of_level(v, levels, (first, second, third, last))


@triton.jit
def advance(record, w_at, m_at, v_at, g, geometry, cols, c, STEP: tl.constexpr):
    """Where the weights should go, and the new moments."""
    w = g
    if not STEP.decodes_late:
        w = codecs.decode(w_at, geometry, cols, STEP.weight, STEP, False)
    g = descent_gradient(g, w, c, STEP)
    m, v, before = g, g, None
    if STEP.first.stored:
        m = codecs.decode(m_at, geometry, cols, STEP.first, STEP, False)
    if STEP.carries and STEP.second.two_bit_log:
        v, before = decode_two_bits(v_at, geometry, c, STEP)
    elif STEP.second.kind != "none":
        v = decode_second(record, v_at, geometry, cols, STEP)
    m, v, moved, size = update(g, m, v, before, c, STEP)
    if STEP.decodes_late:
        w = codecs.decode(w_at, geometry, cols, STEP.weight, STEP, False)
    target = fma(w, c[1], negative(moved * size))
    if STEP.pays_back:  # `tile.paid_back`
        momentum = tl.minimum(tl.maximum(m, -c[12]), c[12])
        target = fma(momentum - m, c[13], target)
        m = momentum
    return target, m, v


@triton.jit
def random_numbers(record, KEY: tl.constexpr, geometry, cols, CODEC: tl.constexpr):
    """The random bits of every element (`numbers.dither`), or nothing that anybody reads."""
    if CODEC.random:
        row = geometry[0] + tl.load(record + FIRST_ROW)
        chunk = row * ((cols + 127) // 128) + geometry[1] // 128
        own = chunk_words(tl.load(record + KEY), chunk)
        return dither(own[:, None, None, None], elements())
    else:
        return elements(), elements()


@triton.jit
def one_scale(record, w_at, STEP: tl.constexpr):
    """The scale of a weight that has only one, from the largest target that the survey's followers found."""
    peak = tl.load(pointer(tl.load(record + WORKSPACE), tl.int64, False) + TARGET_PEAK)
    held = scale_of(tl.load(codecs.scale_pointer(w_at, STEP.weight)), 1.0, STEP.weight)
    return next_scale(from_bits(peak.to(tl.int32)), held, 1.0, STEP.weight, STEP.held)


@triton.jit
def weight_scale(record, w_at, target, geometry, STEP: tl.constexpr):
    """The weight's scales under its policy."""
    if STEP.weight.block < 0:
        return tl.zeros_like(geometry[1]).to(tl.float32)[:, None, None, None] + one_scale(record, w_at, STEP)
    else:
        held = codecs.load_scale(w_at, geometry, STEP.weight)
        absmax = from_bits(codecs.peaks(target, geometry, STEP.weight, STEP))
        return next_scale(absmax, held, codecs.tensor_scale(w_at, geometry, STEP.weight), STEP.weight, STEP.held)


@triton.jit
def round_weight(target, scale, random, w_at, STEP: tl.constexpr):
    """The weight's codes, and what they stand for."""
    if STEP.weight.scaled:
        codes, index = codecs.encode(target, scale, random, w_at, STEP.weight, False)
        if STEP.weight.master:
            return codes, target
        else:
            return codes, codecs.in_scale(index, scale, STEP.weight)
    else:
        return elements(), codecs.rounded_plain(target, random, STEP.weight)


@triton.jit
def moment_metadata(x, geometry, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """The metadata of a moment's blocks, from its numbers."""
    if CODEC.kind == "log":
        return log_code.log_metadata(log_code.log_summary(x, geometry, cols, CODEC, STEP), CODEC)
    elif CODEC.scaled:
        return codecs.moment_scale(x, geometry, CODEC, STEP)
    else:
        return elements()


@triton.jit
def store_metadata(s, metadata, geometry, allowed, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """Stores the metadata of blocks."""
    if CODEC.kind == "log":
        log_code.store_log_metadata(s, metadata, geometry, allowed, cols, CODEC, STEP)
    elif CODEC.scaled and CODEC.block >= 0:
        codecs.store_scale(s, metadata, geometry, allowed, cols, CODEC, STEP)


@triton.jit
def store_moment(
    record, KEY: tl.constexpr, s, x, metadata, geometry, allowed, cols, CODEC: tl.constexpr, STEP: tl.constexpr
):
    """Encodes a moment under this metadata, and stores both."""
    random = random_numbers(record, KEY, geometry, cols, CODEC)
    codes = elements()
    if CODEC.kind == "log":
        codes = log_code.encode_log(x, metadata, random, CODEC)
    elif CODEC.scaled:
        codes, _ = codecs.encode(x, metadata, random, s, CODEC, True)
    codecs.store(s, x, codes, random, geometry, allowed, cols, CODEC, STEP)


@triton.jit
def unless_zero(allowed, number):
    """Those chunks that are allowed, if a number is not zero."""
    return allowed & (tl.where(allowed, number, 0.0) != 0.0)


@triton.jit
def count(x):
    """How many elements of a tensor of chunks are true."""
    return tl.sum(tl.sum(tl.sum(tl.sum(x.to(tl.int32), axis=3), axis=2), axis=1), axis=0).to(tl.int64)


@triton.jit
def tile_peak(x, geometry, STEP: tl.constexpr):
    """Of every chunk, the largest magnitude in its tile, as float bits."""
    bits = where_present(magnitude_bits(x), 0, geometry, STEP.ragged)
    return tl.reshape(over_block(bits, 0, STEP.run, True), (STEP.chunks,))


@triton.jit
def step_tiles(record, found, place, cols, c, STEP: tl.constexpr):
    """Tiles that a program holds as a whole."""
    geometry = geometry_of(place, 0, record, cols, STEP)
    w_at, m_at, v_at = storage(record, WEIGHT), storage(record, FIRST), storage(record, SECOND)
    g = load_gradient(record, geometry, cols, STEP)
    target, m, v = advance(record, w_at, m_at, v_at, g, geometry, cols, c, STEP)
    failed = tile_peak(target, geometry, STEP) >= INFINITE_BITS
    lost_only = failed
    if not STEP.indivisible:  # of those the survey has seen every gradient
        bad_tile = tile_peak(g, geometry, STEP) > LARGEST_ROOT_BITS
        lost_only, failed = failed & ~bad_tile, failed | bad_tile
    if tl.max(failed.to(tl.int32), axis=0) != 0:
        found_here = (magnitude_bits(target) >= INFINITE_BITS) & lost_only[:, None, None, None]
        if not STEP.indivisible:
            found_here = found_here | bad_gradients(g)
        tl.atomic_add(found, count(found_here & present_elements(geometry, STEP.ragged)))
    allowed = geometry[3] & ~failed

    random = random_numbers(record, WEIGHT_KEY, geometry, cols, STEP.weight)
    scale = target
    if STEP.weight.scaled:
        scale = weight_scale(record, w_at, target, geometry, STEP)
    codes, kept = round_weight(target, scale, random, w_at, STEP)
    if STEP.inject:
        m = fma(target - kept, c[10], m)
    m, v = storable(m, STEP.first), storable(v, STEP.second)
    tl.debug_barrier()
    moves = unless_zero(allowed, c[14])
    codecs.store(w_at, target, codes, random, geometry, moves, cols, STEP.weight, STEP)
    store_metadata(w_at, scale, geometry, moves, cols, STEP.weight, STEP)
    if STEP.first.stored:
        stays = allowed
        if STEP.weight_units:
            stays = unless_zero(allowed, c[0])
        metadata = moment_metadata(m, geometry, cols, STEP.first, STEP)
        store_moment(record, FIRST_KEY, m_at, m, metadata, geometry, stays, cols, STEP.first, STEP)
        store_metadata(m_at, metadata, geometry, stays, cols, STEP.first, STEP)
    if STEP.second.stored:
        metadata = moment_metadata(v, geometry, cols, STEP.second, STEP)
        store_moment(record, SECOND_KEY, v_at, v, metadata, geometry, allowed, cols, STEP.second, STEP)
        store_metadata(v_at, metadata, geometry, allowed, cols, STEP.second, STEP)
