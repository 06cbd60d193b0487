"""Models to try the optimizers on: a small GPT, dense or with experts, and Llamas of any size."""

from __future__ import annotations

from .gpt import GPT, MLP, Attention, Block, GPTConfig, MixtureOfExperts, balance_loss
from .llama import Llama, LlamaConfig

__all__ = [
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "MixtureOfExperts",
    "balance_loss",
]
