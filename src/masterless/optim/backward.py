"""Stepping inside the backward pass, so that gradients never exist all at once.

Contract:
    * As soon as a parameter's gradient is complete its step is taken and the gradient is freed: the peak is
      one layer's gradient, not the model's.
    * The result is that of ``backward()`` followed by ``step()``, to the bit: no step reads another parameter.
    * Quantized embeddings and heads that are used by rows (`tensor.rows`) are stepped slice by slice: their gradient
      never exists as a whole. It is summed in fp32, where a dense one would be rounded to the parameter's dtype.
    * What needs all gradients together is had by other means: the global norm of the *previous* step
      (`clip_previous_norm`), or the exact one by a backward pass that only measures (`clip_global_norm`); sums over
      several backward passes in buffers of a low-bit format (`accumulate`). Skipping a whole step on overflow cannot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from masterless.formats import parse
from masterless.optim.accumulation import GradientSum
from masterless.optim.base import LowBitOptimizer, require
from masterless.optim.plan import Member
from masterless.optim.slices import sliceable, step_in_slices
from masterless.tensor.quantized import local_of
from masterless.tensor.rows import RowSink, Share, rows_per_slice

PREVIOUS_NORM = "previous_gradient_norm"  # key of the first param group: a checkpoint of the optimizer holds it


class BackwardStepper:
    """Handle of `step_in_backward`: `remove` it, or use it as a context manager.

    Attributes:
        norm: the global norm of the last step's gradient before clipping; None if nothing clips by a global norm.
    """

    def __init__(self) -> None:
        self.norm: float | None = None
        self._handles: list[Any] = []

    def remove(self) -> None:
        """Goes back to ordinary steps."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> BackwardStepper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Backward passes inside only measure the global norm: the first pass of ``clip_global_norm``."""
        raise ValueError("measuring() belongs to step_in_backward(..., clip_global_norm=...); pass it")
        yield


