"""Training without master weights: every weight format under every rule, the scale policies, refusals, bytes."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import masterless as ml
from masterless.formats import codec, parse, scaling
from masterless.formats.rounding import dither
from masterless.optim.errors import LossyUpdateWarning
from masterless.step import statistics
from masterless.tensor.quantized import QuantizedTensor

HALF_ULP = 2.0**-24  # largest relative error of one fp32 operation
PLAIN = ["fp8", "int8", "int6", "int4", "int3", "int2", "fp4"]
GROUPED = ["int4:tensor", "int4:row", "int4:64", "int4:128:pow2"]
HIDDEN = ["int4+2", "int4+4", "int4+6"]
MASTER = ["fp8+32", "int8+32", "int4+32"]
FORMATS = [*PLAIN, *GROUPED, *HIDDEN, *MASTER]
SHAPE = (6, 160)  # a full block and a tail in every row

B1, B2, LR, WD, EPS = 0.8, 0.9, 0.02, 0.1, 1e-6
BETAS = {"betas": (B1, B2), "weight_decay": WD, "eps": EPS}
RULES = {
    "adamw": (ml.AdamW, BETAS),
    "adam": (ml.Adam, BETAS),
    "sgd": (ml.SGD, {"momentum": B1, "weight_decay": WD, "dampening": 0.3}),
    "nesterov": (ml.SGD, {"momentum": B1, "nesterov": True}),
    "rmsprop": (ml.RMSprop, {"momentum": B1, "alpha": B2, "eps": EPS}),
    "adafactor": (ml.Adafactor, {"beta1": B1, "weight_decay": WD}),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(dense, format):
    return nn.Parameter(QuantizedTensor.from_dense(dense, format))


def build(rule, p, **options):
    """An optimizer over one parameter, states in fp32."""
    cls, hyperparameters = RULES[rule]
    moments = {name: "fp32" for name in (cls.first_name, cls.second_name) if name}
    options = {"lr": LR, "backend": "reference", **hyperparameters, **moments, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossyUpdateWarning)
        return cls([("p", p)], **options)


def step(optimizer, p, grad):
    p.grad = grad
    optimizer.step()


def parts(p):
    return {name: tensor.clone() for name, tensor in p.detach().stored.tensors.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weight(p):
    return p.detach().stored.decode().double()


def step_size(rule, p, t):
    """What a momentum without compensation is multiplied by in a step: its unit, in units of the weight."""
    if rule in ("adamw", "adam"):
        return 1.0  # asked for in weight units: see `dropping`
    return LR if rule != "adafactor" else float(weight(p).square().mean().sqrt()) * min(LR, 1 / math.sqrt(t))


def dropping(rule, p, **options):
    """An optimizer without compensation, its momentum in weight units where that can be asked for."""
    units = {"moment_units": "weight"} if rule in ("adamw", "adam") else {}
    return build(rule, p, error_compensation=False, **units, **options)


# --- every format under every rule -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_weight_is_representable_and_the_momentum_holds_what_rounding_lost(format, rule):
    """One step with and one without compensation, from the same state: same codes, and u differs by (1-1/b) e."""
    p, twin = (quantized(random(*SHAPE), format) for _ in range(2))
    optimizer, naive = build(rule, p), dropping(rule, twin)
    first, master = RULES[rule][0].first_name, p.detach().format.master
    for t in range(3):
        step(optimizer, p, random(*SHAPE, seed=t + 1))
    step(naive, twin, torch.zeros(SHAPE))  # allocates
    twin.detach().copy_(p.detach())
    before, g = p.detach().clone(), random(*SHAPE, seed=9)
    size = 1.0 if master and rule not in ("adamw", "adam") else step_size(rule, before, 4)
    if master:
        naive = build(rule, twin, error_compensation=False)
        step(naive, twin, torch.zeros(SHAPE))
        twin.detach().copy_(p.detach())
    for name, value in naive.state[twin].items():
        value.copy_(optimizer.state[p][name] / (size if name == first else 1))
    step(optimizer, p, g)
    step(naive, twin, g)

    stored = p.detach().stored
    assert equal(parts(p), parts(twin))
    values = codec.decode(stored.slab(0, 6), 160, stored.format)
    for u in (None, dither(1, 6, 160), dither(2, 6, 160)):
        again = codec.encode(values, stored.format, u, scale=stored.rows_of("scale").float())
        if not stored.format.master or u is None:  # the visible code of a master copy is its nearest
            assert all(torch.equal(again[name], stored.rows_of(name)) for name in again)

    ordinary, found = (o.state[q][first].double() for o, q in ((naive, twin), (optimizer, p)))
    if stored.format.master:
        assert torch.equal(found, ordinary)
        return
    ordinary = ordinary * size
    decay = 1 - LR * WD if rule in ("adamw", "adafactor") else 1.0
    direction, share = (LR * g.double() + B1 * ordinary, 1 / B1) if rule == "nesterov" else (ordinary, 1.0)
    error = decay * weight(before) - direction - weight(p)
    unit = share * (1 - 1 / B1)
    # fp32: W~ takes four operations on numbers of the weight's size, u' two; u has the rounding of the conversion
    atol = 16 * HALF_ULP * float(weight(before).abs().max() + found.abs().max())
    torch.testing.assert_close(found - ordinary, unit * error, rtol=16 * HALF_ULP, atol=atol)
    assert float((unit * error).abs().max()) > 100 * atol, "the injection must stand out"


@pytest.mark.parametrize("rule", ["adamw", "nesterov"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_nobody_moves_keeps_its_exact_code(format, rounding, rule):
    """Every other weight has no gradient; its neighbours in the same block wander about."""
    start = random(*SHAPE)
    start[:, ::64] = 4.0  # the largest of their blocks, without gradient: nothing overflows, nothing is wasted
    p = quantized(start, format)
    quantum = 4.0 / p.detach().format.max_level if "fp" not in format else 0.25
    lr = 0.3 * quantum if rule == "adamw" else 0.2
    optimizer = build(rule, p, lr=lr, weight_decay=0.0, weight_rounding=rounding)
    before, dense = parts(p), weight(p)
    for t in range(20):
        g = p.detach().dequantize() - 1.5 * random(*SHAPE, seed=t).tanh()
        g[:, ::2] = 0.0
        step(optimizer, p, g)
        assert torch.equal(parts(p)["scale"], before["scale"])
        assert torch.equal(weight(p)[:, ::2], dense[:, ::2])
    assert not torch.equal(weight(p)[:, 1::2], dense[:, 1::2])


@pytest.mark.parametrize("format", ["int4", "fp8", "int4:tensor", "int4+4", "int4+32"])
@pytest.mark.parametrize("rule", RULES)
def test_a_learning_rate_of_zero_moves_neither_the_weight_nor_its_momentum(rule, format):
    """What rounding took waits in the momentum, to the byte; the second moment goes on."""
    cls = RULES[rule][0]
    for first in ("fp32", "int4", "dynamic2"):
        p = quantized(random(*SHAPE), format)
        optimizer = build(rule, p, **{cls.first_name: first})
        for t in range(3):
            step(optimizer, p, random(*SHAPE, seed=t))
        state = optimizer.state[p]
        start, before = parts(p), {name: value.clone() for name, value in state.items()}
        optimizer.param_groups[0]["lr"] = 0.0
        for t in range(3):
            step(optimizer, p, random(*SHAPE, seed=10 + t))
            assert equal(parts(p), start)
        for name, value in state.items():
            stays = name.split(".")[0] == cls.first_name and not p.detach().format.master
            assert torch.equal(value, before[name]) == stays, name


@pytest.mark.parametrize("policy", ["held", "recompute"])
def test_a_learning_rate_of_zero_moves_nothing_in_the_middle_of_a_run(policy):
    """Rounding may leave a block's largest weight below the last level, or below half of it: that is no reason."""
    p = quantized(random(32, 256), "int4")
    optimizer = build("adamw", p, scale_policy=policy)
    for t in range(30):
        optimizer.param_groups[0]["lr"] = 0.1
        step(optimizer, p, 0.3 * random(32, 256, seed=t) + p.detach().dequantize())  # the weights shrink
        start = parts(p)
        optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer, p, torch.zeros(32, 256))
        assert equal(parts(p), start)


