"""One parameter's step as data: where its numbers lie, what to do with them, and the keys of its random bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from masterless.formats.layout import CHUNK
from masterless.formats.storage import Storage
from masterless.step.rules import Rule
from masterless.step.scalars import Scalars


class Alone:
    """The ranks that share a parameter, when there is only this process (`sharding.agreement.Ranks` are several)."""

    splits_matrix = False  # whether they share the rows of one matrix
    shape: tuple[int, ...] | None = None  # of the whole parameter, if it is not this process's

    def max(self, x: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, element by element."""
        return x

    def any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank."""
        return condition

    def whole_chunks(self, bad: Tensor, first_col: int) -> Tensor:
        """Of a shard of a vector: all elements of every chunk in which any rank has a bad one."""
        raise NotImplementedError("a whole vector has whole chunks")


ALONE = Alone()


@dataclass
class Task:
    """Everything one parameter's step needs."""

    name: str
    rule: Rule
    scalars: Scalars
    group: Mapping[str, Any]
    grad: Tensor
    weight: Storage
    first: Storage | None
    second: Storage | None
    rounding: dict[str, str]  # purpose -> rounding
    keys: dict[str, int]  # purpose -> key of `rounding.dither`
    inject: bool = False
    maximize: bool = False
    scale_policy: str = "held"
    first_row: int = 0  # this shard's first row in the whole parameter
    first_col: int | None = None  # of a shard of a vector: its first element in the whole
    ranks: Alone = ALONE

    @property
    def storages(self) -> list[Storage]:
        """The weight and the moments that are kept."""
        return [s for s in (self.weight, self.first, self.second) if s is not None]

    @property
    def pays_back(self) -> bool:
        """Whether the weight is paid back what its momentum holds of the errors of rounding it to nearest."""
        return self.inject and self.rule.pays_back(self.weight.format, self.rounding["weight"])

    @property
    def factored(self) -> bool:
        """Whether the second moment is row and column means."""
        return self.second is not None and self.second.format.kind == "factored"

    @property
    def one_scale(self) -> bool:
        """Whether the weight has a single scale."""
        return self.weight.format.scaled and self.weight.format.granularity == "tensor"

    @property
    def indivisible(self) -> bool:
        """Whether one bad gradient must keep the whole parameter from moving."""
        return self.factored or self.one_scale or self.rule.finish is not None

    @property
    def sharded(self) -> bool:
        """Whether other ranks hold parts of the parameter."""
        return self.ranks is not ALONE

    @property
    def chunks_per_tile(self) -> int:
        """Chunks of a row that stand or fall together: the longest block of any storage; 0: given by element."""
        if self.first_col is not None:
            return 0
        blocks = [s.layout.block(s.format) for s in self.storages if s.format.scaled]
        return max(1, *(-(-b // CHUNK) for b in blocks)) if blocks else 1
