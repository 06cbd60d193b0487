"""A kept copy of a decoded weight is never out of date: every way in which stored numbers change."""

import copy
import gc
import io
import multiprocessing
import pickle
import signal
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from weight_cases import random

import masterless as ml
from masterless.backends.reference import ReferenceBackend
from masterless.interop.safetensors import load_safetensors, save_safetensors
from masterless.interop.training_state import load_training_state, save_training_state
from masterless.step import dispatch
from masterless.tensor.cache import place_of
from masterless.tensor.state import load_rounded_

X = random(3, 64, seed=9)


def layer(format="int4+4", seed=0):
    """A model of one quantized matrix, used as a whole, with a kept copy."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    ml.quantize_(model, format)
    ml.cache_decoded_(model, "1MB")
    return model


def kept(p):
    """The memory of the copy that is kept now."""
    place = place_of(p)
    return None if place is None or place._copy is None else place._copy.dense


def stepped(model, cls=ml.AdamW, **options):
    names = {"exp_avg": "int4", "exp_avg_sq": "log2"} if cls is ml.AdamW else {}
    optimizer = cls(model.named_parameters(), lr=0.3, **names, **options)
    model(X).square().sum().backward()
    optimizer.step()


def step_in_backward(model):
    optimizer = ml.SGD(model.named_parameters(), lr=0.3)
    with ml.step_in_backward(model, optimizer):
        model(X).square().sum().backward()


def step_in_slices(model):
    p = model[0].weight
    with ml.step_in_backward(model, ml.AdamW(model.named_parameters(), lr=0.3)):
        ml.linear_cross_entropy(X, p, torch.arange(3)).backward()
    assert p.grad is None


def compiled_step(model, backend):
    optimizer = ml.AdamW(model.named_parameters(), lr=0.3, backend=backend)
    torch.compiler.reset()
    torch.compile(lambda grad: optimizer.step_on([grad]), backend="aot_eager")(random(64, 64))


def trade(model):
    optimizer = ml.AdamW(model.named_parameters(), lr=0.3, exp_avg="int4", exp_avg_sq="log2")
    model(X).square().sum().backward()
    optimizer.step()
    model(X)
    ml.trade_momentum_(optimizer)


def safetensors(model, path):
    save_safetensors(layer(seed=1), path / "m.safetensors")
    load_safetensors(model, path / "m.safetensors")


def training_state(model, path):
    other = layer(seed=1)
    optimizer = ml.AdamW(other.named_parameters(), lr=0.1)
    other(X).sum().backward()
    optimizer.step()
    save_training_state(path / "s.safetensors", other, optimizer)
    load_training_state(path / "s.safetensors", model, ml.AdamW(model.named_parameters(), lr=0.1))


def part(p, name):
    return p.stored.tensors[name]


def flip(tensor):
    """Other codes, in place, by an operation of torch."""
    tensor.bitwise_xor_(torch.full_like(tensor, 0x33))


def in_inference_mode(p):
    with torch.inference_mode():
        flip(part(p, "codes"))


def other_memory(p):
    codes = part(p, "codes")
    codes.data = codes ^ 0x33


class Careless(ReferenceBackend):
    """Writes as a kernel does, unseen, and forgets to say so."""

    def step(self, prepared, turn, only_survey=False):
        stored = tuple(t for task in prepared for t in task.weight.tensors.values())
        with torch.autograd._unsafe_preserve_version_counter(stored):
            return super().step(prepared, turn, only_survey)


def careless_step(model):
    own = dispatch._backends["cpu"]
    try:
        dispatch.register("cpu", Careless())
        stepped(model, ml.SGD)
    finally:
        dispatch.register("cpu", own)


def compiled_write(p):
    torch.compiler.reset()
    torch.compile(lambda codes: codes.copy_(codes ^ 0x33), backend="aot_eager")(part(p, "codes"))


CHANGES = {
    "kernel": lambda m, _: stepped(m),
    "reference": lambda m, _: stepped(m, backend="reference"),
    "SGD": lambda m, _: stepped(m, ml.SGD),
    "Muon": lambda m, _: stepped(m, ml.Muon),
    "Adafactor": lambda m, _: stepped(m, ml.Adafactor),
    "step in backward": lambda m, _: step_in_backward(m),
    "step in slices": lambda m, _: step_in_slices(m),
    "a backend that forgets to count": lambda m, _: careless_step(m),
    "compiled step, kernel": lambda m, _: compiled_step(m, "auto"),
    "compiled step, reference": lambda m, _: compiled_step(m, "reference"),
    "trade_momentum_": lambda m, _: trade(m),
    "show_hidden_bits_": lambda m, _: ml.show_hidden_bits_(m),
    "copy_": lambda m, _: m[0].weight.detach().copy_(layer(seed=1)[0].weight.detach()),
    "zero_": lambda m, _: m[0].weight.detach().zero_(),
    "encode_": lambda m, _: m[0].weight.encode_(random(64, 64, seed=5)),
    "encode_ in inference mode": lambda m, _: torch.inference_mode()(m[0].weight.encode_)(random(64, 64, seed=5)),
    "encode_ of a piece": lambda m, _: m[0].weight.detach()[8:16].encode_(random(8, 64, seed=5)),
    "copy_ to a piece": lambda m, _: m[0].weight.detach()[8:16].copy_(layer(seed=1)[0].weight.detach()[:8]),
    "load_state_dict": lambda m, _: m.load_state_dict(layer(seed=1).state_dict()),
    "load_state_dict, assign": lambda m, _: m.load_state_dict(layer(seed=1).state_dict(), assign=True),
    "load_rounded_": lambda m, _: load_rounded_(m, {"0.weight": random(64, 64, seed=5)}),
    "load_safetensors": safetensors,
    "load_training_state": training_state,
    "codes": lambda m, _: flip(part(m[0].weight, "codes")),
    "codes, detached": lambda m, _: flip(part(m[0].weight, "codes").detach()),
    "codes of the detached parameter": lambda m, _: flip(part(m[0].weight.detach(), "codes")),
    "codes of a piece": lambda m, _: flip(part(m[0].weight[8:16], "codes")),
    "codes of a piece of a piece": lambda m, _: flip(part(m[0].weight.detach()[8:16][1:3], "codes")),
    "codes in inference mode": lambda m, _: in_inference_mode(m[0].weight),
    "codes by foreach": lambda m, _: torch._foreach_copy_([part(m[0].weight, "codes")], [random(64, 32).byte()]),
    "codes in a compiled function": lambda m, _: compiled_write(m[0].weight),
    "scale": lambda m, _: part(m[0].weight, "scale").mul_(2),
    "scale of a piece": lambda m, _: part(m[0].weight[8:16], "scale").mul_(2),
    "other memory": lambda m, _: other_memory(m[0].weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_the_stored_numbers_goes_unnoticed(change, tmp_path):
    model = layer("int4" if change == "trade_momentum_" else "int4+4")  # hidden bits need no momentum
    before = model(X).detach()
    assert kept(model[0].weight) is not None, "nothing was kept: the test would pass whatever happens"
    CHANGES[change](model, tmp_path)
    p = model[0].weight
    after, true = model(X).detach(), F.linear(X, p.detach().decode())
    assert torch.equal(after, true)
    assert not torch.equal(before, after), "nothing has changed: the test would pass whatever happens"
    if change != "load_state_dict, assign":
        assert kept(p) is not None, "the parameter has lost its place"


@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "int4+32", "nvfp4", "int4:tensor", "mxfp8"])
def test_every_stored_tensor_of_every_kind_of_format_counts(format):
    model = layer(format)
    p = model[0].weight
    for name in ("codes", "scale", "tensor_scale"):
        if name not in p.stored.tensors:
            continue
        model(X)
        assert kept(p) is not None
        tensor = part(p, name)
        (flip if tensor.dtype == torch.uint8 else lambda t: t.mul_(2))(tensor)
        found, true = model(X).detach(), F.linear(X, p.detach().decode())
        assert torch.equal(found.nan_to_num(7.0), true.nan_to_num(7.0)), name


def test_no_other_memory_can_get_the_address_of_what_was_decoded():
    model = layer()
    model(X)
    codes = part(model[0].weight, "codes")
    memory = weakref.ref(codes.untyped_storage())
    codes.data = codes ^ 0x33
    assert memory() is not None, "it could come back with other numbers"
    model(X)
    assert memory() is None


def test_hidden_bits_that_are_shown_count():
    model = layer()
    ml.show_hidden_bits_(model)
    p = model[0].weight
    before = model(X).detach()
    flip(part(p, "hidden"))
    after = model(X).detach()
    assert torch.equal(after, F.linear(X, p.detach().decode())) and not torch.equal(before, after)


@pytest.mark.parametrize("use", ["transposed", "matmul", "multi-head"])
def test_views_and_other_products_are_up_to_date(use):
    p = layer()[0].weight
    attention = nn.MultiheadAttention(64, 2, bias=False)
    attention.out_proj.weight = p

    def result():
        if use == "multi-head":
            with torch.no_grad():
                attention.in_proj_weight.fill_(0.01)
            return attention(X, X, X)[0]
        return X @ p.T if use == "transposed" else torch.matmul(X, p)

    first = result().detach()
    assert kept(p) is not None
    p.encode_(random(64, 64, seed=5))
    second = result().detach()
    ml.cache_decoded_(nn.ParameterList([p]), 0)
    assert torch.equal(second, result()) and not torch.equal(first, second)


def test_a_result_that_is_a_view_is_the_callers_to_write_to():
    model = layer()
    p = model[0].weight
    expected = model(X).detach()
    for result in (torch.einsum("ij->ji", p), p.dequantize(), p.decode(), p.T.dequantize(), p * 1):
        result.detach().numpy()[:] = 7.0
    with torch.no_grad():
        torch.einsum("ij->ij", p).numpy()[:] = 7.0
    assert kept(p) is not None and torch.equal(model(X), expected)


def test_a_copy_that_an_operation_has_written_to_is_not_used_again():
    model = layer()
    p = model[0].weight
    expected = model(X).detach()
    with torch.no_grad():
        F.embedding(torch.arange(64), p, max_norm=0.1)  # torch scales the table it is given, in place
    assert torch.equal(model(X), expected)


def test_memory_that_other_processes_can_write_to_is_not_kept():
    model = layer()
    model(X)
    model.share_memory()
    codes = part(model[0].weight, "codes")
    before = model(X).detach()
    assert kept(model[0].weight) is None

    process = multiprocessing.get_context("fork").Process(target=flip, args=(codes,))
    process.start()
    process.join()
    assert process.exitcode == 0
    after = model(X).detach()
    assert torch.equal(after, F.linear(X, model[0].weight.detach().decode())) and not torch.equal(before, after)


def test_a_step_that_is_interrupted_leaves_no_old_copy():
    """Ctrl-C reaches Python when the kernel has returned, before anything else of the step is done."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False))
    ml.quantize_(model, "int4")
    ml.cache_decoded_(model, "1GB")
    p, x = model[0].weight, random(1, 2048)
    optimizer = ml.SGD(model.named_parameters(), lr=1.0, momentum=0.9)
    p.grad = random(2048, 2048)
    optimizer.step()
    start = time.perf_counter()
    optimizer.step()
    duration = time.perf_counter() - start

    def stop(*_):
        raise KeyboardInterrupt

    changed, previous = 0, signal.signal(signal.SIGALRM, stop)
    try:
        for i in range(8):
            before = model(x).detach()
            assert kept(p) is not None
            try:
                signal.setitimer(signal.ITIMER_REAL, duration * (0.3 + 0.05 * i))
                optimizer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                true = F.linear(x, p.detach().decode())
                changed += not torch.equal(before, true)
                assert torch.equal(model(x), true)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert changed, "no interrupt came while the kernel computed"


# --- what has no place --------------------------------------------------------------------------------------


def test_copies_and_conversions_have_no_place_and_leave_the_original_its_own():
    model = layer()
    model(X)
    p = model[0].weight
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    copies.append(copy.deepcopy(model).to(torch.bfloat16))
    for other in copies:
        assert place_of(other[0].weight) is None and torch.equal(other.float()(X), model(X))
    assert kept(p) is not None
    model.to(torch.bfloat16)
    assert place_of(model[0].weight) is None
    model.float()
    ml.cache_decoded_(model, "1MB")
    model(X)
    ml.dequantize_(model)
    assert type(model[0].weight.data) is torch.Tensor


def test_a_conversion_frees_the_copy():
    for convert in (lambda m: m.to(torch.bfloat16), ml.dequantize_, lambda m: ml.cache_decoded_(m, None)):
        model = layer()
        model(X)
        memory = weakref.ref(kept(model[0].weight).untyped_storage())
        assert memory() is not None
        convert(model)
        gc.collect()
        assert memory() is None