# --- the scale ----------------------------------------------------------------------------------------------


def after_moving(format, start, moves, **options):
    """A parameter after one SGD step of exactly ``moves`` ({column: move}), and its scale before."""
    p = quantized(start, format)
    scale = parts(p)["scale"].float()
    g = torch.zeros_like(start)
    for column, move in moves.items():
        g[:, column] = -move
    step(build("sgd", p, lr=1.0, weight_decay=0.0, **options), p, g)
    return p, scale, parts(p)["scale"].float()


@pytest.mark.parametrize(("format", "top"), [("int4", 7), ("int8", 127), ("fp8", 448), ("int4:128:pow2", 7)])
def test_a_held_scale_grows_on_overflow_and_shrinks_on_waste(format, top):
    quantum = 2.0**-4
    start = torch.zeros(2, 128)
    start[:, :3] = torch.tensor([top, 3.0, -2.0]) * quantum  # exact in all four formats
    half_gap = (16 if format == "fp8" else 0.5) * quantum  # of the last gap of the grid
    p, before, after = after_moving(format, start, {0: half_gap})
    assert torch.equal(before, after) and (before == quantum).all(), "half a gap past the end is still held"
    assert torch.equal(weight(p)[:, :3], start[:, :3].double())

    moves = {0: 4 * half_gap, 5: 0.25 * quantum}
    p, before, after = after_moving(format, start, moves)
    absmax = top * quantum + moves[0]
    assert (after > before).all()
    # with headroom (1/16), rounded up to the scale's kind: bf16 has 8 bits, a power of two up to a factor of two
    kind = 2.0 if "pow2" in format else 1 + 2.0**-7
    assert (after >= absmax * scaling.HEADROOM / top).all()
    assert (after <= absmax * scaling.HEADROOM / top * kind).all()

    p, before, after = after_moving(format, start, {0: -0.55 * top * quantum})
    assert (after < before).all() and (after >= 0.45 * quantum).all()
    p, before, after = after_moving(format, start, {0: -0.49 * top * quantum})
    assert torch.equal(before, after), "a block that still needs more than half of the grid is no waste"


