"""What a torch.optim user does, done with ours: it works the same, or is refused (`test_optim_refusals.py`)."""

import copy
import pickle

import pytest
import torch
from backends import every_backend  # noqa: F401
from torch import nn
from torch.optim import lr_scheduler as schedulers

import masterless as ml

pytestmark = pytest.mark.usefixtures("every_backend")

LOW = {"exp_avg": "int4", "exp_avg_sq": "log2"}
OPTIMIZERS = {
    "AdamW": (ml.AdamW, LOW),
    "Adam": (ml.Adam, {**LOW, "moment_units": "update"}),
    "AdaBelief": (ml.AdaBelief, {"exp_avg": "dynamic4", "exp_avg_var": "log4"}),
    "SGD": (ml.SGD, {"momentum": 0.9, "momentum_buffer": "int8"}),
    "RMSprop": (ml.RMSprop, {"momentum": 0.9, "momentum_buffer": "fp8", "square_avg": "log3"}),
    "Lion": (ml.Lion, {"exp_avg": "int2"}),
    "Adafactor": (ml.Adafactor, {"beta1": 0.9, "exp_avg": "fp4"}),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5))


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(inputs(seed)).square().mean()


def train(model: nn.Module, optimizer, steps: int = 3, first: int = 0) -> list[torch.Tensor]:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def build(name: str, params, **options):
    cls, formats = OPTIMIZERS[name]
    return cls(params, lr=1e-3 if name == "RMSprop" else 1e-2, **formats, **options)


def same(a, b) -> bool:
    return all(torch.equal(x.detach(), y.detach()) for x, y in zip(a, b, strict=True))


# --- the loop ---------------------------------------------------------------------------------------------


@each_optimizer
def test_training_lowers_the_loss_prints_nothing_and_leaves_gradients_alone(name, capfd):
    model = small_model()
    optimizer = build(name, model.named_parameters())
    before = loss_of(model).item()
    for _ in range(10):
        optimizer.zero_grad()
        loss_of(model).backward()
        grads = [p.grad for p in model.parameters()]
        copies, versions = [g.clone() for g in grads], [g._version for g in grads]
        optimizer.step()
        for p, grad, value, version in zip(model.parameters(), grads, copies, versions, strict=True):
            assert p.grad is grad and torch.equal(grad, value) and grad._version == version
    assert loss_of(model).item() < before
    assert str(optimizer).startswith(name)
    assert capfd.readouterr() == ("", "")


@each_optimizer
def test_closures(name):
    model, twin = small_model(), small_model()
    optimizer, reference = build(name, model.parameters()), build(name, twin.parameters())

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    expected = loss_of(model).item()
    assert optimizer.step(closure).item() == expected
    assert same(model.parameters(), train(twin, reference, 1))
    assert reference.step() is None


@each_optimizer
def test_maximize_is_descent_along_the_negated_gradient(name):
    one, other = small_model(), small_model()
    up, down = build(name, one.parameters(), maximize=True), build(name, other.parameters())
    for step in range(3):
        for model, sign, optimizer in ((one, -1, up), (other, 1, down)):
            optimizer.zero_grad()
            (sign * loss_of(model, step)).backward()
            optimizer.step()
    assert same(one.parameters(), other.parameters())


def test_a_tensor_learning_rate_is_a_learning_rate():
    one, other = small_model(), small_model()
    lr = torch.tensor(1e-2, dtype=torch.float64)
    tensor, number = ml.AdamW(one.parameters(), lr=lr, **LOW), ml.AdamW(other.parameters(), lr=1e-2, **LOW)
    assert same(train(one, tensor), train(other, number))
    lr.fill_(5e-3)  # changed in place, as schedulers do
    number.param_groups[0]["lr"] = 5e-3
    assert same(train(one, tensor), train(other, number))


SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_work_unmodified(kind, tensor_lr):
    """The same rates (and cycled betas) as under torch.optim.AdamW, and no warning."""
    courses = []
    for cls, options in ((ml.AdamW, LOW), (torch.optim.AdamW, {})):
        model = small_model()
        lr = torch.tensor(1e-2) if tensor_lr else 1e-2
        optimizer = cls(model.parameters(), lr=lr, **options)
        scheduler = SCHEDULERS[kind](optimizer)
        course = []
        for step in range(8):
            train(model, optimizer, 1, step)
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            course.append((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"]))
        courses.append(course)
    assert courses[0] == courses[1]


def test_a_learning_rate_of_zero_moves_nothing():
    for name in OPTIMIZERS:
        model = small_model()
        optimizer = OPTIMIZERS[name][0](model.parameters(), lr=0.0, weight_decay=0.1, **OPTIMIZERS[name][1])
        before = [p.detach().clone() for p in model.parameters()]
        assert same(train(model, optimizer), before), name


# --- groups -----------------------------------------------------------------------------------------------


def test_add_param_group_with_options_of_its_own():
    model = small_model()
    optimizer = ml.AdamW(model[0].parameters(), lr=1e-2, **LOW)
    optimizer.add_param_group(
        {"params": model[2].parameters(), "lr": 0.0, "exp_avg": "INT8:ROW", "quantize_states": "all"}
    )
    assert optimizer.param_groups[1]["exp_avg"] == "int8:row"
    assert optimizer.param_groups[1]["exp_avg_sq"] == "log2"
    frozen = [p.detach().clone() for p in model[2].parameters()]
    train(model, optimizer)
    assert same(model[2].parameters(), frozen)
    states = [sorted(optimizer.state[p]) for p in model.parameters()]
    low_bit = ["exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.step", "exp_avg_sq.top", "step"]
    assert states == [low_bit, ["exp_avg", "exp_avg_sq", "step"], low_bit, low_bit]


OVERRIDES = {
    "lr": 5e-3,
    "betas": (0.5, 0.9),
    "eps": 1e-3,
    "weight_decay": 0.5,
    "exp_avg": "int8",
    "exp_avg_sq": "log4",
    "moment_units": "gradient",  # "auto" means update units at 4 bits
    "maximize": True,
    "rounding": "nearest",
    "seed": 7,
    "quantize_states": "all",
}


@pytest.mark.parametrize("option", OVERRIDES)
def test_every_option_can_be_overridden_in_a_group(option):
    """A group with the option set ends where an optimizer built with it ends, and elsewhere than without."""
    ends = []
    for inside, outside in (({option: OVERRIDES[option]}, {}), ({}, {option: OVERRIDES[option]}), ({}, {})):
        model = small_model()
        groups = [{"params": list(model.named_parameters()), **inside}]
        ends.append(train(model, ml.AdamW(groups, **{"lr": 1e-2, **LOW, **outside})))
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])


def test_random_bits_of_named_parameters_do_not_depend_on_the_groups():
    """One group, two groups, or the groups in another order: the same weights, bit for bit."""
    ends = []
    for split in (lambda n: [n], lambda n: [n[:1], n[1:]], lambda n: [n[3:], n[:3]], lambda n: [[x] for x in n[::-1]]):
        model = small_model()
        groups = [{"params": part} for part in split(list(model.named_parameters()))]
        ends.append(train(model, ml.AdamW(groups, lr=1e-2, exp_avg="int2", exp_avg_sq="log2", quantize_states="all")))
    assert all(same(ends[0], end) for end in ends[1:])


def test_nameless_parameters_go_by_their_position():
    """Splitting groups in place keeps positions, so it changes nothing; another seed or position does."""
    ends = []
    for split in (lambda n: [n], lambda n: [n[:1], n[1:]], lambda n: [n[::-1]]):
        model = small_model()
        groups = [{"params": part} for part in split(list(model.parameters()))]
        ends.append(train(model, ml.AdamW(groups, lr=1e-2, exp_avg="int2", exp_avg_sq="log2")))
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])
    model = small_model()
    assert not same(
        ends[0], train(model, ml.AdamW(model.parameters(), lr=1e-2, exp_avg="int2", exp_avg_sq="log2", seed=1))
    )


