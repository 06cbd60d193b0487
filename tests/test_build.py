"""Models that are quantized while they are built: the same bits as quantizing the dense model, and never dense."""

import math

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

import masterless as ml
from masterless.lab.models import GPT, GPTConfig
from masterless.tensor.quantized import QuantizedTensor


def gpt(**options):
    config = GPTConfig(vocab_size=96, n_layer=2, d_model=64, seq_len=32, **options)
    return lambda: GPT(config, torch.Generator().manual_seed(3))


def stack():
    """Default initialisations of torch, a tied weight, buffers, one initialisation of several operations."""
    model = nn.Sequential(nn.Embedding(80, 64, padding_idx=3), nn.Linear(64, 80), nn.LSTM(64, 64))
    model[1].weight = model[0].weight
    nn.init.trunc_normal_(model[1].weight, std=0.1)
    model.scale = nn.Parameter(torch.randn(64, 64) * 2)
    model.register_buffer("mask", torch.ones(64, 64).tril())
    model.register_buffer("frequencies", 10.0 ** -torch.arange(0, 64, 2))
    return model


def transformer():
    return nn.TransformerEncoderLayer(64, 4, 128)


def assert_equal(a, b):
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name
    assert [(n, p.requires_grad) for n, p in a.named_parameters()] == [
        (n, p.requires_grad) for n, p in b.named_parameters()
    ]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", ["int8", "int4+4", "int4:tensor"])
@pytest.mark.parametrize(
    "make",
    [gpt(), gpt(n_experts=4, tie_embeddings=True), stack, transformer],
    ids=["gpt", "moe", "stack", "transformer"],
)
def test_it_is_quantize_of_the_dense_model_to_the_bit(make, format, dtype):
    torch.manual_seed(1)
    dense = make()
    dense = dense if dtype is None else dense.to(dtype)
    expected = ml.quantize_(dense, format)
    torch.manual_seed(1)
    built, report = ml.build_quantized(make, format, dtype=dtype)
    assert_equal(built, dense)
    assert str(report) == str(expected)


def test_selectors_mean_what_they_mean_for_quantize():
    options = {"include": [nn.Embedding], "exclude": ["*.down.*"], "rules": {"head.weight": "int8"}}
    dense = gpt()()
    ml.quantize_(dense, "int4", **options)
    assert_equal(ml.build_quantized(gpt(), "int4", **options)[0], dense)


def test_no_more_than_one_tensor_is_dense_at_a_time():
    config = GPTConfig(vocab_size=64, n_layer=12, d_model=256, seq_len=32)
    largest, slab = 4 * 4 * 256 * 256, 4 * (1 << 17)
    with LiveBytes() as live:
        _model, report = ml.build_quantized(lambda: GPT(config, torch.Generator().manual_seed(0)), "int8")
    assert report.stored_bytes <= live.now
    assert live.peak <= report.stored_bytes + 2 * largest + 8 * slab  # a slab's intermediate results are a few slabs
    assert report.dense_bytes > 2 * live.peak  # or the line above would show nothing


def test_an_empty_model_has_the_structure_and_buffers():
    model, _ = ml.build_quantized(with_mask, "int8", initialise=False)
    assert isinstance(model[0].linear1.weight, QuantizedTensor)
    assert float(model[0].linear1.weight.dequantize().detach().abs().sum()) == 0
    assert torch.equal(model.mask, torch.ones(64, 64).triu())
    assert all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers()))


def with_mask():
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128))
    model.register_buffer("mask", torch.ones(64, 64).triu())
    return model


def test_an_initialisation_that_comes_back_is_refused():
    def make():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        with torch.no_grad():
            model[0].weight.mul_(math.sqrt(2))
        return model

    with pytest.raises(ValueError, match="its exact values are gone; initialise parameters one after the other"):
        ml.build_quantized(make, "int8")
    ml.build_quantized(make, "int8", exclude=["0.weight"])


def test_a_function_that_makes_different_models_is_refused():
    sizes = iter([64, 96])
    with pytest.raises(ValueError, match="two different models"):
        ml.build_quantized(lambda: nn.Sequential(nn.Linear(64, next(sizes))), "int8")
