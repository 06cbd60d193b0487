"""Quantized parameters under torch's modes and transforms: inference mode, vmap, torch.func, the compiler's cache."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from weight_cases import mlp, parts, quantized, random, same_storage, visible

import masterless as ml
from masterless.tensor.quantized import QuantizedTensor


@pytest.mark.parametrize("format", ["int4", "int4+4", "fp8", "int4:tensor"])
def test_inference_mode_computes_what_no_grad_does(format):
    model, x = mlp(format), random(2, 64)
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


USES = {
    "detach": lambda w: w.detach().dequantize(),
    "transposed": lambda w: random(3, 64) @ w.T,
    "transposed twice": lambda w: random(3, 64) @ w.T.detach().t().mT,
    "rows": lambda w: w[3:7].dequantize(),
    "arithmetic": lambda w: w * 2 + 1,
    "clone": lambda w: w.clone().dequantize(),
    "copy": lambda w: copy.deepcopy(w).dequantize(),
    "embedding": lambda w: F.embedding(torch.tensor([1, 5]), w),
    "dtype": lambda w: w.bfloat16().dequantize(),
    "device": lambda w: w.to("cpu", copy=True).dequantize(),
}


@pytest.mark.parametrize("use", USES)
def test_inference_mode_allows_every_use(use):
    w = quantized(40, 64)
    with torch.no_grad():
        expected = USES[use](w)
    with torch.inference_mode():
        assert torch.equal(USES[use](w), expected)
    F.linear(random(2, 64), w).sum().backward()  # and leaves the parameter trainable
    assert w.grad is not None


def test_a_state_dict_taken_in_inference_mode_loads():
    model, other = mlp(), mlp(seed=1)
    with torch.inference_mode():
        state = model.state_dict()
    other.load_state_dict(state)
    assert same_storage(model[0].weight, other[0].weight)


def test_vmap_and_the_transforms_of_torch_func():
    model, x = mlp(), random(5, 3, 64)
    dense = ml.dequantize_(copy.deepcopy(model))
    assert torch.equal(torch.vmap(model)(x), torch.vmap(dense)(x))
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.vmap(torch.func.grad(f))):
        found, expected = (transform(lambda v, m=m: m(v).square().sum())(x) for m in (model, dense))
        assert torch.equal(found, expected)


def test_compiling_does_not_warn_and_the_key_is_stable():
    model, x = mlp(), random(3, 64)
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend="aot_eager")(x)
        keys = {p._stable_hash_for_caching() for p in (model[0].weight, mlp(seed=1)[0].weight)}
    assert not [w for w in caught if "_stable_hash_for_caching" in str(w.message)]
    assert len(keys) == 1, "numbers are not in it"
    others = [quantized(96, 64, format="int8"), quantized(64, 96), model[0].weight.detach(), model[0].weight.T]
    assert len(keys | {p._stable_hash_for_caching() for p in others}) == 5


def test_modules_share_memory_and_train_on():
    model = mlp()
    model(random(2, 64)).sum().backward()
    model.share_memory()
    assert all(t.is_shared() for t in model[0].weight.stored.tensors.values())
    before = parts(model[0].weight)
    ml.AdamW(model.named_parameters(), lr=0.1).step()
    assert not torch.equal(before["codes"], parts(model[0].weight)["codes"])


@pytest.mark.parametrize("format", ["int4", "int4+4", "fp8", "int8+32"])
def test_nbytes_are_the_stored_ones(format):
    q = quantized(40, 64, format=format)
    live = sum(t.numel() * t.itemsize for t in q.stored.tensors.values())
    assert q.nbytes == q.stored_bytes == q.detach().nbytes == q.T.nbytes == live
    assert isinstance(q, QuantizedTensor) and visible(q).nbytes == 40 * 64 * 4
