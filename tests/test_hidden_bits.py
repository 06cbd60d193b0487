"""Which bits the forward pass sees: `show_hidden_bits_` changes that and nothing else."""

import copy

import pytest
import torch
from torch import nn

import masterless as ml
from masterless.formats import parse
from masterless.tensor.gather import visible_format, visible_specs


def model_of(format="int4+4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 96))
    ml.quantize_(model, format)
    return model


def train(model, opt, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(step))
        (model(x) - x.flip(1)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def optimizer_of(model, backend="auto"):
    options = {"exp_avg": "int4", "exp_avg_sq": "log4", "betas": (0.9, 0.95), "backend": backend}
    return ml.AdamW(model.named_parameters(), lr=1e-2, **options)


@pytest.mark.parametrize("name", ["int4+2", "int4+4:64", "int4+6:row:fp32"])
def test_formats_are_twins(name):
    hidden, shown = parse(name), parse(name).showing(True)
    assert parse(str(shown)) == shown and shown.showing(False) == hidden and shown.shown
    assert shown.bits_per_element == hidden.bits_per_element and shown.levels == hidden.levels
    assert parse("int8").showing(True) == parse("int8") and parse("int4+32").showing(True) == parse("int4+32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_sees_all_bits_and_no_byte_changes(dtype):
    model = model_of().to(dtype)
    weight = model[0].weight
    before = {name: t.clone() for name, t in weight.stored.tensors.items()}
    fine, coarse = weight.stored.decode().to(dtype), weight.dequantize()
    assert not torch.equal(fine, coarse)
    assert ml.show_hidden_bits_(model) == ["0.weight", "2.weight"] and ml.show_hidden_bits_(model) == []
    assert torch.equal(weight.dequantize(), fine) and str(weight.format) == "int4++4"
    x = torch.randn(3, 96, dtype=dtype)
    assert torch.equal(model[0](x), nn.functional.linear(x, fine, model[0].bias))
    assert torch.equal(weight[8:16].dequantize(), fine[8:16]) and torch.equal(weight.T.dequantize(), fine.T)
    assert ml.show_hidden_bits_(model, False) == ["0.weight", "2.weight"]
    assert torch.equal(weight.dequantize(), coarse)
    assert all(torch.equal(before[name], t) for name, t in weight.stored.tensors.items())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_run_goes_on_with_its_states(backend):
    model = model_of()
    opt = optimizer_of(model, backend)
    ml.show_hidden_bits_(model)
    train(model, opt, 5)
    twin = copy.deepcopy(model)
    assert str(twin[0].weight.format) == "int4++4"
    ml.show_hidden_bits_(model, False)
    assert {str(p.format) for p in model.parameters() if isinstance(p, ml.QuantizedTensor)} == {"int4+4"}
    x = torch.randn(4, 96)
    assert not torch.equal(model(x), twin(x))
    train(model, opt, 5, start=5)
    assert int(opt.state[model[0].weight]["step"]) == 10


def test_kernel_and_reference_agree_through_the_switch():
    runs = []
    for backend in ("auto", "reference"):
        model = model_of("int4++4")
        opt = optimizer_of(model, backend)
        train(model, opt, 3)
        ml.show_hidden_bits_(model, False)
        train(model, opt, 3, start=3)
        runs.append([t for p in (model[0].weight, model[2].weight) for t in p.stored.tensors.values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_checkpoints_say_what_is_shown(tmp_path):
    model = model_of()
    ml.show_hidden_bits_(model)
    torch.save(model.state_dict(), tmp_path / "shown.pt")
    state = torch.load(tmp_path / "shown.pt", weights_only=True)
    with pytest.raises((ValueError, RuntimeError), match=r"int4\+\+4"):
        model_of().load_state_dict(state)
    other = model_of()
    ml.show_hidden_bits_(other)
    other.load_state_dict(state)
    assert torch.equal(other[0].weight.dequantize(), model[0].weight.dequantize())


def test_a_backward_pass_of_another_view_is_refused():
    model = model_of()
    loss = model(torch.randn(2, 96)).sum()
    ml.show_hidden_bits_(model)
    with pytest.raises(RuntimeError, match=r"changed|modified"):
        loss.backward()


def test_fsdp_would_gather_what_is_shown():
    fmt = parse("int4++4")
    assert set(visible_specs(fmt, (64, 96), 32)) == {"scale", "codes", "hidden"} and visible_format(fmt) == fmt
    assert set(visible_specs(parse("int4+4"), (64, 96), 32)) == {"scale", "codes"}


def test_what_has_no_hidden_bits_is_refused():
    with pytest.raises(ValueError, match=r"no parameter of the model has hidden bits; quantize it as 'int4\+4'"):
        ml.show_hidden_bits_(model_of("int8"))
