"""How a tensor of any shape is seen as rows: the one geometry that weights and states share.

Contract:
    * A row is the shortest run of trailing dimensions that holds at least `MIN_ROW` elements; it never takes
      in dimension 0 (unless that is the only one: a vector is one row). ``[out, in]`` has rows of ``in``,
      experts ``[E, out, in]`` too, a convolution ``[out, in, 3, 3]`` has rows of ``in * 9``.
    * Scale blocks, packed codes and random numbers all run inside a row, in chunks that start at its first
      element. A split along dimension 0 therefore consists of whole blocks and changes no code.
    * Weights and states share this geometry, so a tile of 128 elements is the same 128 elements in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from masterless.formats.format import Format

MIN_ROW = 32
CHUNK = 128  # elements packed together, and numbered together by the random bits


@dataclass(frozen=True)
class Layout:
    """A tensor's shape as `rows` x `cols`.

    Attributes:
        slices: the length of dimension 0 (1 for a vector).
        rows: all rows, slice after slice.
        cols: elements of a row.
        matrix_rows: rows of one matrix: the last dimension before the row. A stack of experts has several
            matrices; an ordinary weight is one.
    """

    slices: int
    rows: int
    cols: int
    matrix_rows: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Layout:
        """The layout of a shape; scalars are one row of one element."""
        if len(shape) <= 1:
            return cls(1, 1, math.prod(shape), 1)
        cols, split = 1, len(shape)
        while split > 1 and cols < MIN_ROW:
            split -= 1
            cols *= shape[split]
        return cls(shape[0], math.prod(shape[:split]), cols, shape[split - 1])

    @property
    def rows_per_slice(self) -> int:
        """Rows in one slice of dimension 0."""
        return self.rows // self.slices if self.slices else 0

    @property
    def matrices(self) -> int:
        """Matrices in the stack; each has its own factored second moment."""
        return self.rows // self.matrix_rows if self.matrix_rows else 0

    def block(self, format: Format) -> int:
        """Elements of a row that share one scale."""
        return format.granularity if isinstance(format.granularity, int) else max(self.cols, 1)

    def blocks_per_row(self, format: Format) -> int:
        """Scales in one row (a shorter tail block counts as one)."""
        return -(-self.cols // self.block(format))

    @property
    def chunks_per_row(self) -> int:
        """Chunks of `CHUNK` elements in one row, the tail included."""
        return -(-self.cols // CHUNK)


def is_matrix_like(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is worth quantizing by default.

    Vectors (norms, biases) are a rounding error of the memory, and slices of fewer than `MIN_ROW` elements
    (an ``[out, 8]`` adapter) would pay more for metadata than for codes: both stay in full precision.
    """
    return len(shape) >= 2 and Layout.of(shape).cols >= MIN_ROW and math.prod(shape) > 0
