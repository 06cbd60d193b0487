"""Decoded weights kept between uses: who gets a place, that it is used, the same bits, and no more bytes than asked."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from test_decode_cache_changes import kept
from torch import nn
from torch.utils.checkpoint import checkpoint
from weight_cases import random

import masterless as ml
from masterless.lab.models import GPT, GPTConfig
from masterless.tensor.cache import byte_count, place_of, reserved_bytes

CONFIG = GPTConfig(vocab_size=64, n_layer=2, n_head=2, d_model=64, seq_len=16)
MOE = GPTConfig(vocab_size=64, n_layer=1, n_head=2, d_model=64, seq_len=16, d_ff=64, n_experts=3)
LAYER = 128 * 128 * 4  # bytes of a layer of `deep`, decoded


def deep(depth=8):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(depth)))
    ml.quantize_(model, "int4")
    return model.requires_grad_(False)  # gradients of weights would add up


# --- who gets a place -----------------------------------------------------------------------------------------


def test_places_go_to_what_still_fits_in_the_order_of_the_model():
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 32), nn.Linear(32, 64)
    )
    ml.quantize_(model, "int8")
    sizes = {f"{i}.weight": layer.weight.numel() * 4 for i, layer in enumerate(model)}
    report = ml.cache_decoded_(model, 33_000)
    assert list(report.cached) == ["0.weight", "3.weight", "4.weight"] and report.budget == 33_000
    assert {**report.cached, **report.left_out} == sizes and report.nbytes == reserved_bytes(model) <= 33_000
    assert [place_of(layer.weight) is not None for layer in model] == [True, False, False, True, True]
    assert ml.cache_decoded_(model, 33_000) == report
    off = ml.cache_decoded_(model, 0)
    assert (off.budget, off.cached, off.left_out, reserved_bytes(model)) == (0, {}, {}, 0)


def test_the_copy_has_the_parameters_dtype_and_tied_weights_count_once():
    model = GPT(GPTConfig(vocab_size=64, n_layer=1, n_head=2, d_model=64, seq_len=16, tie_embeddings=True)).bfloat16()
    ml.quantize_(model, "int8", include=["*"])
    report = ml.cache_decoded_(model, "1MB")
    assert report.cached["embed.weight"] == 64 * 64 * 2 and "head.weight" not in report.cached
    model(torch.zeros(1, 4, dtype=torch.long))
    assert kept(model.head.weight).dtype == torch.bfloat16


def test_a_table_that_only_an_embedding_has_is_no_candidate():
    model = GPT(CONFIG)
    ml.quantize_(model, "int8", include=["*"])
    report = ml.cache_decoded_(model, "1MB")
    assert "embed.weight" not in {**report.cached, **report.left_out} and "head.weight" in report.cached


@pytest.mark.parametrize(
    ("budget", "count"),
    [(None, 0), (0, 0), (5, 5), ("0", 0), ("64MB", 64 * 10**6), ("1.5 KiB", 1536), ("2gb", 2 * 10**9), ("1TiB", 2**40)],
)
def test_budgets(budget, count):
    assert byte_count(budget) == count


@pytest.mark.parametrize("budget", [-1, 1.5, True, "", "much", "64XB", "1.5", "-1MB", "64iB", b"64MB", "9" * 40 + "B"])
def test_a_budget_that_is_none_says_what_to_write(budget):
    model = deep(1)
    ml.cache_decoded_(model, "1MB")
    with pytest.raises(ValueError, match=r"is no number of bytes; write e\.g\. '64MB'"):
        ml.cache_decoded_(model, budget)
    assert place_of(model[0].weight) is not None, "what is refused changes nothing"


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match=r"budget=1000: the smallest weight takes 65,536 bytes decoded; raise it"):
        ml.cache_decoded_(deep(2), 1000)
    with pytest.raises(ValueError, match=r"no parameter of the model is quantized.*quantize_\(model, 'int8'\) first"):
        ml.cache_decoded_(nn.Linear(64, 64), "1MB")
    with pytest.raises(ValueError, match=r"'0\.weight' lies on meta, and only on the CPU .*; pass 0 there"):
        ml.cache_decoded_(deep(1).to("meta"), "1MB")
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(64, 64))
        model[0].weight = nn.Parameter(ml.QuantizedTensor.from_dense(random(64, 64), "int8"), requires_grad=False)
    with pytest.raises(ValueError, match=r"was made in inference mode, where torch counts no changes; make the model"):
        ml.cache_decoded_(model, "1MB")


# --- that it is used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["linear", "x @ w.T", "einsum", "checkpoint", "products"])
def test_forward_and_backward_of_all_batches_read_one_copy(use):
    """Seen by writing to the copy where torch cannot see it: every use that reads it finds zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    ml.quantize_(model, "int8")
    ml.cache_decoded_(model, "1MB")
    if use == "products":
        ml.use_products_(model, "int8")
    p = model[0].weight
    uses = {
        "x @ w.T": lambda x: x @ p.T,
        "einsum": lambda x: torch.einsum("bi,oi->bo", x, p),
        "checkpoint": lambda x: checkpoint(model, x, use_reentrant=False),
    }
    x = random(2, 64).requires_grad_()
    compute = uses.get(use, model)
    compute(x).sum().backward()
    assert kept(p) is not None and x.grad.abs().sum() > 0
    kept(p).numpy()[:] = 0.0
    for _ in range(2):
        x.grad = None
        y = compute(x)
        y.sum().backward()
        assert not x.grad.any() and (use == "products" or not y.any())


