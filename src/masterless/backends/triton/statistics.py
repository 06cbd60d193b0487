"""What a step must know of whole parameters before any of them moves: `step.statistics` in launches.

Contract:
    * The survey counts gradients that are not finite; one that must be finite stops the whole step.
    * Sums are exact: integers in units of a power of two (`numbers.counted`), added by atomics in whatever order.
    * Largest magnitudes are compared as float bits, which atomics know.
    * No launch writes what another program of it still reads.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton import codecs
from masterless.backends.triton.codecs import storage
from masterless.backends.triton.kernels import (
    advance,
    bad_gradients,
    count,
    decode_second,
    geometry_of,
    load_gradient,
    one_scale,
    owner_of,
)
from masterless.backends.triton.numbers import (
    INFINITE_BITS,
    LARGEST,
    counted,
    float_bits,
    from_bits,
    magnitude_bits,
    power_of_two,
    stored_scale,
    sum_exponent,
    weighed_bits,
)
from masterless.backends.triton.record import (
    ADAFACTOR_LENGTH,
    COL_SUMS,
    COLS,
    COUNTERS,
    FIRST,
    LOST,
    MATRIX_ROWS,
    MEANS,
    MOVES,
    MUST_BE_FINITE,
    NUMBERS_LENGTH,
    PEAKS,
    RECORD_LENGTH,
    ROW_SUMS,
    ROWS,
    SECOND,
    SURVEYED,
    TARGET_PEAK,
    UPDATE_PEAK,
    UPDATE_SUM,
    WEIGHT,
    WEIGHT_PEAK,
    WEIGHT_SUM,
    WORKSPACE,
)
from masterless.backends.triton.rules import descent_gradient, numbers, update
from masterless.backends.triton.tiles import elements, over_block, pointer, present_elements

_BLOCK = tl.constexpr(1024)


@triton.jit
def _count_bits(n):
    """As `(n - 1).bit_length()` of a positive number."""
    bits = tl.zeros_like(n)
    for k in tl.static_range(62):
        bits += ((n - 1) >> k > 0).to(tl.int64)
    return bits


@triton.jit
def _squarable(record, w_at, g, geometry, cols, c, STEP: tl.constexpr):
    """The gradient that statistics are made of; zero where there is none."""
    if STEP.l2:
        w = codecs.decode(w_at, geometry, cols, STEP.weight, STEP, False)
        g = descent_gradient(g, w, c, STEP)
    return tl.where(present_elements(geometry, STEP.ragged), g, 0.0)


@triton.jit
def _chunk_peak(x, NEGATIVE: tl.constexpr):
    """The largest magnitude of every chunk as float bits, int64, as it counts in a format."""
    return tl.reshape(over_block(weighed_bits(x, NEGATIVE), 0, 1, True), (x.shape[0],)).to(tl.int64)


@triton.jit
def survey_kernel(records, table, owners, counts, stop, STEP: tl.constexpr):
    """Counts bad gradients; of indivisible tasks also with weight decay, and finds the first largest magnitudes."""
    task, place = owner_of(owners)
    record = records + task * RECORD_LENGTH
    cols, c = tl.load(record + COLS).to(tl.int32), numbers(table + task * NUMBERS_LENGTH)
    geometry = geometry_of(place, 0, record, cols, STEP)
    w_at = storage(record, WEIGHT)
    there = present_elements(geometry, STEP.ragged)
    g = load_gradient(record, geometry, cols, STEP)
    bad = bad_gradients(g) & there
    if STEP.indivisible:
        g = _squarable(record, w_at, g, geometry, cols, c, STEP)
        if STEP.l2:
            bad = bad | (bad_gradients(g) & there)
        if STEP.second.kind == "factored":
            matrix = geometry[0] // tl.load(record + MATRIX_ROWS)
            p = pointer(tl.load(record + PEAKS), tl.int64, False)
            tl.atomic_max(p + matrix, _chunk_peak(g, 1.0), mask=geometry[3])
        if STEP.adafactor:
            w = codecs.decode(w_at, geometry, cols, STEP.weight, STEP, False)
            peak = tl.max(tl.where(geometry[3], _chunk_peak(tl.where(there, w, 0.0), 1.0), 0), axis=0)
            tl.atomic_max(pointer(tl.load(record + WORKSPACE), tl.int64, False) + WEIGHT_PEAK, peak)
    found = count(bad)
    if found != 0:
        tl.atomic_add(counts + COUNTERS * task + SURVEYED, found)
        if tl.load(record + MUST_BE_FINITE) != 0:
            tl.atomic_max(stop, 1)


@triton.jit
def _stopped(counts, task, stop):
    return (tl.load(stop) != 0) | (tl.load(counts + COUNTERS * task + SURVEYED) != 0)


# --- factored second moments -------------------------------------------------------------------------------------


@triton.jit
def _factored_exponent(record, cols, matrix):
    """Of the unit in which a matrix's squares are counted."""
    peak = tl.load(pointer(tl.load(record + PEAKS), tl.int64, False) + matrix)
    wide = from_bits(peak.to(tl.int32)).to(tl.float64)
    longest = tl.maximum(tl.load(record + MATRIX_ROWS), cols.to(tl.int64))
    return sum_exponent(wide * wide, _count_bits(longest))


