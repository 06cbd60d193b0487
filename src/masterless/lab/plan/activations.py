"""Bytes of activations: a model, held to measurements (`masterless profile`, tests/test_profile.py).

Per token and layer, in elements of the compute dtype (bf16, 2 bytes), what the backward pass needs:

    attention     2 h                  input of the norm, and its output, which q, k and v share
                  q + k + v + o        what flash attention keeps (the o projection's input is among it)
                  + 4 bytes per head     the log-sum-exp of each row
                  + q + k              inputs of the q and k norms, where there are any
                  + 2 r                inputs and outputs of the latent norms (rank r), where there are any
    feed-forward  2 h                  input and output of the norm
                  4 f                  gate, its activation, up, and their product (2 f without a gate)
    experts       2 h + top_k (2 h + 4 f_e) + 4 f_s, and two fp32 router scores per expert
    post-norms    + 2 h                where the outputs of both halves are normed too
    norms         + 4 bytes each       the reciprocal deviation

That is with fused kernels, as on a GPU. Torch on a CPU (`fused=False`, measured with `saved_tensors_hooks`) also keeps:

    norms         2 h fp32 and h       the input as fp32, the normalised input, and the output
    attention     + o                  heads are joined in a copy; and q + k where one product makes q, k and v
    experts       2 top_k h + p top_k (h + 2 f_e) of a buffer padded to the longest queue: p = sqrt(experts)
                  before the router has learned to balance (measured 1.6-1.9 of 4 experts, 2.3-3.1 of 8)

Beside the layers: the last norm and the logits, which cost 10 bytes per token and vocabulary entry (bf16 logits, their
fp32 log-softmax, its fp32 gradient), in fp32 12. `linear_cross_entropy` computes them in slices and keeps the head's
input: 2 h bytes and, for one slice, 2 + 4 + 2 bytes per token and row, and an fp32 gradient of the input.

With full checkpointing a layer keeps its input only, and the peak adds the larger of one layer, recomputed, and the
head. No dropout; attention is never materialised; k and v are not repeated for grouped queries.
"""

from __future__ import annotations

import math

from masterless.lab.plan.parameters import Geometry
from masterless.tensor.rows import rows_per_slice

CHECKPOINTING = ("none", "full")
COMPUTE = 2  # bytes of an element: bf16


def activation_bytes(
    geometry: Geometry,
    tokens: int,
    checkpointing: str = "none",
    *,
    fused: bool = True,
    compute: int = COMPUTE,
    sliced_head: bool = False,
) -> int:
    """Peak bytes of the activations of one forward and backward pass over so many tokens."""
    g = geometry
    head = head_bytes(g, fused, compute, sliced_head)
    layers = [
        (count, layer_bytes(g, moe, fused=fused, compute=compute))
        for count, moe in ((g.dense_layers, False), (g.moe_layers, True))
    ]
    if checkpointing == "none":
        return tokens * (sum(count * size for count, size in layers) + head)
    kept = (g.dense_layers + g.moe_layers) * g.hidden * compute
    return tokens * (kept + max(head, *(size for count, size in layers if count)))


def head_bytes(g: Geometry, fused: bool = True, compute: int = COMPUTE, sliced: bool = False) -> int:
    """Bytes a token that the last norm and the loss need."""
    norm = _norm_bytes(g.hidden, fused, compute)
    if not sliced:
        return norm + g.vocab * (compute + 8)
    rows = min(g.vocab, rows_per_slice(g.hidden))
    return norm + (4 + compute) * g.hidden + rows * (4 + 2 * compute)


def padding(g: Geometry) -> float:
    """How much longer than the mean the longest queue of an untrained router is."""
    return max(1.0, math.sqrt(g.experts))


def _norm_bytes(width: int, fused: bool, compute: int) -> int:
    return (2 * width * compute if fused else 2 * width * 4 + width * compute) + 4


def layer_bytes(g: Geometry, moe: bool, *, fused: bool = True, compute: int = COMPUTE) -> int:
    """Bytes a token that one layer keeps for the backward pass."""
    factor = 4 if g.gated else 2
    elements = g.q + g.k + g.v + g.out + 2 * g.latents + (g.q + g.k) * g.qk_norms
    if not fused:
        elements += g.out + (g.q + g.k) * g.joint_qkv
    if not moe:
        elements += factor * g.ff
    elif fused:
        elements += g.top_k * (2 * g.hidden + factor * g.moe_ff) + factor * g.shared_ff
    else:
        padded = round(padding(g) * g.top_k * (g.hidden + factor * g.moe_ff))
        elements += 2 * g.top_k * g.hidden + padded + factor * g.shared_ff
    norms = (2 + 2 * g.post_norms) * _norm_bytes(
        g.hidden, fused, compute
    ) - 2 * g.post_norms * g.hidden * compute * fused
    return elements * compute + 4 * g.heads + norms + (8 * g.experts if moe else 0)
