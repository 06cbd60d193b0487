"""The loss of a language model without its logits: the output head decoded in slices of the vocabulary.

Contract:
    * ``linear_cross_entropy(x, w, targets)`` is ``F.cross_entropy(F.linear(x, w).float(), targets)``. Logits are
      computed in the dtype of `x` (autocast's, if it is on), everything after them in fp32.
    * Neither the logits of all tokens over the whole vocabulary, nor their gradient, nor a dense copy of a stored `w`
      exist at once: all are made slice by slice, in the backward pass once more.
    * The gradient of `w` is dense, unless it has a row sink (`tensor.rows`): then it is made slice by slice, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from masterless.step import dispatch as ops
from masterless.tensor.decoding import StoredTensor
from masterless.tensor.pieces import piece
from masterless.tensor.rows import RowSink, has_rows, rows_per_slice, sink_of


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, rows: int | None = None
) -> Tensor:
    """The mean cross-entropy of a linear output head, without making its logits.

    Args:
        x: what the head sees, ``[..., width]``.
        weight: the head ``[vocabulary, width]``, quantized or dense; a tied embedding is fine.
        targets: the right tokens, ``[...]``.
        ignore_index: targets of this value do not count.
        rows: of the head that are dense at a time; by default about 16 million elements.

    Returns:
        The mean over all targets that count, fp32.

    >>> x, w, targets = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
    >>> expected = torch.nn.functional.cross_entropy(x @ w.T, targets)
    >>> bool(torch.isclose(linear_cross_entropy(x, w, targets, rows=4), expected))
    True
    """
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: a head of shape {tuple(weight.shape)} does not fit inputs of shape "
            f"{tuple(x.shape)}; it takes [vocabulary, width] and [..., width]"
        )
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: targets of shape {tuple(targets.shape)} for inputs of shape {tuple(x.shape)}; pass "
            f"one target per token"
        )
    if isinstance(weight, StoredTensor) and not has_rows(weight.stored):
        raise ValueError(
            f"linear_cross_entropy: a head stored as '{weight.format}' has no scales by row; quantize it as 'int8'"
        )
    flat = targets.reshape(-1)
    outside = (flat != ignore_index) & ((flat < 0) | (flat >= weight.shape[0]))
    if bool(outside.any()):
        raise IndexError(
            f"linear_cross_entropy: target {int(flat[outside][0])} is no row of a head of {weight.shape[0]} rows"
        )
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    rows = rows or rows_per_slice(weight.shape[1])
    return _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight, flat, ignore_index, rows, sink_of(weight))


class _Head:
    """One call: what its slices are computed from."""

    def __init__(self, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int) -> None:
        self.x, self.weight, self.targets, self.rows = x, weight.detach(), targets, rows
        self.counts = targets != ignore_index
        self.count = max(1, int(self.counts.sum()))

    def slices(self) -> Iterator[tuple[int, int]]:
        size = self.weight.shape[0]
        return ((start, min(start + self.rows, size)) for start in range(0, size, self.rows))

    def weights(self, start: int, stop: int) -> Tensor:
        """Some rows of the head in the dtype of the computation."""
        if isinstance(self.weight, StoredTensor):
            return ops.dequantize(piece(self.weight, start, stop).stored, self.x.dtype)
        return self.weight[start:stop].to(self.x.dtype)

    def logits(self, weights: Tensor) -> Tensor:
        return torch.mm(self.x, weights.T).to(torch.float32)

    def hits(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The tokens whose target is in a slice, and where."""
        token = torch.nonzero((self.targets >= start) & (self.targets < stop) & self.counts).squeeze(1)
        return token, self.targets[token] - start

    def errors(self, logits: Tensor, log_sum: Tensor, start: int, stop: int, scale: Tensor) -> Tensor:
        """The gradient of the logits of a slice, in the dtype of the computation; overwrites `logits`."""
        errors = logits.sub_(log_sum.unsqueeze(1)).exp_()
        token, column = self.hits(start, stop)
        errors[token, column] -= 1.0
        return errors.mul_((self.counts * scale).unsqueeze(1)).to(self.x.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int, sink: RowSink | None
    ) -> Tensor:
        head = _Head(x.detach(), weight, targets, ignore_index, rows)
        highest = torch.full(targets.shape, -torch.inf, device=x.device)
        total, right = torch.zeros_like(highest), torch.zeros_like(highest)
        for start, stop in head.slices():
            logits = head.logits(head.weights(start, stop))
            token, column = head.hits(start, stop)
            right[token] = logits[token, column]
            higher = torch.maximum(highest, logits.amax(dim=1))
            total = total * (highest - higher).exp() + logits.sub_(higher.unsqueeze(1)).exp_().sum(dim=1)
            highest = higher
        log_sum = highest + total.log()
        ctx.save_for_backward(x, log_sum)
        ctx.head, ctx.sink = head, sink
        ctx.changes = _changes(weight)
        ctx.ticket = None if sink is None else sink.ticket()
        return ((log_sum - right) * head.counts).sum() / head.count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x, log_sum), head = ctx.saved_tensors, ctx.head
        if _changes(head.weight) != ctx.changes:
            raise RuntimeError(
                f"an output head of shape {tuple(head.weight.shape)} was changed between the forward and the backward "
                f"pass that needs it; step the optimizer after backward()"
            )
        scale = grad / head.count
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        shares = wants_weight and ctx.sink is not None and ctx.sink.accepts(ctx.ticket)
        dense = x.new_empty(head.weight.shape, dtype=head.weight.dtype) if wants_weight and not shares else None
        grad_x = torch.zeros_like(x, dtype=torch.float32) if wants_x else None

        def errors_in(weights: Tensor, start: int, stop: int) -> Tensor:
            return head.errors(head.logits(weights), log_sum, start, stop, scale)

        for start, stop in head.slices() if wants_x or dense is not None else ():
            weights = head.weights(start, stop)
            errors = errors_in(weights, start, stop)
            if grad_x is not None:
                grad_x += torch.mm(errors, weights)
            if dense is not None:
                dense[start:stop] = torch.mm(errors.T, head.x)
        if shares:  # asked for after this, slice by slice, each before the step that changes it

            def share(start: int, stop: int) -> Tensor:
                return torch.mm(errors_in(head.weights(start, stop), start, stop).T, head.x).to(torch.float32)

            ctx.sink.hand_in(ctx.ticket, share)
        return None if grad_x is None else grad_x.to(head.x.dtype), dense, None, None, None, None


def _changes(weight: Tensor) -> Any:
    return weight.stored.tensors["codes"]._version if isinstance(weight, StoredTensor) else weight._version
