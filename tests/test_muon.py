"""Muon: torch's own, the identities of the orthogonal step, few bits, checkpoints. Shards: `distributed/test_step`."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import masterless as ml
from masterless.formats import parse
from masterless.lab.models import GPT, GPTConfig
from masterless.optim.muon import COEFFICIENTS
from masterless.step.orthogonal import given_back, newton_schulz, shape_factor

SHAPES = ((64, 96), (96, 64), (48, 48))


def matrices(shapes=SHAPES, weights: str | None = None) -> nn.ParameterList:
    g = torch.Generator().manual_seed(0)
    dense = [torch.randn(shape, generator=g) * 0.1 for shape in shapes]
    return nn.ParameterList(
        [nn.Parameter(d if weights is None else ml.QuantizedTensor.from_dense(d, weights)) for d in dense]
    )


def give_gradients(parameters, step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        values = p.detach().dequantize() if isinstance(p, ml.QuantizedTensor) else p.detach()
        p.grad = torch.randn(p.shape, generator=g) * 0.01 + values * 0.1


def train(parameters, opt, first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients(parameters, step)
        opt.step()


def stored(parameters, opt) -> list[Tensor]:
    """Everything that a run has stored, in order."""
    found = []
    for p in parameters:
        found += list(p.stored.tensors.values()) if isinstance(p, ml.QuantizedTensor) else [p.detach()]
        found += [value for _, value in sorted(opt.state[p].items())]
    return found


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- torch's own ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_in_fp32_it_is_torchs_for_a_hundred_steps(nesterov, adjust):
    ours, theirs = matrices(), matrices()
    options = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust}
    opt, twin = ml.Muon(ours.parameters(), momentum_buffer="fp32", **options), torch.optim.Muon(theirs, **options)
    for step in range(100):
        for parameters in (ours, theirs):
            give_gradients(theirs, step)
            for p, q in zip(parameters, theirs, strict=True):
                p.grad = q.grad.clone()
        opt.step()
        twin.step()
    for p, q in zip(ours, theirs, strict=True):
        # The momentum and the products are torch's to the bit; torch applies a step by a fused multiply-add and we
        # round twice, 2^-24 of the weight in each of 100 steps, of which a part comes back through the gradient.
        assert float((p - q).detach().abs().max()) <= 100 * 2.0**-24 * float(q.detach().abs().max())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_checkpoints_go_to_torch_and_come_back():
    ours, theirs = matrices(), matrices()
    opt, twin = ml.Muon(ours.parameters(), momentum_buffer="fp32"), torch.optim.Muon(theirs)
    train(ours, opt, 0, 3)
    twin.load_state_dict(opt.torch_state_dict())
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(opt.state[p]["momentum_buffer"], twin.state[q]["momentum_buffer"])
    back = ml.Muon(ours.parameters(), momentum_buffer="int8")
    back.load_state_dict(twin.state_dict())
    for p in ours:
        exact, coarse = opt.state[p]["momentum_buffer"], back.state_storage(p, back.param_groups[0])["momentum_buffer"]
        assert torch.allclose(coarse.decode(), exact, atol=float(exact.abs().max()) / 127)


# --- orthogonalising --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 40), (90, 30), (30, 90)])
def test_newton_schulz_brings_all_singular_values_near_one(shape):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    o = newton_schulz(u, COEFFICIENTS, 5, 1e-7, torch.float32)
    values = torch.linalg.svdvals(o)
    assert 0.6 < float(values.min()) and float(values.max()) < 1.25  # the polynomial's own, of 5 iterations
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    assert float((o * (left @ right)).sum() / (o.norm() * (left @ right).norm())) > 0.98


def test_a_stack_is_its_matrices():
    stack = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(2))
    together = newton_schulz(stack, COEFFICIENTS, 5, 1e-7, torch.float32)
    alone = torch.stack([newton_schulz(m, COEFFICIENTS, 5, 1e-7, torch.float32) for m in stack])
    assert torch.allclose(together, alone, atol=1e-5)  # other products of the matrix library, fp32
    experts = matrices([(3, 24, 40)])
    each = nn.ParameterList([nn.Parameter(m.clone()) for m in experts[0].detach()])
    options = {"lr": 0.02, "momentum_buffer": "fp32", "ns_dtype": "fp32", "adjust_lr_fn": "match_rms_adamw"}
    opt, single = ml.Muon(experts.parameters(), **options), ml.Muon(each.parameters(), **options)
    for step in range(5):
        give_gradients(experts, step)
        for p, g in zip(each, experts[0].grad, strict=True):
            p.grad = g.clone()
        opt.step()
        single.step()
    assert torch.allclose(experts[0].detach(), torch.stack([p.detach() for p in each]), atol=1e-5)


def test_the_two_conventions_of_size():
    assert shape_factor(None, (64, 16)) == shape_factor("original", (7, 64, 16)) == 2.0
    assert shape_factor("original", (16, 64)) == 1.0
    assert shape_factor("match_rms_adamw", (16, 64)) == shape_factor("match_rms_adamw", (64, 16)) == 0.2 * 8.0
    # Moonshot's: the update's root mean square is 0.2, AdamW's usual one.
    o = newton_schulz(torch.randn(64, 256), COEFFICIENTS, 5, 1e-7, torch.float32)
    assert 0.15 < shape_factor("match_rms_adamw", (64, 256)) * float(o.square().mean().sqrt()) < 0.25


# --- what rounding takes (docs/muon.md) -------------------------------------------------------------------------------


def polar(u: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    return left @ right


def split(x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """The part of x that is tangent at o, and the rest, o (or its rows) times a symmetric matrix."""
    if o.shape[0] >= o.shape[1]:
        inner = o.mT @ x
        normal = o @ (inner + inner.mT) / 2
    else:
        inner = x @ o.mT
        normal = (inner + inner.mT) @ o / 2
    return x - normal, normal


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
def test_to_first_order_the_step_turns_by_the_tangent_part_of_the_error(shape):
    """polar(U + given back) = O - X / size + O(X^2) for tangent X: of a tenth of X a hundredth is missed."""
    g = torch.Generator().manual_seed(3)
    u = torch.randn(shape, generator=g, dtype=torch.float64).float()
    o = polar(u)
    tangent, _ = split(torch.randn(shape, generator=g), o)
    size = 0.02
    rests = []
    for scale in (1e-2, 1e-3):
        error = tangent * scale * size
        turned = polar((u + given_back(error, u, o, size)).double()) - polar(u.double())
        rests.append(float((turned + error.double() / size).norm() / (error.double() / size).norm()))
    assert rests[0] < 0.1 and rests[1] < rests[0] / 8


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
def test_what_would_make_the_step_longer_cannot_be_given_back(shape):
    """An error along O itself changes the momentum's size and nothing else: the polar factor does not see it."""
    u = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    o = polar(u)
    given = given_back(o * 1e-3, u, o, 0.02)
    assert torch.allclose(given, u * -0.05, atol=1e-4)
    assert torch.allclose(polar(u + given), o, atol=1e-4)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_steps_after_an_injection_return_the_tangent_error(nesterov):
    """Without further gradients momentum shrinks and keeps its direction: what the coming steps turn by adds up to e.

    The momentum is M = U + share * given back. Steps turn by ``b^k * given`` (``b^(k+1)`` with Nesterov) relative to
    ``b^k U``: in a quiet run with gradients the injected part fades against a U that stays, so the share is that of a
    geometric series. Here U is held fixed to show just that.
    """
    g, b, size = torch.Generator().manual_seed(5), 0.9, 0.02
    u = torch.randn(20, 8, generator=g).double()
    o = polar(u)
    error = split(torch.randn(20, 8, generator=g).double(), o)[0] * 1e-4 * size
    share = (1 / b - 1) / (b if nesterov else 1)
    injected = given_back(error.float(), u.float(), o.float(), size).double() * share
    returned = torch.zeros_like(error)
    for k in range(1, 400):
        weight = b ** (k + 1) if nesterov else b**k
        returned -= size * (polar(u + injected * weight) - o)
    assert float((returned - error).norm() / error.norm()) < 1e-3


