"""The monitor against numbers computed by hand on tiny tensors, and against the predictor where its model holds."""

import io
import json
import sys

import pytest
import torch

import masterless as ml
from masterless.insight.effects import codes_of
from masterless.insight.monitor import Monitor
from masterless.tensor.quantized import weight_storage

SHAPE = (2, 64)


def normal(shape=SHAPE, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(opt, p, g):
    p.grad = g.clone()
    opt.step()


def stepped(make, shape=SHAPE, dtype=torch.float32, **options):
    """A parameter of ones and its optimizer after one step, so that there is state."""
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    opt = make([("w", p)], **options)
    step(opt, p, normal(shape).to(dtype))
    return p, opt


def last(monitor, key, name="w"):
    return monitor.samples[-1]["parameters"][name][key]


# --- by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stock", [False, True])
def test_stalls_of_a_bf16_second_moment(stock):
    # At v = 1 the neighbours of bf16 are 1 - 2^-8 and 1 + 2^-7. With b2 = 0.999 a zero gradient pulls to 0.999, which
    # rounds back; g = 3 gives 1.008, which does not. Three of four elements see no gradient.
    if stock:
        p, opt = stepped(torch.optim.AdamW, dtype=torch.bfloat16, fused=True)
    else:
        p, opt = stepped(ml.AdamW, exp_avg="bf16", exp_avg_sq="bf16", rounding="nearest", backend="reference")
    opt.state[p]["exp_avg_sq"].fill_(1.0)
    g = torch.zeros(SHAPE, dtype=p.dtype)
    g[:, ::4] = 3.0
    with Monitor(opt, every=1) as monitor:
        step(opt, p, g)
    second = last(monitor, "exp_avg_sq")
    assert second["stalled_codes"] == second["stalled_values"] == 0.75 and second["live"] == 1.0
    assert last(monitor, "exp_avg")["stalled_codes"] == 0.0 and second["age"] == 1
    assert monitor.samples[0]["total"]["exp_avg_sq"]["stalled_codes"] == 0.75
    assert second["predicted"] == pytest.approx(ml.staleness.stall_probability("bf16", 0.999, step=1), abs=1e-3)


def test_codes_may_stand_still_while_their_scale_moves():
    # One element of the block grows by half, and the scale with it: its own code stays at the top, the values move.
    p, opt = stepped(
        ml.AdamW, (1, 64), exp_avg="fp32", exp_avg_sq="uint8", rounding="nearest", betas=(0.9, 0.5), backend="reference"
    )
    storage = opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"]
    storage.encode_(torch.ones(1, 64))
    with Monitor(opt, every=1) as monitor:
        step(opt, p, torch.full((1, 64), 2.0))  # v: 1 -> 2.5 everywhere
    entry = last(monitor, "exp_avg_sq")
    assert entry["stalled_codes"] == 1.0 and entry["stalled_values"] == 0.0
    assert max(entry["histogram"]) == sum(entry["histogram"]) == 64


def test_an_element_without_a_gradient_is_not_live():
    p, opt = stepped(ml.AdamW, exp_avg="fp32", exp_avg_sq="fp8", rounding="nearest", backend="reference")
    opt.reset_state(states="all")
    with Monitor(opt, every=1) as monitor:
        g = torch.zeros(SHAPE)
        g[0] = 1.0
        step(opt, p, g)
    assert last(monitor, "exp_avg_sq")["live"] == 0.5 and last(monitor, "exp_avg_sq")["stalled_codes"] == 0.0
    assert last(monitor, "exp_avg_sq")["predicted"] is None  # it starts from zero


def test_lost_updates():
    # A bf16 weight of 1 moves down by 2^-8 at least: 0.1 * 1e-3 is lost, 0.1 * 1 is not, and no gradient loses nothing.
    p, opt = stepped(ml.SGD, dtype=torch.bfloat16, lr=0.1, weight_rounding="nearest", backend="reference")
    p.data.fill_(1.0)
    g = torch.full(SHAPE, 1e-3, dtype=torch.bfloat16)
    g[:, :16], g[:, 16:32] = 1.0, 0.0
    with Monitor(opt, every=1) as monitor:
        step(opt, p, g)
    assert last(monitor, "weight")["live"] == 0.75
    assert last(monitor, "weight")["lost"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("format", ["int4", "fp8", "int4+2"])
def test_injected_residue(format):
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 8, bias=False)
    ml.quantize_(layer, format, include=["weight"])
    options = {"lr": 1e-3, "exp_avg": "fp32", "exp_avg_sq": "fp32", "backend": "reference"}
    opt = ml.AdamW(layer.named_parameters(), **options)
    step(opt, layer.weight, normal((8, 128), 1))
    u, g = opt.state[layer.weight]["exp_avg"].clone(), normal((8, 128), 2)
    d_before = (opt.state[layer.weight]["exp_avg_sq"] / (1 - 0.999)).sqrt() + 1e-8
    before = codes_of(weight_storage(layer.weight))
    with Monitor(opt, every=1) as monitor:
        step(opt, layer.weight, g)
    v = opt.state[layer.weight]["exp_avg_sq"]
    d = (v / (1 - 0.999**2)).sqrt() + 1e-8
    exact = 0.9 * u * d_before / d + 0.1 * 1e-3 * g / d
    expected = (opt.state[layer.weight]["exp_avg"] - exact).norm() / exact.norm()
    entry = last(monitor, "weight", "weight")
    assert entry["injected"] == pytest.approx(float(expected), rel=1e-5) and float(expected) > 0.05
    unchanged = float((codes_of(weight_storage(layer.weight)) == before).double().mean())
    assert entry["lost"] == pytest.approx(unchanged, abs=1e-9) and sum(entry["histogram"]) == 1024
    assert last(monitor, "exp_avg", "weight")["rounding_error"] < 1e-6
    assert last(monitor, "exp_avg", "weight")["predicted"] is None  # no average of gradients any more


def test_clipping_below_a_log_code_and_nowhere_in_an_asymmetric_one():
    p, opt = stepped(
        ml.AdamW,
        (1, 64),
        exp_avg="dynamic4",
        exp_avg_sq="log2",
        rounding="nearest",
        moment_units="gradient",
        backend="reference",
    )
    opt.reset_state(states="all")
    # The signed dynamic map ends at -0.8875: a block whose largest number is negative has a larger scale.
    g = -torch.ones(1, 64)
    g[0, :16] = -0.01
    with Monitor(opt, every=1) as monitor:
        step(opt, p, g)
    assert last(monitor, "exp_avg")["clipped"] == 0.0
    assert last(monitor, "exp_avg_sq")["clipped"] == 0.0
    # Below the lowest level of the log code: 8 lanes would need 128 elements; 64 have 4, whose smallest minima decide.
    g = torch.ones(1, 64)
    g[0, 0] = 1e-4
    opt.reset_state(states="all")
    with Monitor(opt, every=1) as monitor:
        step(opt, p, g)
    lowest = float(opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"].decode().min())
    expected = float((0.001 * g * g < lowest * 0.999).double().mean())
    assert last(monitor, "exp_avg_sq")["clipped"] == expected == 1 / 64


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ml.AdamW, {}),
        (ml.Adam, {"weight_decay": 0.1}),
        (ml.AdamW, {"moment_units": "update"}),
        (ml.AdamW, {"exp_avg_sq": "factored"}),
        (ml.AdaBelief, {}),
        (ml.RMSprop, {"momentum": 0.9}),
        (ml.SGD, {"momentum": 0.9, "nesterov": True}),
        (ml.SGD, {"momentum": 0.9, "maximize": True}),
        (ml.Lion, {}),
        (ml.Adafactor, {}),
        (ml.Adafactor, {"beta1": 0.9, "exp_avg_sq": "fp32"}),
    ],
)
def test_the_recomputed_step_is_the_step(make, options):
    formats = {
        name: "fp32"
        for name in (make.first_name, make.second_name)
        if name and name not in options and not (make is ml.Adafactor and name == "exp_avg_sq")
    }
    p = torch.nn.Parameter(normal((40, 64), 3))
    opt = make([("w", p)], lr=1e-2, backend="reference", **formats, **options)
    with Monitor(opt, every=3, sample=1024) as monitor:
        for seed in range(6):
            step(opt, p, normal((40, 64), seed))
    assert [sample["step"] for sample in monitor.samples] == [3, 6]
    for key, entry in monitor.samples[-1]["parameters"]["w"].items():
        if key == "weight":
            assert entry["lost"] == 0.0
        else:
            assert entry["rounding_error"] < 1e-7, key  # fp32 states store what the rule computes