@triton.jit
def factored_sums_kernel(records, table, owners, counts, stop, STEP: tl.constexpr):
    """Adds up the squares of a matrix's rows and columns; walks columns."""
    task, place = owner_of(owners)
    record = records + task * RECORD_LENGTH
    if not _stopped(counts, task, stop):
        cols, c = tl.load(record + COLS).to(tl.int32), numbers(table + task * NUMBERS_LENGTH)
        geometry = geometry_of(place, 0, record, cols, STEP)
        g = load_gradient(record, geometry, cols, STEP)
        g = _squarable(record, storage(record, WEIGHT), g, geometry, cols, c, STEP)
        matrix = tl.max(geometry[0], axis=0) // tl.load(record + MATRIX_ROWS)
        wide = g.to(tl.float64)
        units = counted(wide * wide, _factored_exponent(record, cols, matrix))
        units = tl.where(geometry[3][:, None, None, None], units, 0)
        by_row = tl.sum(tl.sum(tl.sum(units, axis=3), axis=2), axis=1)
        tl.atomic_add(pointer(tl.load(record + ROW_SUMS), tl.int64, False) + geometry[0], by_row, mask=geometry[3])
        by_col = tl.sum(units, axis=0)[None, :, :, :]
        col = tl.max(geometry[1], axis=0) + elements()
        p = pointer(tl.load(record + COL_SUMS), tl.int64, False) + matrix * cols + col
        tl.atomic_add(p, by_col, mask=col < cols)


@triton.jit
def _average_in(p, sums, exponent, divisor, i, mask, c):
    """One of the factors' arrays after this step."""
    mean = tl.load(sums + i, mask=mask, other=0).to(tl.float64) * power_of_two(exponent) / divisor
    old = tl.load(p + i, mask=mask, other=0.0)
    return tl.where(mask, tl.minimum(old * c[5] + mean.to(tl.float32) * c[6], LARGEST), 0.0)


