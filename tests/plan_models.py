"""Configs with their published parameter counts, and small models of the same architectures, for the plan's tests."""

from __future__ import annotations

import json
from pathlib import Path

from masterless.lab.plan import Model, Parameter
from masterless.lab.plan.parameters import model_of_config

CONFIGS = Path(__file__).parent / "data" / "configs"

# Counts as published with the checkpoints (model cards, safetensors metadata).
PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the routing biases of 58 layers are set by a rule: no parameters
    "gemma-3-1b": 999_885_952,
    "gemma-2-9b": 9_241_705_984,
    "gemma-7b": 8_537_680_896,
    "gpt2": 124_439_808,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3-mini": 3_821_079_552,
    "pythia-6.9b": 6_857_302_016,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}


def config_of(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


# What a small model of any architecture has in place of a config's own sizes; odd on purpose.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 3),
    **{
        "num_key_value_heads": 2,
        "head_dim": 20,
        "intermediate_size": 200,
        "moe_intermediate_size": 50,
        "vocab_size": 101,
    },
    **{"shared_expert_intermediate_size": 70, "n_positions": 33, "q_lora_rank": 36, "kv_lora_rank": 33},
    **{"qk_nope_head_dim": 14, "qk_rope_head_dim": 6, "v_head_dim": 17},
}


def small(name: str) -> Model:
    config = config_of(name)
    return model_of_config(config | {k: v for k, v in SMALL.items() if config.get(k) is not None}, name)


def expand(p: Parameter) -> list[str]:
    return [p.name.replace("*", str(e)) for e in range(p.count)] if "*" in p.name else [p.name]
