"""`masterless plan`: published parameter counts, bytes by hand and against live tensors, shards, activations."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch
import torch.nn.functional as F
from plan_models import CONFIGS, PUBLISHED, config_of, expand, small
from torch import nn

import masterless as ml
from masterless.formats import parse
from masterless.formats.storage import predicted_bytes
from masterless.insight.memory import measure
from masterless.lab.plan import Model, Settings, advise, load_model, make_plan
from masterless.lab.plan.activations import activation_bytes, layer_bytes
from masterless.lab.plan.architectures import ARCHITECTURES
from masterless.lab.plan.parameters import Geometry, model_of_config
from masterless.lab.plan.table import shard_shape, why_dense
from masterless.optim.presets import PRESETS
from masterless.tensor.quantized import QuantizedTensor


def rows_of(name: str, **settings) -> dict:
    plan = make_plan(load_model(CONFIGS / f"{name}.json"), Settings(**settings))
    return {row.system.name: row for row in plan.rows}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert load_model(CONFIGS / f"{name}.json").numel == PUBLISHED[name]


def test_every_architecture_is_tested():
    tested = {json.loads(path.read_text())["model_type"] for path in CONFIGS.glob("*.json")}
    assert set(ARCHITECTURES) - {"gemma3"} == tested


def test_a_nested_config_is_its_language_model():
    nested = {"model_type": "gemma3", "text_config": config_of("gemma-3-1b"), "vision_config": {}}
    model = model_of_config(nested, "nested")
    assert model.numel == PUBLISHED["gemma-3-1b"]
    assert "language model only" in model.notes[0]


# --- totals by hand ---------------------------------------------------------------------------------------


def test_llama_3_8b_by_hand():
    rows, n = rows_of("llama-3-8b"), 8_030_261_248
    inner = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)  # all rows are made of whole blocks
    vectors = 65 * 4096
    outer = 2 * 128256 * 4096
    assert inner + outer + vectors == n
    # per token and layer: 2 bytes of (norms 4h, q and o 2h, k and v 2 * 1024, feed-forward 4f), 32 heads, two norms
    layer = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336) + 4 * 32 + 8
    activations = 2048 * (32 * layer + 2 * 2 * 4096 + 4 + 10 * 128256)

    torch_row = rows["torch AdamW"]
    assert (torch_row.weights, torch_row.master, torch_row.states) == (2 * n, 4 * n, 8 * n)
    assert torch_row.total == 16 * n + activations

    ours = rows["2-byte-int4"]
    assert ours.weights == inner + inner // 128 * 2 + 2 * (outer + vectors)
    matrices = inner + outer
    assert ours.states == matrices + matrices // 128 * (2 + 4) + 8 * vectors
    decoded = 2 * 14336 * 4096
    assert ours.total == ours.weights + ours.states + 2 * n + decoded + activations
    assert ours.total_in_backward == ours.total - 2 * n + 2 * 128256 * 4096


def test_deepseek_moe_16b_by_hand():
    rows, n = rows_of("deepseek-moe-16b", checkpointing="full", seq_len=1024), 16_375_728_128
    # shape -> how many: attention, the dense layer's feed-forward, 27 layers of 64 experts and 2 shared in one
    inner = {(2048, 2048): 28 * 4, (10944, 2048): 2, (2048, 10944): 1}
    inner |= {(1408, 2048): 27 * 64 * 2, (2048, 1408): 27 * 64, (2816, 2048): 27 * 2, (2048, 2816): 27}
    left = {(102400, 2048): 2, (64, 2048): 27}
    vectors = 57 * 2048
    assert sum(k * a * b for (a, b), k in (inner | left).items()) + vectors == n
    head = 2 * 2 * 2048 + 4 + 10 * 102400
    activations = 1024 * (28 * 2 * 2048 + head)  # the head is larger than any layer

    one = rows["1-byte"]
    # INT6 and a 16-bit scale per 128 elements; a 2-bit first moment with the same, fp32 means of rows and columns
    scales = {(a, b): 2 * a * -(-b // 128) for a, b in inner | left}
    assert one.weights == sum(k * (a * b * 6 // 8 + scales[a, b]) for (a, b), k in inner.items()) + 2 * (
        sum(k * a * b for (a, b), k in left.items()) + vectors
    )
    first = sum(k * (a * b * 2 // 8 + scales[a, b]) for (a, b), k in (inner | left).items())
    assert one.states == first + sum(k * 4 * (a + b) for (a, b), k in (inner | left).items()) + 8 * vectors
    assert one.total == one.weights + one.states + 2 * n + 2 * 10944 * 2048 + activations

    bnb = rows["bitsandbytes 8-bit"]
    matrices = n - vectors  # vectors of 2048 keep fp32 states
    assert bnb.total == 2 * n + 2 * n + 2 * (matrices + 4 * matrices // 256) + 8 * vectors + activations


def test_gemma_3_1b_by_hand():
    rows, n = rows_of("gemma-3-1b"), 999_885_952
    inner = {(1024, 1152): 26, (256, 1152): 52, (1152, 1024): 26, (6912, 1152): 52, (1152, 6912): 26}
    vectors = 26 * (4 * 1152 + 2 * 256) + 1152
    table = 262144 * 1152
    elements = sum(k * a * b for (a, b), k in inner.items())
    assert elements + table + vectors == n

    ours = rows["1.8-byte"]  # INT8 with a 16-bit scale per row; 1152 = 9 * 128, 1024 and 6912 are multiples too
    assert ours.weights == elements + sum(k * 2 * a for (a, _), k in inner.items()) + 2 * (table + vectors)
    matrices = elements + table
    assert ours.states == matrices * 6 // 8 + matrices // 128 * 6 + 8 * vectors
    # the tied table's gradient waits for its other half
    assert ours.gradients_in_backward == 2 * (2 * table)

    torchao = rows["torchao 4-bit"]  # two tables of 64 bytes a matrix; vectors keep bf16 states
    count = sum(inner.values()) + 1
    assert torchao.states == 2 * (matrices // 2 + 4 * matrices // 128 + 64 * count) + 2 * 2 * vectors
    assert torchao.weights + torchao.gradients == 4 * n
    assert torchao.workspace == torchao.master == 0


# --- against live tensors ---------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """Stands for GPT-2's layer, which `quantize_` knows by its name."""

    __module__ = "transformers.pytorch_utils"


