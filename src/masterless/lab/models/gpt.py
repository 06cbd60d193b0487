"""A small GPT, dense or with sparse mixture-of-experts layers, written to be read.

It reads top to bottom: configuration, attention, the two kinds of feed-forward layer, the block, the model.

Choices, and why:

* *Rotary positions.* They hold no parameters, so every matrix of the model is an embedding or a linear map,
  and what a quantized run stores is easy to account for. The angles are computed in each forward pass, a few
  thousand cosines: a cached buffer would be left uninitialised by ``to_empty`` and cast by ``.bfloat16()``.
* *Squared ReLU.* It costs what GELU costs, and at the default size reached a validation loss 3-5% lower
  (800 steps of 512 bytes of the default corpus, two seeds).
* *Whole weight tensors.* A weight is only ever an operand of ``F.linear`` or ``torch.einsum``, never indexed
  or reshaped, so a parameter that stores 4-bit codes behind a tensor subclass works unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab_size: Number of token ids; 256 for raw bytes.
        n_layer: Number of blocks.
        n_head: Attention heads per block.
        d_model: Width of the residual stream.
        seq_len: Longest sequence the model accepts.
        d_ff: Hidden width of the feed-forward layer, per expert; ``None`` means ``4 * d_model``.
        n_experts: Experts per layer; 0 is a dense model.
        experts_per_token: Experts each token is sent to.
        balance_coefficient: Weight of the load-balancing loss in the training loss.
        tie_embeddings: Use one matrix as token embedding and as output head.
        init_std: Standard deviation of the initial weights.
        rope_base: Base of the rotary wavelengths.
    """

    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    d_model: int = 128
    seq_len: int = 128
    d_ff: int | None = None
    n_experts: int = 0
    experts_per_token: int = 2
    balance_coefficient: float = 0.01
    tie_embeddings: bool = False
    init_std: float = 0.02
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "n_head", "d_model", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1; pass a positive number")
        if self.d_ff is not None and self.d_ff < 1:
            raise ValueError(f"d_ff={self.d_ff}: must be positive; pass None for 4 * d_model")
        if self.d_model % (2 * self.n_head):
            raise ValueError(
                f"d_model={self.d_model}, n_head={self.n_head}: rotary positions need heads of even width; "
                f"make d_model a multiple of {2 * self.n_head}"
            )
        if self.n_experts < 0:
            raise ValueError(f"n_experts={self.n_experts}: cannot be negative; pass 0 for a dense model")
        if self.n_experts and not 1 <= self.experts_per_token <= self.n_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}: a token visits 1 to n_experts={self.n_experts} "
                "experts; lower it or add experts"
            )

    @property
    def hidden_size(self) -> int:
        """Hidden width of the feed-forward layer, with the default filled in."""
        # A property, not a filled-in field: it must follow d_model through dataclasses.replace.
        return 4 * self.d_model if self.d_ff is None else self.d_ff


def rotary_angles(length: int, head_dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, each ``[length, head_dim / 2]``, that rotate queries and keys."""
    # Angles in fp32 whatever the model's dtype: bf16 cannot tell position 257 from 258.
    frequency = base ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequency)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (first half, second half) of the last dimension of ``x`` by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def squared_relu(x: Tensor) -> Tensor:
    """Return ``max(x, 0)**2``."""
    return F.relu(x).square()


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix each position of ``x`` ``[batch, length, d_model]`` with the positions before it."""
        batch, length, width = x.shape
        # [batch, length, 3 * width] -> three of [batch, head, length, head_dim]
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class MLP(nn.Module):
    """The dense feed-forward layer: up, squared ReLU, down."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.hidden_size, bias=False)
        self.down = nn.Linear(config.hidden_size, config.d_model, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output and a balance loss of zero (there is nothing to balance)."""
        return self.down(squared_relu(self.up(x))), x.new_zeros((), dtype=torch.float32)


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    r"""Return the load-balancing loss of the Switch Transformer, 1 when the routing is uniform.

    :math:`E \sum_e f_e P_e` with :math:`f_e` the share of all assignments that expert e received and
    :math:`P_e` its mean router probability. Only P carries a gradient: it moves probability away from
    overloaded experts.

    Args:
        probabilities: Router probabilities, ``[tokens, experts]``.
        counts: Assignments received by each expert, ``[experts]``.
    """
    share = counts.float() / counts.sum()
    return len(counts) * (share * probabilities.mean(dim=0)).sum()


class MixtureOfExperts(nn.Module):
    """A sparse feed-forward layer: each token visits its best few experts, and no token is dropped.

    The expert weights are two 3-D parameters ``[n_experts, out, in]``. Tokens are gathered into one padded
    buffer ``[n_experts, capacity, d_model]``, as long as the queue of the busiest expert, so that all experts
    run as one batched product.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        experts, width, hidden = config.n_experts, config.d_model, config.hidden_size
        self.n_experts, self.experts_per_token = experts, config.experts_per_token
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts for ``tokens`` ``[n, d_model]``.

        Returns:
            The chosen experts and their weights in the output, both ``[n, experts_per_token]`` (a token's
            weights sum to one), and the probabilities of all experts ``[n, n_experts]``.
        """
        # fp32: near-ties between experts should not be decided by bf16 rounding.
        probabilities = self.router(tokens).float().softmax(dim=-1)
        weight, expert = probabilities.topk(self.experts_per_token, dim=-1)
        return expert, weight / weight.sum(dim=-1, keepdim=True), probabilities

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, of the shape of ``x``, and its balance loss."""
        tokens = x.reshape(-1, x.shape[-1])
        expert, weight, probabilities = self.route(tokens)

        # An assignment is a (token, expert) pair; its rank is its place in the expert's queue.
        chosen = expert.reshape(-1)
        queue = F.one_hot(chosen, self.n_experts).cumsum(dim=0)
        rank = queue.gather(1, chosen[:, None]).squeeze(1) - 1
        counts = queue[-1]
        capacity = int(counts.max())
        # Row of the flattened buffer; no two assignments share one, so the copies below are deterministic.
        slot = chosen * capacity + rank

        repeated = tokens[:, None].expand(-1, self.experts_per_token, -1).reshape(len(chosen), -1)
        buffer = tokens.new_zeros(self.n_experts * capacity, tokens.shape[-1]).index_copy(0, slot, repeated)
        buffer = buffer.view(self.n_experts, capacity, -1)
        hidden = squared_relu(torch.einsum("eci,eoi->eco", buffer, self.up))
        output = torch.einsum("eci,eoi->eco", hidden, self.down)

        visits = output.flatten(0, 1).index_select(0, slot).view(*expert.shape, -1)
        mixed = (visits * weight.to(visits.dtype)[:, :, None]).sum(dim=1)
        return mixed.view_as(x), balance_loss(probabilities, counts)


class Block(nn.Module):
    """One transformer block: attention, then a feed-forward layer, each on the normalised stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model)
        self.mlp: MLP | MixtureOfExperts = MixtureOfExperts(config) if config.n_experts else MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new residual stream and the balance loss of the feed-forward layer."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        update, balance = self.mlp(self.mlp_norm(x))
        return x + update, balance