def test_a_power_of_two_scale_shrinks_without_touching_anyone():
    start = torch.zeros(2, 128)
    start[:, :3] = torch.tensor([7.0, 3.0, -2.0]) / 16
    p, before, after = after_moving("int4:128:pow2", start, {0: -7 / 16})
    assert torch.equal(after, before / 2)
    assert torch.equal(weight(p)[:, 1:3], start[:, 1:3].double())


def test_a_recomputed_scale_moves_weights_that_nobody_touched_and_a_held_one_does_not():
    start = random(4, 128)
    untouched = start.abs() < start.abs().amax(1, keepdim=True)
    start = torch.where(untouched, 0.7 * start, start)
    for policy in scaling.POLICIES:
        p = quantized(start, "int4")
        before = weight(p)
        g = torch.where(untouched, 0.0, 0.2 * start)  # only the largest of each block moves, inwards
        step(build("sgd", p, lr=1.0, weight_decay=0.0, scale_policy=policy), p, g)
        moved = (weight(p) != before)[untouched & (before != 0)]
        assert moved.all() if policy == "recompute" else not moved.any()


# --- no temporary of full size ------------------------------------------------------------------------------


class LargestAllocation(TorchDispatchMode):
    """The largest tensor, in elements, that any operation allocates (views and in-place results are none)."""

    def __init__(self):
        super().__init__()
        self.largest, self.where = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor}
        for t in tree_leaves(out):
            if type(t) is torch.Tensor and t.numel() > self.largest and t.untyped_storage().data_ptr() not in known:
                self.largest, self.where = t.numel(), func
        return out


