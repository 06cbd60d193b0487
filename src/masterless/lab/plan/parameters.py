"""The parameters of a model, from its config, the headers of its files, or a number of parameters.

Contract:
    * No weight is read and no model is built: names and shapes come from the table in `architectures`, or from the
      headers of safetensors files.
    * Alike parameters (the experts of a layer) are one entry with a count, so a model of a million matrices costs no
      more to plan than one of a hundred.
    * Input that cannot be read is a `PlanError` with the value, the reason and the remedy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from masterless.interop.files import read_json
from masterless.lab.plan.architectures import ARCHITECTURES, CONFIG_KEYS, Architecture, Module, is_moe_layer, symbols
from masterless.lab.plan.headers import FLOATS, read_headers, safetensors_files

MOST_LAYERS = 10_000
ROOT = -1  # the unit of what is in no layer


class PlanError(ValueError):
    """A model or a size that cannot be planned for."""


@dataclass(frozen=True)
class Parameter:
    """One parameter, or several alike.

    Attributes:
        name: full name; ``*`` stands for the index of an expert.
        shape: of each of them.
        layer: kind of the module that holds it, as `quantize.why_left` takes it.
        count: how many there are.
        unit: index of the layer it is in, `ROOT` for embeddings, the last norm and the head.
        tied: whether it is also the output head.
    """

    name: str
    shape: tuple[int, ...]
    layer: str
    count: int = 1
    unit: int = ROOT
    tied: bool = False

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Geometry:
    """The widths that decide how large activations are, per token; see `activations`."""

    hidden: int
    vocab: int
    heads: int
    q: int
    k: int
    v: int
    out: int
    latents: int
    ff: int
    gated: bool
    qk_norms: bool
    post_norms: bool
    dense_layers: int
    moe_layers: int = 0
    experts: int = 0
    top_k: int = 0
    moe_ff: int = 0
    shared_ff: int = 0
    joint_qkv: bool = False  # one product makes q, k and v: what keeps v keeps all three


@dataclass(frozen=True)
class Model:
    """A model as a plan sees it.

    Attributes:
        name: what tables call it.
        parameters: its parameters.
        geometry: widths for the activations; None if they are not known.
        notes: what a reader should know about where the shapes come from.
    """

    name: str
    parameters: tuple[Parameter, ...]
    geometry: Geometry | None = None
    notes: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(p.numel for p in self.parameters)


def load_model(path: str | Path) -> Model:
    """The model behind a ``config.json``, a safetensors file or index, or a directory of either."""
    if not str(path).strip():
        raise PlanError("'': an empty name; give a config.json, a safetensors file or a directory with either")
    path = Path(path)
    if not path.exists():
        raise PlanError(
            f"{path}: no such file or directory; give a config.json, a safetensors file, a directory with either, "
            f"or --params 7B"
        )
    try:
        files = safetensors_files(path)
        if files:
            return _model_of_files(path, files)
        config = path / "config.json" if path.is_dir() else path
        if not config.exists():
            raise PlanError(f"{path}: holds neither config.json nor *.safetensors; give a directory that does")
        return model_of_config(read_config(config), _title(config))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(str(error)) from error


def read_config(path: Path) -> dict[str, Any]:
    """The dictionary in a config file."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise PlanError(f"{path}: holds a {type(config).__name__}, not an object; give a Hugging Face config.json")
    return config


