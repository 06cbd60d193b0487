"""Where each number of a task lies in the records that kernels read: `launch`'s fields as compile-time constants."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

import triton.language as tl

from masterless.backends.triton.launch import FIELDS, HEADER, STORAGE, WORK
from masterless.step.scalars import Scalars

NUMBERS = (*Scalars._fields, "moves")  # of a task's step; "moves" is zero where the weight must not be stored anew
ADAFACTOR = ("step_size", "rate1", "min_rms", "clip_threshold", "without_buffer")  # fp64, before the RMS are known
COUNTS = ("surveyed", "lost", "stepped")

RECORD_LENGTH = tl.constexpr(len(FIELDS))
NUMBERS_LENGTH = tl.constexpr(len(NUMBERS))
MOVES = tl.constexpr(NUMBERS.index("moves"))
ADAFACTOR_LENGTH = tl.constexpr(len(ADAFACTOR))
COUNTERS = tl.constexpr(len(COUNTS))

ROWS = tl.constexpr(HEADER.index("rows"))
COLS = tl.constexpr(HEADER.index("cols"))
MATRIX_ROWS = tl.constexpr(HEADER.index("matrix_rows"))
FIRST_ROW = tl.constexpr(HEADER.index("first_row"))
MUST_BE_FINITE = tl.constexpr(HEADER.index("must_be_finite"))
GRAD = tl.constexpr(HEADER.index("grad"))
WEIGHT_KEY = tl.constexpr(HEADER.index("weight_key"))
FIRST_KEY = tl.constexpr(HEADER.index("first_key"))
SECOND_KEY = tl.constexpr(HEADER.index("second_key"))
WORKSPACE = tl.constexpr(HEADER.index("workspace"))
PEAKS = tl.constexpr(HEADER.index("peaks"))
ROW_SUMS = tl.constexpr(HEADER.index("row_sums"))
COL_SUMS = tl.constexpr(HEADER.index("col_sums"))
MEANS = tl.constexpr(HEADER.index("means"))

WEIGHT = tl.constexpr(len(HEADER))
FIRST = tl.constexpr(len(HEADER) + len(STORAGE))
SECOND = tl.constexpr(len(HEADER) + 2 * len(STORAGE))

SURVEYED = tl.constexpr(COUNTS.index("surveyed"))
LOST = tl.constexpr(COUNTS.index("lost"))
STEPPED = tl.constexpr(COUNTS.index("stepped"))

WEIGHT_PEAK = tl.constexpr(WORK.index("weight_peak"))
UPDATE_PEAK = tl.constexpr(WORK.index("update_peak"))
TARGET_PEAK = tl.constexpr(WORK.index("target_peak"))
WEIGHT_SUM = tl.constexpr(WORK.index("weight_sum"))
UPDATE_SUM = tl.constexpr(WORK.index("update_sum"))
