"""Embeddings and output heads stored quantized: rows decoded, losses without logits, steps without whole gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from test_backward import assert_same, everything
from torch import nn

import masterless as ml
from masterless.tensor import rows
from masterless.tensor.quantized import QuantizedTensor

VOCAB, WIDTH, TOKENS = 96, 64, 24


class Model(nn.Module):
    """An embedding, a layer, a head; tied or not."""

    def __init__(self, tied=False, vocab=VOCAB, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)
        ml.quantize_(self, "int8", include=[nn.Embedding, "head.weight"] if not tied else [nn.Embedding])

    def forward(self, ids, targets, whole=False):
        x = self.embed(ids) + self.layer(self.embed(ids)).relu()
        if whole:
            return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())
        return ml.linear_cross_entropy(x, self.head.weight, targets, rows=40)


def batch(step=0, vocab=VOCAB):
    ids = torch.randint(vocab, (2, TOKENS // 2 + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def adamw(model, **options):
    return ml.AdamW(model.named_parameters(), **{"lr": 1e-2, "exp_avg": "int4", "exp_avg_sq": "log4", **options})


# --- the two functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "int4", "int4+4", "fp8", "int8+32"])
@pytest.mark.parametrize("padding", [None, 5, -3])
def test_an_embedding_is_that_of_the_decoded_table(format, padding):
    table = nn.Parameter(QuantizedTensor.from_dense(torch.randn(VOCAB, WIDTH), format))
    dense = table.detach().dequantize().requires_grad_()
    ids = torch.randint(VOCAB, (3, 7))
    ids[0, :3] = 5
    upstream = torch.randn(3, 7, WIDTH)
    for weight in (table, dense):
        out = F.embedding(ids, weight, padding_idx=padding)
        (out * upstream).sum().backward()
    assert torch.equal(F.embedding(ids, table, padding), F.embedding(ids, dense, padding))
    assert torch.equal(table.grad, dense.grad)


def test_an_embedding_decodes_its_rows_only():
    table = QuantizedTensor.from_dense(torch.randn(4096, WIDTH), "int8")
    with LiveBytes() as live:
        F.embedding(torch.arange(8), table)
    assert live.peak < 4096 * WIDTH / 8


def test_an_index_outside_the_table_is_an_error():
    table = QuantizedTensor.from_dense(torch.randn(VOCAB, WIDTH), "int8")
    with pytest.raises(IndexError, match=f"{VOCAB} in a table of {VOCAB} rows"):
        F.embedding(torch.tensor([0, VOCAB]), table)


@pytest.mark.parametrize("rows", [1, 40, VOCAB, 1000])
@pytest.mark.parametrize("stored", [True, False], ids=["int8", "dense"])
def test_the_loss_without_logits_is_cross_entropy(stored, rows):
    weight = torch.randn(VOCAB, WIDTH)
    if stored:
        weight = QuantizedTensor.from_dense(weight, "int8")
    weight = nn.Parameter(weight)
    dense = (weight.dequantize() if stored else weight).detach().clone().requires_grad_()
    targets = torch.randint(VOCAB, (4, 6))
    targets[1, :4] = -100
    x = torch.randn(4, 6, WIDTH)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = ml.linear_cross_entropy(mine, weight, targets, rows=rows)
    expected = F.cross_entropy(F.linear(theirs, dense).flatten(0, 1), targets.flatten())
    (3 * loss).backward()
    (3 * expected).backward()
    # fp32 products and sums in another order
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    # Where large terms cancel: a rounding of 2^-24 for each of the sum's terms, which are below one.
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=VOCAB * 2.0**-24)
    torch.testing.assert_close(weight.grad, dense.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_refuses_what_it_cannot_mean():
    head = QuantizedTensor.from_dense(torch.randn(VOCAB, WIDTH), "int8")
    x = torch.randn(3, WIDTH)
    with pytest.raises(ValueError, match="does not fit inputs of shape"):
        ml.linear_cross_entropy(torch.randn(3, 5), head, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="one target per token"):
        ml.linear_cross_entropy(x, head, torch.zeros(4, dtype=torch.long))
    with pytest.raises(IndexError, match=f"target {VOCAB} is no row"):
        ml.linear_cross_entropy(x, head, torch.tensor([0, VOCAB, -100]))
    with pytest.raises(ValueError, match="no scales by row"):
        ml.linear_cross_entropy(
            x, QuantizedTensor.from_dense(torch.randn(VOCAB, WIDTH), "int8:tensor"), torch.zeros(3).long()
        )


def test_a_head_that_changes_before_its_backward_pass_is_an_error():
    head = nn.Parameter(QuantizedTensor.from_dense(torch.randn(VOCAB, WIDTH), "int8"))
    loss = ml.linear_cross_entropy(torch.randn(3, WIDTH), head, torch.zeros(3).long())
    head.encode_(torch.randn(VOCAB, WIDTH))
    with pytest.raises(RuntimeError, match="was changed between the forward and the backward"):
        loss.backward()


def test_bf16_and_autocast_compute_in_bf16():
    head = nn.Parameter(QuantizedTensor.from_dense(torch.randn(VOCAB, WIDTH), "int8"))
    x, targets = torch.randn(5, WIDTH), torch.arange(5)
    plain = ml.linear_cross_entropy(x.bfloat16(), head, targets)
    with torch.autocast("cpu", torch.bfloat16):
        cast = ml.linear_cross_entropy(x, head, targets)
    assert plain.dtype == cast.dtype == torch.float32 and torch.equal(plain, cast)
    assert not torch.equal(plain, ml.linear_cross_entropy(x, head, targets))


# --- steps in slices ------------------------------------------------------------------------------------------


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(rows, "SLICE", 40 * WIDTH)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "states", [("int4", "log4", (0.9, 0.95)), ("none", "log2", (0.0, 0.95)), ("int2", "fp32", (0.5, 0.9))]
)
def test_a_step_in_slices_is_the_whole_step_to_the_bit(states, backend):
    from masterless.optim.slices import step_in_slices

    first, second, betas = states
    results = []
    for in_slices in (False, True):
        p = nn.Parameter(
            QuantizedTensor.from_dense(torch.randn(VOCAB, 200, generator=torch.Generator().manual_seed(1)), "int8")
        )
        optimizer = ml.AdamW([("w", p)], lr=1e-2, exp_avg=first, exp_avg_sq=second, betas=betas, backend=backend)
        for step in range(3):
            grad = torch.randn(VOCAB, 200, generator=torch.Generator().manual_seed(step))
            if in_slices:
                step_in_slices(optimizer, next(optimizer.parameters()), lambda a, b, grad=grad: grad[a:b], 40)
            else:
                p.grad = grad
                optimizer.step()
        results.append(everything(None, optimizer))
    assert_same(*results)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_steps_by_rows_are_ordinary_steps(tied, small_slices):
    """Up to the order of fp32 sums, which may tip a few roundings: the first moment, fp32, is compared instead."""
    results = []
    for in_backward in (False, True):
        model = Model(tied)
        optimizer = adamw(model, exp_avg="fp32", exp_avg_sq="fp32", error_compensation=False)
        handle = ml.step_in_backward(model, optimizer) if in_backward else None
        model(*batch()).backward()
        optimizer.step()
        assert all(int(s["step"]) == 1 for s in optimizer.state.values())
        if handle:
            assert all(p.grad is None for p in model.parameters())
            handle.remove()
        results.append({name: optimizer.state[p]["exp_avg"] for _, p, name in optimizer.parameters()})
    assert len(results[0]) == (3 if tied else 4)
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-8)


def test_a_tied_table_that_is_also_used_as_a_whole_gets_one_step(small_slices):
    results = []
    for in_backward in (False, True):
        model = Model(tied=True)
        optimizer = adamw(model)
        handle = ml.step_in_backward(model, optimizer) if in_backward else None
        for step in range(2):
            model(*batch(step), whole=True).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(everything(model, optimizer))
        if handle:
            handle.remove()
            assert not hasattr(model.embed.weight, "row_sink")
    assert_same(*results)


def test_a_table_used_by_rows_and_through_a_view_is_refused(small_slices):
    model = Model(tied=True)
    with (
        ml.step_in_backward(model, adamw(model)),
        pytest.raises(RuntimeError, match="through a view of it, as a whole"),
    ):
        x = model.embed(batch()[0])
        (x @ model.head.weight.T).square().mean().backward()


def test_a_forward_pass_whose_backward_pass_never_comes_is_told(small_slices):
    model = Model(tied=True)
    optimizer = adamw(model)
    with ml.step_in_backward(model, optimizer):
        kept = model(*batch(1))
        model(*batch()).backward()
        assert kept.requires_grad
        with pytest.raises(RuntimeError, match=r"embed.weight.*has not run.*no_grad"):
            optimizer.step()


def test_evaluation_without_gradients_does_not_count(small_slices):
    model = Model(tied=True)
    optimizer = adamw(model)
    with ml.step_in_backward(model, optimizer):
        with torch.no_grad():
            kept = model(*batch(1))
        model(*batch()).backward()
        optimizer.step()
    assert kept.grad_fn is None and int(optimizer.state[model.embed.weight]["step"]) == 1


def test_a_bad_gradient_in_a_slice_is_reported(small_slices):
    model = Model()
    optimizer = adamw(model)
    with ml.step_in_backward(model, optimizer), pytest.raises(ml.NonFiniteGradientError, match=r"head.weight.*rows 0"):
        (model(*batch()) * float("nan")).backward()


def test_factored_states_take_the_dense_way():
    model = Model()
    optimizer = adamw(model, exp_avg_sq="factored")
    with ml.step_in_backward(model, optimizer):
        assert not hasattr(model.embed.weight, "row_sink")
        model(*batch()).backward()
    assert int(optimizer.state[model.embed.weight]["step"]) == 1


# --- clipping and sums ----------------------------------------------------------------------------------------


def momenta(model, optimizer):
    return {name: optimizer.state[p]["momentum_buffer"].clone() for _, p, name in optimizer.parameters()}


def sgd(model):
    return ml.SGD(model.named_parameters(), lr=1e-3, momentum=0.5, momentum_buffer="fp32", error_compensation=False)


def gradients(model, step=0, scale=1.0):
    twin = copy.deepcopy(model)
    (scale * twin(*batch(step))).backward()
    return {name: p.grad for name, p in twin.named_parameters()}


def global_norm(grads):
    return float(torch.stack([g.norm() for g in grads.values()]).norm())


def test_the_exact_global_norm_takes_two_passes(small_slices):
    model = Model()
    expected = gradients(model)
    norm = global_norm(expected)
    optimizer = sgd(model)
    with ml.step_in_backward(model, optimizer, clip_global_norm=norm / 4) as stepper:
        with stepper.measuring():
            model(*batch()).backward()
        assert not optimizer.state
        model(*batch()).backward()
        assert stepper.norm == pytest.approx(norm, rel=1e-5)  # sums in another order
        for name, buffer in momenta(model, optimizer).items():
            torch.testing.assert_close(buffer, expected[name] / 4, rtol=1e-4, atol=1e-8)
        with pytest.raises(RuntimeError, match="was not measured"):
            model(*batch()).backward()


def test_the_previous_norm_clips_the_next_step_and_survives_a_checkpoint(small_slices):
    model = Model()
    optimizer = sgd(model)
    norm = global_norm(gradients(model, scale=1000))
    with ml.step_in_backward(model, optimizer, clip_previous_norm=1e-3) as stepper:
        (1000 * model(*batch())).backward()
        assert stepper.norm == pytest.approx(norm, rel=1e-4)
        first = momenta(model, optimizer)
        assert all(float(b.norm()) <= 1.0001e-3 for b in first.values())  # each by itself, there being no norm yet
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        expected = gradients(model, step=1)
        model(*batch(1)).backward()
        for name, buffer in momenta(model, optimizer).items():
            torch.testing.assert_close(buffer, 0.5 * first[name] + expected[name] * 1e-3 / norm, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("format", ["fp32", "int8", "bf16"])
def test_sums_over_several_passes(format, small_slices):
    model = Model()
    parts = [gradients(model, step) for step in range(3)]
    optimizer = sgd(model)
    with ml.step_in_backward(model, optimizer, accumulate=3, accumulate_in=format):
        for step in range(3):
            assert not optimizer.state
            model(*batch(step)).backward()
        assert all(int(s["step"]) == 1 for s in optimizer.state.values())
        for name, buffer in momenta(model, optimizer).items():
            expected = sum(part[name] for part in parts)
            exact = format == "fp32" or name in ("embed.weight", "head.weight")
            # two stochastic roundings to within one quantum (1/127 of a block's largest; 1/128 of a number)
            tolerance = 1e-6 if exact else float(expected.abs().max()) * 2.5 / 127
            torch.testing.assert_close(buffer, expected, rtol=1e-4, atol=tolerance)


def test_a_parameter_without_gradient_in_the_last_pass_is_stepped(small_slices):
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    optimizer = sgd(model)
    x = torch.ones(1, 64)
    with ml.step_in_backward(model, optimizer, accumulate=2, accumulate_in="fp32"):
        model[0](x).sum().backward()
        model[1](x).sum().backward()
        model[1](x).sum().backward()
        model[1](x).sum().backward()
    assert {int(optimizer.state[p]["step"]) for p in model[0].parameters()} == {1}
    assert {int(optimizer.state[p]["step"]) for p in model[1].parameters()} == {2}
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], torch.ones(64, 64))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip_global_norm": 1.0, "accumulate": 2}, "the norm of a sum is known only when the sum is"),
        ({"clip_global_norm": 1.0, "clip_previous_norm": 1.0}, "choose one"),
        ({"accumulate": 0}, "a number of backward passes"),
        ({"accumulate_in": "log4"}, "gradients have signs"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        ml.step_in_backward(model, adamw(model), **options)


def test_measuring_needs_its_option():
    model = Model()
    with ml.step_in_backward(model, adamw(model)) as stepper, pytest.raises(ValueError, match="clip_global_norm"):
        with stepper.measuring():
            pass


# --- nothing large is ever dense ------------------------------------------------------------------------------


class Allocations(LiveBytes):
    """Bytes of the largest single tensor that an operation has made."""

    largest, shape = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for t in torch.utils._pytree.tree_leaves(out):
            if type(t) is torch.Tensor and t.dtype.is_floating_point and t.numel() * t.itemsize > self.largest:
                self.largest, self.shape = t.numel() * t.itemsize, (str(func), tuple(t.shape))
        return out


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_no_dense_tensor_is_larger_than_a_layer_or_a_slice_of_the_head(tied, small_slices):
    vocab = 2000
    model = Model(tied, vocab)
    optimizer = adamw(model)
    inputs = batch(0, vocab)
    with ml.step_in_backward(model, optimizer):
        model(*inputs).backward()  # makes the states
        with Allocations() as allocations:
            model(*inputs).backward()
    layer, piece, activations = 4 * WIDTH * WIDTH, 4 * 40 * WIDTH, 4 * TOKENS * WIDTH
    assert allocations.largest <= max(layer, piece, activations), allocations.shape
    assert 4 * vocab * WIDTH > 20 * allocations.largest
