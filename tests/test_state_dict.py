"""Checkpoints: plain tensors, bit-for-bit resumes, torch.optim's dicts in and out, conversions, refusals."""

import copy
import io

import pytest
import torch
from backends import every_backend  # noqa: F401
from torch import Tensor, nn

import masterless as ml
from masterless.formats import parse
from masterless.formats.storage import Storage

pytestmark = pytest.mark.usefixtures("every_backend")

SHAPES = {"matrix": (6, 130), "stack": (2, 3, 40), "vector": (7,), "scalar": ()}

CONFIGURATIONS = {
    "fp32": (ml.AdamW, {"exp_avg": "fp32", "exp_avg_sq": "fp32"}),
    "bf16": (ml.AdamW, {"exp_avg": "bf16", "exp_avg_sq": "bf16", "quantize_states": "all"}),
    "int4/log2": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "int8/log8 nearest": (ml.AdamW, {"rounding": "nearest"}),
    "int2/log3 log dither": (ml.AdamW, {"exp_avg": "int2", "exp_avg_sq": "log3", "rounding": "stochastic-log"}),
    "all": (ml.AdamW, {"exp_avg": "int3:64:fp32", "exp_avg_sq": "log4:row", "quantize_states": "all"}),
    "update units": (ml.AdamW, {"exp_avg": "fp8", "exp_avg_sq": "fp8", "moment_units": "update"}),
    "fp4 L2": (ml.Adam, {"exp_avg": "fp4:row:pow2", "exp_avg_sq": "fp4", "weight_decay": 0.1}),
    "factored": (ml.AdamW, {"exp_avg": "dynamic4", "exp_avg_sq": "factored", "quantize_states": "all"}),
    "none": (ml.AdamW, {"exp_avg": "none", "exp_avg_sq": "udynamic8", "betas": (0.0, 0.99)}),
    "none factored": (ml.AdamW, {"exp_avg": "none", "exp_avg_sq": "factored", "betas": (0.0, 0.99)}),
    "sgd": (ml.SGD, {"momentum": 0.9, "dampening": 0.1, "momentum_buffer": "dynamic3"}),
    "sgd plain": (ml.SGD, {}),
    "rmsprop": (ml.RMSprop, {"momentum": 0.9, "square_avg": "uint4", "momentum_buffer": "dynamic8"}),
    "lion": (ml.Lion, {"exp_avg": "dynamic2"}),
    "adabelief": (ml.AdaBelief, {"exp_avg": "int6", "exp_avg_var": "log2:64"}),
    "adafactor": (ml.Adafactor, {"beta1": 0.9, "exp_avg": "int4"}),
}


def parameters(dtype=torch.float32) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(n, nn.Parameter(torch.randn(s, generator=generator).to(dtype))) for n, s in SHAPES.items()]


def steps(optimizer, params, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        for _, p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def build(name: str, params, **options):
    cls, chosen = CONFIGURATIONS[name]
    return cls(params, lr=1e-2, **{**chosen, **options})


def through_a_file(state_dict):
    """Saved and loaded as a careful user does: nothing but tensors and plain Python in it."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def clone(params) -> list[tuple[str, nn.Parameter]]:
    return [(n, nn.Parameter(p.detach().clone())) for n, p in params]


def assert_same(a, b) -> None:
    """Two nested dicts of tensors and values are equal, dtypes and bits included."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


def weights(params) -> list[Tensor]:
    return [p.detach() for _, p in params]


# --- resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name, dtype):
    params = parameters(dtype)
    optimizer = build(name, params)
    steps(optimizer, params, 3)
    saved = through_a_file(optimizer.state_dict())
    resumed_params = clone(params)
    resumed = build(name, resumed_params, seed=99)  # the seed, like every hyperparameter, follows the checkpoint
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), optimizer.state_dict())
    steps(optimizer, params, 3, first=3)
    steps(resumed, resumed_params, 3, first=3)
    assert all(map(torch.equal, weights(params), weights(resumed_params)))
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_states_keep_their_own_dtypes_beside_bf16_parameters():
    params = parameters(torch.bfloat16)
    optimizer = build("int4/log2", params)
    steps(optimizer, params, 1)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    state = optimizer.state[params[0][1]]
    assert {k: v.dtype for k, v in state.items()} == {
        "step": torch.int64,
        "exp_avg.codes": torch.uint8,
        "exp_avg.scale": torch.bfloat16,
        "exp_avg_sq.codes": torch.uint8,
        "exp_avg_sq.top": torch.bfloat16,
        "exp_avg_sq.step": torch.uint8,
    }
    assert optimizer.state[params[2][1]]["exp_avg"].dtype == torch.float32


