"""A parameter stored quantized: every operation is the dense one with the decoded weight."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from weight_cases import FORMATS, mlp, parts, quantized, random, same_storage, visible

import masterless as ml
from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor

# --- computing ----------------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 3], [3, 0]])
OPERATIONS = {
    "linear": ((40, 64), lambda w, x: F.linear(x(2, 64), w)),
    "linear with bias": ((40, 64), lambda w, x: F.linear(x(2, 3, 64), w, x(40))),
    "embedding": ((40, 64), lambda w, x: F.embedding(IDS, w)),
    "embedding bag": ((40, 64), lambda w, x: F.embedding_bag(IDS, w)),
    "conv1d": ((8, 16, 3), lambda w, x: F.conv1d(x(2, 16, 9), w, padding=1)),
    "conv2d": ((8, 4, 3, 3), lambda w, x: F.conv2d(x(2, 8, 9, 9), w, x(8), stride=2, groups=2)),
    "conv3d": ((4, 4, 3, 3, 3), lambda w, x: F.conv3d(x(1, 4, 5, 5, 5), w)),
    "conv_transpose1d": ((16, 8, 5), lambda w, x: F.conv_transpose1d(x(1, 16, 9), w)),
    "conv_transpose2d": ((16, 8, 3, 3), lambda w, x: F.conv_transpose2d(x(1, 16, 5, 5), w)),
    "conv_transpose3d": ((4, 8, 2, 3, 3), lambda w, x: F.conv_transpose3d(x(1, 4, 3, 3, 3), w)),
    "bilinear": ((4, 32, 64), lambda w, x: F.bilinear(x(2, 32), x(2, 64), w)),
    "experts, einsum": ((4, 48, 64), lambda w, x: torch.einsum("eci,eoi->eco", x(4, 3, 64), w)),
    "experts, bmm": ((4, 64, 48), lambda w, x: torch.bmm(x(4, 3, 64), w)),
    "experts, transposed": ((4, 48, 64), lambda w, x: torch.bmm(x(4, 3, 64), w.transpose(1, 2))),
    "experts, matmul": ((4, 64, 48), lambda w, x: torch.matmul(x(4, 3, 64), w)),
    "experts, baddbmm": ((4, 64, 48), lambda w, x: torch.baddbmm(x(4, 1, 48), x(4, 3, 64), w)),
    "one expert": ((4, 48, 64), lambda w, x: F.linear(x(3, 64), w[2]) + F.linear(x(3, 64), w[-1])),
    "all experts": ((4, 48, 64), lambda w, x: sum(F.linear(x(3, 64), expert) for expert in w)),
    "one transposed expert": ((4, 48, 64), lambda w, x: x(3, 64) @ w[1].T),
    "narrow experts": ((4, 48, 8), lambda w, x: F.linear(x(3, 8), w[2])),
    "x @ w": ((64, 40), lambda w, x: x(2, 64) @ w),
    "w @ x": ((40, 64), lambda w, x: w @ x(64, 2)),
    "x @ w.T": ((40, 64), lambda w, x: x(2, 64) @ w.T),
    "w @ w.T": ((40, 64), lambda w, x: w @ w.T),
    "mm": ((64, 40), lambda w, x: torch.mm(x(2, 64), w)),
    "mv": ((40, 64), lambda w, x: torch.mv(w, x(64))),
    "addmm": ((64, 40), lambda w, x: torch.addmm(x(40), x(2, 64), w)),
    "tensordot": ((40, 64), lambda w, x: torch.tensordot(x(2, 64), w, dims=([1], [1]))),
    "elementwise": ((40, 64), lambda w, x: (w * x(64)).tanh() + w.square().mean()),
    "slices": ((40, 64), lambda w, x: w[3:7].exp().sum(0) + w[5] + w[:, 2].sum()),
    "reshape": ((40, 64), lambda w, x: w.view(-1, 32).square() + w.flatten()[:32]),
}


def outcome(function, w, autocast=False):
    """Output and gradients (of the weight and of every input) of a call; inputs are the same in every call."""
    inputs = []

    def x(*shape):
        inputs.append(random(*shape, seed=len(inputs) + 1).requires_grad_())
        return inputs[-1]

    w.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = function(w, x)
    y.float().square().sum().backward()
    return [y.detach(), w.grad, *(t.grad for t in inputs)]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_the_dense_one_with_the_decoded_weight(name, autocast):
    """Bitwise: the same torch kernels see the same numbers."""
    shape, function = OPERATIONS[name]
    for format in ("int4", "fp8", "int4+4", "int4+32", "int4:tensor"):
        q = quantized(*shape, format=format)
        dense = visible(q).requires_grad_()
        found, expected = outcome(function, q, autocast), outcome(function, dense, autocast)
        for a, b in zip(found, expected, strict=True):
            assert type(a) is torch.Tensor and a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_computes_with_its_visible_code(format):
    q = quantized(40, 160, format=format)
    x = random(3, 160, seed=1)
    assert torch.equal(F.linear(x, q), x @ visible(q).T)
    hidden = q.detach().stored.decode()
    assert torch.equal(hidden, visible(q)) == ("+" not in format)
    if "+32" in format:
        assert torch.equal(hidden, random(40, 160))


def test_layers_of_torch_work_unchanged():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    lstm = nn.LSTM(64, 64, batch_first=True)
    both = nn.ModuleList([layer, lstm])
    quantize_(both, "int8", include=["*in_proj_weight", "1.weight_*"])
    dense = ml.dequantize_(copy.deepcopy(both))
    x = random(2, 5, 64)
    for model in (both, dense):
        model[1](model[0](x))[0].square().sum().backward()
    for p, d in zip(both.parameters(), dense.parameters(), strict=True):
        assert torch.equal(p.grad, d.grad)
    with torch.no_grad():
        both.eval(), dense.eval()
        torch.testing.assert_close(both[0](x), dense[0](x))  # torch's fused inference path orders sums differently


def test_frozen_weights_and_no_grad():
    model = mlp().requires_grad_(False)
    x = random(2, 64).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None and all(p.grad is None and not p.requires_grad for p in model.parameters())
    with torch.no_grad():
        assert not mlp()(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(mlp()(x), mlp()(x.detach()))


def test_gradients_of_low_precision_parameters_have_their_dtype():
    q = nn.Parameter(QuantizedTensor.from_dense(random(40, 64).bfloat16(), "int4"))
    assert q.dtype == torch.bfloat16
    F.linear(random(2, 64).bfloat16(), q).sum().backward()
    assert q.grad.dtype == torch.bfloat16
    q = quantized(40, 64)
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(random(2, 64), q).sum().backward()
    assert q.grad.dtype == torch.float32


def test_second_derivatives_reach_the_weight():
    q, x = quantized(40, 64), random(2, 64).requires_grad_()
    dense = visible(q).requires_grad_()

    def second(w):
        (g,) = torch.autograd.grad(F.linear(x, w).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)[0]

    assert torch.equal(second(q), second(dense))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_forward_and_backward_are_the_eager_ones(autocast):
    model, x = mlp(), random(3, 64).requires_grad_()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for call in (model, compiled):
        model.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = call(x)
        y.float().square().sum().backward()
        grads.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    optimizer = ml.AdamW(model.named_parameters(), lr=0.1, backend="reference")
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x)) and not torch.equal(compiled(x), grads[0][0])


# --- moving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16), lambda m: m.half()])
def test_dtype_conversion_changes_what_is_computed_in_not_what_is_stored(convert):
    model = mlp()
    codes = parts(model[0].weight)
    optimizer = ml.AdamW(model.named_parameters(), lr=0.1, backend="reference")
    weight = model[0].weight
    model(random(2, 64)).sum().backward()
    model.zero_grad()
    convert(model)
    assert model[0].weight is weight, "the optimizer still has it"
    dtype = model[0].weight.dtype
    assert dtype in (torch.bfloat16, torch.float16) and model[0].weight.format.bits == 4
    assert all(torch.equal(codes[k], v) for k, v in parts(weight).items())
    if dtype == torch.bfloat16:
        model(random(2, 64).to(dtype)).float().square().sum().backward()
        optimizer.step()
        assert not torch.equal(parts(weight)["codes"], codes["codes"])
    with pytest.raises(ValueError, match=r"torch\.int32; decode it first"):
        weight.int()


def test_models_can_be_built_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    quantize_(model, "int4")
    assert all(t.is_meta for t in parts(model[0].weight).values())
    model.to_empty(device="cpu")
    source = mlp()
    model.load_state_dict(source.state_dict())
    assert model[0].weight.requires_grad and same_storage(model[0].weight, source[0].weight)
    x = random(2, 64)
    assert torch.equal(model(x), source(x))
    model = mlp().to("meta")
    assert model[0].weight.device.type == "meta" and model(x.to("meta")).shape == (2, 64)


def test_shared_memory_shares_the_codes():
    q = quantized(40, 64)
    assert q.share_memory_() is q
    assert all(t.is_shared() for t in q.detach().stored.tensors.values())


# --- what is not possible says so ---------------------------------------------------------------------------

IN_PLACE = {
    "add_": lambda p: p.add_(1),
    "mul_": lambda p: p.detach().mul_(0.5),
    "+=": lambda p: p.__iadd__(1),
    "item assignment": lambda p: p.__setitem__(0, 1.0),
    "slice": lambda p: p[2:4].mul_(2),
    ".data of it": lambda p: p.data.add_(1),
    ".data": lambda p: setattr(p, "data", torch.zeros(40, 64)),
    "init": lambda p: nn.init.normal_(p),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "out=": lambda p: torch.add(torch.ones(40, 64), 1, out=p.detach()),
    "lerp_": lambda p: p.lerp_(torch.zeros(40, 64), 0.5),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_changes_are_refused(name):
    p = quantized(40, 64)
    before = parts(p)
    with pytest.raises(RuntimeError, match=r"stored as 'int4' in place.*encode_\(\).*dequantize_"), torch.no_grad():
        IN_PLACE[name](p)
    assert all(torch.equal(before[k], v) for k, v in parts(p).items())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_of_torch_are_refused(cls, options):
    p = quantized(40, 64)
    p.grad = random(40, 64)
    with pytest.raises(RuntimeError, match="Update it with an optimizer of masterless"):
        cls([p], lr=0.1, **options).step()


def test_repr_says_what_it_is():
    q = nn.Parameter(QuantizedTensor.from_dense(random(4, 64).bfloat16(), "int4:64"))
    assert repr(q) == "QuantizedTensor('int4:64', shape=(4, 64), dtype=torch.bfloat16, requires_grad=True)"
    assert repr(q.detach()) == "QuantizedTensor('int4:64', shape=(4, 64), dtype=torch.bfloat16)"
    assert "in_features=64" in repr(mlp()) and q.stored_bytes == 4 * (32 + 2)
    with pytest.raises(AttributeError, match="no_such_thing"):
        q.no_such_thing  # noqa: B018
