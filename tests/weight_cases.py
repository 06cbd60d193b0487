"""What the tests of quantized parameters share: parameters of any shape and format, and what is stored in them."""

import torch
from torch import nn

from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor

FORMATS = [
    "fp8",
    "int8",
    "int4",
    "int3",
    "int2",
    "fp4",
    "int4:tensor",
    "int4:row",
    "int4:64",
    "int4+4",
    "int4+32",
    "mxfp8",
    "nvfp4",
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(*shape, format="int4", seed=0):
    return nn.Parameter(QuantizedTensor.from_dense(random(*shape, seed=seed), format))


def visible(p):
    return p.detach().dequantize()


def parts(p):
    return {name: tensor.clone() for name, tensor in p.detach().stored.tensors.items()}


def same_storage(a, b):
    a, b = parts(a), parts(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mlp(format="int4", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    if format:
        quantize_(model, format)
    return model
