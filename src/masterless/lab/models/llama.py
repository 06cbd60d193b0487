"""The Llama architecture, made to be trained in little memory: no logits, one layer's activations at a time.

Names and shapes of parameters are those of Hugging Face's checkpoints, so that a directory of safetensors files loads
as it is (`masterless.interop.shards`). It covers Llama 2 and 3, TinyLlama, Mistral up to its window, and Qwen 3
(norms of queries and keys), from their ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from masterless.lab.models.gpt import rotary_angles, rotate
from masterless.tensor.head import linear_cross_entropy


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, under the names that ``config.json`` uses."""

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    sliding_window: int | None = None
    num_local_experts: int = 0  # feed-forward layers to choose from, by token; 0: one for all
    num_experts_per_tok: int = 2

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """The shape that a ``config.json`` describes.

        Raises:
            ValueError: if it describes something that this model is not.
        """
        kind = config.get("model_type")
        if kind not in ("llama", "mistral", "qwen3"):
            raise ValueError(f"model_type={kind!r}: this model is a Llama; give a config of llama, mistral or qwen3")
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise ValueError("attention_bias or mlp_bias: this model has no biases; give a config without them")
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
        if scaling or config.get("hidden_act", "silu") != "silu":
            what = f"rope_scaling={scaling}" if scaling else f"hidden_act={config['hidden_act']!r}"
            raise ValueError(f"{what}: this model has plain rotary positions and SiLU; give a config with these")
        heads = config["num_attention_heads"]
        values = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        values.setdefault("num_key_value_heads", heads)
        values.setdefault("head_dim", config["hidden_size"] // heads)
        values.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
        return cls(**{**values, "qk_norm": kind == "qwen3"})


class Linear(nn.Linear):
    """A linear layer without bias whose weights the model initialises: drawing billions of numbers twice takes time."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Leaves it to the model."""


class Embedding(nn.Embedding):
    """An embedding that the model initialises."""

    def reset_parameters(self) -> None:
        """Leaves it to the model."""


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width, size = config.hidden_size, config.head_dim
        self.q_proj = Linear(width, config.num_attention_heads * size)
        self.k_proj = Linear(width, config.num_key_value_heads * size)
        self.v_proj = Linear(width, config.num_key_value_heads * size)
        self.o_proj = Linear(config.num_attention_heads * size, width)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mixes each position of ``[batch, length, width]`` with those before it."""
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = self.config.num_key_value_heads != self.config.num_attention_heads
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=grouped
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1)))


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Of each position by itself."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class SparseMLP(nn.Module):
    """Experts, of which every token visits its best few; those that nobody visits are neither decoded nor stepped."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.visited = config.num_experts_per_tok
        self.gate = Linear(config.hidden_size, config.num_local_experts)
        self.experts = nn.ModuleList(MLP(config) for _ in range(config.num_local_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Of each position by itself."""
        tokens = x.flatten(0, -2)
        shares, chosen = self.gate(tokens).float().softmax(-1).topk(self.visited)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(tokens[row]) * shares[row, place, None])
        return out.view_as(x)


class Layer(nn.Module):
    """Attention and feed-forward layer, each on the normalised stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SparseMLP(config) if config.num_local_experts else MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The new residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: LlamaConfig, checkpointing: bool) -> None:
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """What the output head sees, ``[batch, length, width]``."""
        window = self.config.sliding_window
        if window is not None and ids.shape[1] > window:
            raise ValueError(
                f"a sequence of {ids.shape[1]} tokens: the model attends to {window} at a time, which this code "
                f"does not do; shorten the sequence"
            )
        x = self.embed_tokens(ids)
        cos, sin = rotary_angles(ids.shape[1], self.config.head_dim, self.config.rope_theta, like=x)
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin)
        return cast(Tensor, self.norm(x))


class Llama(nn.Module):
    """A Llama language model whose forward pass ends in the loss, not in logits.

    Args:
        config: the shape.
        generator: source of the initial weights; torch's default generator if None.
        checkpointing: keep each layer's input only, and compute the layer again in the backward pass.
    """

    def __init__(
        self, config: LlamaConfig, generator: torch.Generator | None = None, checkpointing: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, checkpointing)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range, generator=generator)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next tokens, in nats."""
        return linear_cross_entropy(self.model(ids), self.lm_head.weight, targets)