def test_injection_is_asked_for_by_name_and_changes_the_momentum_only_by_what_is_given_back():
    runs = {}
    for compensation in (None, False, True):
        parameters = matrices([(48, 64)], "int8")
        opt = ml.Muon(parameters.parameters(), lr=0.02, momentum_buffer="fp32", error_compensation=compensation)
        train(parameters, opt, 0, 1)
        runs[compensation] = (
            parameters[0].stored.tensors["codes"].clone(),
            opt.state[parameters[0]]["momentum_buffer"],
        )
    assert torch.equal(runs[None][0], runs[True][0])  # the first step sees no difference
    assert torch.equal(runs[None][1], runs[False][1])
    assert not torch.equal(runs[None][1], runs[True][1])


# --- few bits ---------------------------------------------------------------------------------------------------------

FORMATS = [
    (None, "int8"),
    (None, "int4"),
    (None, "int3"),
    (None, "int2"),
    ("int8", "int4"),
    ("int4", "int4"),
    ("int4+4", "int4"),
    ("fp8", "int8"),
    ("mxfp8", "mxfp4"),
    ("nvfp4", "int4"),
    ("int8", "none"),
]


@pytest.mark.parametrize(("weights", "momentum"), FORMATS)
@pytest.mark.parametrize("inject", [True, None])
def test_the_kernel_and_the_reference_agree_to_the_bit_and_a_run_resumes_to_the_bit(weights, momentum, inject):
    options = {"lr": 0.02, "momentum_buffer": momentum, "momentum": 0.0 if momentum == "none" else 0.95}
    if weights and momentum != "none":
        options["error_compensation"] = inject
    runs = []
    for backend in ("auto", "reference"):
        parameters = matrices([(33, 160), (3, 24, 40)], weights)
        opt = ml.Muon(parameters.parameters(), backend=backend, ns_dtype="fp32", **options)
        train(parameters, opt, 0, 3)
        runs.append((parameters, opt))
    assert same(stored(*runs[0]), stored(*runs[1]))
    assert runs[0][1].state_bytes() == runs[0][1].predicted_state_bytes()
    parameters, opt = runs[0]
    resumed = copy.deepcopy(parameters)
    again = ml.Muon(resumed.parameters(), ns_dtype="fp32", **options)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(parameters, opt, 3, 5)
    train(resumed, again, 3, 5)
    assert same(stored(parameters, opt), stored(resumed, again))


