"""What cannot be honoured is refused at once: the message has the value, the reason and a remedy."""

import pytest
import torch
from backends import reference_backend  # noqa: F401
from torch import nn

import masterless as ml

pytestmark = pytest.mark.usefixtures("reference_backend")

# optimizer, arguments, then what the message must contain: the option and value, the reason, the remedy
REFUSED_ARGUMENTS = [
    (ml.AdamW, {"amsgrad": True}, "amsgrad=True", "third buffer", "leave it out"),
    (ml.Adam, {"amsgrad": True}, "amsgrad=True", "third buffer", "leave it out"),
    (ml.RMSprop, {"centered": True}, "centered=True", "third buffer", "AdaBelief"),
    *(
        (cls, {option: True}, f"{option}=True", reason, remedy)
        for cls in (ml.AdamW, ml.SGD, ml.RMSprop, ml.Lion, ml.AdaBelief, ml.Adafactor)
        for option, reason, remedy in (
            ("capturable", "on the host", "leave it out"),
            ("differentiable", "no derivative", "torch.optim"),
        )
    ),
    (ml.AdamW, {"lr": -1e-3}, "lr=-0.001", "must not be negative", "not be negative"),
    (ml.AdamW, {"lr": float("nan")}, "lr=nan", "must not be", "must"),
    (ml.AdamW, {"lr": torch.ones(2)}, "lr=tensor", "one element", "must have one element"),
    (ml.AdamW, {"weight_decay": -0.1}, "weight_decay=-0.1", "must not be negative", "not be negative"),
    (ml.AdamW, {"betas": (1.0, 0.9)}, "betas=(1.0, 0.9)", "both must lie in [0, 1)", "[0, 1)"),
    (ml.AdamW, {"betas": (0.9, 1.5)}, "betas=(0.9, 1.5)", "both must lie in [0, 1)", "[0, 1)"),
    (ml.AdamW, {"betas": (0.9,)}, "betas=(0.9,)", "two numbers are needed", "two numbers"),
    (ml.AdamW, {"betas": (0.9, torch.tensor(0.99))}, "betas=(0.9, tensor", "both floats or both Tensors", "both"),
    (ml.AdamW, {"eps": -1.0}, "eps=-1.0", "must not be negative", "not be negative"),
    (ml.AdamW, {"moment_units": "m"}, "moment_units='m'", "'update'", "'weight'"),
    (ml.AdamW, {"rounding": "up"}, "'up'", "unknown rounding", "choose one of nearest"),
    (ml.AdamW, {"weight_rounding": "stochastic-log"}, "weight_rounding='stochastic-log'", "not for weights", "weights"),
    (ml.AdamW, {"scale_policy": "free"}, "scale_policy='free'", "choose one of", "held, recompute"),
    (ml.AdamW, {"quantize_states": "some"}, "quantize_states='some'", "'matrices' or 'all'", "'all'"),
    (ml.AdamW, {"nonfinite": "ignore"}, "nonfinite='ignore'", "'raise-now' or 'skip'", "'skip'"),
    (ml.AdamW, {"seed": -1}, "seed=-1", "non-negative", "63-bit integer"),
    (ml.AdamW, {"seed": 0.5}, "seed=0.5", "non-negative", "63-bit integer"),
    (ml.AdamW, {"backend": "cuda"}, "'cuda'", "unknown backend", "choose one of auto, reference"),
    (ml.AdamW, {"exp_avg": "int5"}, "'int5'", "unknown format", "known formats"),
    (ml.AdamW, {"exp_avg": "log2"}, "'log2'", "first moment has them", "use 'int2'"),
    (ml.AdamW, {"exp_avg": "int8:tensor"}, "'int8:tensor'", "sharded", "use 'int8'"),
    (ml.AdamW, {"exp_avg_sq": "int8"}, "'int8'", "a second moment has not", "use 'log8'"),
    (ml.AdamW, {"exp_avg_sq": "none"}, "'none'", "cannot do without", "use 'factored'"),
    (ml.AdamW, {"exp_avg": "none"}, "exp_avg='none'", "needs a buffer", "set it to 0 or choose a format"),
    (ml.SGD, {"momentum": 1.0}, "momentum=1.0", "must lie in [0, 1)", "[0, 1)"),
    (ml.SGD, {"nesterov": True}, "nesterov=True", "requires a momentum", "zero dampening"),
    (ml.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov=True", "requires", "zero dampening"),
    (ml.SGD, {"momentum": 0.9, "momentum_buffer": "uint4"}, "'uint4'", "negative values", "use 'int4'"),
    (ml.RMSprop, {"alpha": 1.0}, "alpha=1.0", "must lie in [0, 1)", "[0, 1)"),
    (ml.RMSprop, {"square_avg": "dynamic8"}, "'dynamic8'", "a second moment has not", "use 'log8'"),
    (ml.AdaBelief, {"betas": (0.0, 0.9)}, "betas=(0.0, 0.9)", "without beta1", "deviation"),
    (ml.AdaBelief, {"exp_avg_var": "factored"}, "exp_avg_var='factored'", "tile by tile", "use 'log2'"),
    (ml.Lion, {"betas": (0.9, -0.1)}, "betas=(0.9, -0.1)", "both must lie", "[0, 1)"),
    (ml.Adafactor, {"beta2_decay": 0.5}, "beta2_decay=0.5", "must not be positive", "not be positive"),
    (ml.Adafactor, {"d": 0.5}, "d=0.5", "at least 1", "at least 1"),
    (ml.Adafactor, {"beta1": 1.0}, "beta1=1.0", "must lie in [0, 1)", "[0, 1)"),
    (ml.Adafactor, {"eps": (-1.0, 1e-3)}, "eps=(-1.0, 0.001)", "must not be negative", "not be negative"),
]


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 40), dtype=dtype))