def model_of_config(config: Mapping[str, Any], name: str) -> Model:
    """The model that a Hugging Face config describes."""
    kind, architecture, config, notes = _architecture(config, name)
    try:
        s = symbols(config, architecture)
    except ValueError as error:
        raise PlanError(f"{name}: a {kind} config that {error}") from error
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise PlanError(f"{name}: a {kind} config with mlp_only_layers={str(dense)[:60]}; write a list of numbers")
    if s["layers"] > MOST_LAYERS:
        raise PlanError(f"{name}: a {kind} config of {s['layers']:,} layers; more than {MOST_LAYERS:,} are no model")
    moe = [is_moe_layer(i, s, frozenset(dense)) for i in range(s["layers"])]
    parameters: list[Parameter] = []

    def add(module: Module, prefix: str, unit: int) -> None:
        symbol = module.when.removeprefix("!")
        if symbol and bool(s[symbol]) == module.when.startswith("!"):
            return
        missing = [dim for dim in module.shape if not s[dim]]
        if missing:
            keys = " or ".join(map(repr, CONFIG_KEYS.get(missing[0], (missing[0],))))
            raise PlanError(f"{name}: a {kind} config without {keys}, which {module.path} needs; add it")
        path = f"{prefix}.{module.path}" if prefix else module.path
        tied = module.layer == "embedding" and module.shape[0] == "vocab" and bool(s["tied"])
        count = s[module.count] if module.count else 1
        parameters.append(
            Parameter(f"{path}.weight", tuple(s[d] for d in module.shape), module.layer, count, unit, tied)
        )
        if module.bias and s[module.bias]:
            parameters.append(Parameter(f"{path}.bias", (s[module.bias_size],), module.layer, count, unit))

    for module in architecture.before:
        add(module, architecture.base, ROOT)
    for i, has_experts in enumerate(moe):
        for module in (*architecture.every, *(architecture.moe if has_experts else architecture.dense)):
            add(module, f"{architecture.base}.{architecture.layers}.{i}", i)
    for module in architecture.after:
        add(module, architecture.base, ROOT)
    if not s["tied"]:
        add(architecture.head, "", ROOT)
    return Model(name, tuple(parameters), _geometry(architecture, s, sum(moe)), notes)


def _architecture(config: Mapping[str, Any], name: str) -> tuple[str, Architecture, Mapping[str, Any], tuple[str, ...]]:
    """The architecture that a config names, the part of the config that describes it, and notes."""
    kind = config.get("model_type")
    notes: tuple[str, ...] = ()
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        kind = nested.get("model_type", kind)
        notes = ("language model only: the config also describes a vision or audio tower, which is not counted",)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise PlanError(
            f"{name}: unknown architecture model_type={str(kind)[:60]!r}; known: {', '.join(ARCHITECTURES)}; "
            f"for any other model give its safetensors files"
        )
    return kind, ARCHITECTURES[kind], nested if isinstance(nested, Mapping) else config, notes


def _geometry(architecture: Architecture, s: Mapping[str, int], moe_layers: int) -> Geometry:
    paths = {module.path for module in architecture.every}
    latent = bool(s["kv_lora"])
    return Geometry(
        hidden=s["hidden"],
        vocab=s["vocab"],
        heads=s["heads"],
        q=s["q"],
        k=s["q"] if latent else s["kv"],  # latent keys and values are expanded to all heads in training
        v=s["o"] if latent else s["kv"],
        out=s["o"] if latent else s["q"],
        latents=s["q_lora"] + s["kv_lora"],
        ff=s["ff"],
        gated=architecture.gated,
        qk_norms="self_attn.q_norm" in paths,
        post_norms="post_feedforward_layernorm" in paths,
        dense_layers=s["layers"] - moe_layers,
        moe_layers=moe_layers,
        experts=s["experts"],
        top_k=s["top_k"],
        moe_ff=s["moe_ff"],
        shared_ff=s["shared_ff"],
    )


# --- headers ----------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_BUFFERS = re.compile(
    r"(?:^|\.)(?:rotary_emb\.inv_freq|(?:attn|attention)\.(?:masked_)?bias|e_score_correction_bias|\w+_scale_inv)$"
)
_EMBEDDINGS = {"wte", "wpe", "embed_in", "embed", "embedding", "embeddings", "tok_embeddings", "word_embeddings"}
_EMBEDDINGS |= {"embed_tokens", "position_embeddings", "token_embedding", "position_embedding"}
_CONV1D = {"c_attn", "c_proj", "c_fc"}  # GPT-2's