def build(model: Model) -> nn.Module:
    """A live module tree with the parameters of a plan's model."""
    kinds = {"linear": lambda: nn.Linear(1, 1), "embedding": lambda: nn.Embedding(1, 1), "norm": lambda: nn.RMSNorm(1)}
    root = nn.Module()
    for p in model.parameters:
        for name in [p.name.replace("*", str(e)) for e in range(p.count)] if "*" in p.name else [p.name]:
            *path, key = name.split(".")
            holder = root
            for depth, part in enumerate(path, 1):
                if part not in holder._modules:
                    leaf = depth == len(path)
                    holder.add_module(part, kinds.get(p.layer, Conv1D)() if leaf else nn.Module())
                    if leaf:
                        holder._modules[part]._parameters.clear()
                holder = holder._modules[part]
            holder.register_parameter(key, nn.Parameter(torch.randn(p.shape)))
            if p.tied:
                root.lm_head = nn.Linear(1, 1, bias=False)
                root.lm_head.weight = holder.weight
    return root


def live(model: Model, preset: str) -> tuple[nn.Module, dict]:
    chosen = PRESETS[preset]
    module = build(model)
    if chosen.weights:
        ml.quantize_(module.bfloat16(), chosen.weights)
    optimizer = ml.AdamW(module.named_parameters(), **chosen.options)
    for group, p, _ in optimizer.parameters():
        optimizer.state_storage(p, group)  # allocates as the first step does
    return module, measure(optimizer)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", [*PUBLISHED, "kimi-k2"])
