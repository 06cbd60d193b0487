"""Bytes of quantized parameters and their states: live tensors, and what is predicted of them."""

import pytest
import torch
from test_error_compensation import FORMATS, quantized, random
from torch import nn

import masterless as ml
from masterless.insight import memory

GPT2 = [(768, 2304), (768, 768), (3072, 768), (768, 3072)]


@pytest.mark.parametrize(
    ("format", "exp_avg", "exp_avg_sq", "limit"),
    [
        ("int4", "int4", "log2", 1.33),
        ("fp8", "int4", "log2", 1.83),
        ("int8", "none", "factored", 1.05),
        ("int4+4", "none", "factored", 1.05),
        ("int8", "int2", "factored", 1.31),
    ],
)
def test_bytes_of_a_quantized_parameter(format, exp_avg, exp_avg_sq, limit):
    """Weights, both states and metadata; live tensors, and predicted to the byte."""
    options = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if exp_avg == "none":
        options.update(betas=(0.0, 0.95), error_compensation=False)
    named = [(str(shape), quantized(torch.zeros(shape), format)) for shape in GPT2]
    optimizer = ml.AdamW(named, **options)
    for group, p, _ in optimizer.parameters():
        optimizer.state_storage(p, group)  # what the first step allocates
    live = memory.measure(optimizer)
    assert live == memory.predict_optimizer(optimizer)
    assert live == {str(shape): memory.predict(shape, format, exp_avg, exp_avg_sq) for shape in GPT2}
    total = sum(live.values(), memory.Bytes(0, 0, 0))
    assert total.per_parameter <= limit


@pytest.mark.parametrize("exp_avg_sq", ["log2", "factored", "fp8"])
@pytest.mark.parametrize("format", FORMATS)
def test_predicted_bytes_are_the_live_ones_for_awkward_shapes(format, exp_avg_sq):
    shapes = [(1, 33), (7, 127), (3, 129), (5, 3, 45), (4, 9, 3, 3), (33, 1, 40)]
    named = [(str(shape), quantized(random(*shape), format)) for shape in shapes]
    named += [("vector", nn.Parameter(torch.zeros(77))), ("narrow", nn.Parameter(torch.zeros(9, 4)))]
    optimizer = ml.AdamW(named, exp_avg="int3", exp_avg_sq=exp_avg_sq, backend="reference")
    predicted = memory.predict_optimizer(optimizer)
    for _, p in named:
        p.grad = torch.ones(p.shape)
    optimizer.step()
    assert memory.measure(optimizer) == predicted
    assert sum(b.states for b in predicted.values()) == optimizer.state_bytes()
    assert all(b.total > 0 for b in predicted.values())
