"""Stepping inside the backward pass: the same bits as an ordinary step, and gradients that never exist all at once."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import masterless as ml
from masterless.lab.models import GPT, GPTConfig
from masterless.optim.backward import step_in_backward
from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor

CONFIG = GPTConfig(vocab_size=64, n_layer=3, n_head=2, d_model=64, seq_len=16, tie_embeddings=True)


def gpt(format="int4"):
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    if format:
        quantize_(model, format)
    return model


def batch(step):
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def adamw(model, **options):
    return ml.AdamW(model.named_parameters(), **{"lr": 1e-2, "backend": "reference", **options})


def everything(model, optimizer):
    """A copy of every stored tensor of the weights and of the states, by name."""
    found = {}
    for _, p, name in optimizer.parameters():
        tensors = p.detach().stored.tensors if isinstance(p, QuantizedTensor) else {"values": p.detach()}
        for key, value in (*tensors.items(), *optimizer.state.get(p, {}).items()):
            found[f"{name}.{key}"] = value.clone()
    return found


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def train(model, optimizer, steps, in_backward, between=None, **clip):
    handle = step_in_backward(model, optimizer, **clip) if in_backward else None
    for t in range(steps):
        optimizer.zero_grad()
        model(*batch(t))[1].backward()
        if not in_backward and between:
            between(model)
        optimizer.step()
    if handle:
        handle.remove()
    return everything(model, optimizer)


OPTIMIZERS = {
    "adamw": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "adamw, factored": (ml.AdamW, {"exp_avg": "int8", "exp_avg_sq": "factored"}),
    "sgd": (ml.SGD, {"momentum": 0.9, "nesterov": True}),
    "adafactor": (ml.Adafactor, {"beta1": 0.9}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("format", ["int4", None], ids=["int4", "dense"])
def test_it_is_backward_and_step_to_the_bit(name, format):
    cls, options = OPTIMIZERS[name]
    results = []
    for in_backward in (False, True):
        model = gpt(format)
        optimizer = cls(model.named_parameters(), lr=1e-2, backend="reference", **options)
        start = everything(model, optimizer) if not results else None
        results.append(train(model, optimizer, 3, in_backward))
        assert start is None or any(not torch.equal(start[k], results[0][k]) for k in start)
    assert_same(*results)


def test_gradients_are_freed_as_they_are_used():
    model = gpt()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    alive = []

    def count(p):
        alive.append(sum(q.grad is not None for q in model.parameters()))

    counters = [p.register_post_accumulate_grad_hook(count) for p in matrices]  # run before the steps are taken
    with step_in_backward(model, adamw(model)):
        model(*batch(0))[1].backward()
        assert all(p.grad is None for p in model.parameters())
    assert len(alive) == len(matrices) and max(alive) == 1
    alive.clear()
    model(*batch(0))[1].backward()
    assert max(alive) > len(matrices), "without it they add up"
    for counter in counters:
        counter.remove()


def test_no_gradient_tensor_survives_the_backward_pass():
    model = gpt()
    shape = tuple(model.blocks[0].mlp.up.weight.shape)
    with step_in_backward(model, adamw(model)):
        model(*batch(0))[1].backward()
    gc.collect()
    with torch.no_grad():
        alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == shape]
    assert not alive


# --- clipping -----------------------------------------------------------------------------------------------


def test_clip_value_is_torchs():
    def between(model):
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    results = []
    for in_backward in (False, True):
        model = gpt()
        clip = {"clip_value": 1e-3} if in_backward else {}
        results.append(train(model, adamw(model), 3, in_backward, between, **clip))
    assert_same(*results)


def test_clip_norm_is_per_parameter():
    limit = 1e-2
    seen = {}
    model = gpt()
    optimizer = ml.SGD(model.named_parameters(), lr=1.0, momentum=0.5, momentum_buffer="fp32", backend="reference")
    plain = copy.deepcopy(model)
    plain(*batch(0))[1].backward()
    with step_in_backward(model, optimizer, clip_norm=limit):
        model(*batch(0))[1].backward()
    norms = set()
    for (name, p), dense in zip(model.named_parameters(), plain.parameters(), strict=True):
        norm = float(dense.grad.norm())
        norms.add(norm > limit)
        expected = dense.grad * min(1.0, limit / norm)
        if not isinstance(p, QuantizedTensor):  # its first buffer is the gradient itself
            # the norm is a sum of up to 4096 squares and its order is torch's own: 1e-5 relative covers it
            torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected, rtol=1e-5, atol=0)
            seen[name] = True
    assert norms == {True, False} and len(seen) > 3, "some must be clipped and some not"


def test_both_clippings_apply():
    model = nn.Linear(64, 64, bias=False)
    optimizer = ml.SGD(model.parameters(), lr=1.0, momentum=0.9, momentum_buffer="fp32", backend="reference")
    with step_in_backward(model, optimizer, clip_value=0.5, clip_norm=1.0):
        (model.weight * 7.0).sum().backward()
    buffer = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(buffer, torch.full((64, 64), 1 / 64))  # all at 0.5, then a norm of 32 scaled to 1: exact


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["clip_value", "clip_norm", "clip_previous_norm", "clip_global_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_clipping_to_nothing_is_refused(option, value):
    model = gpt()
    with pytest.raises(ValueError, match=f"{option}={value}: must be positive"):
        step_in_backward(model, adamw(model), **{option: value})


def test_foreign_optimizers_and_strangers_are_refused():
    model = gpt(None)
    with pytest.raises(TypeError, match="optimizer of masterless, not AdamW"):
        step_in_backward(model, torch.optim.AdamW(model.parameters()))
    optimizer = ml.AdamW([*model.named_parameters(), ("stranger", nn.Parameter(torch.zeros(3)))])
    with pytest.raises(ValueError, match="not in the model, for instance 'stranger'"):
        step_in_backward(model, optimizer)


def test_ddp_steps_in_its_communication_hook(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
        before = model.module.weight.detach().clone()
        with step_in_backward(model, adamw(model)):
            model(torch.ones(1, 64)).sum().backward()
        assert model.module.weight.grad is None  # more, with several ranks, in tests/distributed
        assert not torch.equal(model.module.weight, before)
    finally:
        dist.destroy_process_group()


# --- living with it -----------------------------------------------------------------------------------------


def test_the_library_offers_it_at_the_top():
    assert ml.step_in_backward is step_in_backward


def test_remove_and_context_manager_go_back_to_ordinary_steps():
    model = gpt()
    optimizer = adamw(model)
    handle = step_in_backward(model, optimizer)
    handle.remove()
    handle.remove()  # twice does no harm
    with step_in_backward(model, optimizer):
        pass
    before = everything(model, optimizer)
    model(*batch(0))[1].backward()
    assert_same(before, everything(model, optimizer))
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert int(optimizer.state[model.norm.weight]["step"]) == 1


def test_schedulers_and_the_ordinary_loop_keep_working():
    """Warnings are errors here: a scheduler that believed the optimizer had not stepped would warn."""
    results = []
    for in_backward in (False, True):
        model = gpt()
        optimizer = adamw(model, lr=2e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        handle = step_in_backward(model, optimizer) if in_backward else None
        for t in range(4):
            model(*batch(t))[1].backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] < 1e-6
        assert {int(s["step"]) for s in optimizer.state.values()} == {4}
        results.append(everything(model, optimizer))
        if handle:
            handle.remove()
    assert_same(*results)


def test_a_loaded_state_dict_takes_effect():
    """Loading gives the optimizer new groups; the hooks must step with their learning rate."""
    model = gpt()
    optimizer = adamw(model)
    train(model, optimizer, 1, in_backward=False)
    optimizer.zero_grad()
    saved_model, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    saved_model_state = copy.deepcopy(model.state_dict())
    expected_optimizer = adamw(saved_model)
    expected_optimizer.load_state_dict(saved)
    expected_optimizer.param_groups[0]["lr"] = 3e-3
    expected = train(saved_model, expected_optimizer, 2, in_backward=False)
    with step_in_backward(model, optimizer):
        model(*batch(5))[1].backward()
        model.load_state_dict(saved_model_state)
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = 3e-3
        for t in range(2):
            model(*batch(t))[1].backward()
    assert_same(everything(model, optimizer), expected)


def test_frozen_parameters_and_parameters_without_gradient_are_left_alone():
    model = gpt()
    model.blocks[0].requires_grad_(False)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = adamw(model)
    with step_in_backward(model, optimizer):
        model(*batch(0))[1].backward()
    for name, p in model.named_parameters():
        if name in frozen:
            assert p not in optimizer.state
            same = p.detach().dequantize() if isinstance(p, QuantizedTensor) else p
            was = frozen[name]
            assert torch.equal(same, was.dequantize() if isinstance(was, QuantizedTensor) else was)
        else:
            assert int(optimizer.state[p]["step"]) == 1


def test_a_gradient_that_is_not_finite_is_reported_and_freed():
    model = gpt()
    optimizer = adamw(model)
    with step_in_backward(model, optimizer), pytest.raises(ml.NonFiniteGradientError):
        (model(*batch(0))[1] * float("nan")).backward()
    assert all(p.grad is None for p in model.parameters())
