"""Small models to try the optimizers on: a dense and a mixture-of-experts GPT."""

from __future__ import annotations

from .gpt import GPT, MLP, Attention, Block, GPTConfig, MixtureOfExperts, balance_loss

__all__ = ["GPT", "MLP", "Attention", "Block", "GPTConfig", "MixtureOfExperts", "balance_loss"]
