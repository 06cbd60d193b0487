"""What systems cost: our presets and the ones people use today, as data.

Peers, and where the numbers are from:

    torch AdamW     mixed precision as usually counted: bf16 weights and gradients, an fp32 master copy, fp32 m and v.
                    16 bytes per parameter, 2 of them gradients; fp32 gradients would make it 18.
    bitsandbytes    AdamW8bit: bf16 weights and gradients, no master; a code of 8 bits and an fp32 absmax per block of
                    256 for m and v each; tensors of fewer than 4096 elements keep fp32 states.
    torchao         AdamW4bit: bf16 weights and gradients, no master; a code of 4 bits, an fp32 scale per block of 128
                    and a table of 16 fp32 levels for m and v each; tensors (under FSDP: shards) of fewer than 4096
                    elements, or not of whole blocks, keep states of their own dtype.
    ECO             as published: FP8 weights with a scale per row in the linear layers of the blocks (with experts: in
                    those only), fp32 elsewhere, fp32 m and v; gradients counted in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from masterless.formats import Format, parse
from masterless.formats.storage import predicted_bytes, tensor_specs
from masterless.insight.memory import stored_formats
from masterless.lab.plan.parameters import Parameter
from masterless.optim.presets import PRESETS
from masterless.tensor.quantized import as_weight

ITEMSIZE = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class PeerState:
    """How another library stores a moment.

    Attributes:
        bits: of a code.
        block: elements that share an fp32 scale, over the flattened tensor.
        smallest: tensors of fewer elements are not quantized.
        whole_blocks: whether tensors that are not made of whole blocks are not quantized either.
        table: bytes that every tensor adds.
        plain: bytes per element where it is not quantized.
    """

    bits: int
    block: int
    smallest: int
    plain: int
    whole_blocks: bool = False
    table: int = 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the moment of a tensor (under FSDP: of a local shard)."""
        n = math.prod(shape)
        if n < self.smallest or (self.whole_blocks and n % self.block):
            return n * self.plain
        return -(-n * self.bits // 8) + 4 * -(-n // self.block) + self.table


State = Format | PeerState


@dataclass(frozen=True)
class Stored:
    """How a system stores one parameter."""

    weight: Format
    states: tuple[State, ...]


@dataclass(frozen=True)
class System:
    """A way to train.

    Attributes:
        name: what tables call it.
        summary: one line about it.
        weights: format of quantized weights; None if it has none.
        plain: format of the others.
        gradients: format of the gradients.
        exp_avg: the first moment, as a format's name or a peer's state.
        exp_avg_sq: the second moment.
        master: whether there is an fp32 copy of every weight.
        experts_only: whether in a model with experts only those are quantized.
        ours: whether it is a preset of this library.
        vocabulary: format of embeddings and heads where those are quantized, too; None if it cannot.
        vocabulary_exp_avg_sq: their second moment.
    """

    name: str
    summary: str
    weights: str | None
    plain: str
    gradients: str
    exp_avg: str | PeerState
    exp_avg_sq: str | PeerState
    master: bool = False
    experts_only: bool = False
    ours: bool = False
    vocabulary: str | None = None
    vocabulary_exp_avg_sq: str | None = None

    def stored(self, parameter: Parameter, quantized: bool, vocabulary: bool = False) -> Stored:
        """How this parameter is stored.

        `quantized` says what the rules of `quantize_` make of it, `vocabulary` whether it is an embedding or a head.
        """
        return _stored(self, parameter.shape, quantized and self.weights is not None, vocabulary)


@cache
def _stored(system: System, shape: tuple[int, ...], quantized: bool, vocabulary: bool) -> Stored:
    weights = system.weights if quantized and system.weights else system.plain
    first, second = system.exp_avg, system.exp_avg_sq
    if quantized and vocabulary and system.vocabulary is not None:
        weights, second = system.vocabulary, system.vocabulary_exp_avg_sq or second
    if isinstance(first, PeerState) or isinstance(second, PeerState):
        states = tuple(state if isinstance(state, PeerState) else parse(state) for state in (first, second))
        return Stored(as_weight(weights) if quantized else parse(weights), states)
    weight, *moments = stored_formats(shape, weights, first, second)
    return Stored(weight, tuple(moments))


BITSANDBYTES = PeerState(bits=8, block=256, smallest=4096, plain=4)
TORCHAO = PeerState(bits=4, block=128, smallest=4096, plain=2, whole_blocks=True, table=16 * 4)

PEERS = (
    System("torch AdamW", "bf16 weights, fp32 master, m and v", None, "bf16", "bf16", "fp32", "fp32", master=True),
    System("bitsandbytes 8-bit", "bf16 weights, 8-bit m and v", None, "bf16", "bf16", BITSANDBYTES, BITSANDBYTES),
    System("torchao 4-bit", "bf16 weights, 4-bit m and v", None, "bf16", "bf16", TORCHAO, TORCHAO),
    System("ECO, published", "FP8 weights, fp32 m and v", "fp8", "fp32", "bf16", "fp32", "fp32", experts_only=True),
)


def preset_system(name: str, dtype: str = "bf16") -> System:
    """A preset as a system; `dtype` is that of a model whose matrices are quantized, and of its gradients."""
    preset = PRESETS[name]
    plain = dtype if preset.weights else "fp32"
    options = preset.options
    return System(
        name,
        preset.summary,
        preset.weights,
        plain,
        plain,
        options["exp_avg"],
        options["exp_avg_sq"],
        ours=True,
        vocabulary=preset.vocabulary,
        vocabulary_exp_avg_sq=preset.vocabulary_options.get("exp_avg_sq"),
    )


@cache
def state_bytes(state: State, shape: tuple[int, ...]) -> int:
    """Bytes of one moment."""
    return state.nbytes(shape) if isinstance(state, PeerState) else predicted_bytes(state, shape)


@cache
def weight_bytes(format: Format, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes of a weight: as stored, of its master copy, and what the forward pass needs of it on another rank."""
    parts = {name: math.prod(size) * dtype.itemsize for name, (size, dtype) in tensor_specs(format, shape).items()}
    master = parts.pop("master", 0)
    stored = sum(parts.values())
    if not format.scaled:
        return stored, master, 2 * math.prod(shape)  # dense weights travel in bf16
    return stored, master, stored - parts.get("hidden", 0)
