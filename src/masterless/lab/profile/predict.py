"""What a step of the command line's GPT should hold at most, phase by phase, before it is run.

Contract:
    * Weights and states are exact (`insight.memory`). Activations are the plan's model for unfused kernels in fp32.
    * Forward pass: everything static, the activations of all layers, logits and their log-softmax, one decoded matrix.
    * Decoded weights that are kept (`cache_decoded_`) are there from the first forward pass on.
    * Backward pass: the larger of its two ends. At its beginning all activations are there, and the gradient of the
      logits; at its end all gradients are, and one layer. With steps in the backward pass only one gradient is.
    * In a layer, gradients of activations live beside them: those of the widest product, twice (experts: three times).
"""

from __future__ import annotations

from dataclasses import dataclass

from masterless.formats import parse
from masterless.formats.storage import predicted_bytes
from masterless.insight.memory import predict_optimizer
from masterless.lab.models import GPT
from masterless.lab.plan.activations import head_bytes, layer_bytes, padding
from masterless.lab.plan.parameters import Geometry
from masterless.optim import LowBitOptimizer
from masterless.tensor.cache import place_of, reserved_bytes
from masterless.tensor.quantized import QuantizedTensor

_FP32 = 4


@dataclass(frozen=True)
class Prediction:
    """Bytes beyond what the process holds before it has a model.

    Attributes:
        weights: as stored.
        states: of the optimizer.
        forward: the peak of the forward pass, static part included.
        backward: the peak of the backward pass.
        step: the peak of the optimizer's step.
        kept: of decoded weights that are kept between uses; part of all peaks.
    """

    weights: int
    states: int
    forward: int
    backward: int
    step: int
    kept: int = 0

    @property
    def static(self) -> int:
        """Weights and states."""
        return self.weights + self.states

    @property
    def peak(self) -> int:
        """The largest of all phases."""
        return max(self.forward, self.backward, self.step)


def geometry_of(model: GPT) -> Geometry:
    """The widths of the command line's GPT as the plan takes them."""
    c = model.config
    return Geometry(
        hidden=c.d_model,
        vocab=c.vocab_size,
        heads=c.n_head,
        q=c.d_model,
        k=c.d_model,
        v=c.d_model,
        out=c.d_model,
        latents=0,
        ff=c.hidden_size,
        gated=False,
        qk_norms=False,
        post_norms=False,
        dense_layers=0 if c.n_experts else c.n_layer,
        moe_layers=c.n_layer if c.n_experts else 0,
        experts=c.n_experts,
        top_k=c.experts_per_token if c.n_experts else 0,
        moe_ff=c.hidden_size if c.n_experts else 0,
        joint_qkv=True,
    )


def predict_step(
    model: GPT, optimizer: LowBitOptimizer, tokens: int, in_backward: bool, accumulate: int = 1
) -> Prediction:
    """The peaks of one training step over so many tokens, `accumulate` times."""
    g = geometry_of(model)
    parts = predict_optimizer(optimizer).values()
    weights, states = sum(p.weights for p in parts), sum(p.states for p in parts)
    sizes = [p.numel() * p.itemsize for p in model.parameters()]
    others = [p for p in model.parameters() if isinstance(p, QuantizedTensor) and place_of(p) is None]
    decoded, kept = max((p.numel() * p.itemsize for p in others), default=0), reserved_bytes(model)
    layer = tokens * layer_bytes(g, bool(g.moe_layers), fused=False, compute=_FP32)
    layers = (g.dense_layers + g.moe_layers) * layer
    logits = tokens * g.vocab * _FP32
    norm = tokens * head_bytes(g, fused=False, compute=_FP32) - 3 * logits
    wide = round(padding(g) * g.top_k * g.moe_ff) if g.moe_layers else g.ff
    flowing = (3 if g.moe_layers else 2) * tokens * wide * _FP32  # batched products copy one of them
    buffers = sum(predicted_bytes(parse("int8"), p.shape) for p in model.parameters())  # of `step_in_backward`
    static = weights + states + kept + (buffers if in_backward and accumulate > 1 else 0)
    forward = static + layers + norm + 2 * logits + decoded
    if in_backward:
        backward = static + layers + norm + max(3 * logits, logits + flowing + decoded + max(sizes))
        return Prediction(weights, states, forward, backward, static, kept)
    beginning = static + layers + norm + max(3 * logits, logits + flowing + decoded + max(sizes))
    end = static + sum(sizes) + layer + logits + decoded
    return Prediction(weights, states, forward, max(beginning, end), static + sum(sizes), kept)
