"""From a configuration to a run: the one place where text, model and optimizer are put together.

`assemble` makes a model in its formats and its optimizer; `build` reads a `RunConfig` and calls it. Training in one
process, on several ranks and in comparisons differ in what they do with the result, not in how it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

import masterless
from masterless.insight.memory import measure, predict_optimizer
from masterless.interop.files import reason_of
from masterless.lab.models import GPT, GPTConfig
from masterless.optim import LowBitOptimizer
from masterless.optim.backward import BackwardStepper, step_in_backward
from masterless.tensor.build import build_quantized
from masterless.tensor.cache import byte_count, cache_decoded_
from masterless.tensor.state import joined, load_rounded_

from .config import ConfigError, RunConfig
from .corpus import Corpus, CorpusError, stdlib_corpus, text_corpus
from .limits import require_affordable
from .loop import TrainSettings
from .run_files import load_weights
from .tokenizer import load_tokenizer, tokenize, train_tokenizer

# What the decays of the moments are called where it is not `betas`; None: there is no such option.
_DECAYS: dict[str, tuple[str, str | None]] = {
    "SGD": ("momentum", None),
    "RMSprop": ("momentum", "alpha"),
    "Adafactor": ("beta1", None),
}


class Built(NamedTuple):
    """What is needed to train."""

    corpus: Corpus
    model: GPT
    optimizer: LowBitOptimizer


def build(
    config: RunConfig, corpus: Corpus, initial: bool = True, spread: Callable[[GPT], object] = lambda model: None
) -> Built:
    """The run that a configuration describes.

    `initial` says whether to load the weights of `config.init`: not if a checkpoint is loaded afterwards. `spread` is
    called with the quantized model before the optimizer is built, to shard it over ranks.
    """
    require_affordable(config, corpus.vocab_size)
    init = Path(config.init) if config.init is not None and initial else None

    def prepare(model: GPT) -> None:
        if init is not None:
            load_initial(model, init)
        spread(model)

    shape = GPTConfig(vocab_size=corpus.vocab_size, **model_options(config))
    options = {"lr": config.lr, "weight_decay": config.weight_decay, **_optimizer_options(config)}
    model, optimizer = assemble(shape, config.weights, config.optimizer, options, config.seed, prepare)
    if byte_count(config.decode_cache):
        cache_decoded_(model, config.decode_cache)
    return Built(corpus, model, optimizer)


def assemble(
    shape: GPTConfig,
    weights: str | None,
    optimizer: str,
    options: Mapping[str, Any],
    seed: int,
    prepare: Callable[[GPT], object] = lambda model: None,
) -> tuple[GPT, LowBitOptimizer]:
    """A model with the initial weights of the seed, stored in a format, and the optimizer over its parameters.

    `weights` is the format of the inner matrices (None and "fp32" leave the model as it is, "bf16" casts all of it),
    `optimizer` the name of a class of `masterless` with its `options`; `prepare` is called before that is built.
    """

    def make() -> GPT:
        return GPT(shape, torch.Generator().manual_seed(seed))

    if weights in (None, "fp32"):
        model = make()
    elif weights == "bf16":
        model = make().bfloat16()
    else:
        model = cast(GPT, build_quantized(make, weights)[0])
    prepare(model)
    kind: Any = getattr(masterless, optimizer)
    return model, kind(model.named_parameters(), seed=seed, **options)


def build_corpus(config: RunConfig, tokenizer_path: Path | None = None) -> Corpus:
    """The text of a run; a tokenizer that was stored is used, else one is trained if the configuration asks for it."""
    corpus = text_corpus(config.data, config.seq_len) if config.data else stdlib_corpus()
    if config.vocab:
        stored = tokenizer_path is not None and tokenizer_path.exists()
        corpus = tokenize(corpus, load_tokenizer(tokenizer_path) if stored else train_tokenizer(corpus, config.vocab))  # type: ignore[arg-type]
    shortest = min(len(corpus.train), len(corpus.validation))
    if shortest <= config.seq_len:
        reason = f"the shorter side of the split has {shortest} tokens, a sequence takes {config.seq_len} + 1"
        raise CorpusError(f"seq-len={config.seq_len}", reason, "add text or lower --seq-len")
    return corpus


def model_options(config: RunConfig) -> dict[str, Any]:
    """The shape of the model as keyword arguments of `GPTConfig`, but for the vocabulary, which the text decides."""
    return {
        "n_layer": config.layers,
        "n_head": config.heads,
        "d_model": config.width,
        "seq_len": config.seq_len,
        "d_ff": config.hidden,
        "n_experts": config.experts,
        "experts_per_token": config.experts_per_token,
        "tie_embeddings": config.tie_embeddings,
    }


def _optimizer_options(config: RunConfig) -> dict[str, Any]:
    kind: Any = getattr(masterless, config.optimizer)
    names = ("rounding", "weight_rounding", "error_compensation", "reset")
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    if kind.first_name:
        options[kind.first_name] = config.exp_avg
    if kind.second_name:
        options[kind.second_name] = config.exp_avg_sq
    if config.optimizer not in _DECAYS:
        return {**options, "betas": (config.beta1, config.beta2)}
    decays = zip(_DECAYS[config.optimizer], (config.beta1, config.beta2), strict=True)
    return options | {name: value for name, value in decays if name is not None}


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
        show_hidden=config.show_hidden,
        trade_last=config.trade_last or 0.0,
        trade_for=config.trade_for,
    )


def build_stepper(config: RunConfig, model: nn.Module, optimizer: LowBitOptimizer) -> BackwardStepper | None:
    """What steps in the backward pass, if the configuration asks for it."""
    if not config.step_in_backward:
        return None
    return step_in_backward(model, optimizer, clip_norm=config.clip or None, accumulate=config.accumulate)


def load_initial(model: GPT, path: Path) -> None:
    """Takes the weights of a checkpoint or a state dict; formats are converted."""
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
    try:
        load_rounded_(model, weights)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: its weights cannot be used ({reason_of(error)}); pass another --init") from error


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
