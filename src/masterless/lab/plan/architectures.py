"""What a model of each architecture is made of: one table, read by `shapes`.

Contract:
    * An architecture is data: its modules, each with a path, the symbols of its dimensions and the flag that gives it a
      bias. A symbol is a number derived from the config by `symbols`; nothing here is code for one architecture.
    * Names and shapes are those of the Hugging Face checkpoints: every linear weight is ``[out, in]``, experts are
      separate matrices. Buffers (rotary tables, masks, routing biases set by a rule) are no parameters.
    * A config may leave out what the architecture has a default for; anything else that is missing is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Module:
    """A module with a weight, and a bias if the symbol `bias` is true.

    Attributes:
        path: its name, relative to the layer or to the model.
        layer: what kind it is, as `quantize.why_left` takes it.
        shape: symbols of the weight's dimensions.
        bias_size: symbol of the bias's length.
        bias: symbol that says whether there is a bias; empty for never.
        when: symbol that says whether the module is there at all (``!symbol``: not there); empty for always.
        count: symbol of how many there are (experts, ``*`` in the path); empty for one.
    """

    path: str
    layer: str
    shape: tuple[str, ...]
    bias_size: str = ""
    bias: str = ""
    when: str = ""
    count: str = ""


def linear(path: str, out: str, inp: str, bias: str = "", when: str = "", count: str = "") -> Module:
    """A linear layer, ``[out, in]``."""
    return Module(path, "linear", (out, inp), out, bias, when, count)


def conv1d(path: str, out: str, inp: str) -> Module:
    """GPT-2's linear layer, with its weight as ``[in, out]``."""
    return Module(path, "transposed linear", (inp, out), out, "true")


def norm(path: str, width: str = "hidden", bias: str = "", when: str = "") -> Module:
    """An RMS norm, or with a bias a layer norm."""
    return Module(path, "norm", (width,), width, bias, when)


def embedding(path: str, rows: str = "vocab", width: str = "hidden") -> Module:
    """An embedding table."""
    return Module(path, "embedding", (rows, width))


def gated_mlp(path: str, width: str, bias: str = "", when: str = "", count: str = "") -> tuple[Module, ...]:
    """Gate, up and down projections of the usual names."""
    ends = {"gate_proj": (width, "hidden"), "up_proj": (width, "hidden"), "down_proj": ("hidden", width)}
    return tuple(linear(f"{path}.{name}", *shape, bias, when, count) for name, shape in ends.items())


