"""The step plan: whatever changes between steps, the result is that of a plan made anew."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch

import masterless as ml
from masterless.backends.cpu import library as kernels
from masterless.formats.rounding import PURPOSES, parameter_id, stream_key, stream_keys
from masterless.optim import plan

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernel")
SHAPES = {"a": (6, 200), "b": (40,), "c": (3, 5, 64), "d": (4, 130)}


def make(cls=ml.AdamW, **options):
    torch.manual_seed(3)
    named = []
    for name, shape in SHAPES.items():
        dense = torch.randn(shape) * 0.05
        p = torch.nn.Parameter(ml.QuantizedTensor.from_dense(dense, "int4") if name == "d" else dense)
        named.append((name, p))
    return cls(named, lr=1e-2, **options)


def parameters_of(optimizer):
    return {name: p for _, p, name in optimizer.parameters()}


def give_gradients(optimizer, step):
    for i, p in enumerate(parameters_of(optimizer).values()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(p.dtype)


def stored(optimizer):
    found = {}
    for name, p in parameters_of(optimizer).items():
        tensors = p.stored.tensors if isinstance(p, ml.QuantizedTensor) else {"values": p.detach()}
        tensors = {**tensors, **{k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}}
        found |= {f"{name}.{k}": v for k, v in tensors.items()}
    return found


def assert_equal(kept, anew):
    right, left = stored(anew), stored(kept)
    assert right.keys() == left.keys()
    assert [k for k in right if not torch.equal(right[k], left[k])] == []


def set_options(**options):
    def change(optimizer):
        optimizer.param_groups[0].update(options)

    return change


def replace_states(optimizer):
    for state in optimizer.state.values():
        state.update({k: v.clone() for k, v in state.items()})


def move_state_memory(optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def move_weights(optimizer):
    for p in parameters_of(optimizer).values():
        if not isinstance(p, ml.QuantizedTensor):
            p.data = p.data.clone()


def transpose_a_weight(optimizer):
    p = parameters_of(optimizer)["a"]
    p.data = p.data.t().contiguous().t()


def narrow_a_weight(optimizer):
    p = parameters_of(optimizer)["b"]
    p.grad = None
    p.data = p.data.bfloat16()


def load_own_state(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_a_state(optimizer):
    del optimizer.state[parameters_of(optimizer)["a"]]


def reset(optimizer):
    optimizer.reset_state(params="a")


def rename(optimizer):
    optimizer.param_groups[0]["param_names"] = ["other", "b", "c", "d"]


def append_a_parameter(optimizer):
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3, 130)))
    optimizer.param_groups[0]["param_names"].append("e")


def replace_a_parameter(optimizer):
    optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(40))


def rename_in_place(optimizer):
    optimizer.param_groups[0]["param_names"][0] = "other"


CHANGES = [
    set_options(lr=0.0),
    set_options(lr=0.3),
    set_options(betas=(0.5, 0.9)),
    set_options(weight_decay=0.0),
    set_options(rounding="nearest", weight_rounding="nearest"),
    set_options(error_compensation=False),
    set_options(maximize=True),
    set_options(scale_policy="recompute"),
    set_options(seed=17),
    set_options(backend="reference"),
    replace_states,
    move_state_memory,
    move_weights,
    transpose_a_weight,
    narrow_a_weight,
    load_own_state,
    forget_a_state,
    reset,
    rename,
    rename_in_place,
    append_a_parameter,
    replace_a_parameter,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__qualname__.split(".")[0])
def test_a_change_between_steps_is_seen(change):
    kept, anew = make(), make()
    for step in range(6):
        for optimizer in (kept, anew):
            if step == 3:
                change(optimizer)
            give_gradients(optimizer, step)
        anew.plan = plan.StepPlan()
        kept.step()
        anew.step()
        assert_equal(kept, anew)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2", "reset": "2:soft"}),
        (ml.SGD, {"momentum": 0.9, "dampening": 0.5, "momentum_buffer": "int8"}),
        (ml.Adafactor, {"exp_avg_sq": "factored", "error_compensation": False}),
        (ml.RMSprop, {"weight_decay": 0.1, "momentum": 0.9}),
    ],
)
def test_kept_descriptions_equal_the_reference(cls, options):
    kept, reference = make(cls, **options), make(cls, backend="reference", **options)
    for step in range(5):
        for optimizer in (kept, reference):
            give_gradients(optimizer, step)
            if step == 2:  # one parameter sits a step out, and is younger from then on
                parameters_of(optimizer)["c"].grad = None
            optimizer.step()
    assert_equal(kept, reference)
    assert len(kept.plan.entries) == len(SHAPES)
    assert {type(e.backend).__name__ for e in kept.plan.entries.values()} == {"CpuBackend"}
    assert {type(e.backend).__name__ for e in reference.plan.entries.values()} == {"ReferenceBackend"}


def test_descriptions_are_really_kept(monkeypatch):
    optimizer = make()
    give_gradients(optimizer, 0)
    optimizer.step()
    monkeypatch.setattr(plan, "task_of", lambda *args: pytest.fail("described anew"))
    give_gradients(optimizer, 1)  # other tensors at other addresses
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def test_copies_and_pickles_describe_their_own_tensors():
    optimizer = make()
    give_gradients(optimizer, 0)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        before = {k: v.clone() for k, v in stored(optimizer).items()}
        give_gradients(twin, 1)
        twin.step()
        after = stored(optimizer)
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_nothing_keeps_replaced_states_alive():
    import weakref

    optimizer = make()
    give_gradients(optimizer, 0)
    optimizer.step()
    codes = weakref.ref(optimizer.state[parameters_of(optimizer)["a"]]["exp_avg.codes"])
    load_own_state(optimizer)
    assert codes() is None


@pytest.mark.parametrize("times", [1, 5])  # few parameters go another way
def test_keys_of_many_parameters_are_those_of_each(times):
    seeds, steps = [0, 5, 2**63 - 1] * times, [1, 2**24, 7] * times
    identities = [parameter_id(name) for name in "abcdefghijklmno"[: 3 * times]]
    keys = stream_keys(*(np.array(column, dtype=np.uint64) for column in (seeds, steps, identities)))
    expected = [[stream_key(*row, p) for p in PURPOSES] for row in zip(seeds, steps, identities, strict=True)]
    assert keys.tolist() == expected


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_gradient_is_not_kept(backend):
    """Only then does freeing gradients, or stepping in the backward pass, give memory back."""
    optimizer = make(backend=backend)
    give_gradients(optimizer, 0)
    grads = [weakref.ref(p.grad) for p in parameters_of(optimizer).values()]
    optimizer.step()
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None] * len(SHAPES)