def test_bytes_equal_live_tensors(name, preset):
    model = small(name)
    module, bytes_of = live(model, preset)
    row = next(row for row in make_plan(model).rows if row.system.name == preset)
    assert sum(b.parameters for b in bytes_of.values()) == model.numel
    assert sum(b.weights for b in bytes_of.values()) == row.weights
    assert sum(b.states for b in bytes_of.values()) == row.states
    assert sum(p.numel() * p.itemsize for p in module.parameters()) == row.gradients
    if PRESETS[preset].weights:
        quantized = {n for n, p in module.named_parameters() if isinstance(p, QuantizedTensor)}
        predicted = {n for p in model.parameters if not why_dense(p) for n in expand(p)}
        assert quantized == predicted


def test_gpt2_is_quantized_though_its_matrices_are_transposed():
    model = load_model(CONFIGS / "gpt2.json")
    assert make_plan(model).quantized == 12 * 12 * 768 * 768


# --- shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 64, 300])
@pytest.mark.parametrize("shape", [(257, 200), (6, 33, 130), (64, 96), (5, 64), (101,)])
def test_shards_are_torch_chunks_and_sum_to_the_whole(shape, shards):
    parts = [shard_shape(shape, shards, rank) for rank in range(shards)]
    chunks = torch.empty(shape, device="meta").chunk(shards)
    assert parts[: len(chunks)] == [tuple(c.shape) for c in chunks]
    assert all(part[0] == 0 for part in parts[len(chunks) :])
    for name in ("fp32", "bf16") if len(shape) == 1 else ("fp32", "int8:row", "int4", "int4+4", "log2", "int3"):
        format = parse(name)
        assert sum(predicted_bytes(format, part) for part in parts) == predicted_bytes(format, shape)
    assert max(predicted_bytes(parse("fp32"), part) for part in parts) == predicted_bytes(parse("fp32"), parts[0])


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_the_largest_rank_holds_a_chunk_of_every_stored_tensor(shards):
    model = small("deepseek-moe-16b")
    module, _ = live(model, "2-byte-int4")
    row = next(r for r in make_plan(model, Settings(shards=shards)).rows if r.system.name == "2-byte-int4")
    tensors = []
    for p in module.parameters():
        tensors += p.stored.tensors.values() if isinstance(p, QuantizedTensor) else [p]
    assert row.weights == sum(t.chunk(shards)[0].numel() * t.itemsize for t in tensors)
    # each rank receives the others' (padded) codes and scales, layers twice and the root once; hidden bits stay
    visible = {
        name: sum(t.chunk(shards)[0].numel() * t.itemsize for k, t in p.stored.tensors.items() if k != "hidden")
        if isinstance(p, QuantizedTensor)
        else p.chunk(shards)[0].numel() * 2
        for name, p in module.named_parameters()
    }
    gathers = sum(size * (2 if ".layers." in name else 1) for name, size in visible.items())
    assert row.gathered == (shards - 1) * gathers
    assert row.reduced == (shards - 1) * 2 * sum(p.chunk(shards)[0].numel() for p in module.parameters() if p.dim())


def test_int4_moves_fewer_bytes_than_bf16():
    rows = rows_of("llama-3-8b", shards=8)
    inner = 6_979_321_856
    assert rows["torch AdamW"].gathered == 7 * 2 * (2 * (inner + 64 * 4096) + 2 * 128256 * 4096 + 4096) // 8
    dense = 2 * 2 * 7 * inner // 8
    ours = rows["1-byte-int4"].gathered - (rows["torch AdamW"].gathered - dense)
    assert dense / ours == pytest.approx(16 / 4.125)


def test_huge_models_are_planned_by_shapes_alone():
    for name in ("kimi-k2", "llama-3-70b"):
        tracemalloc.start()
        model = load_model(CONFIGS / f"{name}.json")
        plan = make_plan(model, Settings(shards=1000))
        advise(plan, 80 * 10**9)
        assert tracemalloc.get_traced_memory()[1] < 50e6
        tracemalloc.stop()
    assert load_model(CONFIGS / "kimi-k2.json").numel == 1_026_408_209_408


# --- activations ------------------------------------------------------------------------------------------


