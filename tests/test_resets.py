"""Resets: what they clear, and what the next update is."""

import math

import pytest
import torch
from reset_cases import FORMATS, SHAPE, adamw, equal, gradients, parameter, run, update_size

import masterless as ml
from masterless.formats.storage import Storage
from masterless.optim import resets
from masterless.optim.resets import SOFT_SAMPLES

# --- the counters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hard", "soft"])
@pytest.mark.parametrize("format", FORMATS)
def test_local_counter_keeps_the_size_of_the_update(format, mode):
    # A stationary gradient: constant size, constant sign, so that m and v estimate it exactly.
    p = parameter()
    g = 0.5 * gradients(1)[0].sign()
    opt = adamw(p, exp_avg_sq=format)
    run(opt, p, [g] * 99)
    before = update_size(opt, p, g)
    assert opt.reset_state(mode=mode).total == p.numel()
    after = update_size(opt, p, g)
    # The formats' own rounding of v moves both by up to half of its relative gap to the square root's half.
    assert after == pytest.approx(before, rel=0.03)


@pytest.mark.parametrize(("beta2", "inflation"), [(0.9, 3.16), (0.99, 10.0), (0.999, 31.6)])
def test_the_global_counter_would_inflate_the_update_as_predicted(beta2, inflation):
    sizes = {}
    for counter in ("local", "global"):
        p = parameter()
        g = 0.5 * gradients(1)[0].sign()
        opt = adamw(p, exp_avg_sq="fp32", betas=(0.9, beta2))
        run(opt, p, [g] * 3)
        opt.state[p]["step"].fill_(20_000.0)  # a long run of this gradient ends here
        opt.state[p]["exp_avg"].copy_(g)
        opt.state[p]["exp_avg_sq"].copy_(g * g)
        before = update_size(opt, p, g)
        opt.reset_state()
        if counter == "global":
            del opt.state[p]["exp_avg_sq.reset_step"]
        sizes[counter] = update_size(opt, p, g) / before
    assert sizes["local"] == pytest.approx(1.0, rel=1e-3)
    # v restarts as (1-b2) g^2 and is not corrected: the update grows by 1/sqrt(1-b2).
    assert sizes["global"] == pytest.approx(1 / math.sqrt(1 - beta2), rel=0.01)
    assert sizes["global"] == pytest.approx(inflation, rel=0.01)


def test_a_soft_reset_keeps_the_update_for_random_gradients_and_a_hard_one_does_not():
    # Gaussian gradients: after a hard reset the one estimate of v is g^2 itself, and m/|g| is anything.
    sizes = {}
    for mode in (None, "soft", "hard"):
        p = parameter((64, 128))
        opt = adamw(p, exp_avg_sq="fp32")
        grads = gradients(201, (64, 128))
        run(opt, p, grads[:200])
        if mode:
            opt.reset_state(mode=mode)
        before = p.detach().clone()
        run(opt, p, grads[200:])
        sizes[mode] = p.detach() - before
    change = (sizes["soft"] - sizes[None]).norm() / sizes[None].norm()
    # 1/(2 (n+1)) times the spread sqrt(2) of chi-square(1): 0.042 at n = 16, correlated a little with m.
    assert 0.02 < float(change) < 0.07
    assert float(sizes["soft"].norm() / sizes[None].norm()) == pytest.approx(1.0, abs=0.03)
    assert float(sizes["hard"].norm() / sizes[None].norm()) > 2


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_a_soft_reset_is_the_formula_of_its_docstring(state):
    p = parameter()
    opt = adamw(p, exp_avg_sq="fp32", betas=(0.99, 0.999))
    run(opt, p, gradients(50))
    before, beta = opt.state[p][state].clone(), 0.99 if state == "exp_avg" else 0.999
    report = opt.reset_state(states=state, mode="soft")
    assert torch.allclose(opt.state[p][state], before * (1 - beta**SOFT_SAMPLES) / (1 - beta**50), rtol=1e-6)
    assert int(opt.state[p][f"{state}.reset_step"]) == 50 - SOFT_SAMPLES and report.total == p.numel()
    # A second one finds nothing to shorten.
    again = opt.state[p][state].clone()
    assert opt.reset_state(states=state, mode="soft").total == 0
    assert torch.equal(opt.state[p][state], again)


@pytest.mark.parametrize("format", ["fp8", "fp4", "uint8"])
def test_a_soft_reset_changes_scales_and_no_code(format):
    p = parameter()
    opt = adamw(p, exp_avg_sq=format)
    run(opt, p, gradients(40))
    codes, values = opt.state[p]["exp_avg_sq.codes"].clone(), opt.state_storage(p, opt.param_groups[0])
    before = values["exp_avg_sq"].decode()
    opt.reset_state(mode="soft")
    assert torch.equal(opt.state[p]["exp_avg_sq.codes"], codes)
    ratio = opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"].decode() / before
    assert torch.allclose(ratio, torch.tensor((1 - 0.999**16) / (1 - 0.999**40)), rtol=2**-8)  # a bf16 scale