# --- beside the predictor ---------------------------------------------------------------------------------

PREDICTED = [  # format, rounding, and how far the share of stalled codes may be from what this step's state predicts
    ("bf16", "nearest", 0.02),
    ("bf16", "stochastic", 0.02),
    ("fp8", "nearest", 0.03),
    ("fp4", "nearest", 0.03),
    # A block's scale still moves after 100 steps. Values then lie between the levels of the new grid: rounded to
    # nearest they go back to their code, dithered they may not. The model's grid stands still: at step 40 it is 0.067
    # too high, with a standard deviation of 0.005 over seeds of the random bits (six of them).
    ("fp8", "stochastic", 0.08),
    ("log2", "stochastic-log", 0.03),
    ("log4", "stochastic", 0.1),
]


@pytest.mark.parametrize(("format", "rounding", "margin"), PREDICTED)
def test_measured_is_predicted_for_gaussian_gradients(format, rounding, margin):
    # Rows of equal sigma, sigmas spread over binades.
    shape = (512, 128)  # blocks whose scale moved change together: few of them would be noise
    sigma = 4 ** normal((512, 1), 5)
    p = torch.nn.Parameter(torch.zeros(shape))
    opt = ml.AdamW([("w", p)], exp_avg="bf16", exp_avg_sq=format, rounding=rounding, backend="reference")
    with Monitor(opt, every=40, histogram=False) as monitor:
        for seed in range(120):
            step(opt, p, sigma * normal(shape, seed))
    for sample in monitor.samples:
        entry = sample["total"]["exp_avg_sq"]
        measured, from_age, here = (entry[field] for field in ("stalled_codes", "predicted", "predicted_here"))
        assert measured == pytest.approx(here, abs=margin), sample["step"]
        assert measured == pytest.approx(from_age, abs=max(0.06, margin)), sample["step"]
        if format == "bf16":  # mantissas spread over binades, as the formula from the age alone assumes
            assert measured == pytest.approx(from_age, abs=0.02), sample["step"]
        first = sample["total"]["exp_avg"]
        assert first["stalled_codes"] == pytest.approx(first["predicted"], abs=0.005)