def test_a_version_number_is_in_it():
    params = parameters()
    assert build("int4/log2", params).state_dict()["param_groups"][0]["masterless_version"] == 2


def test_a_fresh_optimizers_dict_loads():
    params = parameters()
    optimizer = build("int4/log2", params)
    optimizer.load_state_dict(through_a_file(build("int4/log2", parameters()).state_dict()))
    steps(optimizer, params, 1)


def test_loading_one_dict_twice_shares_nothing():
    params = parameters()
    source = build("int4/log2", params)
    steps(source, params, 2)
    saved = source.state_dict()  # as torch's: references to the live tensors
    frozen = copy.deepcopy(saved)
    first_params, second_params = clone(params), clone(params)
    first, second = build("int4/log2", first_params), build("int4/log2", second_params)
    first.load_state_dict(saved)
    second.load_state_dict(saved)
    steps(first, first_params, 2)
    assert_same(saved, frozen)
    assert_same(second.state_dict(), frozen)
    steps(second, second_params, 2)
    assert_same(first.state_dict(), second.state_dict())


def test_schedulers_resume_from_the_loaded_groups():
    """What a scheduler wrote into a group survives, so that `last_epoch=` works as with torch.optim."""
    params = parameters()
    optimizer = build("int4/log2", params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    steps(optimizer, params, 1)
    scheduler.step()
    resumed = build("int4/log2", clone(params))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert resumed.param_groups[0]["initial_lr"] == 1e-2
    again = torch.optim.lr_scheduler.StepLR(resumed, 1, gamma=0.5, last_epoch=scheduler.last_epoch)
    assert again.base_lrs == [1e-2]


def test_load_hooks_see_what_the_user_loads():
    params = parameters()
    optimizer = build("int4/log2", params)
    steps(optimizer, params, 1)
    saved, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(d["state"][0]["exp_avg.codes"].dtype))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("post"))
    optimizer.load_state_dict(saved)
    assert seen == [torch.uint8, "post"]
    optimizer.register_load_state_dict_pre_hook(lambda o, d: {**d, "state": {}})
    optimizer.load_state_dict(saved)
    assert not optimizer.state


# --- torch.optim, in and out --------------------------------------------------------------------------------