@triton.jit
def factored_finish_kernel(records, table, owners, counts, stop, STEP: tl.constexpr):
    """Averages a matrix's sums into its factors, and finds the mean of its row factors; a program for each matrix."""
    task, place = owner_of(owners)
    record = records + task * RECORD_LENGTH
    if not _stopped(counts, task, stop):
        cols, rows = tl.load(record + COLS).to(tl.int32), tl.load(record + MATRIX_ROWS).to(tl.int32)
        c, s = numbers(table + task * NUMBERS_LENGTH), storage(record, SECOND)
        matrix = place
        exponent = _factored_exponent(record, cols, matrix)
        row = pointer(s[2], tl.float32, False) + matrix * rows
        row_sums = pointer(tl.load(record + ROW_SUMS), tl.int64, False) + matrix * rows
        block = tl.arange(0, _BLOCK)
        peaks = tl.zeros_like(block)
        for start in range(0, rows, _BLOCK):
            i = start + block
            new = _average_in(row, row_sums, exponent, cols.to(tl.float64), i, i < rows, c)
            tl.store(row + i, new, mask=i < rows)
            peaks = tl.maximum(peaks, float_bits(new))
        # The same thread reads again what it wrote.
        unit = sum_exponent(from_bits(tl.max(peaks, axis=0)).to(tl.float64), _count_bits(rows.to(tl.int64)))
        total = tl.zeros_like(block).to(tl.int64)
        for start in range(0, rows, _BLOCK):
            i = start + block
            total += counted(tl.load(row + i, mask=i < rows, other=0.0).to(tl.float64), unit)
        mean = tl.sum(total, axis=0).to(tl.float64) * power_of_two(unit) / rows.to(tl.float64)
        tl.store(pointer(tl.load(record + MEANS), tl.float32, False) + matrix, mean.to(tl.float32))
        col = pointer(s[3], tl.float32, False) + matrix * cols
        col_sums = pointer(tl.load(record + COL_SUMS), tl.int64, False) + matrix * cols
        for start in range(0, cols, _BLOCK):
            i = start + block
            new = _average_in(col, col_sums, exponent, rows.to(tl.float64), i, i < cols, c)
            tl.store(col + i, new, mask=i < cols)


# --- Adafactor ---------------------------------------------------------------------------------------------------


@triton.jit
def _rms_exponent(work, record, cols, PEAK: tl.constexpr):
    """Of the unit in which the squares of a whole parameter are counted."""
    wide = from_bits(tl.load(work + PEAK).to(tl.int32)).to(tl.float64)
    return sum_exponent(wide * wide, _count_bits(tl.load(record + ROWS) * cols))


@triton.jit
def _sum_of_squares(x, exponent, geometry):
    wide = x.to(tl.float64)
    units = tl.where(geometry[3][:, None, None, None], counted(wide * wide, exponent), 0)
    return tl.sum(tl.sum(tl.sum(tl.sum(units, axis=3), axis=2), axis=1), axis=0)


@triton.jit
def adafactor_kernel(records, table, owners, counts, stop, STEP: tl.constexpr, SECOND_PASS: tl.constexpr):
    """The largest update and the sum of squared weights; in a second pass the sum of squared updates."""
    task, place = owner_of(owners)
    record = records + task * RECORD_LENGTH
    if not _stopped(counts, task, stop):
        cols, c = tl.load(record + COLS).to(tl.int32), numbers(table + task * NUMBERS_LENGTH)
        work = pointer(tl.load(record + WORKSPACE), tl.int64, False)
        geometry = geometry_of(place, 0, record, cols, STEP)
        there = present_elements(geometry, STEP.ragged)
        w = codecs.decode(storage(record, WEIGHT), geometry, cols, STEP.weight, STEP, False)
        g = descent_gradient(load_gradient(record, geometry, cols, STEP), w, c, STEP)
        v = decode_second(record, storage(record, SECOND), geometry, cols, STEP)
        # STEP has no first moment here: the update itself, before clipping.
        _, _, moved, _ = update(g, g, v, None, c, STEP)
        moved = tl.where(there, moved, 0.0)
        if SECOND_PASS:
            exponent = _rms_exponent(work, record, cols, UPDATE_PEAK)
            tl.atomic_add(work + UPDATE_SUM, _sum_of_squares(moved, exponent, geometry))
        else:
            tl.atomic_max(work + UPDATE_PEAK, tl.max(tl.where(geometry[3], _chunk_peak(moved, 1.0), 0), axis=0))
            exponent = _rms_exponent(work, record, cols, WEIGHT_PEAK)
            tl.atomic_add(work + WEIGHT_SUM, _sum_of_squares(tl.where(there, w, 0.0), exponent, geometry))