def step_in_backward(
    model: nn.Module,
    optimizer: LowBitOptimizer,
    *,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    clip_previous_norm: float | None = None,
    clip_global_norm: float | None = None,
    accumulate: int = 1,
    accumulate_in: str = "int8",
) -> BackwardStepper:
    """Applies every parameter's update as soon as its gradient is ready, and frees the gradient.

    ``optimizer.step()`` in the loop then finds nothing left to do; keep it, schedulers expect it. Each backward pass is
    a step, unless `accumulate` says otherwise.

    Args:
        model: the model whose backward pass takes the steps.
        optimizer: an optimizer of this library over the model's parameters.
        clip_value: clips every gradient element to ``[-clip_value, clip_value]``.
        clip_norm: scales each parameter's gradient down to at most this norm.
        clip_previous_norm: scales all gradients by ``clip_previous_norm / norm`` where `norm`, the global norm of the
            *previous* step's gradients, is larger than it. The very first step clips each parameter by itself.
        clip_global_norm: clips by the global norm exactly, in two passes over the same batch: the first one inside
            ``with stepper.measuring():``, which steps nothing.
        accumulate: backward passes per step; gradients are summed (divide the loss), in buffers that are stored as ...
        accumulate_in: ... this format, rounded stochastically: "int8" (1.06 bytes per parameter) or any signed one;
            "fp32" is exact. Parameters used by rows keep what their gradient is made from instead, which is exact.

    Returns:
        A handle; ``remove()`` it to go back to ordinary steps.

    >>> from masterless.optim import AdamW
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    >>> with step_in_backward(model, AdamW(model.parameters(), exp_avg="int4", exp_avg_sq="log2")):
    ...     model(torch.ones(2, 64)).sum().backward()
    >>> model[0].weight.grad is None
    True
    """
    limits = {
        "clip_value": clip_value,
        "clip_norm": clip_norm,
        "clip_previous_norm": clip_previous_norm,
        "clip_global_norm": clip_global_norm,
    }
    for name, value in limits.items():
        require(value is None or value > 0.0, name, value, "must be positive")
    require(isinstance(accumulate, int) and accumulate >= 1, "accumulate", accumulate, "a number of backward passes")
    require(parse(accumulate_in).signed, "accumulate_in", accumulate_in, "gradients have signs; 'int8' or 'fp32'")
    require(
        clip_previous_norm is None or clip_global_norm is None,
        "clip_previous_norm",
        clip_previous_norm,
        "not together with clip_global_norm; choose one",
    )
    require(
        accumulate == 1 or clip_global_norm is None,
        "clip_global_norm",
        clip_global_norm,
        "not with accumulate: the norm of a sum is known only when the sum is; use clip_previous_norm",
    )
    if not isinstance(optimizer, LowBitOptimizer):
        raise TypeError(f"step_in_backward needs an optimizer of masterless, not {type(optimizer).__name__}")
    inside = {id(p) for p in model.parameters()}
    strangers = [name for _, p, name in optimizer.parameters() if id(p) not in inside]
    if strangers:
        raise ValueError(f"the optimizer holds parameters that are not in the model, for instance {strangers[0]!r}")
    replicated = isinstance(model, nn.parallel.DistributedDataParallel)
    if replicated or any(local_of(p) is not p for _, p, _ in optimizer.parameters()):
        require(
            clip_previous_norm is None and clip_global_norm is None and accumulate == 1,
            "step_in_backward",
            "a model that several ranks share",
            "it clips by value or per parameter and does not accumulate; leave the other options out",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # A parameter's own hook would see gradients that are not yet reduced, and the replicas would drift apart.
        from masterless.optim.ddp_hook import step_in_hook  # torch.distributed is large

        stepper = BackwardStepper()
        owners = _Owners(optimizer)
        clip = _Clip(clip_value, clip_norm)
        stepper._handles = [step_in_hook(model, optimizer, clip.whole, owners.of)]
        return stepper
    return _Stepper(optimizer, limits, accumulate, accumulate_in)


class _Owners:
    """The group and name of each parameter; loading a state dict gives the optimizer new groups."""

    def __init__(self, optimizer: LowBitOptimizer) -> None:
        self._optimizer = optimizer
        self._owners: dict[int, Member] = {}
        self._groups: list[dict[str, Any]] = []

    def of(self, p: Tensor) -> Member:
        if self._groups is not self._optimizer.param_groups:
            self._groups = self._optimizer.param_groups
            self._owners.update({id(member[1]): member for member in self._optimizer.parameters()})
        return self._owners[id(p)]


class _Clip:
    """What is done to gradients before a step; `scale` is the share that global clipping leaves of them."""

    def __init__(self, value: float | None, norm: float | None) -> None:
        self.value, self.norm, self.scale = value, norm, 1.0

    def by_value(self, grad: Tensor) -> Tensor:
        return grad if self.value is None else grad.clamp(-self.value, self.value)

    def factor(self, squares: float, limit: float | None) -> float:
        """What a parameter's gradient of this squared norm is multiplied with."""
        norm = math.sqrt(squares)
        return self.scale if limit is None or norm <= limit else self.scale * limit / norm

    def whole(self, grad: Tensor) -> Tensor:
        """A whole gradient, clipped by value and by its own norm."""
        grad = self.by_value(grad)
        if self.norm is not None:
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
            grad = grad * (self.norm / norm.clamp(min=self.norm)).to(grad.dtype)
        return grad if self.scale == 1.0 else grad * self.scale


class _Stepper(BackwardStepper):
    """Takes the steps of one process; see `step_in_backward`."""

    def __init__(
        self, optimizer: LowBitOptimizer, limits: dict[str, float | None], accumulate: int, accumulate_in: str
    ) -> None:
        super().__init__()
        self._optimizer, self._owners = optimizer, _Owners(optimizer)
        self._clip = _Clip(limits["clip_value"], limits["clip_norm"])
        self._previous, self._global = limits["clip_previous_norm"], limits["clip_global_norm"]
        self._accumulate, self._format = accumulate, parse(accumulate_in)
        self._sums: dict[int, tuple[Tensor, GradientSum]] = {}  # of gradients so far, by the parameter's id
        self._shares: dict[int, tuple[Tensor, list[Share]]] = {}
        self._sinks: dict[int, RowSink] = {}
        self._by_rows: set[int] = set()  # parameters that have been used so in the present pass
        self._passes, self._pass, self._measures = 0, -1, False
        self._squares, self._known_norm = 0.0, None  # type: tuple[float, float | None]
        for member in optimizer.parameters():
            p = member[1]
            if not p.requires_grad:
                continue
            self._handles.append(p.register_post_accumulate_grad_hook(self._arrived))
            if sliceable(optimizer, member):
                sink = self._sinks[id(p)] = p.row_sink = RowSink(lambda shares, p=p: self._shared(p, shares))  # type: ignore[attr-defined,misc]
                self._handles.append(_Attribute(p, sink))
        self._handles.append(optimizer.register_step_pre_hook(self._check_complete))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Backward passes inside only measure the global norm: the first pass of ``clip_global_norm``."""
        if self._global is None:
            raise ValueError("measuring() belongs to step_in_backward(..., clip_global_norm=...); pass it")
        self._measures, self._squares = True, 0.0
        try:
            yield
        finally:
            self._measures = False
        self._known_norm, self._squares = math.sqrt(self._squares), 0.0

    # --- gradients arrive --------------------------------------------------------------------------------------

    def _arrived(self, p: Tensor) -> None:
        """A parameter's dense gradient is complete."""
        grad, p.grad = p.grad, None
        if grad is None:  # all of it went to the sink
            return
        self._begin_pass()
        sink = self._sinks.get(id(p))
        if sink is not None and not sink.used_whole and (sink.waits or id(p) in self._by_rows):
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} was used by rows and, through a view of it, as a whole; use "
                f"the parameter itself (F.linear(x, weight), not x @ weight.T)"
            )
        if self._measures:
            self._squares += _square_sum(self._clip.by_value(grad))
            return
        if self._last_pass:
            self._step(p, self._with_sum(p, grad))
        else:
            self._keep(p, grad)

    def _shared(self, p: Tensor, shares: Sequence[Share]) -> None:
        """All uses of a parameter by rows have handed in their shares of its gradient."""
        self._begin_pass()
        self._by_rows.add(id(p))
        if self._measures:
            self._squares += self._square_sum_of(p, shares)
            return
        kept = self._shares.setdefault(id(p), (p, []))[1]
        kept.extend(shares)
        if self._last_pass:
            self._step_rows(p, self._shares.pop(id(p))[1])

    @property
    def _last_pass(self) -> bool:
        return self._passes == self._accumulate - 1

    def _begin_pass(self) -> None:
        """With the first gradient of a backward pass: what global clipping leaves of all of them."""
        number = torch._C._current_graph_task_id()  # an earlier pass may have ended with an error, and not been told
        if self._pass == number:
            return
        self._pass, self._clip.scale = number, 1.0
        self._by_rows.clear()
        if not self._measures:
            self._squares = 0.0
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)  # type: ignore[attr-defined]
        if self._measures or not self._last_pass:
            return
        norm, limit = self._known_norm, self._global or self._previous
        if self._previous is not None:
            norm = self._optimizer.param_groups[0].get(PREVIOUS_NORM)
        if self._global is not None and norm is None:
            raise RuntimeError(
                "clip_global_norm: the norm of this batch's gradients was not measured; run its backward pass first "
                "inside `with stepper.measuring():`"
            )
        if norm is not None and limit is not None and norm > limit:
            self._clip.scale = limit / norm

    def _end_pass(self) -> None:
        """After the last gradient of a backward pass."""
        self._pass = -1
        for sink in self._sinks.values():
            sink.used_whole = False
        if self._measures:
            return
        if not self._last_pass:
            self._passes += 1
            return
        for p, total in list(self._sums.values()):  # what got no gradient in the last pass
            self._step(p, total.plus(None))
        for p, shares in list(self._shares.values()):
            self._step_rows(p, shares)
        self._sums.clear()
        self._shares.clear()
        self._passes, self._known_norm = 0, None
        if self._previous is not None or self._global is not None:
            self.norm, self._squares = math.sqrt(self._squares), 0.0
            if self._previous is not None:
                self._optimizer.param_groups[0][PREVIOUS_NORM] = self.norm

    def _check_complete(self, *_: Any) -> None:
        waiting = [key for key, sink in self._sinks.items() if sink.waits]
        if waiting:
            name = next(name for _, p, name in self._optimizer.parameters() if id(p) in waiting)
            raise RuntimeError(
                f"{name} was used by rows in a forward pass whose backward pass has not run, and waits for its "
                f"gradient; compute without gradients (torch.no_grad()) what is not trained on"
            )

    # --- sums over several passes ------------------------------------------------------------------------------

    def _keep(self, p: Tensor, grad: Tensor) -> None:
        if id(p) not in self._sums:
            group, _, name = self._owners.of(p)
            step = int(self._optimizer.state.get(p, {}).get("step", 0))
            self._sums[id(p)] = (p, GradientSum(self._format, p.shape, p.device, group["seed"], step, name))
        self._sums[id(p)][1].add_(grad)

    def _with_sum(self, p: Tensor, grad: Tensor) -> Tensor:
        kept = self._sums.pop(id(p), None)
        return grad if kept is None else kept[1].plus(grad)

    # --- steps -------------------------------------------------------------------------------------------------

    def _step(self, p: Tensor, grad: Tensor) -> None:
        first_of_all = self._previous is not None and PREVIOUS_NORM not in self._optimizer.param_groups[0]
        if self._previous is not None or self._global is not None:
            squares = _square_sum(self._clip.by_value(grad))
            self._squares += squares
            if first_of_all:
                grad = grad * self._clip.factor(squares, self._previous)
        p.grad = self._clip.whole(grad)
        try:
            self._optimizer.step_parameters([self._owners.of(p)])
        finally:
            p.grad = None

    def _step_rows(self, p: Tensor, shares: Sequence[Share]) -> None:
        clip, factor = self._clip, self._clip.scale
        first_of_all = self._previous is not None and PREVIOUS_NORM not in self._optimizer.param_groups[0]
        limit = self._previous if first_of_all else clip.norm
        squares = 0.0
        if limit is not None:
            factor = clip.factor(self._square_sum_of(p, shares), limit)

        def gradient(start: int, stop: int) -> Tensor:
            nonlocal squares
            grad = clip.by_value(_sum(shares, start, stop))
            squares += _square_sum(grad)
            return grad if factor == 1.0 else grad * factor

        step_in_slices(self._optimizer, self._owners.of(p), gradient, rows_per_slice(p.shape[1]))
        self._squares += squares

    def _square_sum_of(self, p: Tensor, shares: Sequence[Share]) -> float:
        rows = rows_per_slice(p.shape[1])
        slices = ((start, min(start + rows, p.shape[0])) for start in range(0, p.shape[0], rows))
        return sum(_square_sum(self._clip.by_value(_sum(shares, *run))) for run in slices)


class _Attribute:
    """Takes a parameter's sink away again."""

    def __init__(self, p: Tensor, sink: RowSink) -> None:
        self._p, self._sink = p, sink

    def remove(self) -> None:
        if self._p.__dict__.get("row_sink") is self._sink:
            del self._p.row_sink  # type: ignore[attr-defined]


def _sum(shares: Sequence[Share], start: int, stop: int) -> Tensor:
    total = shares[0](start, stop)
    for share in shares[1:]:
        total += share(start, stop)
    return total


def _square_sum(grad: Tensor) -> float:
    return float(torch.linalg.vector_norm(grad, dtype=torch.float32)) ** 2
