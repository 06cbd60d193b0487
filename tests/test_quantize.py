"""From dense models to quantized ones and back: what is chosen, why, and the bytes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from weight_cases import quantized, random

import masterless as ml
from masterless.formats import FormatError
from masterless.formats.storage import predicted_bytes
from masterless.lab.models import GPT, GPTConfig
from masterless.tensor.quantize import dequantize_, quantize_
from masterless.tensor.quantized import QuantizedTensor, as_weight

DENSE = GPTConfig(vocab_size=64, n_layer=2, n_head=2, d_model=64, seq_len=16)
SPARSE = GPTConfig(vocab_size=64, n_layer=2, n_head=2, d_model=64, seq_len=16, n_experts=4)


def names(decisions):
    return {d.name for d in decisions}


def reasons(report):
    return {d.name: d.reason for d in report.decisions}


def stored(model):
    return {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


# --- defaults -----------------------------------------------------------------------------------------------


def test_the_dense_gpt_quantizes_the_linears_of_its_blocks():
    model = GPT(DENSE)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = quantize_(model, "int4")
    inner = {
        f"blocks.{i}.{part}.weight" for i in (0, 1) for part in "attention.qkv attention.out mlp.up mlp.down".split()
    }
    assert stored(model) == names(report.quantized) == inner
    assert names(report.left) == set(before) - inner
    why = reasons(report)
    assert why["embed.weight"] == "embedding" and why["head.weight"] == "output head"
    assert why["blocks.0.attention_norm.weight"] == why["norm.weight"] == "vector"
    assert why["blocks.0.mlp.up.weight"] == "matrix"
    for name, p in model.named_parameters():
        expected = QuantizedTensor.from_dense(before[name], "int4").dequantize() if name in inner else before[name]
        assert torch.equal(p.detach().dequantize() if name in inner else p, expected)
        assert p.requires_grad and isinstance(p, nn.Parameter)


def test_the_sparse_gpt_quantizes_its_experts_and_not_its_router():
    model = GPT(SPARSE)
    report = quantize_(model, "fp8")
    inner = {f"blocks.{i}.{part}" for i in (0, 1) for part in ("attention.qkv.weight", "attention.out.weight")}
    experts = {f"blocks.{i}.mlp.{part}" for i in (0, 1) for part in ("up", "down")}
    assert stored(model) == inner | experts
    assert reasons(report)["blocks.0.mlp.router.weight"] == "router"
    _, loss = model(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_transformer_layers_of_torch():
    report = quantize_(nn.TransformerEncoderLayer(64, 4, 128), "int8")
    assert names(report.quantized) == {"self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
    assert "MultiheadAttention" in reasons(report)["self_attn.in_proj_weight"]
    assert "include=" in reasons(report)["self_attn.in_proj_weight"]


class Oddities(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(8, 64, bias=False)
        self.group_norm = nn.GroupNorm(2, 64)
        self.layer_norm = nn.LayerNorm((4, 64))
        self.conv1d, self.conv2d = nn.Conv1d(32, 32, 3), nn.Conv2d(32, 32, 3)
        self.bilinear = nn.Bilinear(64, 64, 4)
        self.position = nn.Parameter(torch.zeros(1, 50, 64))
        self.experts = nn.Parameter(random(3, 64, 64))
        self.layer = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(64, 64), "attention": nn.Linear(64, 64)})])
        self.classifier = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.output = nn.Linear(64, 64)
        self.integers = nn.Parameter(torch.zeros(64, 64, dtype=torch.int64), requires_grad=False)


def test_what_is_left_alone_and_why():
    report = quantize_(Oddities(), "int8")
    assert names(report.quantized) == {"experts", "layer.0.output.weight", "layer.0.attention.weight"}
    why = reasons(report)
    assert "too small" in why["narrow.weight"] and why["layer.0.output.bias"] == "vector"
    assert why["group_norm.weight"] == "vector" and why["layer_norm.weight"] == "norm"
    for name, kind in (("conv1d", "Conv1d"), ("conv2d", "Conv2d"), ("bilinear", "Bilinear")):
        assert f"not a linear layer ({kind})" in why[f"{name}.weight"]
    assert "not a linear layer" in why["position"]
    for head in ("classifier.0.weight", "classifier.2.weight", "output.weight"):
        assert why[head] == "output head"
    everything = quantize_(Oddities(), "int8", include=["*"])
    assert "conv1d.weight" in names(everything.quantized) and "output.weight" in names(everything.quantized)
    assert "too small" in reasons(everything)["narrow.weight"]  # what cannot be stored so is not, even if included
    assert reasons(everything)["integers"] == "dtype torch.int64"


class Conv1D(nn.Module):
    """As in transformers, where GPT-2 is made of it: a linear layer whose weight is [in, out]."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def test_conv1d_of_transformers_is_a_linear_layer():
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(96, 64), nn.GELU(), Conv1D(64, 96))
    report = quantize_(model, "int4")
    assert stored(model) == {"0.weight", "2.weight"}
    assert reasons(report)["0.weight"] == "matrix [in, out]: its scales run along outputs"
    assert model[0].weight.shape == (64, 96) and model[0].weight.stored.tensors["scale"].shape == (64, 1)
    x = random(5, 3, 64)
    expected = dequantize_(copy.deepcopy(model))
    for m in (model, expected):
        m(x).square().sum().backward()
    assert torch.equal(model(x), expected(x)) and torch.equal(model[0].weight.grad, expected[0].weight.grad)
    optimizer = ml.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_another_conv1d_is_not():
    other = type("Conv1D", (nn.Module,), {"__module__": "somewhere"})()
    other.weight = nn.Parameter(random(64, 64))
    assert reasons(quantize_(nn.Sequential(other)))["0.weight"].startswith("not a linear layer (Conv1D)")