@triton.jit
def _rms(work, record, cols, PEAK: tl.constexpr, SUM: tl.constexpr):
    unit = power_of_two(_rms_exponent(work, record, cols, PEAK))
    total = tl.load(work + SUM).to(tl.float64) * unit
    return tl.sqrt(total / (tl.load(record + ROWS) * cols).to(tl.float64))


@triton.jit
def adafactor_finish_kernel(records, table, adafactor, owners, counts, stop, STEP: tl.constexpr):
    """As `rules.finish_adafactor` and its twin in weight units: completes a task's numbers; a program for each."""
    task, _ = owner_of(owners)
    record = records + task * RECORD_LENGTH
    if not _stopped(counts, task, stop):
        cols = tl.load(record + COLS)
        work = pointer(tl.load(record + WORKSPACE), tl.int64, False)
        given = adafactor + task * ADAFACTOR_LENGTH
        rms_weight = _rms(work, record, cols, WEIGHT_PEAK, WEIGHT_SUM)
        rms_update = _rms(work, record, cols, UPDATE_PEAK, UPDATE_SUM)
        alpha = tl.maximum(tl.load(given + 2), rms_weight) * tl.load(given)
        ratio = tl.maximum(rms_update / tl.load(given + 3), 1.0)
        clip = (ratio * 0.0 + 1.0) / ratio
        without_buffer = tl.load(given + 4) != 0.0
        out = table + task * NUMBERS_LENGTH
        size = tl.where(without_buffer, alpha * clip, alpha).to(tl.float32)
        tl.store(out + 9, clip.to(tl.float32))
        if STEP.weight_units:
            inside = ~without_buffer
            moves = alpha != 0.0
            rate = (tl.load(given + 1) * clip * alpha).to(tl.float32)
            tl.store(out + 4, tl.where(moves, rate, 0.0), mask=inside)
            tl.store(out + 3, 1.0, mask=inside & ~moves)
            tl.store(out + 10, 0.0, mask=inside & ~moves)
            size = tl.where(inside, tl.where(moves, 1.0, 0.0), size)
        tl.store(out, size)


# --- one scale for a whole weight --------------------------------------------------------------------------------


@triton.jit
def target_peak_kernel(records, table, owners, counts, stop, STEP: tl.constexpr):
    """The largest target of a weight with one scale; counts those that are not finite."""
    task, place = owner_of(owners)
    record = records + task * RECORD_LENGTH
    if not _stopped(counts, task, stop):
        cols, c = tl.load(record + COLS).to(tl.int32), numbers(table + task * NUMBERS_LENGTH)
        geometry = geometry_of(place, 0, record, cols, STEP)
        g = load_gradient(record, geometry, cols, STEP)
        w_at, m_at, v_at = storage(record, WEIGHT), storage(record, FIRST), storage(record, SECOND)
        target, _, _ = advance(record, w_at, m_at, v_at, g, geometry, cols, c, STEP)
        there = present_elements(geometry, STEP.ragged)
        lost = count((magnitude_bits(target) >= INFINITE_BITS) & there)
        if lost != 0:
            tl.atomic_add(counts + COUNTERS * task + LOST, lost)
        peak = tl.max(tl.where(geometry[3], _chunk_peak(tl.where(there, target, 0.0), STEP.weight.negative), 0), axis=0)
        tl.atomic_max(pointer(tl.load(record + WORKSPACE), tl.int64, False) + TARGET_PEAK, peak)


@triton.jit
def store_scale_kernel(records, table, owners, counts, stop, STEP: tl.constexpr):
    """Stores the scale of a weight that has only one, after all of it was encoded; a program for each."""
    task, _ = owner_of(owners)
    record = records + task * RECORD_LENGTH
    kept = _stopped(counts, task, stop) | (tl.load(counts + COUNTERS * task + LOST) != 0)
    if not (kept | (tl.load(table + task * NUMBERS_LENGTH + MOVES) == 0.0)):
        s = storage(record, WEIGHT)
        scale = one_scale(record, s, STEP)
        tl.store(codecs.scale_pointer(s, STEP.weight), stored_scale(scale, 1.0, STEP.weight))
