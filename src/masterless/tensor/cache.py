"""Decoded weights kept between uses, within a budget of bytes: memory for time.

Contract:
    * Without it a weight is decoded in the forward pass, again in the backward pass, and again for each batch of an
      accumulation. With it, once after each change of the stored numbers, which nobody can make unseen
      (`tensor.places`). Losses and gradients are the same to the bit.
    * Who gets a place is decided here, from shapes, in the order in which the model has its parameters: whatever still
      fits. A decoded byte saves about the same time wherever it is, and this order is one that a reader can predict.
    * A place is as large as the weight in its parameter's dtype, and is filled when the weight is first used. Under
      autocast it holds autocast's, which is not larger.
    * Embeddings and heads that are used by rows have no use for it; compiled graphs decode by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from torch import Tensor, nn

from masterless.tensor.places import Closed, Place, assign
from masterless.tensor.quantized import QuantizedTensor, local_of

_BYTES = {"B": 1} | {
    f"{prefix}{unit}": base**power
    for base, unit in ((1000, "B"), (1024, "IB"))
    for power, prefix in enumerate("KMGT", 1)
}


@dataclass(frozen=True)
class CacheReport:
    """Which weights have a place for their decoded copy. ``print`` it.

    Attributes:
        budget: bytes that all copies may take together.
        cached: bytes of each copy, by the parameter's name.
        left_out: bytes that the others would take, which did not fit.
    """

    budget: int
    cached: dict[str, int]
    left_out: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies when every one is there."""
        return sum(self.cached.values())

    def __str__(self) -> str:
        if not self.budget:
            return "no decoded weights are kept"
        others = f"; {len(self.left_out)} did not fit ({sum(self.left_out.values()):,} bytes)" if self.left_out else ""
        return f"{len(self.cached)} decoded weights are kept, {self.nbytes:,} of {self.budget:,} bytes{others}"


def cache_decoded_(model: nn.Module, budget: int | str | None) -> CacheReport:
    """Keeps decoded weights between uses, as many as fit into a budget of bytes: memory for time.

    A weight is then decoded once after each step, and not in every forward and backward pass. Nothing else changes:
    losses, gradients and checkpoints are the same to the bit. Places go to the parameters in the order of the model,
    to whatever still fits. Parameters that are replaced (`quantize_`, ``model.to(...)``, a merge) and copies have no
    place: call this again. Compiled graphs (`torch.compile`) do not use it.

    Args:
        model: has quantized parameters, on the CPU and not sharded.
        budget: in bytes: an integer, or a string with a unit such as "64MB" (10^6) or "64MiB" (2^20). 0 and None free
            everything and keep nothing.

    Returns:
        Which weights are kept and which did not fit: print it.

    >>> from masterless import quantize_
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64))
    >>> _ = quantize_(model, "int8")
    >>> print(cache_decoded_(model, "50KB"))
    2 decoded weights are kept, 49,152 of 50,000 bytes; 1 did not fit (32,768 bytes)
    >>> print(cache_decoded_(model, None))
    no decoded weights are kept
    """
    size = byte_count(budget)
    found = {name: local for name, p in model.named_parameters() if isinstance(local := local_of(p), QuantizedTensor)}
    cached: dict[str, int] = {}
    left_out: dict[str, int] = {}
    if size:
        _refuse(model, found)
        left = size
        for name, p in _used_whole(model, found):
            nbytes = p.numel() * p.itemsize
            (cached if nbytes <= left else left_out)[name] = nbytes
            left -= cached.get(name, 0)
        if not cached:
            least = min(left_out.values(), default=0)
            need = f"the smallest weight takes {least:,} bytes decoded; raise it, or pass 0"
            raise ValueError(f"cache_decoded_: budget={budget!r}: {need if least else _NOTHING}")
    for name, p in found.items():
        if not isinstance(p.stored.place, Closed):
            assign(p.stored, Place(p, cached[name]) if name in cached else None)
    return CacheReport(size, cached, left_out)


def reserved_bytes(model: nn.Module) -> int:
    """Bytes of the places that a model's parameters have, filled or not."""
    return sum(place.nbytes for p in model.parameters() if (place := place_of(p)) is not None)


def place_of(p: Tensor) -> Place | None:
    """The place of a parameter's decoded copy, if it has one."""
    place = p.stored.place if isinstance(p, QuantizedTensor) else None
    return place if isinstance(place, Place) else None


def byte_count(budget: int | str | None) -> int:
    """A number of bytes: 0 for None, an integer as it is, a string with its unit: "64MB" (10^6), "64MiB" (2^20)."""
    if budget is None:
        return 0
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    text = budget.strip().upper() if isinstance(budget, str) else ""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?B)?", text)
    if match is None or match[2] == "IB" or (match[2] is None and "." in match[1]):
        shown = repr(budget[:60] if isinstance(budget, str) else budget)
        raise ValueError(f"budget={shown} is no number of bytes; write e.g. '64MB', '64MiB', 67108864, or 0 for none")
    return int(Decimal(match[1]) * _BYTES[match[2] or "B"])


_NOTHING = "no parameter of the model is quantized and used as a whole; quantize_(model, 'int8') first, or pass 0"


def _used_whole(model: nn.Module, found: dict[str, QuantizedTensor]) -> Iterator[tuple[str, QuantizedTensor]]:
    """All but the tables that only embeddings have: these decode the rows that they look up."""
    elsewhere = {
        id(p)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    return ((name, p) for name, p in found.items() if id(p) in elsewhere)


def _refuse(model: nn.Module, found: dict[str, QuantizedTensor]) -> None:
    """Raises a ValueError for parameters of which not every change would be seen."""
    whole = dict(model.named_parameters())
    for name, p in found.items():
        reason = ""
        if whole[name] is not p or isinstance(p.stored.place, Closed):
            reason = "is sharded, and FSDP2 refills what it gathers in every pass; pass 0 under FSDP2"
        elif p.device.type != "cpu":
            reason = f"lies on {p.device}, and only on the CPU every change is counted when it happens; pass 0 there"
        elif any(tensor.is_inference() for tensor in p.stored.tensors.values()):
            reason = "was made in inference mode, where torch counts no changes; make the model outside of it"
        if reason:
            raise ValueError(f"cache_decoded_: parameter {name!r} {reason}")
