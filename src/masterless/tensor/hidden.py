"""Which bits of a weight the forward pass sees: all of them first, the visible code at the end.

Contract:
    * ``int4+4`` and ``int4++4`` are the same bytes. The forward pass reads the INT4 code of the first, and all eight
      bits of the second. Going from one to the other changes no byte of the weight and nothing of the optimizer.
    * The format's name says which it is, also in checkpoints: a model that shows its hidden bits does not load as one
      that does not, or the other way round.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from masterless.formats.storage import Storage
from masterless.tensor import places
from masterless.tensor.quantized import QuantizedTensor, local_of


def show_hidden_bits_(model: nn.Module, shown: bool = True) -> list[str]:
    """Lets the forward pass see the hidden bits of a model's weights, or only their visible codes.

    For a model that is to be served in INT4: train it on its finer grid first, and on INT4 for the last part of the run
    (40% in our study). With a long momentum (beta1 0.9, Muon) that ends at a lower loss than INT4 all along, with that
    of the presets at the same (docs/recipes-appendix.md).

    Args:
        model: has weights in a format with hidden bits, such as "int4+4".
        shown: whether they are shown.

    Returns:
        The names of the parameters that show something else now.

    >>> model = nn.Linear(64, 64)
    >>> from masterless import quantize_
    >>> _ = quantize_(model, "int4+4")
    >>> show_hidden_bits_(model), str(model.weight.format)
    (['weight'], 'int4++4')
    """
    found: list[tuple[str, Any]] = [(name, p) for name, p in model.named_parameters() if _has_hidden_bits(p)]
    if not found:
        raise ValueError("show_hidden_bits_: no parameter of the model has hidden bits; quantize it as 'int4+4'")
    sharded = [name for name, p in found if local_of(p) is not p]
    if sharded:
        raise ValueError(
            f"show_hidden_bits_: parameter {sharded[0]!r} is sharded, and FSDP2 keeps buffers of what it gathers; "
            f"save the model, and call this on the whole one before fully_shard"
        )
    changed = []
    for name, p in found:
        format = p.format.showing(shown)
        if format != p.format:
            before, p.stored = p.stored, Storage(format, p.stored.shape, p.stored.tensors)
            places.hand_over(before, p.stored)
            # A backward pass that is still to come would compute with other weights than its forward pass.
            increment_version([p, p.stored.tensors["codes"]])
            changed.append(name)
    return changed


def _has_hidden_bits(p: Tensor) -> bool:
    own = local_of(p)
    return isinstance(own, QuantizedTensor) and own.format.fine_bits > 0
