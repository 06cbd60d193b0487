"""The momentum's bits go to the weights: what a trade changes, what it keeps, what it refuses."""

import copy
import io

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

import masterless as ml

OPTIONS = {"exp_avg": "int4", "exp_avg_sq": "factored", "betas": (0.8, 0.95), "weight_rounding": "nearest"}


def model_of(format="int4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 96))
    ml.quantize_(model, format)
    return model


def optimizer_of(model, lr=1e-2, **options):
    return ml.AdamW(model.named_parameters(), lr=lr, **{**OPTIONS, **options})


def train(model, opt, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def theta_of(opt, p):
    group = opt.param_groups[0]
    b = group["betas"][0]
    return p.stored.decode() - opt.state_storage(p, group)["exp_avg"].decode() * (b / (1 - b))


@pytest.mark.parametrize("format", ["int4", "int4:32", "int4:row", "int4+2"])
def test_weights_become_theta_in_the_bytes_of_weight_and_momentum(format):
    model = model_of(format)
    opt = optimizer_of(model)
    train(model, opt, 5)
    p = model[0].weight
    theta, before = theta_of(opt, p), p.stored.nbytes + opt.state_storage(p, opt.param_groups[0])["exp_avg"].nbytes
    second = {key: value.clone() for key, value in opt.state[p].items() if key.startswith("exp_avg_sq")}
    report = ml.trade_momentum_(opt)
    assert report.formats == {n: (str(ml.parse_format(format)), "int8:row") for n in ("0.weight", "2.weight")}
    assert p is model[0].weight and str(p.format) == "int8:row"
    # To nearest in INT8: exactly what quantizing theta gives.
    expected = ml.QuantizedTensor.from_dense(theta, "int8")
    assert all(torch.equal(t, p.stored.tensors[name]) for name, t in expected.stored.tensors.items())
    assert p.stored.nbytes <= before and report.bytes_after <= report.bytes_before
    assert opt.state_bytes_of(p) == sum(value.numel() * value.itemsize for value in second.values())
    assert second and all(torch.equal(value, opt.state[p][key]) for key, value in second.items())
    assert int(opt.state[p]["step"]) == 5


def test_nothing_that_rounding_took_is_lost():
    """A trade moves theta by no more than half a quantum of INT8; the INT4 weight it was stored as is far away."""
    model = model_of()
    opt = optimizer_of(model, lr=1e-4)  # far below a quantum: u holds hardly more than rounding errors
    train(model, opt, 30)
    p = model[0].weight
    theta, coarse = theta_of(opt, p), p.stored.decode()
    ml.trade_momentum_(opt)
    error = (p.dequantize().detach() - theta).abs().max()
    quantum = p.stored.tensors["scale"].float().max()
    assert error <= 0.5 * quantum * 1.001 < 0.2 * (coarse - theta).abs().max()


def test_hidden_bits_keep_what_the_forward_pass_sees():
    model = model_of()
    opt = optimizer_of(model)
    train(model, opt, 5)
    theta = theta_of(opt, model[0].weight)
    ml.trade_momentum_(opt, "int4+4")
    p = model[0].weight
    expected = ml.QuantizedTensor.from_dense(theta, "int4+4")
    assert str(p.format) == "int4+4" and torch.equal(p.dequantize(), expected.dequantize())
    assert torch.equal(p.stored.decode(), expected.stored.decode())


def test_other_members_of_a_group_lose_their_momentum_and_are_named():
    model = model_of()
    opt = ml.AdamW(
        [
            {"params": [("0.weight", model[0].weight), ("0.bias", model[0].bias)]},
            {"params": [("2.weight", model[2].weight)], "error_compensation": False, "weight_rounding": "stochastic"},
            {"params": [("2.bias", model[2].bias)]},
        ],
        lr=1e-2,
        **OPTIONS,
    )
    train(model, opt, 3)
    kept = copy.deepcopy([opt.state[model[2].weight], opt.state[model[2].bias]])
    report = ml.trade_momentum_(opt)
    assert list(report.formats) == ["0.weight"] and report.without_momentum == ("0.bias",)
    assert "0.bias" in str(report) and "int4 -> int8:row" in str(report)
    assert not any(key.split(".")[0] == "exp_avg" for key in opt.state[model[0].bias])
    assert [g["betas"] for g in opt.param_groups] == [(0.0, 0.95), (0.8, 0.95), (0.8, 0.95)]
    for then, p in zip(kept, (model[2].weight, model[2].bias), strict=True):
        assert then.keys() == opt.state[p].keys() and all(torch.equal(then[k], opt.state[p][k]) for k in then)
    train(model, opt, 2, start=3)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_run_goes_on_and_learns(backend):
    model = model_of()
    opt = optimizer_of(model, backend=backend)
    before = train(model, opt, 60)
    ml.trade_momentum_(opt)
    for group in opt.param_groups:
        group["lr"] = 1e-3
    after = train(model, opt, 60, start=60)
    assert sum(after[-10:]) < sum(before[-10:])


def test_kernel_and_reference_agree_after_a_trade():
    ends = []
    for backend in ("auto", "reference"):
        model = model_of()
        opt = optimizer_of(model, backend=backend)
        for step in range(6):
            if step == 3:
                ml.trade_momentum_(opt)
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)) * 0.1
            opt.step()
        ends.append([t for p in (model[0].weight, model[2].weight) for t in p.stored.tensors.values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_traded_run_is_saved_and_resumed_to_the_bit():
    model, other = model_of(), model_of()
    opt, again = optimizer_of(model), optimizer_of(other)
    train(model, opt, 4)
    ml.trade_momentum_(opt)
    train(model, opt, 4, start=4)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    ml.trade_momentum_(again)  # before the first step: only formats and options change
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    train(model, opt, 4, start=8)
    train(other, again, 4, start=8)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(
            p.detach().dequantize() if hasattr(p, "stored") else p,
            q.detach().dequantize() if hasattr(q, "stored") else q,
        )


def test_schedulers_and_hooks_hold_on():
    model = model_of()
    opt = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    train(model, opt, 2)
    schedule.step()
    ml.trade_momentum_(opt)
    train(model, opt, 2, start=2)
    schedule.step()
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([1e-2 / 3])


def test_step_in_backward_goes_on():
    model = model_of()
    opt = optimizer_of(model)
    stepper = ml.step_in_backward(model, opt)
    for step in range(6):
        if step == 3:
            ml.trade_momentum_(opt)
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(step))
        (model(x) - x.flip(1)).square().mean().backward()
    assert int(opt.state[model[0].weight]["step"]) == 6 and str(model[0].weight.format) == "int8:row"
    stepper.remove()


def test_experts_are_traded_slice_by_slice(monkeypatch):
    monkeypatch.setattr("masterless.optim.trade._SLAB", 1000)
    p = nn.Parameter(ml.QuantizedTensor.from_dense(torch.randn(5, 32, 64), "int4"))
    opt = ml.AdamW([("experts", p)], lr=1e-2, **OPTIONS)
    p.grad = torch.randn(5, 32, 64)
    opt.step()
    theta = theta_of(opt, p)
    ml.trade_momentum_(opt)
    assert torch.equal(p.stored.decode(), ml.QuantizedTensor.from_dense(theta, "int8").stored.decode())


def test_never_more_than_one_weight_is_there_twice():
    layers, size = 24, 256 * 256
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))
    with LiveBytes() as live:
        ml.quantize_(model, "int4")
        opt = ml.AdamW(model.named_parameters(), lr=1e-2, **OPTIONS)
        for p in model.parameters():
            p.grad = torch.zeros(p.shape)
        opt.step()
        opt.zero_grad()
        before = live.now
        live.peak = 0
        ml.trade_momentum_(opt)
        after = live.now
    # Of one weight: its new codes, theta and a product in fp32, and whatever an operation holds in between.
    assert live.peak - before <= size * (1 + 4 * 4) < layers * size and after <= before


