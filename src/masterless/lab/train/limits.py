"""What this machine can hold: refused with numbers, before the system ends the process without a word."""

from __future__ import annotations

from masterless.interop.files import machine_memory

from .config import ConfigError, RunConfig

_BLOCK = 50_000  # bytes of the Python objects of a transformer block, however narrow it is


def parameter_count(config: RunConfig, vocab_size: int) -> int:
    """The matrix elements of a model, from its configuration."""
    hidden = config.hidden or 4 * config.width
    feed_forward = 2 * config.width * hidden * max(1, config.experts) + config.width * config.experts
    blocks = config.layers * (4 * config.width**2 + feed_forward)
    return blocks + vocab_size * config.width * (1 if config.tie_embeddings else 2)


def require_affordable(config: RunConfig, vocab_size: int) -> None:
    """Raises an error if the model or its batches cannot fit, counting only what is certain to be needed at once."""
    tokens = config.batch * config.seq_len
    needs = {
        # Dense fp32 weights, which are initialised before they are quantized, and their gradients.
        f"width={config.width}, layers={config.layers}": 8 * parameter_count(config, vocab_size)
        + _BLOCK * config.layers,
        # Logits, their softmax and its gradient; four activations of a block; the ids.
        f"batch={config.batch}": tokens * (12 * vocab_size + 16 * config.width * config.layers + 16),
        f"eval-batches={config.eval_batches}": 16 * tokens * config.eval_batches,
    }
    option, need = max(needs.items(), key=lambda item: item[1])
    if sum(needs.values()) > machine_memory():
        raise ConfigError(
            f"{option}: needs at least {need / 1e9:,.1f} GB, and this machine has {machine_memory() / 1e9:,.1f}; "
            f"make it smaller"
        )
