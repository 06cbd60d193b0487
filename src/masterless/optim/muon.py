"""Muon: momentum whose matrix is orthogonalised before it is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from masterless.formats import Format
from masterless.formats.rounding import PURPOSES, parameter_id, stream_key
from masterless.formats.scaling import FROZEN
from masterless.formats.storage import Storage
from masterless.optim.base import LowBitOptimizer, require
from masterless.optim.batch import of_all_ranks, scale_policy
from masterless.optim.options import Options, common
from masterless.optim.plan import Member, StepPlan, counter_of, explained, task_of
from masterless.step import dispatch, tile
from masterless.step.orthogonal import ADJUSTMENTS, given_back, newton_schulz, shape_factor
from masterless.step.rules import RULES, Rule, Update
from masterless.step.scalars import Scalars, check_scalars
from masterless.step.task import ALONE, Task

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, as in torch.optim.Muon


def averaged(g: Tensor, m: Tensor | None, c: Scalars, nesterov: bool) -> tuple[Tensor, Tensor]:
    """The new momentum ``m + (1-mu)(g - m)``, and what of it and the gradient is orthogonalised."""
    if m is None:
        return g, g
    m = torch.lerp(m, g, c.rate1)  # as torch.optim.Muon has it, to the bit
    return m, torch.lerp(g, m, c.keep1) if nesterov else m


def _muon_scalars(group: Mapping[str, Any], t1: int, t2: int) -> Scalars:
    """Step size (before the shape's factor), decay, and the rates of the momentum."""
    lr, mu = float(group["lr"]), float(group["momentum"])
    return Scalars(step_size=lr, decay=1.0 - lr * group["weight_decay"], keep1=mu, rate1=1.0 - mu)


def _not_by_tile(g: Tensor, m: Tensor | None, second_moment: Any, c: Scalars) -> Update:
    raise NotImplementedError("Muon orthogonalises whole matrices: it has no step tile by tile")


MUON = Rule("muon", _not_by_tile, _muon_scalars, "momentum_buffer", None, by_tile=False)


class Muon(LowBitOptimizer):
    """Muon (Jordan et al. 2024) whose only state, the momentum, lives in a few bits.

    ``m <- mu m + (1-mu) g``, ``U = mu m + (1-mu) g`` with Nesterov, else m; ``W <- (1 - lr wd) W - lr f O``, O the
    orthogonalised U (`masterless.step.orthogonal`), f a factor of the shape. The leading arguments are those of
    `torch.optim.Muon`. For the matrices inside a model, experts ``[E, out, in]`` included (each by itself): embeddings,
    heads, norms and biases are AdamW's, see `muon_groups`.

    Args:
        params: matrices or stacks of matrices: parameters, named parameters, or param groups.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: mu.
        nesterov: look ahead.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: below this a norm is not divided by.
        ns_steps: iterations.
        adjust_lr_fn: "original" (None) or "match_rms_adamw": how the step depends on a matrix's shape.
        momentum_buffer: format of the momentum: "int8", "int4", "int3", "int2", "mxfp8", "bf16", "fp32", ...
        ns_dtype: "bf16", or "fp32": in which the products are computed.
        **options: see `masterless.optim.options.Options`. ``error_compensation=True`` gives back what rounding took
            from a quantized weight as far as an orthogonal step can (`docs/muon.md`); None drops it, as False does,
            which under stochastic rounding is unbiased: hidden bits ("int4+4") keep it.

    >>> model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    >>> matrices, rest = muon_groups(model)
    >>> opt = Muon(matrices, lr=0.02, momentum_buffer="int4")
    >>> [name for group in rest for name, _ in group["params"]]
    ['0.weight', '2.weight', '1.bias', '2.bias']
    """

    torch_twin = getattr(torch.optim, "Muon", None)  # since torch 2.9
    first_name = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        momentum_buffer: str | Format = "int8",
        ns_dtype: str = "bf16",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "momentum_buffer": momentum_buffer,
                "ns_dtype": ns_dtype,
                **common(options),
            },
        )

    def new_plan(self) -> StepPlan:
        """Whole matrices at a time."""
        return MatrixPlan()

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """Muon."""
        return MUON

    def momentum(self, group: dict[str, Any]) -> float:
        """The momentum."""
        return float(group["momentum"])

    def compensates(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Only where it is asked for by name: an orthogonal step gives back a part of the error."""
        return group["error_compensation"] is True and super().compensates(p, group)

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Momentum in [0, 1), three coefficients, fewer than 100 iterations."""
        momentum, coefficients, steps = group["momentum"], group["ns_coefficients"], group["ns_steps"]
        require(0.0 <= momentum < 1.0, "momentum", momentum, "must lie in [0, 1)")
        require(group["eps"] >= 0.0, "eps", group["eps"], "must not be negative")
        require(len(coefficients) == 3, "ns_coefficients", coefficients, "three numbers are needed")
        require(isinstance(steps, int) and 0 < steps < 100, "ns_steps", steps, "a number from 1 to 99")
        adjust = group["adjust_lr_fn"]
        require(adjust is None or adjust in ADJUSTMENTS, "adjust_lr_fn", adjust, f"one of {', '.join(ADJUSTMENTS)}")
        require(group["ns_dtype"] in _DTYPES, "ns_dtype", group["ns_dtype"], f"one of {', '.join(_DTYPES)}")

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.dim() not in (2, 3):
            raise ValueError(
                f"Muon steps matrices and stacks of matrices, and a parameter has shape {tuple(p.shape)}: give it to "
                f"AdamW. muon_groups(model) sorts a model's parameters for both"
            )
        super()._check_parameter(p, group)


def muon_groups(
    model: nn.Module, heads: Sequence[str] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The model's parameters for two optimizers: inner matrices for Muon, all else for `masterless.AdamW`.

    AdamW gets embeddings (weights of `nn.Embedding`, and what is tied to them), heads, and whatever is not a matrix
    or a stack of matrices; the latter without weight decay, if it is a vector.

    Args:
        model: any module; parameters that need no gradient are left out.
        heads: names (or their ends) of output layers. None: the last `nn.Linear` that the model defines, which is
            where language models and classifiers have theirs.

    Returns:
        Param groups for `Muon` and for `masterless.AdamW`, with names.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> inner, rest = muon_groups(model)
    >>> [name for name, _ in inner[0]["params"]]
    ['0.weight']
    """
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    ends = tuple(heads) if heads is not None else tuple(linear[-1:])
    unknown = [end for end in ends if not any(name.endswith(end) for name in modules)]
    if unknown:
        raise ValueError(f"heads={list(ends)!r}: the model has no module {unknown[0]!r}; name its output layers")
    apart = {
        id(p)
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) or (ends and name.endswith(ends))
        for p in module.parameters(recurse=False)
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = [(name, p) for name, p in named if p.dim() in (2, 3) and id(p) not in apart]
    own = {id(p) for _, p in inner}
    rest = [(name, p) for name, p in named if id(p) not in own]
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in rest if p.dim() > 1]},
        {"params": [(name, p) for name, p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [{"params": inner}], [group for group in groups if group["params"]]


# --- the step -------------------------------------------------------------------------------------------------------


@dataclass
class _Matrix:
    """One parameter's step.

    Attributes:
        member: the parameter with its group and name.
        task: its storages and its place in the whole.
        grad: its gradient.
        original: of a weight that is not contiguous, and is stepped in a copy.
        scalars: the numbers of this step.
    """

    member: Member
    task: Task
    grad: Tensor
    original: Tensor | None
    scalars: Scalars

    @classmethod
    def of(cls, optimizer: LowBitOptimizer, member: Member, grad: Tensor) -> _Matrix:
        with explained(optimizer, member[2]):
            task, original = task_of(optimizer, member, grad)
            task.weight.validate()
        scalars = MUON.scalars(member[0], 1, 1)
        check_scalars(scalars, member[0])
        return cls(member, task, grad, original, scalars)

    def step(self, count: int) -> int:
        """Steps momentum and weight; returns how many targets are not finite. `count`: of this step, from 1."""
        group, p, name = self.member
        task, c = self.task, self.scalars
        g = self.grad.detach().to(torch.float32)
        g = -g if task.maximize else g
        stored = task.first is not None
        m, update = averaged(g, _decoded(task, task.first) if stored else None, c, group["nesterov"])
        keys = {purpose: stream_key(group["seed"], count, parameter_id(name), purpose) for purpose in PURPOSES}
        policy, lost = scale_policy(group, c), 0
        if policy != FROZEN:
            whole = self._whole(update)
            options = (group["ns_coefficients"], group["ns_steps"], group["eps"], _DTYPES[group["ns_dtype"]])
            direction = newton_schulz(whole, *options)
            size = c.step_size * shape_factor(group["adjust_lr_fn"], p.shape)
            own = self._own_rows(direction).to(torch.float32).contiguous()
            before = _decoded(task, task.weight) if task.inject else None
            numbers = Scalars(step_size=size, decay=c.decay)
            lost = _store(task, task.weight, own, numbers, keys["weight"], task.rounding["weight"], policy)
            if before is not None and size and not task.ranks.any(lost > 0):
                error = self._whole(before * c.decay - own * size - _decoded(task, task.weight))
                share = (1.0 / c.keep1 - 1.0) / (c.keep1 if group["nesterov"] else 1.0)
                m = m + self._own_rows(given_back(error, whole, direction, size)) * share
        if task.first is not None:
            kept, rounding = Scalars(step_size=-1.0, decay=0.0), task.rounding["exp_avg"]
            _store(task, task.first, tile.storable(m), kept, keys["exp_avg"], rounding, "recompute")
        if self.original is not None:
            self.original.copy_(task.weight.tensors["values"])
        return lost

    @property
    def _gathers(self) -> bool:
        return self.task.ranks is not ALONE and self.task.ranks.splits_matrix

    def _whole(self, rows: Tensor) -> Tensor:
        """The whole matrix of which the ranks have rows; a stack is cut between matrices, which are whole."""
        if not self._gathers:
            return rows
        from masterless.sharding.place import Place  # torch.distributed is large, and one process does without

        return Place.of(self.member[1]).gathered(rows)

    def _own_rows(self, whole: Tensor) -> Tensor:
        if not self._gathers:
            return whole
        first = self.task.first_row
        return whole[first : first + len(self.grad)]


def _decoded(task: Task, storage: Storage | None) -> Tensor:
    assert storage is not None
    backend = dispatch.backend_of(replace(task, rule=RULES["sgd"]), task.group["backend"])
    return backend.decode(storage, torch.float32, visible=False)


def _store(
    task: Task, storage: Storage, direction: Tensor, numbers: Scalars, key: int, rounding: str, policy: str
) -> int:
    """Stores ``decay * stored - step_size * direction``: a step of the rule without momentum, whatever is stored."""
    if not direction.numel():
        return 0
    plain = replace(
        task,
        rule=RULES["sgd"],
        grad=direction,
        weight=storage,
        first=None,
        second=None,
        rounding=dict.fromkeys(PURPOSES, rounding),
        inject=False,
        maximize=False,
        ranks=ALONE,
    )
    backend = dispatch.backend_of(plain, task.group["backend"])
    keys: NDArray[np.uint64] = np.full((1, len(PURPOSES)), key, dtype=np.uint64)
    turn = dispatch.Turn([direction], keys, [(numbers, task.group, policy)], [0], [False])
    return int(backend.step(backend.prepare([plain]), turn).bad[0])


class MatrixPlan(StepPlan):
    """Steps whole matrices, one after the other: working memory is that of a few dense copies of the largest.

    Contract:
        * A gradient that is not finite keeps its whole matrix (of a stack: the stack) from moving; a target that is
          not finite its tile, as in every step.
        * Of a sharded matrix every rank gathers the momentum (in fp32) and orthogonalises it: the result is that of one
          process to the bit, for any number of ranks. A sharded stack is cut between matrices and gathers nothing.
        * The rest is element by element, and the backend's: decoding, and storing momentum and weight.
    """

    def step(self, optimizer: LowBitOptimizer, members: Sequence[Member]) -> list[tuple[Member, int]]:
        """Steps the parameters that have a gradient; returns those with bad elements, and how many."""
        members, grads = self.with_gradients(optimizer, members)
        if not members:
            return []
        matrices = [_Matrix.of(optimizer, member, grad) for member, grad in zip(members, grads, strict=True)]
        mine = [int(tile.bad_elements(matrix.grad).sum()) for matrix in matrices]
        bad = of_all_ranks([matrix.task for matrix in matrices], mine)
        must = [group["nonfinite"] != "skip" for group, _, _ in members]
        self.moved = not any(count and strict for count, strict in zip(bad, must, strict=True))
        if self.moved:
            lost = [0 if bad[i] else self._advance(optimizer, matrix) for i, matrix in enumerate(matrices)]
            bad = [b + more for b, more in zip(bad, of_all_ranks([m.task for m in matrices], lost), strict=True)]
            for _, p, _ in members:
                counter_of(optimizer.state[p])[0] += 1
            increment_version([p for _, p, _ in members])
        return [(member, count) for member, count in zip(members, bad, strict=True) if count]

    def _advance(self, optimizer: LowBitOptimizer, matrix: _Matrix) -> int:
        return matrix.step(int(optimizer.state[matrix.member[1]]["step"]) + 1)