@pytest.mark.parametrize(
    ("weights", "momentum"), [(None, "int4"), ("int8", "int4"), ("int4+4", "int4"), ("fp8", "int8")]
)
def test_it_trains(weights, momentum):
    """A linear map is learnt to a tenth of its error and below, in 1.5 to 4.5 bytes per parameter."""
    g = torch.Generator().manual_seed(6)
    truth = torch.randn(64, 64, generator=g) / 8
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 64, generator=g) / 8)
    if weights:
        ml.quantize_(layer, weights)
    opt = ml.Muon(layer.named_parameters(), lr=0.02, weight_decay=0.0, momentum_buffer=momentum, ns_dtype="fp32")
    losses = []
    for step in range(120):
        opt.param_groups[0]["lr"] = 0.05 * (1 - step / 120)
        x = torch.randn(128, 64, generator=g)
        loss = (layer(x) - x @ truth.mT).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]


# --- behaviour --------------------------------------------------------------------------------------------------------


def test_a_bad_gradient_stops_everything_or_its_own_matrix():
    parameters = matrices(weights="int8")
    opt = ml.Muon(list(zip("abc", parameters, strict=True)), lr=0.02)
    train(parameters, opt, 0, 2)
    before = [t.clone() for t in stored(parameters, opt)]
    give_gradients(parameters, 2)
    parameters[1].grad[3, 5] = math.nan
    with pytest.raises(ml.NonFiniteGradientError, match=r"b \(1 elements\)"):
        opt.step()
    assert same(before, stored(parameters, opt))
    opt.param_groups[0]["nonfinite"] = "skip"
    untouched = [t.clone() for t in parameters[1].stored.tensors.values()]
    opt.step()
    assert same(untouched, list(parameters[1].stored.tensors.values()))
    assert opt.nonfinite_counts == {"b": 1}
    assert not same(before, stored(parameters, opt))


def test_without_a_learning_rate_no_weight_changes():
    parameters = matrices(weights="int4")
    opt = ml.Muon(parameters.parameters(), lr=0.0)
    before = [t.clone() for p in parameters for t in p.stored.tensors.values()]
    train(parameters, opt, 0, 2)
    assert same(before, [t for p in parameters for t in p.stored.tensors.values()])