CASES = [
    *(("adamw", format, {}) for format in FORMATS),
    *((rule, "int4", {}) for rule in RULES if rule not in ("adamw", "adafactor")),
    ("adamw", "int4", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    ("adamw", "int4", {"exp_avg": "int4", "exp_avg_sq": "factored"}),
    ("adafactor", "int4", {"exp_avg": "int4", "exp_avg_sq": "factored"}),
]


@pytest.mark.parametrize(("rule", "format", "options"), CASES, ids=lambda c: c if isinstance(c, str) else "-".join(c))
def test_a_step_allocates_nothing_of_full_size(rule, format, options, monkeypatch):
    monkeypatch.setattr(statistics, "SLAB", 4 * 512)
    p = quantized(random(64, 512), format)
    optimizer = build(rule, p, **options)
    step(optimizer, p, random(64, 512, seed=1))  # states are allocated here
    p.grad = random(64, 512, seed=2)
    with LargestAllocation() as seen:
        optimizer.step()
    assert 0 < seen.largest <= statistics.SLAB, f"{seen.where} allocated {seen.largest} elements"


# --- refusals, warnings, master weights ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options", "reason"),
    [
        (ml.Lion, {}, "its step is a sign"),
        (ml.AdaBelief, {}, "count the error in it as a surprise"),
        (ml.AdamW, {"moment_units": "update"}, "every change of the learning rate would rescale the error"),
        (ml.Adam, {"moment_units": "gradient"}, "every change of the learning rate would rescale the error"),
        (ml.SGD, {}, "without momentum"),
        (ml.AdamW, {"betas": (0.0, 0.99)}, "without momentum"),
        (ml.Adam, {"betas": (0.0, 0.99), "exp_avg": "none"}, "without momentum"),
        (ml.RMSprop, {}, "without momentum"),
        (ml.Adafactor, {}, "without momentum"),
    ],
)
def test_what_cannot_carry_the_error_is_refused_with_a_remedy(cls, options, reason):
    for format in ("int4", "int4+4"):
        p = quantized(random(4, 128), format)
        with pytest.raises(ValueError, match=rf"(?s){cls.__name__}.*{reason}|{reason}") as caught:
            cls([p], error_compensation=True, **options)
        assert f"'{format}'" in str(caught.value) and "error_compensation=False" in str(caught.value)
        optimizer = cls([p], error_compensation=False, backend="reference", **options)
        step(optimizer, p, random(4, 128, seed=1))
        assert torch.isfinite(weight(p)).all()
    cls([quantized(random(4, 128), "int4+32")], error_compensation=True, **options)  # a master copy loses nothing


def test_units_that_cannot_carry_the_error_do_not_switch_compensation_off_without_a_word():
    p = quantized(random(4, 128), "int4")
    for units in ("gradient", "update"):
        with pytest.raises(
            ValueError, match=r"(?s)rescale the error.*moment_units at 'auto'.*error_compensation=False"
        ):
            ml.AdamW([p], moment_units=units)
        ml.AdamW([p], moment_units=units, error_compensation=False)
    ml.AdamW([p], moment_units="weight")


QAT = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "nesterov": "SGD", "rmsprop": "RMSprop"}  # torch.optim's names


@pytest.mark.parametrize("rule", QAT)
@pytest.mark.parametrize("format", MASTER)
def test_master_weights_are_torch_optim_with_a_quantized_forward(format, rule):
    start = random(*SHAPE)
    p, dense = quantized(start, format), nn.Parameter(start.double())
    optimizer, oracle = build(rule, p), getattr(torch.optim, QAT[rule])([dense], lr=LR, **RULES[rule][1])
    for t in range(25):
        stored = p.detach().stored
        master = stored.tensors["master"].view(SHAPE)
        visible = parse(str(stored.format).replace("+32", ""))
        grid = codec.encode(master, visible, scale=stored.rows_of("scale").float())
        assert torch.equal(grid["codes"], stored.rows_of("codes"))
        assert torch.equal(p.detach().dequantize(), codec.decode(grid, 160, visible))
        g = p.detach().dequantize() - random(*SHAPE, seed=1) + 0.1 * random(*SHAPE, seed=t)
        step(optimizer, p, g)
        dense.grad = g.double()
        oracle.step()
        # |W| < 8, about five fp32 roundings a step of numbers up to that size
        torch.testing.assert_close(weight(p), dense.detach(), rtol=0, atol=(t + 1) * 40 * HALF_ULP)


def test_lossy_combinations_are_warned_of_and_others_are_not():
    def warned(format, optimizer=ml.AdamW, **options):
        p = quantized(random(4, 128), format)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer([p], **options)
        return [str(w.message) for w in caught if w.category is LossyUpdateWarning]

    nearest, dropped = {"weight_rounding": "nearest"}, {"error_compensation": False}
    for format in ("int4", "int8", "fp8", "int2", "int4+2"):
        assert "stochastic" in warned(format, **nearest, **dropped)[0], "naive nearest loses most updates"
        assert not warned(format, **dropped) and not warned(format)
    for format in ("int4", "int3", "int2", "fp4", "int4+2"):
        (message,) = warned(format, ml.SGD, **nearest, momentum=0.9)
        assert "0.9" in message and "5.0 quanta" in message
        assert not warned(format, ml.SGD, **nearest, momentum=0.35)
        assert not warned(format, **nearest), "AdamW pays the weight back"
    for format in ("int8", "fp8", "int6", "int4+4", "int4+6", "int4+32", "fp8+32"):
        assert not warned(format, **nearest)
    assert not warned("int4+4", **nearest, **dropped) and not warned("int8+32", **nearest, **dropped)
