"""Resets: what they clear, what the next update is, when a schedule makes them, and that a resumed run agrees.

The steps run on the reference backend; kernels equal it to the bit (test_kernel.py).
"""

import copy
import io
import math

import pytest
import torch

import masterless as ml
from masterless import staleness
from masterless.optim import resets
from masterless.optim.resets import MEASURE_EVERY, SOFT_SAMPLES, ResetSchedule, planned_period
from masterless.storage import Storage

SHAPE = (8, 160)
FORMATS = ["fp32", "bf16", "fp8", "fp4", "uint8", "log8", "log4", "log2", "factored"]


def adamw(p, **options):
    options = {"lr": 1e-3, "weight_decay": 0.0, "exp_avg": "fp32", "backend": "reference", **options}
    return ml.AdamW([("w", p)], **options)


def parameter(shape=SHAPE, seed=0):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def gradients(steps, shape=SHAPE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def run(opt, p, grads):
    for g in grads:
        p.grad = g.clone()
        opt.step()


def update_size(opt, p, g):
    """R.m.s. of the update that one step makes."""
    before = p.detach().clone()
    run(opt, p, [g])
    return float((p.detach() - before).square().mean().sqrt())


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


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


# --- schedules --------------------------------------------------------------------------------------------


def reset_steps(opt, p, grads):
    """The steps after which v restarted."""
    found, last = [], 0
    for t, g in enumerate(grads, 1):
        run(opt, p, [g])
        at = int(opt.state[p].get("exp_avg_sq.reset_step", 0))
        if at != last:
            found.append(t)
        last = at
    return found


@pytest.mark.parametrize("value", [7, "7", "7:hard", "7:soft"])
def test_a_period_is_exact(value):
    p = parameter((2, 32))
    opt = adamw(p, exp_avg_sq="fp8", reset=value)
    found = reset_steps(opt, p, gradients(60, (2, 32)))
    if value == "7:soft":  # with SOFT_SAMPLES = 16 updates or fewer there is nothing to shorten
        assert found == [21, 28, 35, 42, 49, 56]
    else:
        assert found == [7, 14, 21, 28, 35, 42, 49, 56]
        assert opt.reset_counts == {"w": 8 * p.numel()}


def test_auto_follows_the_predictor():
    assert planned_period(ml.format("bf16"), 0.999, "nearest") == 1116
    assert planned_period(ml.format("ufp8"), 0.999, "nearest") == 320
    assert planned_period(ml.format("ufp4"), 0.999, "nearest") == 224
    for format, beta, rounding in (
        ("fp32", 0.999, "nearest"),  # never stalls
        ("ufp8", 0.95, "nearest"),  # below the gate
        ("ufp8", 0.999, "stochastic"),  # the mean keeps its time constant
        ("log2", 0.999, "nearest"),  # levels that follow the block
        ("factored", 0.999, "nearest"),
    ):
        assert planned_period(ml.format(format), beta, rounding) is None
    p = parameter((2, 32))
    period = staleness.reset_period("fp8", 0.98)
    opt = adamw(p, exp_avg_sq="fp8", betas=(0.9, 0.98), rounding="nearest", reset="auto")
    assert period and reset_steps(opt, p, gradients(3 * period, (2, 32))) == [period, 2 * period, 3 * period]
    opt = adamw(p, exp_avg_sq="fp8", betas=(0.9, 0.98), rounding="stochastic", reset="auto")
    assert reset_steps(opt, p, gradients(2 * period, (2, 32))) == []


def test_adaptive_resets_when_the_measured_stalls_outweigh_a_restart():
    shape, beta = (16, 128), 0.99
    p = parameter(shape)
    opt = adamw(p, exp_avg_sq="fp4", betas=(0.9, beta), rounding="nearest", reset="adaptive")
    grads = gradients(130, shape)
    measured, expected = [], None
    for t, g in enumerate(grads, 1):
        storage = opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"]
        before = resets.sampled_codes(storage)
        run(opt, p, [g])
        if "exp_avg_sq.reset_step" in opt.state[p]:
            break
        if t % MEASURE_EVERY == 0:
            measured.append(float((resets.sampled_codes(storage) == before).double().mean()))
            assert not staleness.should_reset(measured, beta, every=MEASURE_EVERY)
        expected = t
    # The planned period of this format is 43 steps; the measurement, one in ten steps, finds about the same.
    assert expected is not None and expected + 1 == int(opt.state[p]["exp_avg_sq.reset_step"])
    assert (expected + 1) % MEASURE_EVERY == 0
    assert abs(expected + 1 - staleness.reset_period("fp4", beta)) <= 2 * MEASURE_EVERY
    # A grid on which nothing stalls is never reset.
    opt = adamw(p, exp_avg_sq="fp32", betas=(0.9, beta), reset="adaptive")
    assert reset_steps(opt, p, grads) == []


def test_scheduled_resets_are_soft_under_error_compensation_and_per_group():
    layer = torch.nn.Linear(128, 64, bias=False)
    ml.quantize_(layer, "int4")
    p, q = parameter(), parameter(seed=3)
    groups = [
        {"params": [("q", layer.weight)], "reset": 20},
        {"params": [("hard", p)], "reset": "20:hard"},
        {"params": [("never", q)]},
    ]
    opt = ml.AdamW(groups, exp_avg_sq="fp8", exp_avg="int8", backend="reference")
    for seed in range(20):
        layer.weight.grad = gradients(1, (64, 128), seed)[0]
        p.grad, q.grad = gradients(2, seed=seed)
        opt.step()
    steps = [opt._local_steps(opt.state[x])[1] for x in (layer.weight, p, q)]
    assert steps == [SOFT_SAMPLES, 0, 20] and set(opt.reset_counts) == {"q", "hard"}


@pytest.mark.parametrize("value", [0, -3, True, "never", "auto:medium", 2.5, "0", "²", ""])
def test_impossible_schedules_are_refused(value):
    with pytest.raises(ValueError, match=r"reset=.*no such schedule; pass None, 'auto'"):
        adamw(parameter(), reset=value)


def test_schedules_that_a_rule_cannot_follow_are_refused():
    p = parameter()
    with pytest.raises(ValueError, match="SGD has no second moment to reset"):
        ml.SGD([p], momentum=0.9, reset=10)
    with pytest.raises(ValueError, match="RMSprop does not correct"):
        ml.RMSprop([p], reset="auto")
    with pytest.raises(ValueError, match="changes from step to step"):
        ml.Adafactor([p], reset="adaptive")
    assert ml.Adafactor([p], reset=100).param_groups[0]["reset"] == 100
    assert ResetSchedule.parse("auto:soft") == ResetSchedule("auto", None, "soft")


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [9, "20:soft", "auto", "adaptive", "adaptive:soft"])
@pytest.mark.parametrize("format", ["bf16", "fp4", "log2"])
def test_a_resumed_run_resets_where_the_uninterrupted_one_does(format, reset):
    options = {"exp_avg_sq": format, "betas": (0.9, 0.99), "rounding": "nearest", "exp_avg": "int4", "reset": reset}
    shape, steps = (4, 128), 90
    grads = gradients(steps, shape)
    whole = parameter(shape)
    run(opt := adamw(whole, **options), whole, grads)
    for cut in (9, 47, 63):
        p = parameter(shape)
        run(first := adamw(p, **options), p, grads[:cut])
        file = io.BytesIO()
        torch.save(copy.deepcopy(first.state_dict()), file)
        file.seek(0)
        q = torch.nn.Parameter(p.detach().clone())
        second = adamw(q, **{**options, "reset": None})
        second.load_state_dict(torch.load(file, weights_only=True))
        assert second.param_groups[0]["reset"] == reset  # hyperparameters follow the checkpoint
        run(second, q, grads[cut:])
        assert torch.equal(q, whole)
        assert equal(second.state[q], opt.state[whole])
    if reset == 9 or (reset == "adaptive" and format != "bf16"):  # at b2 = 0.99 bf16 hardly stalls
        assert any(key.endswith("reset_step") for key in opt.state[whole])