ATTENTION = (
    linear("self_attn.q_proj", "q", "hidden", "qkv_bias"),
    linear("self_attn.k_proj", "kv", "hidden", "qkv_bias"),
    linear("self_attn.v_proj", "kv", "hidden", "qkv_bias"),
    linear("self_attn.o_proj", "hidden", "q", "o_bias"),
)
QK_NORMS = (norm("self_attn.q_norm", "head_dim"), norm("self_attn.k_norm", "head_dim"))
LATENT_ATTENTION = (
    linear("self_attn.q_proj", "q", "hidden", when="!q_lora"),
    linear("self_attn.q_a_proj", "q_lora", "hidden", "qkv_bias", when="q_lora"),
    norm("self_attn.q_a_layernorm", "q_lora", when="q_lora"),
    linear("self_attn.q_b_proj", "q", "q_lora", when="q_lora"),
    linear("self_attn.kv_a_proj_with_mqa", "kv_a", "hidden", "qkv_bias"),
    norm("self_attn.kv_a_layernorm", "kv_lora"),
    linear("self_attn.kv_b_proj", "kv_b", "kv_lora"),
    linear("self_attn.o_proj", "hidden", "o", "o_bias"),
)
NORMS = (norm("input_layernorm"), norm("post_attention_layernorm"))
FOUR_NORMS = (*NORMS, norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm"))
MLP = gated_mlp("mlp", "ff", "mlp_bias")
DEEPSEEK_MOE = (
    linear("mlp.gate", "experts", "hidden"),
    *gated_mlp("mlp.experts.*", "moe_ff", count="experts"),
    *gated_mlp("mlp.shared_experts", "shared_ff", when="shared_ff"),
)


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        every: modules of every layer.
        dense: modules of a layer without experts, besides.
        moe: modules of a layer with experts, besides.
        before: modules before the layers.
        after: modules after the layers.
        head: the output head, which a tied model does not have.
        layers: path of the layers.
        base: path of all but the head.
        defaults: what the architecture's own config class fills in, by config key.
        flags: symbols that are a config key's truth, or constants.
        gated: whether the feed-forward layer has a gate.
    """

    every: tuple[Module, ...]
    dense: tuple[Module, ...] = MLP
    moe: tuple[Module, ...] = ()
    before: tuple[Module, ...] = (embedding("embed_tokens"),)
    after: tuple[Module, ...] = (norm("norm"),)
    head: Module = field(default_factory=lambda: linear("lm_head", "vocab", "hidden"))
    layers: str = "layers"
    base: str = "model"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    gated: bool = True


_BIASED = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_LLAMA = Architecture((*NORMS, *ATTENTION), flags=_BIASED)
_QWEN3 = (*NORMS, *ATTENTION, *QK_NORMS)
_QWEN_MOE = (linear("mlp.gate", "experts", "hidden"), *gated_mlp("mlp.experts.*", "moe_ff", count="experts"))
_SHARED_GATE = (*gated_mlp("mlp.shared_expert", "shared_ff"), linear("mlp.shared_expert_gate", "one", "hidden"))
_SPARSE_STEP = {"decoder_sparse_step": 1, "moe_offset": 1}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA3_TEXT = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}  # left out by nested configs
_GEMMA3 = Architecture((*FOUR_NORMS, *ATTENTION, *QK_NORMS), defaults={**_GEMMA, **_GEMMA3_TEXT}, flags=_BIASED)
_LATENT = Architecture((*NORMS, *LATENT_ATTENTION), moe=DEEPSEEK_MOE, flags=_BIASED)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": Architecture((*NORMS, *ATTENTION)),
    "mixtral": Architecture(
        (*NORMS, *ATTENTION),
        dense=(),
        moe=(
            linear("block_sparse_moe.gate", "experts", "hidden"),
            linear("block_sparse_moe.experts.*.w1", "ff", "hidden", count="experts"),
            linear("block_sparse_moe.experts.*.w2", "hidden", "ff", count="experts"),
            linear("block_sparse_moe.experts.*.w3", "ff", "hidden", count="experts"),
        ),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": Architecture((*NORMS, *ATTENTION), flags={"qkv_bias": True}),
    "qwen2_moe": Architecture(
        (*NORMS, *ATTENTION), moe=(*_QWEN_MOE, *_SHARED_GATE), defaults=_SPARSE_STEP, flags={"qkv_bias": True}
    ),
    "qwen3": Architecture(_QWEN3, defaults={"head_dim": 128}, flags=_BIASED),
    "qwen3_moe": Architecture(_QWEN3, moe=_QWEN_MOE, defaults={"head_dim": 128, **_SPARSE_STEP}, flags=_BIASED),
    "gemma": Architecture((*NORMS, *ATTENTION), defaults=_GEMMA, flags=_BIASED),
    "gemma2": Architecture((*FOUR_NORMS, *ATTENTION), defaults=_GEMMA, flags=_BIASED),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "deepseek": Architecture((*NORMS, *ATTENTION), moe=DEEPSEEK_MOE, flags=_BIASED),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "phi3": Architecture(
        (*NORMS, linear("self_attn.qkv_proj", "qkv", "hidden"), linear("self_attn.o_proj", "hidden", "q")),
        dense=(linear("mlp.gate_up_proj", "two_ff", "hidden"), linear("mlp.down_proj", "hidden", "ff")),
    ),
    "gpt2": Architecture(
        (
            norm("ln_1", bias="true"),
            conv1d("attn.c_attn", "qkv", "hidden"),
            conv1d("attn.c_proj", "hidden", "q"),
            norm("ln_2", bias="true"),
        ),
        dense=(conv1d("mlp.c_fc", "ff", "hidden"), conv1d("mlp.c_proj", "hidden", "ff")),
        before=(embedding("wte"), embedding("wpe", "positions")),
        after=(norm("ln_f", bias="true"),),
        layers="h",
        base="transformer",
        defaults={"tie_word_embeddings": True},
        gated=False,
    ),
    "gpt_neox": Architecture(
        (
            norm("input_layernorm", bias="true"),
            norm("post_attention_layernorm", bias="true"),
            linear("attention.query_key_value", "qkv", "hidden", "qkv_bias"),
            linear("attention.dense", "hidden", "q", "qkv_bias"),
        ),
        dense=(
            linear("mlp.dense_h_to_4h", "ff", "hidden", "true"),
            linear("mlp.dense_4h_to_h", "hidden", "ff", "true"),
        ),
        before=(embedding("embed_in"),),
        after=(norm("final_layer_norm", bias="true"),),
        head=linear("embed_out", "vocab", "hidden"),
        base="gpt_neox",
        defaults={"attention_bias": True},
        flags={"qkv_bias": "attention_bias"},
        gated=False,
    ),
}

LARGEST = 10**10  # of any one size; no model has a dimension like that

# symbol -> config keys that may say it
CONFIG_KEYS = {
    "hidden": ("hidden_size", "n_embd"),
    "vocab": ("vocab_size",),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ff": ("intermediate_size", "n_inner"),
    "positions": ("n_positions", "max_position_embeddings"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "moe_ff": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "shared_ff": ("shared_expert_intermediate_size",),
    "first_dense": ("first_k_dense_replace",),
    "moe_every": ("moe_layer_freq", "decoder_sparse_step"),
    "moe_offset": ("moe_offset",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "v_head": ("v_head_dim",),
}


def symbols(config: Mapping[str, Any], architecture: Architecture) -> dict[str, int]:
    """The numbers behind the symbols of the table."""
    known = {**architecture.defaults, **{k: v for k, v in config.items() if v is not None}}

    def number(symbol: str, default: int | None = None) -> int:
        key = next((k for k in CONFIG_KEYS[symbol] if k in known), None)
        value = default if key is None else known[key]
        if value is None:
            raise ValueError(f"lacks {' or '.join(map(repr, CONFIG_KEYS[symbol]))}; add it")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise ValueError(f"has {key}={str(value)[:40]!r}, which is no size; write a positive whole number")
        if value == 0 and default is None:
            raise ValueError(f"has {key}=0, which makes no model; write a positive whole number")
        return value

    def truth(key: str) -> int:
        value = known.get(key, False)
        if not isinstance(value, bool):  # "false" is true to Python
            raise ValueError(f"has {key}={str(value)[:40]!r}; write true or false without quotes")
        return int(value)

    s = {name: number(name) for name in ("hidden", "vocab", "layers", "heads")}
    s["kv_heads"] = number("kv_heads", s["heads"])
    s["head_dim"] = number("head_dim", s["hidden"] // s["heads"])
    s["ff"] = number("ff", 4 * s["hidden"] if not architecture.gated else None)
    for name in ("positions", "experts", "top_k", "first_dense", "moe_offset", "q_lora", "kv_lora", "nope", "rope"):
        s[name] = number(name, 0)
    s["moe_every"] = number("moe_every", 1) or 1
    s["moe_ff"] = number("moe_ff", s["ff"])
    s["shared_ff"] = number("shared_ff", number("shared_experts", 0) * s["moe_ff"])
    s["v_head"] = number("v_head", s["head_dim"])
    if s["kv_lora"]:
        s["head_dim"] = s["nope"] + s["rope"]
    s["q"] = s["heads"] * s["head_dim"]
    s["kv"] = s["kv_heads"] * s["head_dim"]
    s["o"] = s["heads"] * s["v_head"]
    s["kv_a"] = s["kv_lora"] + s["rope"]
    s["kv_b"] = s["heads"] * (s["nope"] + s["v_head"])
    s["qkv"] = s["q"] + 2 * s["kv"]
    s["two_ff"] = 2 * s["ff"]
    s["one"] = s["true"] = 1
    s["tied"] = truth("tie_word_embeddings")
    flags = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, **architecture.flags}
    s |= {name: truth(flag) if isinstance(flag, str) else int(flag) for name, flag in flags.items()}
    return s


def is_moe_layer(index: int, s: Mapping[str, int], dense_layers: frozenset[int]) -> bool:
    """Whether a layer has experts."""
    if not s["experts"] or index < s["first_dense"] or index in dense_layers:
        return False
    return (index + s["moe_offset"]) % s["moe_every"] == 0
