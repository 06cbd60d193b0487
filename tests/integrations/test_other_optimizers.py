"""States of bitsandbytes and torchao go on in our optimizers and in torch's, from the real packages."""

import copy
from importlib.util import find_spec

import pytest
import torch

import masterless as ml
from masterless.interop import torch_state

needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed (make test asks for it)")
    for name in ("bitsandbytes", "torchao")
}
SHAPES = ((300, 64), (70,), (65, 130))


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(params, step):
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))


def trained(make, steps=3):
    params = parameters()
    optimizer = make(params)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return params, optimizer


def assert_goes_on(params, state, ours, torchs):
    """Our optimizer with fp32 states and torch's own take the same next step from the state."""
    ends = []
    for make in (ours, torchs):
        own = copy.deepcopy(params)
        optimizer = make(own)
        optimizer.load_state_dict(copy.deepcopy(state))
        give_gradients(own, 9)
        optimizer.step()
        ends.append((own, optimizer))
    for p, q in zip(ends[0][0], ends[1][0], strict=True):
        torch.testing.assert_close(p, q, rtol=2.0**-22, atol=1e-8)  # two units in the last place of fp32
    return ends[0][1]


def adamw(exp_avg="fp32", exp_avg_sq="fp32"):
    return lambda params: ml.AdamW(params, lr=1e-3, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


@needs["bitsandbytes"]
@pytest.mark.parametrize("bits", [8, 32])
def test_adamw_of_bitsandbytes(bits):
    import bitsandbytes as bnb

    params, theirs = trained(lambda p: bnb.optim.AdamW(p, lr=1e-3, optim_bits=bits, min_8bit_size=4096))
    saved = theirs.state_dict()
    state = torch_state(saved)
    for i, p in enumerate(params):
        own = theirs.state[p]
        for k, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
            stored = own[f"state{k}"]
            quantized = bits == 8 and p.numel() >= 4096
            assert (stored.dtype == torch.uint8) == quantized
            if quantized:
                stored = bnb.functional.dequantize_blockwise(
                    stored, absmax=own[f"absmax{k}"], code=own[f"qmap{k}"], blocksize=256
                )
            assert torch.equal(state["state"][i][name], stored)
    ours = assert_goes_on(params, state, adamw(), lambda p: torch.optim.AdamW(p, lr=1e-3))
    back = torch.optim.AdamW(parameters(), lr=1e-3)
    back.load_state_dict(ours.torch_state_dict())
    for p, q in zip(ours.state.values(), back.state.values(), strict=True):
        assert torch.equal(p["exp_avg"], q["exp_avg"]) and int(p["step"]) == int(q["step"]) == 4


@needs["bitsandbytes"]
def test_other_optimizers_of_bitsandbytes():
    import bitsandbytes as bnb

    params, theirs = trained(lambda p: bnb.optim.Lion8bit(p, lr=1e-3, min_8bit_size=4096))
    lion = ml.Lion(copy.deepcopy(params), lr=1e-3, exp_avg="fp32")
    lion.load_state_dict(torch_state(theirs.state_dict()))
    assert int(lion.state[lion.param_groups[0]["params"][0]]["step"]) == 3
    with pytest.raises(ValueError, match="no 'exp_avg_sq' for parameter"):
        adamw()(parameters()).load_state_dict(torch_state(theirs.state_dict()))
    params, theirs = trained(lambda p: bnb.optim.SGD8bit(p, lr=1e-3, momentum=0.9, min_8bit_size=4096))
    state = torch_state(theirs.state_dict(), names=("momentum_buffer",))
    for group in state["param_groups"]:
        group.update(momentum=0.9, dampening=0.0, nesterov=False, maximize=False)  # what torch's must find there
    assert_goes_on(
        params,
        state,
        lambda p: ml.SGD(p, lr=1e-3, momentum=0.9, momentum_buffer="fp32"),
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    )
    with pytest.raises(ValueError, match=r"has 1 moments, names=.* says 2"):
        torch_state(theirs.state_dict(), names=("a", "b"))


@needs["torchao"]
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_adamw_of_torchao(kind, monkeypatch):
    import torchao.optim

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its step, without a compiler
    params, theirs = trained(lambda p: getattr(torchao.optim, kind)(p, lr=1e-3))
    state = torch_state(theirs.state_dict())
    assert type(theirs.state[params[0]]["exp_avg"]).__name__.startswith("OptimState")
    for i, p in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            kept, found = theirs.state[p][name], state["state"][i][name]
            assert type(found) is torch.Tensor and found.dtype == torch.float32
            assert torch.equal(found, kept.dequantize() if hasattr(kept, "dequantize") and kept.dim() > 1 else kept)
    assert_goes_on(params, state, adamw(), lambda p: torch.optim.AdamW(p, lr=1e-3))


@needs["bitsandbytes"]
def test_low_bit_states_take_over_and_files_are_read():
    import bitsandbytes as bnb

    params, theirs = trained(lambda p: bnb.optim.AdamW8bit(p, lr=1e-3, min_8bit_size=4096))
    state = torch_state(theirs.state_dict())
    ours = adamw("int8", "log8")(copy.deepcopy(params))
    ours.load_state_dict(state)
    back = ours.torch_state_dict()["state"]
    for i in range(len(params)):
        for name in ("exp_avg", "exp_avg_sq"):
            true, kept = state["state"][i][name], back[i][name]
            # int8: half of 1/127 of a block's largest; log8: half of a ratio of about 1.05
            assert (true - kept).abs().max() <= 0.03 * true.abs().max()


def test_what_is_no_state_in_blocks_is_refused():
    def one(**own):
        return {"state": {0: {"step": 1, **own}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}

    codes, levels = torch.zeros(300, dtype=torch.uint8), torch.zeros(256)
    with pytest.raises(ValueError, match=r"state1 of parameter 0 has one scale for the whole tensor"):
        torch_state(one(state1=codes, state2=codes, qmap1=levels, max1=torch.ones(1)))
    with pytest.raises(ValueError, match=r"300 codes, 5 scales and a map of 256.*damaged"):
        torch_state(one(state1=codes, state2=codes, qmap1=levels, absmax1=torch.ones(5)))
    ademamix = {"state": {}, "param_groups": [{"lr": 1e-3, "alpha": 5.0, "params": [0]}]}
    with pytest.raises(ValueError, match=r"AdEMAMix \(alpha=5\.0\)"):
        torch_state(ademamix)
    plain = torch.optim.AdamW(parameters(), lr=1e-3).state_dict()
    assert torch_state(plain) == plain