# --- attaching --------------------------------------------------------------------------------------------


def model_and_optimizer(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    ml.quantize_(model, "int8", exclude=["2.*"])
    options = {"exp_avg": "int4", "exp_avg_sq": "log2", "backend": "reference", **options}
    return model, ml.AdamW(model.named_parameters(), lr=1e-3, **options)


def train(model, opt, steps):
    for seed in range(steps):
        opt.zero_grad()
        model(normal((8, 64), seed)).square().mean().backward()
        opt.step()


def test_a_monitor_changes_nothing_and_can_be_removed():
    weights = []
    for every in (None, 2):
        model, opt = model_and_optimizer(reset="3:hard")
        if every is None:
            train(model, opt, 6)
        else:
            with Monitor(opt, every=every) as monitor:
                train(model, opt, 6)
            train(model, opt, 0)
            assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks
        weights.append([p.dequantize() if hasattr(p, "dequantize") else p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert [s["step"] for s in monitor.samples] == [2, 4, 6]
    # Step 6 ended with a reset: what is stored then says nothing about the step.
    entry = monitor.samples[-1]["parameters"]["0.weight"]["exp_avg_sq"]
    assert entry["reset"] and "stalled_codes" not in entry
    assert "stalled_codes" in monitor.samples[1]["parameters"]["0.weight"]["exp_avg_sq"]


def test_steps_between_samples_only_count(monkeypatch):
    model, opt = model_and_optimizer()

    def fail(*args):
        raise AssertionError("measured on a step that is not sampled")

    monkeypatch.setattr("masterless.insight.monitor.take_snapshot", fail)
    with Monitor(opt, every=50) as monitor:
        train(model, opt, 3)
    assert monitor.samples == []


def test_only_so_many_rows_are_looked_at():
    p, opt = stepped(ml.AdamW, (64, 128), exp_avg="fp32", exp_avg_sq="fp8", backend="reference")
    with Monitor(opt, every=1, sample=1000) as monitor:
        step(opt, p, normal((64, 128)))
    entry = last(monitor, "exp_avg_sq")
    assert entry["elements"] == 64 * 128 and sum(entry["histogram"]) == 8 * 128


def test_bad_gradients_and_missing_ones_are_left_out():
    model, opt = model_and_optimizer(nonfinite="skip")
    with Monitor(opt, every=2) as monitor:
        train(model, opt, 1)
        model(normal((8, 64))).square().mean().backward()
        model[0].weight.grad[0, 0] = float("nan")
        model[0].bias.grad = None
        opt.step()
    assert set(monitor.samples[0]["parameters"]) == {"2.weight", "2.bias"}


def test_stock_optimizers_without_known_betas():
    p = torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    opt = torch.optim.SGD([p], lr=1e-4, momentum=0.9)
    with Monitor(opt, every=2) as monitor:
        for seed in range(2):
            step(opt, p, normal(seed=seed).bfloat16())
    entry = last(monitor, "weight", "#0")
    assert entry["lost"] == 1.0 and entry["injected"] is None and monitor.samples[0]["step"] == 2
    assert last(monitor, "momentum_buffer", "#0")["predicted"] is None


# --- results ----------------------------------------------------------------------------------------------


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value


def test_results_as_lines_table_scalars_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    model, opt = model_and_optimizer()
    writer, had_pyplot = Writer(), "matplotlib.pyplot" in sys.modules
    with Monitor(opt, every=2, jsonl=tmp_path / "a.jsonl", writer=writer) as monitor:
        with pytest.raises(ValueError, match="no step was sampled yet"):
            monitor.table()
        train(model, opt, 4)
    monitor.write_jsonl(tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == monitor.samples and [line["step"] for line in lines] == [2, 4]

    stalled = monitor.samples[-1]["total"]["exp_avg_sq"]["stalled_codes"]
    assert writer.scalars["masterless/total/exp_avg_sq/stalled_codes", 4] == stalled
    assert ("masterless/0.weight/weight/injected", 2) in writer.scalars
    assert monitor.series("exp_avg_sq", "stalled_codes")[0] == [2, 4]

    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(monitor.table())
    text = console.export_text()
    assert "0.weight" in text and "log2" in text and "total" in text and f"{stalled:.3f}" in text

    monitor.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


@pytest.mark.parametrize(
    ("options", "value"), [({"every": 0}, "every=0"), ({"sample": 0}, "sample=0"), ({"writer": 1}, "writer=1")]
)
def test_impossible_arguments_are_refused(options, value):
    _, opt = stepped(ml.AdamW, backend="reference")
    with pytest.raises(ValueError, match=value):
        Monitor(opt, **options)
