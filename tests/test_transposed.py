"""A transposed view of a quantized weight: decoded by products, kept by nobody, dense in everything else."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from weight_cases import parts, quantized, random, visible

import masterless as ml
from masterless.tensor.decoding import TransposedView
from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor

VIEWS = {
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "t()": lambda w: w.t(),
    "transpose": lambda w: w.transpose(-1, -2),
    "permute": lambda w: w.permute(1, 0),
    "swapaxes": lambda w: torch.swapaxes(w, 0, 1),
    "three times": lambda w: w.T.t().mT,
}
PRODUCTS = {
    "matmul": lambda x, t: x @ t,
    "mm": lambda x, t: torch.mm(x, t),
    "method": lambda x, t: x.matmul(t),
    "addmm": lambda x, t: torch.addmm(torch.ones(40), x, t),
    "linear": lambda x, t: F.linear(x, t.T),
    "einsum": lambda x, t: torch.einsum("bi,io->bo", x, t),
    "from the left": lambda x, t: (t.T @ x.T).T,
    "arithmetic": lambda x, t: x[:, :40] * t[0] + (2 * t).sum(),
}


def saved_shapes(function):
    """The shapes of dense tensors that autograd keeps for the backward pass of a call, and its result."""
    shapes = []

    def pack(saved):
        if type(saved) is torch.Tensor:
            shapes.append(tuple(saved.shape))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = function()
    return shapes, result


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_with_a_view_is_the_dense_one(view, product):
    q, x = quantized(40, 64), random(3, 64, seed=1).requires_grad_()
    dense = visible(q).requires_grad_()
    results = []
    for w in (q, dense):
        x.grad = None
        y = PRODUCTS[product](x, VIEWS[view](w))
        y.square().sum().backward()
        results.append([y.detach(), x.grad, w.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("product", [name for name in PRODUCTS if name != "arithmetic"])
def test_autograd_keeps_no_dense_weight(product):
    q, x = quantized(40, 64), random(3, 64, seed=1).requires_grad_()
    shapes, _ = saved_shapes(lambda: PRODUCTS[product](x, q.T))
    assert shapes and not {(40, 64), (64, 40)} & set(shapes)


def test_a_view_has_the_geometry_of_a_dense_one():
    q = quantized(4, 8, 64)
    dense = visible(q)
    for view in (lambda w: w.mT, lambda w: w.permute(2, 0, 1), lambda w: w.permute(-1, 0, 1).transpose(0, 2).mT):
        found, expected = view(q), view(dense)
        assert isinstance(found, TransposedView) and not isinstance(found, QuantizedTensor)
        assert found.shape == expected.shape and found.stride() == expected.stride() and found.dtype == expected.dtype
        assert found.requires_grad and not found.is_contiguous()
        assert torch.equal(found.contiguous(), expected.contiguous())


USES = {
    "repr": repr,
    "numpy": lambda t: t.detach().numpy().tolist(),
    "tolist": lambda t: t.tolist(),
    "copy": lambda t: copy.deepcopy(t.detach()).tolist(),
    "clone": lambda t: t.clone().tolist(),
    "row": lambda t: t[3].tolist(),
    "rows": lambda t: [row.tolist() for row in t],
    "arithmetic": lambda t: (t * 2 + 1).sum(0).tolist(),
    "reshape": lambda t: t.reshape(-1, 5).tolist(),
    "dtype": lambda t: str(t.bfloat16()),
    "cat": lambda t: torch.cat([t, t]).tolist(),
    "equal": lambda t: torch.equal(t, t.T.T),
}


@pytest.mark.parametrize("use", USES)
def test_everything_else_sees_a_dense_tensor(use):
    q = quantized(40, 64).requires_grad_(False)
    assert USES[use](q.T) == USES[use](visible(q).T)


def test_a_view_is_saved_and_quantized_anew_as_what_it_shows():
    q = quantized(64, 96)
    file = io.BytesIO()
    torch.save(q.detach().T, file)
    file.seek(0)
    assert torch.equal(torch.load(file), visible(q).T)
    again = QuantizedTensor.from_dense(q.detach().T, "int8")
    assert torch.equal(again.dequantize(), QuantizedTensor.from_dense(visible(q).T, "int8").dequantize())
    again.encode_(q.detach().T)
    assert torch.equal(again.dequantize(), QuantizedTensor.from_dense(visible(q).T, "int8").dequantize())


IN_PLACE = {
    "mul_": lambda t: t.mul_(2),
    "copy_": lambda t: t.copy_(torch.zeros(64, 40)),
    "item assignment": lambda t: t.__setitem__(0, 1.0),
    "out=": lambda t: torch.add(torch.ones(64, 40), 1, out=t),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_to_a_view_is_refused(name):
    """A write to the dense copy would be lost without a word."""
    q = quantized(40, 64)
    before = parts(q)
    with pytest.raises(RuntimeError, match="in place"), torch.no_grad():
        IN_PLACE[name](q.detach().T)
    assert all(torch.equal(before[k], v) for k, v in parts(q).items())


@pytest.mark.parametrize("use", [lambda x, t: x @ t, lambda x, t: x[0] * t.T], ids=["product", "elementwise"])
def test_a_step_between_forward_and_backward_is_an_error(use):
    q, x = quantized(40, 64), random(3, 64).requires_grad_()
    loss = use(x, q.T).sum()
    q.grad = random(40, 64)
    ml.SGD([q], lr=0.1, momentum=0.9, backend="reference").step()
    with pytest.raises(RuntimeError, match=r"was changed|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "compiled"])
def test_tied_embedding_and_head(how, autocast):
    """The usual language model: `emb.weight` looks tokens up and, transposed, makes the logits."""
    tokens = torch.tensor([[1, 5, 9], [2, 2, 7]])

    def logits(embedding, linear):
        h = embedding(tokens).tanh()
        return F.linear(h, embedding.weight) if linear else h @ embedding.weight.T

    def gradient(embedding, linear):
        function = torch.compile(logits, backend="aot_eager", fullgraph=True) if how == "compiled" else logits
        embedding.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if how == "checkpoint":
                y = checkpoint(function, embedding, linear, use_reentrant=False)
            else:
                y = function(embedding, linear)
        y.float().square().sum().backward()
        return y.detach(), embedding.weight.grad

    torch.manual_seed(0)
    embedding = nn.Embedding(10, 64)
    quantize_(embedding, "int4", include=[nn.Embedding])
    dense = ml.dequantize_(copy.deepcopy(embedding))
    expected = gradient(dense, linear=True)
    for linear in (True, False):
        for found, wanted in zip(gradient(embedding, linear), expected, strict=True):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)
