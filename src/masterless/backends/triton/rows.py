"""The step of a row that is one tile and longer than a program: walked piece by piece, several times.

Contract: as `kernels`, and to the same bits: metadata of the whole row is known before any piece is stored, and
is stored after the last piece was read.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton import codecs, log_code
from masterless.backends.triton.codecs import storage
from masterless.backends.triton.kernels import (
    advance,
    bad_gradients,
    count,
    geometry_of,
    load_gradient,
    moment_metadata,
    random_numbers,
    round_weight,
    store_metadata,
    store_moment,
    unless_zero,
    weight_scale,
)
from masterless.backends.triton.numbers import (
    INFINITE_BITS,
    fma,
    fresh_scale,
    from_bits,
    magnitude_bits,
    next_scale,
    storable,
)
from masterless.backends.triton.record import FIRST, FIRST_KEY, SECOND, SECOND_KEY, WEIGHT, WEIGHT_KEY
from masterless.backends.triton.tiles import present_elements

_NO_LANE = tl.constexpr(0xFFFFFFFF)
_ABOVE = tl.constexpr(0x7FFFFFFF)  # the bits of all numbers


@triton.jit
def _advanced(record, place, piece, cols, c, STEP: tl.constexpr):
    """A piece of the row: where it lies, its targets and new moments."""
    geometry = geometry_of(place, piece, record, cols, STEP)
    g = load_gradient(record, geometry, cols, STEP)
    w_at, m_at, v_at = storage(record, WEIGHT), storage(record, FIRST), storage(record, SECOND)
    target, m, v = advance(record, w_at, m_at, v_at, g, geometry, cols, c, STEP)
    return geometry, target, m, v


@triton.jit
def _rounded(record, geometry, target, m, peak, cols, c, STEP: tl.constexpr):
    """The weight's scales and codes, and the first moment with what rounding took."""
    w_at = storage(record, WEIGHT)
    random = random_numbers(record, WEIGHT_KEY, geometry, cols, STEP.weight)
    scale = target
    if STEP.weight.scaled:
        if STEP.weight.block == 0:
            held = codecs.load_scale(w_at, geometry, STEP.weight)
            scale = next_scale(from_bits(peak), held, 1.0, STEP.weight, STEP.held)
        else:
            scale = weight_scale(record, w_at, target, geometry, STEP)
    codes, kept = round_weight(target, scale, random, w_at, STEP)
    if STEP.inject:
        m = fma(target - kept, c[10], m)
    return scale, codes, storable(m, STEP.first), random


@triton.jit
def _summary_of_none(STEP: tl.constexpr):
    chunks: tl.constexpr = STEP.chunks
    nothing = tl.full((chunks, 1, 1, 1), _ABOVE, tl.int32)
    return nothing * 0, tl.full((chunks, 8), _NO_LANE, tl.uint32), nothing