def test_resetting_starts_a_stalled_average_moving_again():
    p = parameter((16, 128))
    opt = adamw(p, exp_avg_sq="fp8", rounding="nearest")
    grads = gradients(640, (16, 128))

    def moving():
        before = resets.sampled_codes(opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"])
        run(opt, p, grads[-1:])
        after = resets.sampled_codes(opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"])
        return float((after != before).double().mean())

    run(opt, p, grads[:600])
    stalled = moving()
    opt.reset_state(mode="soft")
    assert stalled < 0.03 and moving() > 0.3  # predicted at j = 16: 1 - P = 0.41
    opt.reset_state(mode="hard")
    run(opt, p, grads[600:602])
    assert moving() > 0.5


# --- what was cleared -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_hard_reset_leaves_the_bytes_of_zeros(format):
    p = parameter()
    opt = adamw(p, exp_avg_sq=format, exp_avg="int4")
    run(opt, p, gradients(3))
    first = {k: v.clone() for k, v in opt.state[p].items() if k.startswith("exp_avg.")}
    opt.reset_state()
    stored = opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"]
    assert equal(stored.tensors, Storage.zeros(stored.format, p.shape).tensors)
    assert not stored.decode().any()
    assert equal(first, {k: v for k, v in opt.state[p].items() if k in first})  # the first moment is left alone
    # A reset state is a fresh one: the next step is that of an optimizer whose v has seen nothing.
    run(opt, p, gradients(1, seed=9))
    assert opt._local_steps(opt.state[p]) == (4, 1)


def test_the_report_counts_what_was_not_zero():
    p, q = parameter(), torch.nn.Parameter(torch.ones(5))
    opt = ml.AdamW([("w", p), ("b", q)], exp_avg="fp32", exp_avg_sq="log4", backend="reference")
    assert opt.reset_state().total == 0  # nothing has been stepped, nothing is allocated
    assert not opt.state[p] if p in opt.state else True
    g = torch.zeros(SHAPE)
    g[:3] = 1.0  # three rows of 160 see a gradient
    p.grad, q.grad = g, torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0])
    opt.step()
    report = opt.reset_state()
    assert report.per_parameter == {"w": 480, "b": 2} and report.total == 482
    assert [entry.elements for entry in report.entries] == [p.numel(), 5]
    assert "482 elements reset" in str(report) and "w exp_avg_sq: 480 of 1,280" in str(report)
    assert opt.reset_state().total == 0  # and a second time there is nothing left


def test_parameters_and_states_are_chosen_by_name_or_tensor():
    p, q = parameter(), parameter(seed=5)
    opt = ml.AdamW([("w", p), ("u", q)], exp_avg="int8", exp_avg_sq="fp8", backend="reference")
    p.grad, q.grad = gradients(2)
    opt.step()
    assert opt.reset_state(params=q).per_parameter == {"u": q.numel()}
    assert opt.reset_state(params=["w"], states=["exp_avg", "exp_avg_sq"]).per_parameter["w"] > p.numel()
    for bad, value in ((dict(params="v"), "'v'"), (dict(params=[torch.ones(2)]), "shape (2,)")):
        with pytest.raises(ValueError, match="not a parameter of this optimizer; pass") as caught:
            opt.reset_state(**bad)
        assert value in str(caught.value)
    with pytest.raises(ValueError, match=r"states='exp_avg_var'.*keeps no such state.*'exp_avg', 'exp_avg_sq'"):
        opt.reset_state(states="exp_avg_var")
    with pytest.raises(ValueError, match="mode='medium': no such reset; pass"):
        opt.reset_state(mode="medium")


def test_under_error_compensation_the_first_moment_is_reset_only_by_name():
    layer = torch.nn.Linear(128, 64, bias=False)
    ml.quantize_(layer, "int4")
    opt = ml.AdamW(layer.named_parameters(), exp_avg="fp32", exp_avg_sq="fp32", backend="reference")
    layer.weight.grad = gradients(1, (64, 128))[0]
    opt.step()
    kept = opt.state[layer.weight]["exp_avg"].clone()
    report = opt.reset_state(states="all")
    assert torch.equal(opt.state[layer.weight]["exp_avg"], kept) and report.total == 64 * 128
    assert "residue" in next(e.kept for e in report.entries if e.state == "exp_avg")
    assert opt.reset_state(states="exp_avg").total == 64 * 128
    assert not opt.state[layer.weight]["exp_avg"].any()
    # Without compensation "all" means all.
    p = parameter()
    opt = adamw(p, exp_avg_sq="fp32")
    run(opt, p, gradients(1))
    assert opt.reset_state(states="all").total == 2 * p.numel()


def test_rules_without_the_correction_say_so():
    p = parameter()
    run(opt := ml.SGD([p], lr=0.1, momentum=0.9, backend="reference"), p, gradients(2))
    with pytest.raises(ValueError, match=r"SGD has none; name the state, e.g. states='momentum_buffer'"):
        opt.reset_state()
    with pytest.raises(ValueError, match=r"no bias correction of 'momentum_buffer'.*mode='hard'"):
        opt.reset_state(states="momentum_buffer", mode="soft")
    assert opt.reset_state(states="momentum_buffer").total > 0
    run(opt := ml.RMSprop([p], backend="reference"), p, gradients(2))
    with pytest.raises(ValueError, match=r"would be 10 times as large; use Adam with betas=\(0, 0.99\)"):
        opt.reset_state()
    # Adafactor's decay restarts with its count: a soft reset changes nothing but the weight of what comes.
    run(opt := ml.Adafactor([p], backend="reference"), p, gradients(40))
    before = opt.state[p]["exp_avg_sq.row"].clone()
    assert opt.reset_state(mode="soft").total == p.numel()
    assert torch.equal(opt.state[p]["exp_avg_sq.row"], before) and opt._local_steps(opt.state[p])[1] == SOFT_SAMPLES