def test_a_backward_pass_after_a_trade_is_refused():
    model = model_of()
    opt = optimizer_of(model)
    train(model, opt, 1)
    loss = model(torch.randn(4, 96)).square().mean()
    ml.trade_momentum_(opt)
    with pytest.raises(RuntimeError, match="changed"):
        loss.backward()


def test_what_cannot_be_traded_is_refused_and_nothing_changes():
    with pytest.raises(ValueError, match="SGD without momentum takes other steps"):
        ml.trade_momentum_(ml.SGD(model_of().parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match="no weight of this optimizer"):
        ml.trade_momentum_(ml.AdamW(nn.Linear(64, 64).parameters(), lr=1e-3))
    model = model_of()
    opt = optimizer_of(model, exp_avg="int3")
    train(model, opt, 1)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"'int4' weights and a 'int3' momentum have 7 bits.*no such format; name one"):
        ml.trade_momentum_(opt)
    assert str(model[0].weight.format) == "int4" and opt.param_groups[0]["betas"] == (0.8, 0.95)
    assert before["state"].keys() == opt.state_dict()["state"].keys()
    ml.trade_momentum_(opt, "int8")
    with pytest.raises(ValueError, match="no weight of this optimizer"):
        ml.trade_momentum_(opt)  # there is no momentum any more