@triton.jit
def _with(summary, x, geometry, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """What is known of a moment's row, after one more piece of it."""
    if CODEC.block == 0 and CODEC.kind == "log":
        more = log_code.log_summary(x, geometry, cols, CODEC, STEP)
        top, lanes = tl.maximum(summary[0], more[0]), tl.minimum(summary[1], more[1])
        return top, lanes, tl.minimum(summary[2], more[2])
    elif CODEC.block == 0 and CODEC.scaled:
        return tl.maximum(summary[0], codecs.peaks(x, geometry, CODEC, STEP)), summary[1], summary[2]
    else:
        return summary


@triton.jit
def _metadata(summary, x, geometry, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """A moment's metadata: of the row, or of the blocks of this piece."""
    if CODEC.block == 0 and CODEC.kind == "log":
        return log_code.log_metadata(summary, CODEC)
    elif CODEC.block == 0 and CODEC.scaled:
        return fresh_scale(from_bits(summary[0]), 1.0, CODEC)
    else:
        return moment_metadata(x, geometry, cols, CODEC, STEP)


@triton.jit
def step_row(record, found, place, cols, c, STEP: tl.constexpr):
    """Steps one row, unless something in it is not finite."""
    chunks: tl.constexpr = STEP.chunks
    pieces = (cols + chunks * 128 - 1) // (chunks * 128)
    bad = tl.zeros((), tl.int64)
    for piece in range(pieces):
        geometry = geometry_of(place, piece, record, cols, STEP)
        g = load_gradient(record, geometry, cols, STEP)
        bad += count(bad_gradients(g) & present_elements(geometry, STEP.ragged))
    peak = tl.zeros((chunks, 1, 1, 1), tl.int32)
    if bad == 0:
        for piece in range(pieces):
            geometry, target, m, v = _advanced(record, place, piece, cols, c, STEP)
            bad += count((magnitude_bits(target) >= INFINITE_BITS) & present_elements(geometry, STEP.ragged))
            if STEP.weight.scaled and STEP.weight.block == 0:
                peak = tl.maximum(peak, codecs.peaks(target, geometry, STEP.weight, STEP))
    if bad != 0:
        tl.atomic_add(found, bad)
    else:
        of_first, of_second = _summary_of_none(STEP), _summary_of_none(STEP)
        if STEP.first.block == 0 or STEP.second.block == 0:
            for piece in range(pieces):
                geometry, target, m, v = _advanced(record, place, piece, cols, c, STEP)
                _, _, m, _ = _rounded(record, geometry, target, m, peak, cols, c, STEP)
                of_first = _with(of_first, m, geometry, cols, STEP.first, STEP)
                of_second = _with(of_second, storable(v, STEP.second), geometry, cols, STEP.second, STEP)
        _store_row(record, place, pieces, peak, of_first, of_second, cols, c, STEP)


@triton.jit
def _store_row(record, place, pieces, peak, of_first, of_second, cols, c, STEP: tl.constexpr):
    w_at, m_at, v_at = storage(record, WEIGHT), storage(record, FIRST), storage(record, SECOND)
    for piece in range(pieces):
        geometry, target, m, v = _advanced(record, place, piece, cols, c, STEP)
        scale, codes, m, random = _rounded(record, geometry, target, m, peak, cols, c, STEP)
        v = storable(v, STEP.second)
        tl.debug_barrier()
        moves = unless_zero(geometry[3], c[14])
        codecs.store(w_at, target, codes, random, geometry, moves, cols, STEP.weight, STEP)
        if STEP.weight.block != 0:
            store_metadata(w_at, scale, geometry, moves, cols, STEP.weight, STEP)
        if STEP.first.stored:
            stays = geometry[3]
            if STEP.weight_units:
                stays = unless_zero(stays, c[0])
            metadata = _metadata(of_first, m, geometry, cols, STEP.first, STEP)
            store_moment(record, FIRST_KEY, m_at, m, metadata, geometry, stays, cols, STEP.first, STEP)
            if STEP.first.block != 0:
                store_metadata(m_at, metadata, geometry, stays, cols, STEP.first, STEP)
        if STEP.second.stored:
            metadata = _metadata(of_second, v, geometry, cols, STEP.second, STEP)
            store_moment(record, SECOND_KEY, v_at, v, metadata, geometry, geometry[3], cols, STEP.second, STEP)
            if STEP.second.block != 0:
                store_metadata(v_at, metadata, geometry, geometry[3], cols, STEP.second, STEP)
    tl.debug_barrier()
    geometry = geometry_of(place, 0, record, cols, STEP)
    if STEP.weight.scaled and STEP.weight.block == 0:
        held = codecs.load_scale(w_at, geometry, STEP.weight)
        scale = next_scale(from_bits(peak), held, 1.0, STEP.weight, STEP.held)
        tl.debug_barrier()
        store_metadata(w_at, scale, geometry, unless_zero(geometry[3], c[14]), cols, STEP.weight, STEP)
    if STEP.first.block == 0 and STEP.first.stored:
        stays = geometry[3]
        if STEP.weight_units:
            stays = unless_zero(stays, c[0])
        metadata = _metadata(of_first, peak, geometry, cols, STEP.first, STEP)
        store_metadata(m_at, metadata, geometry, stays, cols, STEP.first, STEP)
    if STEP.second.block == 0 and STEP.second.stored:
        metadata = _metadata(of_second, peak, geometry, cols, STEP.second, STEP)
        store_metadata(v_at, metadata, geometry, geometry[3], cols, STEP.second, STEP)