class GPT(nn.Module):
    """A decoder-only transformer language model.

    >>> model = GPT(GPTConfig(n_layer=1, d_model=32))
    >>> logits, loss = model(torch.zeros(1, 8, dtype=torch.long))
    >>> tuple(logits.shape), loss
    ((1, 8, 256), None)

    Args:
        config: The model's shape.
        generator: Source of the initial weights; torch's default generator if ``None``.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self._initialise(generator)

    def _initialise(self, generator: torch.Generator | None) -> None:
        # The stream sums 2 * n_layer outputs; shrinking those keeps its variance independent of depth.
        residual = ("attention.out.weight", "mlp.down.weight", "mlp.down")
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norm gains start at one
            std = self.config.init_std
            if name.endswith(residual):
                std /= math.sqrt(2 * self.config.n_layer)
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Predict the next token at every position.

        Args:
            idx: Token ids ``[batch, length]``, int64 (or int32), no longer than ``config.seq_len``.
            targets: The token that follows at each position, same shape.

        Returns:
            Logits ``[batch, length, vocab_size]``, and the mean cross-entropy in nats per token (``None``
            without targets). In training mode, and only then, the load-balancing losses of a mixture of
            experts are added to it.
        """
        config, length = self.config, idx.shape[1]
        if length > config.seq_len:
            raise ValueError(
                f"a sequence of {length} tokens: the model takes at most seq_len={config.seq_len}; "
                "shorten the sequence or raise seq_len in GPTConfig"
            )
        x = self.embed(idx)
        cos, sin = rotary_angles(length, config.d_model // config.n_head, config.rope_base, like=x)
        balance = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, layer_balance = block(x, cos, sin)
            balance = balance + layer_balance
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if self.training and config.n_experts:
            loss = loss + config.balance_coefficient * balance
        return logits, loss

    @torch.no_grad()
    def generate(
        self, idx: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue each sequence of ``idx`` by ``n`` sampled tokens.

        Args:
            idx: Prompts ``[batch, length]``, at least one token long.
            n: Number of tokens to add.
            temperature: Divides the logits; 0 always takes the likeliest token.
            generator: Source of randomness; torch's default generator if ``None``.

        Returns:
            Prompts and continuations, ``[batch, length + n]``.
        """
        if idx.shape[1] == 0:
            raise ValueError("an empty prompt: there is nothing to continue; start with at least one token")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: cannot be negative; pass 0 for the likeliest token")
        was_training = self.training
        self.eval()
        try:
            for _ in range(n):
                # Only the last seq_len tokens: the model never saw longer contexts in training.
                logits = self(idx[:, -self.config.seq_len :])[0][:, -1].float()
                if temperature == 0:
                    following = logits.argmax(dim=-1, keepdim=True)
                else:
                    following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
                idx = torch.cat((idx, following), dim=1)
        finally:
            self.train(was_training)
        return idx

    def num_parameters(self) -> int:
        """Return the number of parameters, a tied matrix counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
