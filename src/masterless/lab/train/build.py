"""From a resolved configuration to a model, an optimizer, a text and the settings of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import masterless
from masterless.insight.memory import measure, predict_optimizer
from masterless.lab.models import GPT, GPTConfig
from masterless.optim import LowBitOptimizer
from masterless.tensor.quantize import quantize_
from masterless.tensor.state import joined, load_rounded_

from .config import ConfigError, RunConfig
from .corpus import Corpus, CorpusError, stdlib_corpus, text_corpus
from .loop import TrainSettings

# What the decays of the moments are called where it is not `betas`; None: there is no such option.
_DECAYS: dict[str, tuple[str, str | None]] = {
    "SGD": ("momentum", None),
    "RMSprop": ("momentum", "alpha"),
    "Adafactor": ("beta1", None),
}


def build_corpus(config: RunConfig, tokenizer_path: Path | None = None) -> Corpus:
    """The text of a run; a tokenizer that was stored is used, else one is trained if the configuration asks for it."""
    corpus = text_corpus(config.data, config.seq_len) if config.data else stdlib_corpus()
    if config.vocab:
        from .tokenizer import load_tokenizer, tokenize, train_tokenizer

        stored = tokenizer_path is not None and tokenizer_path.exists()
        corpus = tokenize(corpus, load_tokenizer(tokenizer_path) if stored else train_tokenizer(corpus, config.vocab))  # type: ignore[arg-type]
    shortest = min(len(corpus.train), len(corpus.validation))
    if shortest <= config.seq_len:
        reason = f"the shorter side of the split has {shortest} tokens, a sequence takes {config.seq_len} + 1"
        raise CorpusError(f"seq-len={config.seq_len}", reason, "add text or lower --seq-len")
    return corpus


def build_model(config: RunConfig, vocab_size: int) -> GPT:
    """The model, dense, with the initial weights of the seed."""
    shape = GPTConfig(
        vocab_size=vocab_size,
        n_layer=config.layers,
        n_head=config.heads,
        d_model=config.width,
        seq_len=config.seq_len,
        d_ff=config.hidden,
        n_experts=config.experts,
        experts_per_token=config.experts_per_token,
        tie_embeddings=config.tie_embeddings,
    )
    return GPT(shape, torch.Generator().manual_seed(config.seed))


def quantize_model(model: GPT, config: RunConfig) -> GPT:
    """Stores the inner matrices in the configuration's format."""
    if config.weights == "bf16":
        return model.bfloat16()
    if config.weights not in (None, "fp32"):
        quantize_(model, config.weights)
    return model


def build_optimizer(model: GPT, config: RunConfig) -> LowBitOptimizer:
    """The optimizer over the model's parameters."""
    kind: Any = getattr(masterless, config.optimizer)
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "rounding": config.rounding,
        "weight_rounding": config.weight_rounding,
        "error_compensation": config.error_compensation,
        "reset": config.reset,
        "seed": config.seed,
    }
    if kind.first_name:
        options[kind.first_name] = config.exp_avg
    if kind.second_name:
        options[kind.second_name] = config.exp_avg_sq
    if config.optimizer in _DECAYS:
        for name, value in zip(_DECAYS[config.optimizer], (config.beta1, config.beta2), strict=True):
            if name is not None:
                options[name] = value
    else:
        options["betas"] = (config.beta1, config.beta2)
    return kind(model.named_parameters(), **options)


def build_settings(config: RunConfig) -> TrainSettings:
    """The settings of the training loop."""
    assert config.lr is not None and config.min_lr is not None
    assert config.warmup is not None and config.eval_every is not None
    return TrainSettings(
        steps=config.steps,
        batch_size=config.batch,
        seq_len=config.seq_len,
        lr=config.lr,
        min_lr_ratio=config.min_lr / config.lr,
        warmup=config.warmup,
        weight_decay=config.weight_decay,
        grad_clip=config.clip if config.clip and not config.step_in_backward else None,
        seed=config.seed,
        eval_every=config.eval_every,
        eval_batches=config.eval_batches,
        accumulate=config.accumulate,
    )


def load_initial(model: GPT, path: Path) -> None:
    """Takes the weights of a checkpoint or a state dict; formats are converted."""
    from .run_files import load_weights

    weights = joined(load_weights(path))
    own = model.state_dict(keep_vars=True)
    missing = [name for name in own if name not in weights]
    foreign = [name for name in weights if name not in own]
    different = [name for name in own if name in weights and weights[name].shape != own[name].shape]
    if missing or foreign or different:
        name = (missing + foreign + different)[0]
        kinds = ("is not in it", "is not in this model", "has another shape")
        kind = kinds[0] if missing else kinds[1] if foreign else kinds[2]
        raise ConfigError(
            f"{path}: weights of another model, {name} {kind}; match the model's options to the checkpoint"
        )
    load_rounded_(model, weights)


def is_inner(name: str, p: torch.Tensor) -> bool:
    """Whether a parameter is one of the inner matrices of `GPT`, the ones that are quantized."""
    return name.startswith("blocks.") and p.dim() >= 2 and "router" not in name


def memory_of(optimizer: LowBitOptimizer) -> dict[str, Any]:
    """Bytes by role, predicted and measured, of the whole model and per parameter of the inner matrices.

    Measured states are there after a first step. Gradients are what the parameters' dtype makes of them.
    """
    predicted, measured = predict_optimizer(optimizer), measure(optimizer)
    inner = [name for _, p, name in optimizer.parameters() if is_inner(name, p)]

    def per_parameter(table: dict[str, Any]) -> float:
        return sum(table[n].total for n in inner) / max(1, sum(table[n].parameters for n in inner))

    roles = dict.fromkeys(("weights", "first moment", "second moment", "gradients"), 0)
    inner_roles = dict.fromkeys(("weights", "first moment", "second moment"), 0)
    for _, p, name in optimizer.parameters():
        own = dict.fromkeys(inner_roles, 0)
        own["weights"] = measured[name].weights
        for key, value in optimizer.state.get(p, {}).items():
            if torch.is_tensor(value) and value.dim() > 0:
                first = key.split(".")[0] == optimizer.first_name
                own["first moment" if first else "second moment"] += value.numel() * value.itemsize
        roles["gradients"] += p.numel() * p.itemsize
        for role, size in own.items():
            roles[role] += size
            inner_roles[role] += size if name in inner else 0
    count = sum(entry.parameters for entry in measured.values())
    return {
        "parameters": count,
        "inner_parameters": sum(measured[n].parameters for n in inner),
        "predicted_per_parameter": per_parameter(predicted),
        "measured_per_parameter": per_parameter(measured),
        "model_per_parameter": sum(entry.total for entry in measured.values()) / max(1, count),
        "bytes": roles,
        "inner_bytes": inner_roles,
    }
