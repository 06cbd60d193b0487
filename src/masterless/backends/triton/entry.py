"""The kernels that are launched for a step's main part and for decoding: `kernels` and `rows` put together."""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton import codecs
from masterless.backends.triton.codecs import storage
from masterless.backends.triton.kernels import geometry_of, owner_of, step_tiles
from masterless.backends.triton.record import (
    COLS,
    COUNTERS,
    LOST,
    NUMBERS_LENGTH,
    RECORD_LENGTH,
    STEPPED,
    SURVEYED,
    WEIGHT,
)
from masterless.backends.triton.rows import step_row
from masterless.backends.triton.rules import numbers
from masterless.backends.triton.tiles import store_plain


@triton.jit
def step_kernel(records, table, owners, counts, stop, STEP: tl.constexpr):
    """Steps the tiles of a program.

    Args:
        records: a record for every task.
        table: the numbers of every task.
        owners: of every program its task, and its number in the task.
        counts: of every task, what is not finite: gradients in the survey, targets of indivisible tasks, both here.
        stop: not zero: nothing moves.
        STEP: the kind of step.
    """
    task, place = owner_of(owners)
    record = records + task * RECORD_LENGTH
    counts += COUNTERS * task
    stopped = tl.load(stop) != 0
    if STEP.indivisible:
        stopped = stopped | (tl.load(counts + SURVEYED) != 0) | (tl.load(counts + LOST) != 0)
    if not stopped:
        cols = tl.load(record + COLS).to(tl.int32)
        c = numbers(table + task * NUMBERS_LENGTH)
        if STEP.walk == "rows":
            step_row(record, counts + STEPPED, place, cols, c, STEP)
        else:
            step_tiles(record, counts + STEPPED, place, cols, c, STEP)


@triton.jit
def decode_kernel(record, out, STEP: tl.constexpr, VISIBLE: tl.constexpr, BF16: tl.constexpr):
    """Decodes the chunks of a program: fp32, or bf16 rounded to nearest even."""
    cols = tl.load(record + COLS).to(tl.int32)
    geometry = geometry_of(tl.program_id(0).to(tl.int64), 0, record, cols, STEP)
    x = codecs.decode(storage(record, WEIGHT), geometry, cols, STEP.weight, STEP, VISIBLE)
    if BF16:
        store_plain(out, codecs.nearest_bf16(x), geometry, geometry[3], cols, STEP)
    else:
        store_plain(out, x, geometry, geometry[3], cols, STEP)
