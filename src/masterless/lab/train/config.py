"""What a run is, as one flat record: the flags of ``masterless train``, the keys of ``run.toml``, the stored config.

Contract:
    * Each option is written once, below, with its section, default and help; flags and keys are made from it.
    * Precedence: flags, then the config file, then the preset, then the defaults. `resolve` leaves nothing open: what
      it returns is stored with the run, so a preset that changes later does not change a run that is resumed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from masterless.formats import parse
from masterless.interop.files import FileError, read_bytes, reason_of
from masterless.optim.presets import get_preset
from masterless.optim.trade import traded_format
from masterless.tensor.cache import byte_count
from masterless.tensor.quantized import as_weight

_LR = {"Lion": 3e-4, "SGD": 0.1, "Adafactor": 0.05}  # AdamW's and its relatives' is 2e-3
MOST_THREADS = max(256, 4 * (os.cpu_count() or 1))
OPTIMIZERS = ("AdamW", "Adam", "AdaBelief", "Adafactor", "Lion", "RMSprop", "SGD")


class ConfigError(ValueError):
    """A configuration that cannot be honoured: says which value, why, and what to do."""


def _option(default: Any, section: str, help: str, shown: str | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"section": section, "help": help, "shown": shown})


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run. A value of None is filled in by `resolve` (or means "none" after it)."""

    data: tuple[str, ...] = _option(
        (), "data", "Text: files or folders (.txt .md .py .jsonl .npy); repeatable.", "the standard library's source"
    )
    vocab: int = _option(0, "data", "Train a BPE tokenizer of this many tokens; 0 trains on bytes.")

    layers: int = _option(2, "model", "Transformer blocks.")
    width: int = _option(128, "model", "Width of the residual stream.")
    heads: int = _option(4, "model", "Attention heads per block.")
    hidden: int | None = _option(None, "model", "Hidden width of a feed-forward layer (of one expert).", "4 x width")
    experts: int = _option(0, "model", "Experts per layer; 0 is a dense model.")
    experts_per_token: int = _option(2, "model", "Experts each token visits.")
    seq_len: int = _option(128, "model", "Tokens per sequence.")
    tie_embeddings: bool = _option(False, "model", "One matrix for embedding and output head.")
    init: str | None = _option(
        None, "model", "Start from the weights of a run or file, rounded stochastically.", "random weights"
    )

    preset: str = _option("2-byte", "formats", "A point on the loss-against-bytes frontier.")
    weights: str | None = _option(
        None, "formats", "Format of the inner matrices: fp32, bf16, fp8, int8, int4, ...", "preset"
    )
    show_hidden: float = _option(
        0.0, "formats", "Share of the steps in which the forward pass sees all bits of int4+4; then INT4 only."
    )
    trade_last: float | None = _option(
        None, "formats", "Share of the steps, at the end, in which the momentum's bits are the weights'.", "preset"
    )
    trade_for: str | None = _option(
        None, "formats", "Format of the weights in that share.", "preset, or the bits of both"
    )
    exp_avg: str | None = _option(None, "formats", "Format of the first moment.", "preset")
    exp_avg_sq: str | None = _option(None, "formats", "Format of the second moment.", "preset")
    rounding: str | None = _option(
        None, "formats", "Of states: stochastic, nearest, stochastic-value or stochastic-log.", "stochastic"
    )
    weight_rounding: str | None = _option(
        None, "formats", "Of weights: stochastic or nearest.", "the preset's, or what suits --init"
    )
    error_compensation: bool | None = _option(
        None, "formats", "Inject what rounding a weight loses into the momentum.", "preset"
    )
    reset: str | None = _option(
        None, "formats", "Restart second moments that stall: auto, adaptive or a number of steps.", "never"
    )

    optimizer: str = _option("AdamW", "optimizer", f"One of {', '.join(OPTIMIZERS)}.")
    lr: float | None = _option(None, "optimizer", "Peak learning rate.", "0.001; Lion 0.0003, SGD 0.1, Adafactor 0.05")
    min_lr: float | None = _option(None, "optimizer", "Learning rate at the end of the cosine.", "lr / 10")
    warmup: int | None = _option(None, "optimizer", "Steps of linear warm-up.", "50, at most a tenth of the steps")
    beta1: float | None = _option(None, "optimizer", "Decay of the first moment.", "preset")
    beta2: float | None = _option(None, "optimizer", "Decay of the second moment.", "preset")
    weight_decay: float = _option(0.1, "optimizer", "Weight decay.")
    clip: float = _option(
        1.0, "optimizer", "Largest gradient norm, with --step-in-backward of each parameter by itself; 0 does not clip."
    )
    step_in_backward: bool = _option(
        False, "optimizer", "Step as soon as a gradient is ready and free it; saves the memory of all gradients."
    )

    steps: int = _option(1500, "run", "Optimizer steps.")
    batch: int = _option(4, "run", "Sequences per backward pass.")
    accumulate: int = _option(1, "run", "Backward passes per step.")
    eval_every: int | None = _option(None, "run", "Steps between evaluations.", "a fifteenth of the steps")
    eval_batches: int = _option(16, "run", "Validation batches per evaluation.")
    save_every: int | None = _option(None, "run", "Steps between checkpoints; 0 saves only at the end.", "eval-every")
    keep: int = _option(2, "run", "Checkpoints to keep.")
    seed: int = _option(0, "run", "Of initial weights, batches and rounding.")
    threads: int | None = _option(None, "run", "Threads of the computation.", "torch's default")
    decode_cache: str | None = _option(
        None, "run", "Keep decoded weights between uses, up to so many bytes, e.g. 64MB; the same results.", "none"
    )


FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}
TYPES: dict[str, Any] = get_type_hints(RunConfig)
MODEL_KEYS = tuple(name for name, field in FIELDS.items() if field.metadata["section"] == "model" and name != "init")


def resolve(
    flags: Mapping[str, Any], file: Mapping[str, Any] | None = None, inherited: Mapping[str, Any] | None = None
) -> RunConfig:
    """The configuration of a run, with every choice made.

    Args:
        flags: options given on the command line.
        file: options of the config file.
        inherited: the model's shape, if it comes from a checkpoint.

    Raises:
        ConfigError: an option is unknown, has a wrong type or an impossible value.
        ValueError: the preset is unknown.
    """
    chosen = {
        **_checked(inherited or {}, "checkpoint"),
        **_checked(file or {}, "config file"),
        **_checked(flags, "flag"),
    }
    config = RunConfig(**chosen)
    if config.optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer={config.optimizer!r}: no such optimizer; choose one of {', '.join(OPTIMIZERS)}")
    preset = get_preset(config.preset).for_steps_of(config.batch * config.seq_len * config.accumulate)
    preset = preset if config.init is None else preset.for_trained_weights()
    options = preset.options
    betas = (0.9, 0.99) if config.optimizer == "Lion" else options["betas"]
    filled: dict[str, Any] = {
        "weights": preset.weights or "fp32",
        "trade_last": preset.trade_last,
        "trade_for": preset.trade_for,
        "exp_avg": options["exp_avg"],
        "exp_avg_sq": options["exp_avg_sq"],
        "rounding": options.get("rounding", "stochastic"),
        "weight_rounding": options.get("weight_rounding", "stochastic"),
        "error_compensation": options.get("error_compensation", True),
        "beta1": betas[0],
        "beta2": betas[1],
        "lr": _LR.get(config.optimizer, 1e-3),
        "warmup": min(50, config.steps // 10),
        "eval_every": max(1, config.steps // 15),
    }
    config = dataclasses.replace(config, **{k: v for k, v in filled.items() if getattr(config, k) is None})
    if not config.trade_last:
        if chosen.get("trade_for") is not None:
            raise ConfigError(
                f"trade-for={config.trade_for}: means nothing without a share; pass --trade-last 0.15, too"
            )
        config = dataclasses.replace(config, trade_for=None)
    if config.reset == "none":
        config = dataclasses.replace(config, reset=None)
    assert config.lr is not None
    if config.min_lr is None:
        config = dataclasses.replace(config, min_lr=config.lr / 10)
    if config.save_every is None:
        config = dataclasses.replace(config, save_every=config.eval_every)
    _check(config)
    return config


def _check(config: RunConfig) -> None:
    def require(condition: bool, name: str, reason: str) -> None:
        if not condition:
            raise ConfigError(f"{name.replace('_', '-')}={getattr(config, name)}: {reason}")

    for name, field in FIELDS.items():
        value = getattr(config, name)
        if type(value) is int:
            # The seed is a 64-bit number; nothing that counts comes near 2^40.
            require(value < (2**63 if name == "seed" else 2**40), name, "absurdly large; pass a smaller number")
        elif type(value) is float:
            require(not math.isnan(value), name, f"is no number; pass one, or leave it out ({field.metadata['help']})")
        elif type(value) is str or name == "data":
            empty = not all(v.strip() for v in value) if name == "data" else not value.strip()
            require(not empty, name, "an empty name; name a file or value, or leave it out")
    for name in ("steps", "batch", "accumulate", "layers", "width", "heads", "seq_len", "eval_batches", "keep"):
        require(getattr(config, name) >= 1, name, "must be at least 1; pass a positive number")
    for name in ("eval_every", "save_every", "vocab", "clip", "weight_decay", "seed", "warmup", "experts"):
        require(getattr(config, name) >= 0, name, "cannot be negative; pass 0 or more")
    require(
        config.threads is None or 1 <= config.threads <= MOST_THREADS,
        "threads",
        f"must lie between 1 and {MOST_THREADS} on this machine; leave it out for torch's own",
    )
    assert config.lr is not None and config.min_lr is not None and config.warmup is not None
    require(math.isfinite(config.lr) and config.lr > 0, "lr", "must be positive and finite; try 0.001")
    require(0 <= config.min_lr <= config.lr, "min_lr", f"must lie between 0 and lr={config.lr:g}; lower it or raise lr")
    require(config.warmup <= config.steps, "warmup", f"longer than the run of {config.steps} steps; lower it")
    require(
        config.vocab == 0 or config.vocab >= 300,
        "vocab",
        "a byte-level BPE needs at least 300 tokens; pass 0 for bytes",
    )
    require(0 <= config.show_hidden < 1, "show_hidden", "a share of the steps, at least 0 and below 1; try 0.6")
    if config.show_hidden and (config.weights in ("fp32", "bf16") or not parse(config.weights or "").fine_bits):
        raise ConfigError(
            f"show-hidden={config.show_hidden:g}: weights {config.weights!r} have no hidden bits to show; "
            f"pass --weights int4+4 or --preset 2-byte-int4"
        )
    assert config.trade_last is not None
    require(0 <= config.trade_last < 1, "trade_last", "a share of the steps, at least 0 and below 1; try 0.2")
    if config.trade_last and (
        config.optimizer not in ("AdamW", "Adam")
        or config.weights in ("fp32", "bf16")
        or not config.beta1
        or config.error_compensation is False
        or parse(config.weights or "").bits + parse(config.weights or "").fine_bits >= 8
    ):
        raise ConfigError(
            f"trade-last={config.trade_last:g}: only AdamW's momentum that holds the rounding errors of weights below "
            f"8 bits can be traded for bits; pass --trade-last 0, or --preset 1-byte-int8"
        )
    if config.trade_last:
        weights = as_weight(config.weights or "")
        late = as_weight(config.trade_for) if config.trade_for else traded_format(weights, parse(config.exp_avg or ""))
        if late.bits + late.fine_bits <= weights.bits + weights.fine_bits:
            raise ConfigError(f"trade-for={config.trade_for}: has no more bits than weights {config.weights}; try int8")

    _check_decode_cache(config)


def _check_decode_cache(config: RunConfig) -> None:
    try:
        size = byte_count(config.decode_cache)
    except ValueError:
        reason = "is no number of bytes; write e.g. 64MB or 64MiB, or leave it out"
        raise ConfigError(f"decode-cache={config.decode_cache}: {reason}") from None
    if size and config.weights in ("fp32", "bf16"):
        raise ConfigError(
            f"decode-cache={config.decode_cache}: weights {config.weights!r} are not decoded; leave it out, or pass "
            f"--weights int8"
        )


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options that were given (None is not), of the right types."""
    checked = {}
    for name, value in values.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FIELDS)}"
            raise ConfigError(f"{where}: unknown option {name!r}; {hint}")
        if value is not None:
            checked[name] = _typed(name, value, where)
    return checked


def _typed(name: str, value: Any, where: str) -> Any:
    hint = TYPES[name]
    wanted = next(t for t in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if t is not type(None))
    if get_origin(wanted) is tuple:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, (list, tuple)) and all(isinstance(v, (str, Path)) for v in values):
            return tuple(map(str, values))
        wanted_name = "a list of paths"
    elif wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif wanted is str and name == "reset" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    elif type(value) is wanted:
        return value
    else:
        wanted_name = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[wanted]
    raise ConfigError(f"{where}: {name}={value!r} has the wrong type; write {wanted_name}")


# --- TOML -------------------------------------------------------------------------------------------------

_MOST_TOML = 1 << 18  # bytes; a configuration has a few hundred


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a config file: keys of `RunConfig`, in sections or not."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ModuleNotFoundError:
            raise ConfigError(f"{path}: Python 3.10 cannot read TOML by itself; pip install tomli") from None
    try:
        parsed = tomllib.loads(read_bytes(path, _MOST_TOML).decode())
    except FileError as error:
        raise ConfigError(str(error)) from None
    except (ValueError, RecursionError) as error:  # ValueError: also of what is not UTF-8
        raise ConfigError(f"{path}: not valid TOML ({reason_of(error)}); correct it") from None
    sections = {field.metadata["section"] for field in FIELDS.values()}
    options: dict[str, Any] = {}
    for key, value in parsed.items():
        inside = value if isinstance(value, dict) and key in sections else {key: value}
        for name, item in inside.items():
            options[name.replace("-", "_")] = item
    return _checked(options, str(path))


def to_toml(config: RunConfig) -> str:
    """The configuration as a file that `read_toml` reads back to the same values; None is left out."""
    lines = ["# A run of `masterless train`; start another like it with --config."]
    section = None
    for name, field in FIELDS.items():
        value = getattr(config, name)
        if field.metadata["section"] != section:
            section = field.metadata["section"]
            lines += ["", f"[{section}]"]
        if value is not None:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)  # of ints and floats, `inf` and `1e-05` too, Python's is TOML's
