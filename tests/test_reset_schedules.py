"""Scheduled resets: when they are made, and that a resumed run agrees."""

import copy
import io

import pytest
import torch
from reset_cases import adamw, equal, gradients, parameter, run

import masterless as ml
from masterless.optim import resets
from masterless.optim.resets import MEASURE_EVERY, SOFT_SAMPLES, ResetSchedule, planned_period
from masterless.step import staleness


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
    if value == "7:hard":
        assert found == [7, 14, 21, 28, 35, 42, 49, 56]
        assert opt.reset_counts == {"w": 8 * p.numel()}
    else:  # with SOFT_SAMPLES = 16 updates or fewer there is nothing to shorten
        assert found == [21, 28, 35, 42, 49, 56]


def test_auto_follows_the_predictor():
    assert planned_period(ml.parse_format("bf16"), 0.999, "nearest") == 1116
    assert planned_period(ml.parse_format("ufp8"), 0.999, "nearest") == 320
    assert planned_period(ml.parse_format("ufp4"), 0.999, "nearest") == 224
    for format, beta, rounding in (
        ("fp32", 0.999, "nearest"),  # never stalls
        ("ufp8", 0.95, "nearest"),  # below the gate
        ("ufp8", 0.999, "stochastic"),  # the mean keeps its time constant
        ("log2", 0.999, "nearest"),  # levels that follow the block
        ("factored", 0.999, "nearest"),
    ):
        assert planned_period(ml.parse_format(format), beta, rounding) is None
    p = parameter((2, 32))
    period = staleness.reset_period("fp8", 0.98)
    opt = adamw(p, exp_avg_sq="fp8", betas=(0.9, 0.98), rounding="nearest", reset="auto:hard")
    assert period and reset_steps(opt, p, gradients(3 * period, (2, 32))) == [period, 2 * period, 3 * period]
    # After a soft reset, the default, the average is SOFT_SAMPLES old and reaches the planned age that much sooner.
    opt = adamw(p, exp_avg_sq="fp8", betas=(0.9, 0.98), rounding="nearest", reset="auto")
    assert reset_steps(opt, p, gradients(2 * period, (2, 32))) == [period, 2 * period - SOFT_SAMPLES]
    opt = adamw(p, exp_avg_sq="fp8", betas=(0.9, 0.98), rounding="stochastic", reset="auto")
    assert reset_steps(opt, p, gradients(2 * period, (2, 32))) == []


def test_adaptive_resets_when_the_measured_stalls_outweigh_a_restart():
    shape, beta = (16, 128), 0.99
    p = parameter(shape)
    opt = adamw(p, exp_avg_sq="fp4", betas=(0.9, beta), rounding="nearest", reset="adaptive:hard")
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


def test_scheduled_resets_are_soft_unless_told_otherwise_and_per_group():
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
    assert ResetSchedule.parse("auto:soft") == ResetSchedule.parse("auto") == ResetSchedule("auto", None, "soft")


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [9, "20:hard", "auto", "adaptive", "adaptive:hard"])
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
