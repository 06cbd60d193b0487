"""Parameters that are used by rows: an embedding decodes the rows that are asked for, and its gradient is never dense.

Contract:
    * `F.embedding` of a stored matrix gathers codes and decodes those rows only. Its values are those of the decoded
      table, its gradient that of torch's embedding.
    * Whoever steps a parameter inside the backward pass may give it a `RowSink` (``parameter.row_sink``). Uses by rows
      (embeddings, `tensor.head.linear_cross_entropy`) then hand in their share of the gradient as a function of a run
      of rows, and when the last use of a backward pass has done so the sink gets all shares at once: a gradient as
      large as the parameter never exists. Tied parameters have several uses, and are stepped once.
    * A parameter that is also used as a whole gets a dense gradient from all its uses, as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from masterless.formats.layout import Layout
from masterless.formats.storage import Storage
from masterless.step import dispatch as ops

SLICE = 1 << 24  # elements of a run of rows that is dense at a time

Share = Callable[[int, int], Tensor]  # (first row, last row + 1) -> its gradient, fp32


def rows_per_slice(width: int) -> int:
    """Rows of a matrix of this width that are decoded, or have a gradient, at a time."""
    return max(1, SLICE // max(1, width))


class Ticket:
    """One use of a parameter by rows whose share of the gradient is still to come; it lives with autograd's graph."""


class RowSink:
    """Collects the shares of one parameter's gradient in a backward pass.

    Args:
        take: called with all shares when the last use has handed in its own.
    """

    def __init__(self, take: Callable[[Sequence[Share]], None]) -> None:
        self.take = take
        self.used_whole = False  # in the present forward pass: then all gradients are dense
        self.shares: list[Share] = []
        self._waiting: weakref.WeakSet[Ticket] = weakref.WeakSet()

    @property
    def waits(self) -> bool:
        """Whether shares were handed in and others are still to come."""
        return bool(self.shares)

    def ticket(self) -> Ticket:
        """Announces a use."""
        ticket = Ticket()
        self._waiting.add(ticket)
        return ticket

    def accepts(self, ticket: Ticket) -> bool:
        """Whether a use may hand in its share; if not, its gradient has to be dense."""
        if self.used_whole:
            self._waiting.discard(ticket)
        return not self.used_whole

    def hand_in(self, ticket: Ticket, share: Share) -> None:
        """Adds a share; the last one sets the step off."""
        self._waiting.discard(ticket)
        self.shares.append(share)
        if not self._waiting:
            shares, self.shares = self.shares, []
            self.take(shares)


def sink_of(parameter: Tensor) -> RowSink | None:
    """The sink of a parameter, if it has one and autograd records."""
    return parameter.__dict__.get("row_sink") if torch.is_grad_enabled() else None


def has_rows(stored: Storage) -> bool:
    """Whether rows of a stored tensor can be taken out: it is a matrix, and each row has scales of its own."""
    return (
        len(stored.shape) == 2
        and stored.format.granularity != "tensor"
        and Layout.of(stored.shape).rows == stored.shape[0]
    )


def decode_rows(stored: Storage, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a stored matrix, dense, in the order asked for."""
    flat = index.reshape(-1)
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= stored.shape[0]):
        raise IndexError(
            f"embedding: index out of range: {int(flat.min())} ... {int(flat.max())} in a table of {stored.shape[0]} "
            f"rows; check the tokens against the vocabulary"
        )
    parts = {name: tensor.index_select(0, flat) for name, tensor in stored.tensors.items()}
    rows = Storage(stored.format, (flat.numel(), stored.shape[1]), parts)
    return ops.dequantize(rows, dtype).view(*index.shape, stored.shape[1])


class GatherRows(torch.autograd.Function):
    """An embedding of a stored matrix."""

    @staticmethod
    def forward(ctx: Any, q: Any, index: Tensor, padding: int, sink: RowSink | None) -> Tensor:  # type: ignore[override]
        """The rows."""
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype, ctx.padding, ctx.sink = q.shape, q.dtype, padding, sink
        ctx.ticket = None if sink is None else sink.ticket()
        return decode_rows(q.stored, index, q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """A dense gradient, or this use's share of it for the sink."""
        (index,) = ctx.saved_tensors
        if ctx.sink is None or not ctx.sink.accepts(ctx.ticket):
            dense = torch.ops.aten.embedding_dense_backward(grad, index, ctx.shape[0], ctx.padding, False)
            return dense.to(ctx.dtype), None, None, None
        flat, rows = index.reshape(-1), grad.reshape(-1, ctx.shape[1])

        def share(start: int, stop: int) -> Tensor:
            mine = (flat >= start) & (flat < stop) & (flat != ctx.padding)
            total = rows.new_zeros(stop - start, rows.shape[1], dtype=torch.float32)
            return total.index_add_(0, flat[mine] - start, rows[mine].to(torch.float32))

        ctx.sink.hand_in(ctx.ticket, share)
        return None, None, None, None


def embedding(q: Any, index: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of a stored matrix at some indices; the row `padding_idx` gets no gradient."""
    padding = -1 if padding_idx is None else padding_idx % q.shape[0]
    return GatherRows.apply(q, index, padding, sink_of(q))