class FusedNorm(torch.autograd.Function):
    """An RMS norm that keeps its input and the reciprocal deviation, as fused kernels do."""

    @staticmethod
    def forward(ctx, x):
        inverse = x.float().square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, inverse)
        return (x.float() * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def test_the_activation_model_is_what_autograd_keeps():
    h, heads, f, tokens = 64, 4, 176, 48
    shapes = {**dict.fromkeys("qkvo", (h, h)), "gate": (f, h), "up": (f, h), "down": (h, f)}
    weights = {name: torch.randn(shape).bfloat16().requires_grad_() for name, shape in shapes.items()}
    saved: dict[int, torch.Tensor] = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t
        return t

    x = torch.randn(1, tokens, h).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = FusedNorm.apply(x)
        # clones stand for the rotation of q and k, which is out of place
        q, k, v = (F.linear(y, weights[n]).view(1, tokens, heads, -1).transpose(1, 2).clone() for n in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z = x + F.linear(mixed.transpose(1, 2).reshape(1, tokens, h), weights["o"])
        y = FusedNorm.apply(z)
        F.linear(F.silu(F.linear(y, weights["gate"])) * F.linear(y, weights["up"]), weights["down"])
    parameters = {w.untyped_storage().data_ptr() for w in weights.values()}
    kept = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in parameters)
    geometry = Geometry(h, 10, heads, h, h, h, h, 0, f, True, False, False, 1)
    assert kept == tokens * layer_bytes(geometry, moe=False)


def test_checkpointing_keeps_inputs_and_one_layer():
    geometry = load_model(CONFIGS / "llama-3-8b.json").geometry
    full, none = (activation_bytes(geometry, 4096, c) for c in ("full", "none"))
    layer = layer_bytes(geometry, moe=False)
    assert full == 4096 * (32 * 2 * 4096 + max(layer, 4 * 4096 + 4 + 10 * 128256))
    assert none == 4096 * (32 * layer + 4 * 4096 + 4 + 10 * 128256)


# --- whole models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.weights])
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-1b", "deepseek-moe-16b", "gpt2"])
def test_bytes_of_whole_models_equal_live_tensors(name, preset):
    model = small(name)
    module = build(model).bfloat16()
    optimizer = ml.prepare(module, preset, whole_model=True)
    for group, p, _ in optimizer.parameters():
        optimizer.state_storage(p, group)
    plan = make_plan(model, Settings(whole_model=True))
    row = next(row for row in plan.rows if row.system.name == preset)
    bytes_of = measure(optimizer).values()
    assert (sum(b.weights for b in bytes_of), sum(b.states for b in bytes_of)) == (row.weights, row.states)
    assert sum(p.numel() for p in module.parameters() if isinstance(p, QuantizedTensor)) == plan.quantized


def test_a_whole_model_has_neither_logits_nor_gradients_of_its_tables():
    dense, whole = rows_of("llama-3-8b"), rows_of("llama-3-8b", whole_model=True)
    one, other = dense["1.3-byte"], whole["1.3-byte"]
    layer = 14336 * 4096
    assert one.gradients_in_backward == 2 * 128256 * 4096 and other.gradients_in_backward == 2 * layer
    assert one.activations - other.activations > 2048 * 128256 * 9
    assert other.bytes_per_parameter < one.bytes_per_parameter
    assert whole["torch AdamW"] == dense["torch AdamW"]  # which cannot


def test_unfused_activations_are_what_autograd_keeps_of_our_models():
    from masterless.lab.models import Llama, LlamaConfig

    tokens, sizes = 48, {}
    for layers in (1, 2):
        config = LlamaConfig(96, 64, 160, layers, 4, 2, 16)
        model = Llama(config, torch.Generator().manual_seed(0), checkpointing=False).bfloat16()
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, int] = {}

        def pack(t, own=own, saved=saved):
            if t.untyped_storage().data_ptr() not in own:
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        ids = torch.zeros(1, tokens, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            kept = model(ids, ids)
        sizes[layers] = sum(saved.values())
        del kept
    geometry = Geometry(64, 96, 4, 64, 32, 32, 64, 0, 160, True, False, False, 1)
    assert sizes[2] - sizes[1] == tokens * layer_bytes(geometry, moe=False, fused=False)