def test_it_steps_in_the_backward_pass_and_ascends_if_asked():
    model = nn.Sequential(nn.Linear(40, 40, bias=False))
    with ml.step_in_backward(model, ml.Muon(model.parameters(), lr=0.02)):
        model(torch.ones(2, 40)).sum().backward()
    assert model[0].weight.grad is None
    down, up = matrices(), matrices()
    opts = [
        ml.Muon(down.parameters(), lr=0.02, weight_decay=0.0),
        ml.Muon(up, lr=0.02, weight_decay=0.0, maximize=True),
    ]
    for p, q, start in zip(down, up, matrices(), strict=True):
        p.grad = q.grad = torch.randn(p.shape)
        assert torch.equal(p.detach(), start.detach())
    for opt in opts:
        opt.step()
    for p, q, start in zip(down, up, matrices(), strict=True):
        assert torch.allclose((p - start).detach(), -(q - start).detach(), atol=1e-6)


def test_a_model_is_sorted_for_muon_and_adamw():
    model = GPT(GPTConfig(n_layer=2, n_head=2, d_model=32, seq_len=16))
    inner, rest = ml.muon_groups(model)
    names = [name for name, _ in inner[0]["params"]]
    others = {name for group in rest for name, _ in group["params"]}
    assert names and all("weight" in name and "emb" not in name for name in names)
    assert {*names, *others} == {name for name, _ in model.named_parameters()} and not {*names} & others
    assert all(p.dim() == 2 for _, p in inner[0]["params"])
    assert rest[-1]["weight_decay"] == 0.0 and all(p.dim() == 1 for _, p in rest[-1]["params"])
    opts = [ml.Muon(inner, lr=0.02), ml.AdamW(rest, lr=1e-3)]
    x = torch.randint(0, 255, (2, 16))
    model(x, x)[1].backward()
    for opt in opts:
        opt.step()
    head = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 40), nn.Linear(40, 3))
    assert [name for name, _ in ml.muon_groups(head)[0][0]["params"]] == ["0.weight", "1.weight"]
    assert [name for name, _ in ml.muon_groups(head, heads=["0", "2"])[0][0]["params"]] == ["1.weight"]
    assert len(ml.muon_groups(head, heads=[])[0][0]["params"]) == 3
    with pytest.raises(ValueError, match="no module 'lm_head'"):
        ml.muon_groups(head, heads=["lm_head"])


def test_a_monitor_measures_what_can_be_measured_of_a_matrix():
    """What the step would have been without rounding is known of the whole matrix only: that is left out."""
    parameters = matrices(weights="int4")
    opt = ml.Muon(list(zip("abc", parameters, strict=True)), lr=0.02, momentum_buffer="int4")
    monitor = ml.Monitor(opt, every=1)
    train(parameters, opt, 0, 3)
    for key, field in (("weight", "lost"), ("momentum_buffer", "stalled_codes")):
        steps, shares = monitor.series(key, field)
        assert steps == [2, 3] and all(0.0 < share < 1.0 for share in shares)
    assert monitor.series("weight", "clipped") == monitor.series("momentum_buffer", "rounding_error") == ([], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum=1.0: must lie in \[0, 1\)"),
        ({"ns_steps": 100}, "ns_steps=100: a number from 1 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"adjust_lr_fn": "muP"}, "adjust_lr_fn='muP': one of original, match_rms_adamw"),
        ({"ns_dtype": "fp8"}, "ns_dtype='fp8': one of bf16, fp32"),
        ({"momentum_buffer": "log4"}, "cannot hold negative values"),
        ({"reset": 100}, "no second moment to reset"),
    ],
)
def test_refusals_name_value_and_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        ml.Muon(matrices().parameters(), **options)


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"shape \(8,\): give it to AdamW. muon_groups"):
        ml.Muon([nn.Parameter(torch.zeros(8))])
    with pytest.raises(ValueError, match=r"without momentum has no buffer"):
        ml.Muon(matrices(weights="int8").parameters(), momentum=0.0, momentum_buffer="none", error_compensation=True)


def test_bytes_per_parameter():
    """INT8 weights and 4-bit momentum: 1.5 bytes; INT4 and 4 bits: one."""
    from masterless.formats.storage import predicted_bytes

    shape, count = (4096, 4096), 4096 * 4096
    for weights, momentum, wanted in (("int8:row", "int4", 1.516), ("int4+4", "int4", 1.531), ("int4", "int4", 1.031)):
        total = sum(predicted_bytes(parse(f), shape) for f in (weights, momentum))
        assert total / count == pytest.approx(wanted, abs=1e-3)