def test_evaluation_reads_it_and_inference_mode_leaves_one_that_trains():
    model = deep(1)
    ml.cache_decoded_(model, "1MB")
    x = random(2, 128)
    with torch.inference_mode():
        expected = model(x)
    copy = kept(model[0].weight)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    x.requires_grad_()
    model(x).sum().backward()
    assert kept(model[0].weight) is copy and torch.equal(x.grad[0], model[0].weight.decode().sum(0))


def test_autocast_keeps_its_own_dtype():
    model, plain = deep(2), deep(2)
    ml.cache_decoded_(model, "1MB")
    x = random(2, 128).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), plain(x))
    assert kept(model[0].weight).dtype == torch.bfloat16
    assert torch.equal(model(x), plain(x)) and kept(model[0].weight).dtype == torch.float32


# --- the same bits -----------------------------------------------------------------------------------------------


def training(preset, budget, config=CONFIG, accumulate=1, in_backward=False, wrap=None, cast=None, steps=4):
    """Losses, gradients and the bytes at the end of a few steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPT(config, torch.Generator().manual_seed(0))
        optimizer = ml.prepare(model, preset, lr=1e-2)
    if budget:
        ml.cache_decoded_(model, budget)
    if wrap == "checkpoint":
        for block in model.blocks:
            block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)
    stepper = ml.step_in_backward(model, optimizer, accumulate=accumulate) if in_backward else None
    torch.compiler.reset()
    call = torch.compile(model, backend="aot_eager") if wrap == "compile" else model
    found = []
    for i in range(steps * accumulate):
        ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(i))
        with torch.autocast("cpu", torch.bfloat16, enabled=cast is not None):
            loss = call(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        found.append(loss.detach())
        if (i + 1) % accumulate == 0:
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    if stepper is not None:
        stepper.remove()
    return model, [*found, *model.state_dict().values()]


CASES = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "checkpoint": {"wrap": "checkpoint", "accumulate": 2},
    "step in backward": {"in_backward": True},
    "step in backward, accumulation": {"in_backward": True, "accumulate": 2},
    "autocast": {"cast": torch.bfloat16, "accumulate": 2},
    "experts": {"config": MOE, "accumulate": 2},
    "compile": {"wrap": "compile", "accumulate": 2, "steps": 2},
}


@pytest.mark.parametrize("preset", ["2-byte", "1-byte-int4", "2-byte-int4"])  # FP8, INT4, int4+4
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_to_the_bit(preset, case):
    _, expected = training(preset, None, **CASES[case])
    for budget in ("100KB", "10MB"):  # some of the weights, all of them
        model, found = training(preset, budget, **CASES[case])
        assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        held = [p for p in model.parameters() if kept(p) is not None]
        # Compiled graphs decode by themselves, as documented.
        assert bool(held) == (case != "compile")


def test_a_weight_changed_between_the_passes_is_an_error_as_ever():
    model = deep(1).requires_grad_()
    ml.cache_decoded_(model, "1MB")
    loss = model(random(2, 128).requires_grad_()).sum()
    model[0].weight.encode_(random(128, 128))
    with pytest.raises(RuntimeError, match="was changed between the forward and the backward pass"):
        loss.backward()


def test_checkpoints_do_not_see_it():
    model = deep(2)
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    ml.cache_decoded_(model, "1MB")
    model(random(1, 128))
    cached = model.state_dict()
    assert cached.keys() == plain.keys() and all(torch.equal(cached[key], plain[key]) for key in plain)
    assert model[0].weight.nbytes == model[0].weight.stored.nbytes < LAYER / 4


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [0, 1, 5, 8])
def test_no_more_bytes_are_kept_than_the_budget(places):
    model, x = deep(8), random(1, 128).requires_grad_()
    ml.cache_decoded_(model, places * LAYER + 100 if places else 0)
    gc.collect()
    small = LAYER // 2  # activations and gradients, 512 bytes each
    with LiveBytes() as live:
        for i in range(3):
            loss = model(x).sum()
            assert places * LAYER <= live.now < places * LAYER + small, "after the forward pass"
            loss.backward()
            assert places * LAYER <= live.now < places * LAYER + small, "after the backward pass"
            # One more is dense while it is used. What is out of date is gone before it is decoded again.
            assert live.peak < (places + (places < 8)) * LAYER + small
            for layer in model:
                layer.weight.encode_(random(128, 128, seed=i))
            live.peak = 0
        ml.cache_decoded_(model, None)
        del loss
        assert live.now < small, "not everything is freed"


def test_less_is_kept_after_a_smaller_budget():
    model = deep(4)
    ml.cache_decoded_(model, 4 * LAYER)
    with LiveBytes() as live:
        model(random(1, 128))
        ml.cache_decoded_(model, LAYER)
        model(random(1, 128))
        assert LAYER <= live.now < 2 * LAYER


def test_a_closed_place_stays_closed():
    """What FSDP2 has gathered is refilled without being counted as a change."""
    from masterless.tensor import gather

    q = ml.QuantizedTensor.from_dense(random(64, 64), "int8")
    (carrier,), metadata = gather.pack(q, 1, torch.Size((64, 64)))
    whole, _ = gather.unpack(q, carrier.view(-1), metadata, torch.float32, None)
    model = nn.ParameterList([nn.Parameter(whole)])
    with pytest.raises(ValueError, match=r"is sharded, and FSDP2 refills what it gathers in every pass; pass 0"):
        ml.cache_decoded_(model, "1MB")
    assert not ml.cache_decoded_(model, 0).cached
    assert torch.equal(F.linear(random(1, 64), model[0]), F.linear(random(1, 64), q.decode()))