def test_a_model_that_names_its_own_head():
    class HuggingFaceLike(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.to_vocabulary = nn.Linear(64, 64), nn.Linear(64, 64)

        def get_output_embeddings(self):
            return self.to_vocabulary

    report = quantize_(HuggingFaceLike(), "int4")
    assert names(report.quantized) == {"body.weight"} and reasons(report)["to_vocabulary.weight"] == "output head"


def test_a_single_layer_is_a_model():
    layer = nn.Linear(64, 64)
    assert names(quantize_(layer, "int4").quantized) == {"weight"} and isinstance(layer.weight, QuantizedTensor)


# --- choices ------------------------------------------------------------------------------------------------


def test_include_and_exclude_by_pattern_and_type():
    model = GPT(DENSE)
    report = quantize_(model, "int4", include=[nn.Embedding, "head.*"], exclude=["blocks.1.*"])
    assert {"embed.weight", "head.weight"} <= names(report.quantized)
    assert reasons(report)["embed.weight"] == "included" and reasons(report)["blocks.1.mlp.up.weight"] == "excluded"
    assert not any(name.startswith("blocks.1.") for name in stored(model))
    report = quantize_(GPT(DENSE), "int4", include=["*"], exclude=[nn.Linear])
    assert names(report.quantized) == {"embed.weight"}, "exclude wins over include"


def test_rules_come_first_and_the_first_that_matches_decides():
    model = GPT(DENSE)
    head = ml.parse_format("int4+4")
    rules = {"blocks.0.attention.*": "int8", "blocks.0.*": None, "head.weight": head, "*.down.*": "fp8"}
    report = quantize_(model, "int4", rules=rules, include=["blocks.0.*"], exclude=["head.weight"])
    formats = {d.name: d.format for d in report.decisions}
    assert formats["blocks.0.attention.qkv.weight"] == "int8:row"
    assert (
        formats["blocks.0.mlp.down.weight"] is None
        and reasons(report)["blocks.0.mlp.down.weight"] == "rule: left alone"
    )
    assert formats["blocks.1.mlp.down.weight"] == "fp8:row" and formats["blocks.1.mlp.up.weight"] == "int4"
    assert formats["head.weight"] == "int4+4" == str(model.head.weight.format)
    assert formats["embed.weight"] is None


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("value", ["*.weight", nn.Linear])
def test_a_bare_pattern_or_type_is_refused(option, value):
    with pytest.raises(TypeError, match=r"take a list of patterns or module types.*write \["):
        quantize_(GPT(DENSE), "int4", **{option: value})


def test_formats_that_cannot_be_weights_are_refused_before_anything_changes():
    for arguments in ({"format": "log2"}, {"format": "bf16"}, {"rules": {"head.*": "nonsense"}}):
        model = GPT(DENSE)
        with pytest.raises(FormatError):
            quantize_(model, **arguments)
        assert not stored(model)


# --- the report, and what stays the same --------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int4", "fp8", "int4+4", "int4+32", "int3:row"])
def test_the_report_counts_bytes_of_live_tensors(format):
    model = GPT(DENSE)
    dense = {name: p.numel() * 4 for name, p in model.named_parameters()}
    report = quantize_(model, format)
    for d, (name, p) in zip(report.decisions, model.named_parameters(), strict=True):
        live = p.stored_bytes if isinstance(p, QuantizedTensor) else p.numel() * 4
        assert (d.name, d.shape, d.dense_bytes, d.stored_bytes) == (name, tuple(p.shape), dense[name], live)
        if d.format:
            assert d.stored_bytes == predicted_bytes(as_weight(format), p.shape)
            assert d.format == str(p.format)
    assert report.dense_bytes == sum(dense.values())
    assert report.stored_bytes == sum(d.stored_bytes for d in report.decisions)
    text = str(report)
    assert all(d.name in text and d.reason in text for d in report.decisions)
    assert text.endswith(f"8 of 15 parameters quantized: {report.dense_bytes:,} -> {report.stored_bytes:,} bytes")


def test_dequantize_gives_what_the_forward_pass_saw():
    for format in ("int4", "int4+4", "fp8+32"):
        model = GPT(SPARSE)
        quantize_(model, format)
        ids = torch.arange(16).view(2, 8)
        before = model(ids)[0]
        seen = {name: p.detach().dequantize() for name, p in model.named_parameters() if name in stored(model)}
        assert dequantize_(model) is model and not stored(model)
        assert torch.equal(model(ids)[0], before)
        for name, p in model.named_parameters():
            assert type(p) is nn.Parameter and p.requires_grad
            assert name not in seen or torch.equal(p, seen[name])
        assert len(quantize_(model, format).quantized) == 8
        if format == "int4":  # its largest weight is on the last level, so the scale, and every code, comes back
            assert torch.equal(model(ids)[0], before)


def test_a_second_call_leaves_quantized_parameters_alone():
    model = GPT(DENSE)
    quantize_(model, "int4", exclude=["blocks.1.*"])
    codes = model.blocks[0].mlp.up.weight.stored.tensors["codes"].clone()
    report = quantize_(model, "int8")
    assert reasons(report)["blocks.0.mlp.up.weight"] == "already quantized"
    assert str(model.blocks[0].mlp.up.weight.format) == "int4"
    assert torch.equal(model.blocks[0].mlp.up.weight.stored.tensors["codes"], codes)
    assert str(model.blocks[1].mlp.up.weight.format) == "int8:row"
    assert names(report.quantized) == {name for name in stored(model) if name.startswith("blocks.1.")}
    unchanged = quantize_(model, "int8")
    assert not unchanged.quantized
    assert sum(d.stored_bytes for d in unchanged.decisions) == report.stored_bytes


def test_requires_grad_and_dtype_are_kept():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    model[0].weight.requires_grad_(False)
    quantize_(model, "int4")
    assert not model[0].weight.requires_grad and model[1].weight.requires_grad
    assert model[0].weight.dtype == torch.bfloat16
    dequantize_(model)
    assert not model[0].weight.requires_grad and model[1].weight.requires_grad
    assert model[0].weight.dtype == torch.bfloat16


def test_parametrized_modules():
    """The stored tensor of a parametrization is not a layer's weight; named explicitly, it works quantized."""

    class Halved(nn.Module):
        def forward(self, x):
            return 0.5 * x

    model = nn.Sequential(nn.Linear(64, 64), parametrizations.weight_norm(nn.Linear(64, 64)))
    parametrize.register_parametrization(model[0], "weight", Halved())
    report = quantize_(model, "int4")
    assert not report.quantized
    assert "ParametrizationList" in reasons(report)["0.parametrizations.weight.original"]
    before = model(random(2, 64))
    quantize_(model, "int8", include=["0.parametrizations.*"])
    assert stored(model) == {"0.parametrizations.weight.original"}
    model(random(2, 64)).sum().backward()
    assert (model(random(2, 64)) - before).abs().max() < 0.05
    # a matrix that a parametrized module owns beside the parametrized one
    model[0].register_parameter("extra", nn.Parameter(random(64, 64)))
    assert "parametrized" in reasons(quantize_(model, "int4"))["0.extra"]


def test_tied_weights_stay_tied():
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(50, 64), "inner": nn.Linear(64, 64), "out": nn.Linear(64, 50)})
    model["out"].weight = model["embed"].weight
    report = quantize_(model, "int4", include=["embed.weight"])
    assert [d.name for d in report.quantized] == ["embed.weight", "inner.weight"]
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies[1].load_state_dict(model.state_dict())
    for m in copies:
        assert m["embed"].weight is m["out"].weight and isinstance(m["embed"].weight, QuantizedTensor)
        hidden = m["inner"](m["embed"](torch.tensor([1, 2])))
        m["out"](hidden).square().sum().backward()
        assert torch.equal(m["embed"].weight.grad, model["embed"].weight.grad)
        assert len(ml.AdamW(m.parameters()).param_groups[0]["params"]) == len(list(m.parameters())) == 4
    assert copies[1]["embed"].weight is not model["embed"].weight
    ml.dequantize_(model)
    assert model["embed"].weight is model["out"].weight and type(model["out"].weight) is nn.Parameter