def _model_of_files(path: Path, files: list[Path]) -> Model:
    entries: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    left: list[str] = []
    for name, (dtype, shape) in read_headers(files).items():
        if dtype not in FLOATS or _BUFFERS.search(name) or 0 in shape:
            left.append(name)
            continue
        pattern = _EXPERT.sub(".experts.*.", name)
        layer = _LAYER.search(name)
        new = Parameter(pattern, shape, _layer_kind(name, shape), 1, int(layer[1]) if layer else ROOT)
        old = entries.setdefault((pattern, shape), replace(new, count=0))
        entries[pattern, shape] = replace(old, count=old.count + 1)
    if not entries:
        raise PlanError(f"{path}: holds no floating-point tensors; give the files of a dense model")
    notes = ["shapes from the headers of the files"]
    if left:
        notes.append(f"{len(left)} tensors that are no trainable parameters are left out, e.g. {left[0]}")
    geometry = None
    config = (path if path.is_dir() else path.parent) / "config.json"
    if config.exists():
        try:
            geometry = model_of_config(read_config(config), _title(config)).geometry
        except PlanError as error:
            notes.append(str(error))
    if geometry is None:
        notes.append("activations are not counted: put the model's config.json beside the files")
    parameters = _mark_tied(_mark_conv1d(list(entries.values())))
    return Model(_title(path), tuple(parameters), geometry, tuple(notes))


def _layer_kind(name: str, shape: tuple[int, ...]) -> str:
    """The kind of module that holds a tensor of this name, by the names that models give them."""
    parts = name.split(".")
    if _EMBEDDINGS.intersection(parts) and len(shape) == 2:
        return "embedding"
    if any("norm" in part or part.startswith("ln_") for part in parts):
        return "norm"
    return "linear"


def _mark_conv1d(parameters: list[Parameter]) -> list[Parameter]:
    """GPT-2's linear layers have their weights as ``[in, out]``; others use its names for ordinary ones."""
    widening = [p.shape for p in parameters if p.name.endswith((".c_attn.weight", ".c_fc.weight"))]
    if not any(shape[0] < shape[-1] for shape in widening):
        return parameters
    return [replace(p, layer="transposed linear") if _CONV1D.intersection(p.name.split(".")) else p for p in parameters]


def _mark_tied(parameters: list[Parameter]) -> list[Parameter]:
    """Without a head of its own a model uses its token embedding, the largest one."""
    tables = [p for p in parameters if p.layer == "embedding"]
    if not tables or any(p.unit == ROOT and p.layer == "linear" and len(p.shape) == 2 for p in parameters):
        return parameters
    largest = max(tables, key=lambda p: p.numel)
    return [replace(p, tied=True) if p is largest else p for p in parameters]


def _title(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name


# --- a number of parameters -------------------------------------------------------------------------------

VOCAB, HEAD_DIM = 32_000, 128


def model_of_size(count: int) -> Model:
    """A Llama-like model of about so many parameters.

    L layers of width ``128 L`` (as Llama 7B and 13B have it), heads of 128, a vocabulary of 32,000, an untied head, and
    a gated feed-forward layer whose width, ``8/3`` of the model's to start with, brings the count as near as multiples
    of 64 can.
    """

    def config(layers: int, ff: int) -> dict[str, Any]:
        width = HEAD_DIM * layers
        sizes = {"hidden_size": width, "intermediate_size": ff, "num_hidden_layers": layers}
        return {"model_type": "llama", "vocab_size": VOCAB, "num_attention_heads": layers, **sizes}

    def size(layers: int, ff: int) -> int:
        width = HEAD_DIM * layers
        return 2 * VOCAB * width + layers * (4 * width**2 + 3 * width * ff + 2 * width) + width

    def usual(layers: int) -> int:
        return 64 * round(8 * HEAD_DIM * layers / 3 / 64)

    if count < size(1, 64):
        raise PlanError(
            f"--params {count:,}: less than a model of one layer with a vocabulary of {VOCAB:,} "
            f"({size(1, 64):,}); give a config.json for so small a model"
        )
    layers = 1
    while abs(size(layers + 1, usual(layers + 1)) - count) < abs(size(layers, usual(layers)) - count):
        layers += 1
    step = size(layers, 64) - size(layers, 0)
    ff = max(64, 64 * round((count - size(layers, 0)) / step))
    model = model_of_config(config(layers, ff), f"{count:,} parameters")
    shape = f"{layers} layers of width {HEAD_DIM * layers}, feed-forward {ff}, vocabulary {VOCAB:,}"
    return replace(model, name="a Llama-like model", notes=(f"asked for {count:,} parameters: {shape}",))