@pytest.mark.parametrize(
    ("cls", "arguments", "value", "reason", "remedy"),
    REFUSED_ARGUMENTS,
    ids=[f"{cls.__name__}-{'-'.join(a)}-{i}" for i, (cls, a, *_) in enumerate(REFUSED_ARGUMENTS)],
)
def test_refused_arguments(cls, arguments, value, reason, remedy):
    """In the constructor, and (where it is an option of a group) in a group of an optimizer that exists."""
    with pytest.raises(ValueError) as caught:
        cls([parameter()], **arguments)
    for part in (value, reason, remedy):
        assert part in str(caught.value)
    optimizer = cls([parameter()])
    group = {"params": [parameter()], **arguments}
    with pytest.raises(ValueError):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_how_torch_loops_is_accepted_whatever_it_says(option):
    for value in (True, False, None):
        ml.AdamW([parameter()], **{option: value})


def test_a_group_may_carry_keys_of_its_own():
    optimizer = ml.AdamW([{"params": [parameter()], "name": "decay", "lr_scale": 0.5}])
    assert optimizer.param_groups[0]["name"] == "decay" and optimizer.state_dict()["param_groups"][0]["lr_scale"] == 0.5


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_switched_off_they_are_accepted(option):
    for value in (False, None):
        ml.AdamW([parameter()], amsgrad=False, **{option: value})


@pytest.mark.parametrize("cls", [ml.AdamW, ml.Adam, ml.SGD, ml.RMSprop, ml.Lion, ml.AdaBelief, ml.Adafactor])
def test_unknown_options_are_refused(cls):
    with pytest.raises(TypeError, match="learning_rate") as caught:
        cls([parameter()], learning_rate=1e-3)
    assert "known: " in str(caught.value) and "rounding" in str(caught.value)
    with pytest.raises(ValueError, match=r"unknown option 'weight_dcay' in a param group; did you mean 'weight_decay'"):
        cls([{"params": [parameter()], "weight_dcay": 1e-3}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_cannot_be_stored_are_refused(dtype):
    p = nn.Parameter(torch.ones(4, 40).to(dtype))
    with pytest.raises(ValueError) as caught:
        ml.AdamW([p])
    for part in ("(4, 40)", str(dtype), "must be float32, bfloat16", ".float()"):
        assert part in str(caught.value)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = ml.AdamW([parameter()])
    for group in ({"params": [parameter(dtype=torch.float64)]}, {"params": [parameter()], "lr": -1.0}):
        with pytest.raises(ValueError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_moves():
    dense, embedding = parameter(), nn.Embedding(10, 40, sparse=True)
    optimizer = ml.SGD([("dense", dense), ("embedding", embedding.weight)], lr=0.1, momentum=0.9)
    dense.grad = torch.ones(4, 40)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    for part in ("SGD", "embedding", "sparse", "share a scale", "sparse=False"):
        assert part in str(caught.value)
    assert torch.equal(dense.detach(), torch.ones(4, 40))
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())


def test_what_torch_refuses_is_refused_as_torch_does():
    p = parameter()
    with pytest.raises(ValueError, match="empty parameter list"):
        ml.AdamW([])
    with pytest.raises(TypeError, match=r"iterable|Tensor"):
        ml.AdamW(p)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ml.AdamW([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="non-leaf"):
        ml.AdamW([p * 2])
    with pytest.raises(ValueError, match="with/without names"):
        ml.AdamW([("p", p), parameter()])
    with pytest.raises(TypeError, match="set"):
        ml.AdamW([{"params": {p}}])


@pytest.mark.parametrize(
    "bad", [{"betas": "ab"}, {"lr": "fast"}, {"lr": None}, {"weight_decay": "much"}, {"eps": None}]
)
def test_values_of_a_wrong_type_do_not_pass(bad):
    with pytest.raises((TypeError, ValueError)):
        ml.AdamW([parameter()], **bad)