def test_formats_and_values_that_cannot_be_weights_are_refused():
    for format, reason in (("log4", "no negative values"), ("bf16", r"\.bfloat16\(\)"), ("int5", "unknown format")):
        with pytest.raises(FormatError, match=reason):
            as_weight(format)
    assert str(as_weight("int8")) == "int8:row" and str(as_weight("int8:128")) == "int8"
    assert str(as_weight("int4")) == "int4" and as_weight("int4").granularity == 128
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"\(4, 64\).*NaN or infinity"):
            QuantizedTensor.from_dense(torch.full((4, 64), value), "int4")
    with pytest.raises(ValueError, match=r"torch\.int64"):
        QuantizedTensor.from_dense(torch.ones(4, 64, dtype=torch.int64), "int4")
    with pytest.raises(ValueError, match=r"shape \(64,\) to one of shape \(4, 64\)"), torch.no_grad():
        quantized(4, 64).copy_(torch.zeros(64))


@pytest.mark.parametrize("argument", ["include", "exclude", "rules"])
def test_a_selector_that_matches_nothing_is_refused_and_nothing_is_changed(argument):
    model = nn.Sequential(nn.Linear(64, 64))
    value = {"*.wieght": "int8"} if argument == "rules" else ["*.wieght"]
    with pytest.raises(ValueError, match=rf"{argument}: '\*\.wieght' matches no parameter.*0\.weight"):
        quantize_(model, "int4", **{argument: value})
    assert type(model[0].weight) is nn.Parameter