def test_counters_do_not_count_as_bytes_and_survive_a_change_of_format():
    p = parameter()
    run(opt := adamw(p, exp_avg_sq="fp8", reset="adaptive", rounding="nearest"), p, gradients(12))
    opt.reset_state()
    assert opt.state_bytes() == opt.predicted_state_bytes()
    q = torch.nn.Parameter(p.detach().clone())
    other = adamw(q, exp_avg_sq="bf16")
    other.load_state_dict(opt.state_dict())
    assert other._local_steps(other.state[q]) == (12, 0)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_export_to_torch_after_a_reset_keeps_the_update(mode):
    # torch corrects by all steps: the exported moments are those that mean the same under that count.
    p = parameter()
    run(opt := adamw(p, exp_avg_sq="fp32"), p, gradients(40))
    opt.reset_state(mode=mode)
    run(opt, p, gradients(3, seed=4))
    age = 3 if mode == "hard" else SOFT_SAMPLES + 3
    exported = opt.torch_state_dict()["state"][0]
    estimate = opt.state[p]["exp_avg_sq"] / (1 - 0.999**age)
    assert int(exported["step"]) == 43 and torch.equal(exported["exp_avg"], opt.state[p]["exp_avg"])
    assert torch.allclose(exported["exp_avg_sq"] / (1 - 0.999**43), estimate, rtol=1e-5)
