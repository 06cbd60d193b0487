"""Bytes of activations: a stated model, not a measurement.

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

Beside the layers: the last norm (2 h) and the logits, which cost 10 bytes per token and vocabulary entry (bf16 logits,
their fp32 log-softmax, its fp32 gradient); a chunked cross-entropy would save most of that.

With full checkpointing a layer keeps its input only, and the peak adds the larger of one layer, recomputed, and the
head. No dropout; attention is never materialised; k and v are not repeated for grouped queries.
"""

from __future__ import annotations

from masterless.lab.plan.parameters import Geometry

CHECKPOINTING = ("none", "full")
COMPUTE = 2  # bytes of an element: bf16
LOGITS = 2 + 4 + 4


def activation_bytes(geometry: Geometry, tokens: int, checkpointing: str = "none") -> int:
    """Peak bytes of the activations of one forward and backward pass over so many tokens."""
    g = geometry
    head = 2 * g.hidden * COMPUTE + 4 + g.vocab * LOGITS
    layers = [(g.dense_layers, layer_bytes(g, moe=False)), (g.moe_layers, layer_bytes(g, moe=True))]
    if checkpointing == "none":
        return tokens * (sum(count * size for count, size in layers) + head)
    kept = (g.dense_layers + g.moe_layers) * g.hidden * COMPUTE
    return tokens * (kept + max(head, *(size for count, size in layers if count)))


def layer_bytes(g: Geometry, moe: bool) -> int:
    """Bytes a token that one layer keeps for the backward pass."""
    factor = 4 if g.gated else 2
    elements = 2 * g.hidden + g.q + g.k + g.v + g.out + 2 * g.latents
    elements += (g.q + g.k) * g.qk_norms + 2 * g.hidden * g.post_norms
    if moe:
        elements += 2 * g.hidden + g.top_k * (2 * g.hidden + factor * g.moe_ff) + factor * g.shared_ff
    else:
        elements += 2 * g.hidden + factor * g.ff
    norms = 2 + 2 * g.post_norms
    return elements * COMPUTE + 4 * g.heads + 4 * norms + (8 * g.experts if moe else 0)