def test_only_matrices_have_low_bit_states_unless_all_is_asked_for():
    shapes = {"matrix": (40, 33), "vector": (33,), "narrow": (40, 8), "conv": (8, 4, 3, 3), "scalar": ()}
    for quantize, low_bit in (("matrices", {"matrix", "conv"}), ("all", set(shapes))):
        params = [(n, nn.Parameter(torch.zeros(s))) for n, s in shapes.items()]
        optimizer = ml.AdamW(params, quantize_states=quantize, exp_avg="int4", exp_avg_sq="log2")
        for name, p in params:
            formats = {k: str(f) for k, f in optimizer.state_formats(p, optimizer.param_groups[0]).items()}
            expected = (
                {"exp_avg": "int4", "exp_avg_sq": "log2"}
                if name in low_bit
                else {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
            )
            assert formats == expected, name


def test_all_with_a_factored_second_moment_keeps_the_asked_first_moment_of_vectors():
    """A vector has nothing to factor, so its second moment is full; its first moment is still the one asked for."""
    p = nn.Parameter(torch.zeros(200))
    optimizer = ml.AdamW([p], quantize_states="all", exp_avg="int4", exp_avg_sq="factored")
    formats = {k: str(f) for k, f in optimizer.state_formats(p, optimizer.param_groups[0]).items()}
    assert formats == {"exp_avg": "int4", "exp_avg_sq": "fp32"}


# --- the rest of the protocol -------------------------------------------------------------------------------


def test_step_hooks():
    model = small_model()
    optimizer = ml.AdamW(model.parameters(), **LOW)
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("pre")),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("post")),
    ]
    train(model, optimizer, 2)
    assert calls == ["pre", "post"] * 2
    for handle in handles:
        handle.remove()
    train(model, optimizer, 1)
    assert len(calls) == 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model = small_model()
    optimizer = ml.AdamW(model.parameters(), **LOW)
    loss_of(model).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all((p.grad is None) if set_to_none else (p.grad == 0).all() for p in model.parameters())


def test_grad_scaler():
    """Unscaled steps are ours exactly (powers of two), and an overflow skips the step and halves the scale."""
    model, twin = small_model(), small_model()
    optimizer, reference = ml.AdamW(model.parameters(), **LOW), ml.AdamW(twin.parameters(), **LOW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same(model.parameters(), train(twin, reference))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    scaler.scale(loss_of(model) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same(model.parameters(), before)
    assert scaler.get_scale() == 2.0**9
    assert optimizer.nonfinite_counts == {}


def test_gradient_accumulation():
    model, twin = small_model(), small_model()
    optimizer, reference = ml.AdamW(model.parameters(), **LOW), ml.AdamW(twin.parameters(), **LOW)
    for seed in (0, 1):
        loss_of(model, seed).backward()
    optimizer.step()
    for p, grads in zip(
        twin.parameters(),
        zip(*(torch.autograd.grad(loss_of(twin, s), twin.parameters()) for s in (0, 1)), strict=True),
        strict=True,
    ):
        p.grad = grads[0] + grads[1]
    reference.step()
    assert same(model.parameters(), twin.parameters())


@each_optimizer
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_continue_as_the_original_and_share_nothing(name, how):
    model = small_model()
    optimizer = build(name, model.named_parameters(), nonfinite="skip")
    train(model, optimizer)
    optimizer.nonfinite_counts["0.weight"] = 3
    pair = (model, optimizer)
    twin, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert other.nonfinite_counts == {"0.weight": 3}
    state = copy.deepcopy(other.state_dict()["state"])
    expected = train(model, optimizer, 3, first=3)
    for index, tensors in other.state_dict()["state"].items():  # the original's steps did not touch the copy
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(state[index][k])) for k, v in tensors.items())
    assert same(expected, train(twin, other, 3, first=3))


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_compiled_models(mode):
    model, twin = small_model(), small_model()
    compiled = torch.compile(model, backend=mode)
    end = train(compiled, ml.AdamW(compiled.named_parameters(), **LOW))
    named = [(f"_orig_mod.{n}", p) for n, p in twin.named_parameters()]  # torch.compile renames: so must the twin
    assert same(end, train(twin, ml.AdamW(named, **LOW)))


@pytest.mark.parametrize(
    ("exp_avg", "exp_avg_sq", "units"),
    [
        ("int8", "log8", "gradient"),
        ("int8", "factored", "gradient"),
        ("int8", "log2", "update"),
        ("int4", "log8", "update"),
        ("int2", "factored", "update"),
        ("fp32", "log2", "gradient"),
        ("bf16", "log2", "gradient"),
        ("none", "log2", "gradient"),
    ],
)
def test_a_coarse_moment_of_either_kind_puts_the_first_one_into_update_units(exp_avg, exp_avg_sq, units):
    betas = (0.0, 0.95) if exp_avg == "none" else (0.9, 0.95)
    optimizer = ml.AdamW(
        [torch.nn.Parameter(torch.ones(128, 128))], betas=betas, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq
    )
    group = optimizer.param_groups[0]
    assert optimizer.rule(group).units == units and group["moment_units"] == "auto"
    assert optimizer.rule(group, compensated=True).units == "weight"