TORCH = {
    "AdamW": (torch.optim.AdamW, ml.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, ml.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, ml.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": (torch.optim.SGD, ml.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD plain": (torch.optim.SGD, ml.SGD, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, ml.RMSprop, {"momentum": 0.9}),
}


def full_precision(cls) -> dict[str, str]:
    return {name: "fp32" for name in (cls.first_name, cls.second_name) if name}


@pytest.mark.parametrize("name", TORCH)
def test_a_torch_state_dict_loads_and_training_goes_on(name):
    """In fp32 ours then continues as torch does: to a few roundings, 2^-24 of a weight each, in three steps."""
    theirs, ours, options = TORCH[name]
    params = parameters()
    reference = theirs(params, lr=1e-2, **options)
    steps(reference, params, 4)
    own_params = clone(params)
    optimizer = ours(own_params, lr=0.5, **full_precision(ours))  # lr and all that follow the checkpoint
    optimizer.load_state_dict(through_a_file(reference.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    steps(reference, params, 3, first=4)
    steps(optimizer, own_params, 3, first=4)
    for a, b in zip(weights(own_params), weights(params), strict=True):
        assert (a - b).abs().max() <= 12 * 2.0**-24 * (1 + b.abs().max())


@pytest.mark.parametrize("name", TORCH)
def test_ours_exports_to_torch_and_training_goes_on(name):
    theirs, ours, options = TORCH[name]
    params = parameters()
    optimizer = ours(params, lr=1e-2, **options, **full_precision(ours))
    steps(optimizer, params, 4)
    own_params = clone(params)
    reference = theirs(own_params, lr=0.5)
    reference.load_state_dict(through_a_file(optimizer.torch_state_dict()))
    assert reference.param_groups[0]["lr"] == 1e-2
    assert reference.param_groups[0]["param_names"] == list(SHAPES)
    steps(optimizer, params, 3, first=4)
    steps(reference, own_params, 3, first=4)
    for a, b in zip(weights(params), weights(own_params), strict=True):
        assert (a - b).abs().max() <= 12 * 2.0**-24 * (1 + b.abs().max())


def test_low_bit_states_export_as_the_values_they_decode_to():
    params = parameters()
    optimizer = build("int4/log2", params, moment_units="gradient")
    steps(optimizer, params, 3)
    exported = optimizer.torch_state_dict()["state"]
    for i, (_, p) in enumerate(params):
        for moment, storage in optimizer.state_storage(p, optimizer.param_groups[0]).items():
            assert torch.equal(exported[i][moment], storage.decode())
            assert exported[i][moment].dtype == torch.float32


def test_update_units_export_as_gradient_units():
    """Relation: m = u * (sqrt(v / (1 - b2^t)) + eps), which makes both give the same step."""
    params = parameters()
    optimizer = ml.AdamW(params, betas=(0.9, 0.99), exp_avg="fp32", exp_avg_sq="fp32", moment_units="update")
    steps(optimizer, params, 3)
    exported = optimizer.torch_state_dict()["state"]
    for i, (_, p) in enumerate(params):
        u, v = (optimizer.state[p][k].double() for k in ("exp_avg", "exp_avg_sq"))
        m = u * ((v / (1 - 0.99**3)).sqrt() + 1e-8)
        assert torch.allclose(exported[i]["exp_avg"].double(), m, rtol=4 * 2.0**-24, atol=0)  # four fp32 roundings


def test_a_moment_that_is_not_stored_exports_as_zeros_that_torch_can_use():
    params = parameters()
    optimizer = build("none", params)
    steps(optimizer, params, 2)
    reference = torch.optim.AdamW(clone(params))
    reference.load_state_dict(optimizer.torch_state_dict())
    assert all((state["exp_avg"] == 0).all() for state in reference.state.values())
    steps(reference, [("", p) for p in reference.param_groups[0]["params"]], 1)


def test_torch_moments_enter_update_units_as_updates():
    params = parameters()
    reference = torch.optim.AdamW(params, betas=(0.9, 0.99))
    steps(reference, params, 3)
    optimizer = ml.AdamW(clone(params), exp_avg="fp32", exp_avg_sq="fp32", moment_units="update")
    optimizer.load_state_dict(reference.state_dict())
    for (_, p), q in zip(params, optimizer.param_groups[0]["params"], strict=True):
        m, v = (reference.state[p][k].double() for k in ("exp_avg", "exp_avg_sq"))
        u = m / ((v / (1 - 0.99**3)).sqrt() + 1e-8)
        assert torch.allclose(optimizer.state[q]["exp_avg"].double(), u, rtol=4 * 2.0**-24, atol=0)


@pytest.mark.parametrize("name", ["lion", "adabelief", "adafactor"])
def test_what_torch_has_no_place_for_is_not_exported(name):
    params = parameters()
    with pytest.raises(ValueError, match=r"no counterpart in torch.optim .* state_dict\(\)"):
        build(name, params).torch_state_dict()


# --- conversions between formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["fp32", "bf16", "int8", "torch"])
@pytest.mark.parametrize("target", [("int4", "log2"), ("fp8", "factored"), ("fp32", "fp32"), ("dynamic8", "uint8")])
def test_other_formats_are_converted_to_the_nearest(source, target):
    params = parameters()
    if source == "torch":
        saver = torch.optim.AdamW(params)
    else:
        saver = ml.AdamW(
            params, exp_avg=source, exp_avg_sq={"int8": "log8"}.get(source, source), moment_units="gradient"
        )
    steps(saver, params, 3)
    exp_avg, exp_avg_sq = target
    loader_params = clone(params)
    loader = ml.AdamW(loader_params, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, moment_units="gradient")
    loader.load_state_dict(through_a_file(saver.state_dict()))
    assert loader.param_groups[0]["exp_avg"] == exp_avg
    for (_, p), (_, q) in zip(params, loader_params, strict=True):
        formats = loader.state_formats(q, loader.param_groups[0])
        for moment, storage in loader.state_storage(q, loader.param_groups[0]).items():
            if source == "torch":
                values = saver.state[p][moment]
            else:
                values = saver.state_storage(p, saver.param_groups[0])[moment].decode()
            same_format = source != "torch" and saver.state_formats(p, saver.param_groups[0])[moment] == formats[moment]
            expected = values if same_format else Storage.zeros(formats[moment], q.shape).encode_(values).decode()
            assert torch.equal(storage.decode(), expected)
    assert all(int(state["step"]) == 3 for state in loader.state.values())
    steps(loader, loader_params, 1, first=3)


def test_loaded_formats_are_this_optimizers_in_the_group_too():
    params = parameters()
    saver = ml.AdamW(params, exp_avg="int8", exp_avg_sq="log8")
    steps(saver, params, 1)
    loader = ml.AdamW(clone(params), exp_avg="int4", exp_avg_sq="log2")
    loader.load_state_dict(saver.state_dict())
    assert parse(loader.param_groups[0]["exp_avg"]) == parse("int4")
    assert set(loader.state_dict()["state"][0]) == {
        "step", "exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.top", "exp_avg_sq.step"
    }  # fmt: skip
