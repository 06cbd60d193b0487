"""Any sequence of public calls ends in the reference's result or in a Python exception.

Two optimizers of the same history, one on the kernel and one on the reference, go through random sequences of steps,
option changes, loads, replaced tensors, group edits, resets, copies. After every call their bytes agree, and what one
refuses the other refuses.

``MASTERLESS_MACHINE_EXAMPLES=3000 pytest tests/test_optimizer_machine.py`` runs it for longer, with other seeds;
``MASTERLESS_KERNEL=/path/to/a/sanitizer/build`` under another kernel.
"""

import copy
import io
import os
import pickle

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import masterless as ml
from masterless.backends.cpu import library

pytestmark = pytest.mark.skipif(not library.available(), reason="no compiled kernel")
EXAMPLES = int(os.environ.get("MASTERLESS_MACHINE_EXAMPLES", "150"))
SHAPES = {"a": (5, 200), "b": (70,), "c": (2, 3, 64), "d": (4, 130)}
REFUSALS = (ValueError, RuntimeError, TypeError)

OPTIMIZERS = {
    "adamw": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "adamw factored": (ml.AdamW, {"exp_avg": "int2", "exp_avg_sq": "factored", "betas": (0.5, 0.95)}),
    "adamw 8": (ml.AdamW, {"exp_avg": "dynamic8", "exp_avg_sq": "log8", "quantize_states": "all"}),
    "sgd": (ml.SGD, {"momentum": 0.9, "momentum_buffer": "int8"}),
    "sgd plain": (ml.SGD, {}),
    "rmsprop": (ml.RMSprop, {"momentum": 0.5, "square_avg": "log4"}),
    "adafactor": (ml.Adafactor, {"beta1": 0.8, "exp_avg": "fp8"}),
    "lion": (ml.Lion, {"exp_avg": "int3"}),
}
OPTIONS = [
    {"lr": 0.0},
    {"lr": 0.3},
    {"lr": float("nan")},
    {"lr": float("inf")},
    {"weight_decay": 0.0},
    {"rounding": "nearest"},
    {"rounding": "stochastic"},
    {"weight_rounding": "nearest"},
    {"error_compensation": False},
    {"error_compensation": None},
    {"scale_policy": "recompute"},
    {"scale_policy": "held"},
    {"maximize": True},
    {"seed": 5},
    {"nonfinite": "skip"},
    {"nonfinite": "raise"},
    {"exp_avg": "int8"},
    {"exp_avg": "int4"},
    {"exp_avg_sq": "factored"},
    {"exp_avg_sq": "log2"},
    {"quantize_states": "all"},
    {"quantize_states": "matrices"},
]

GRADIENTS = ["normal", "normal", "normal", "normal", "zero", "tiny", "huge", "bad"]
REPLACEMENTS = ["clone", "cut", "cast", "free", "transpose", "data clone", "data cut"]


def _tensors(optimizer):
    found = {}
    for _, p, name in optimizer.parameters():
        own = dict(p.stored.tensors) if isinstance(p, ml.QuantizedTensor) else {"values": p.detach()}
        own |= {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, torch.Tensor)}
        found |= {f"{name}.{k}": v for k, v in own.items()}
    return found


def _bytes(tensor):
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
        return b"freed"
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Machine(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(sorted(OPTIMIZERS)), weight=st.sampled_from(["int4", "fp8", "int4+4", "int8:row"]))
    def build(self, kind, weight):
        cls, options = OPTIMIZERS[kind]
        self.cls = cls
        self.pair = []
        for backend in ("auto", "reference"):
            generator = torch.Generator().manual_seed(3)
            named = []
            for name, shape in SHAPES.items():
                dense = torch.randn(shape, generator=generator) * 0.05
                p = nn.Parameter(ml.QuantizedTensor.from_dense(dense, weight) if name in "cd" else dense)
                named.append((name, p))
            self.pair.append(cls(named, lr=1e-2, backend=backend, **options))

    def both(self, action):
        """Does something to both; either both succeed, or both refuse with the same kind of error."""
        outcomes = []
        for optimizer in self.pair:
            try:
                action(optimizer)
                outcomes.append(None)
            except REFUSALS as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], outcomes

    @rule(seed=st.integers(0, 99), kind=st.sampled_from(GRADIENTS), skip=st.booleans())
    def step(self, seed, kind, skip):
        def act(optimizer):
            for i, (_, p, _) in enumerate(optimizer.parameters()):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * i + seed))
                g = g * {"zero": 0.0, "tiny": 1e-30, "huge": 1e15}.get(kind, 1.0)
                if kind == "bad" and g.numel():
                    g.view(-1)[seed % g.numel()] = float("nan")
                p.grad = None if skip and i == seed % 4 else g
            optimizer.step()

        self.both(act)

    @rule(options=st.sampled_from(OPTIONS))
    def set_options(self, options):
        known = [o for o in options if o in self.pair[0].param_groups[0]]
        self.both(lambda optimizer: [optimizer.param_groups[0].update({o: options[o]}) for o in known])

    @rule(which=st.integers(0, 30), how=st.sampled_from(REPLACEMENTS))
    def replace_a_state(self, which, how):
        def act(optimizer):
            keys = [(p, k) for _, p, _ in optimizer.parameters() for k in optimizer.state.get(p, {})]
            if not keys:
                return
            p, key = keys[which % len(keys)]
            old = optimizer.state[p][key]
            new = torch.zeros_like(old) if _bytes(old) == b"freed" else old.clone()
            if how.endswith("cut") and new.dim():
                new = new[:1]
            elif how == "cast":
                new = new.to(torch.float16)
            elif how == "free" and new.dim():
                new.untyped_storage().resize_(0)
            elif how == "transpose" and new.dim() == 2:
                new = new.t().contiguous().t() if new.shape[0] != new.shape[1] else new
            if how.startswith("data"):
                old.data = new
            else:
                optimizer.state[p][key] = new

        self.both(act)

    @rule(name=st.sampled_from("ab"), how=st.sampled_from(["clone", "larger", "columns", "bf16"]))
    def replace_a_weight(self, name, how):
        def act(optimizer):
            p = {n: p for _, p, n in optimizer.parameters()}[name]
            p.grad = None
            if how == "clone":
                p.data = p.data.clone()
            elif how == "larger":
                p.data = torch.ones(SHAPES[name]) if p.shape != SHAPES[name] else torch.ones(60, *p.shape[1:])
            elif how == "columns" and p.dim() == 2:
                p.data = p.data.t().contiguous().t()
            elif how == "bf16":
                p.data = p.data.to(torch.bfloat16 if p.dtype == torch.float32 else torch.float32)

        self.both(act)

    def whole(self):
        """Whether all memory is there: torch's own copies of a freed tensor hold whatever they find."""
        return all(_bytes(t) != b"freed" for optimizer in self.pair for t in _tensors(optimizer).values())

    @precondition(lambda self: self.whole())
    @rule()
    def copy(self):
        self.pair = [copy.deepcopy(optimizer) for optimizer in self.pair]

    @precondition(lambda self: self.whole())
    @rule()
    def pickled(self):
        self.pair = [pickle.loads(pickle.dumps(optimizer)) for optimizer in self.pair]

    @rule(through_a_file=st.booleans())
    def load(self, through_a_file):
        def act(optimizer):
            state = optimizer.state_dict()
            if through_a_file:
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                state = torch.load(file, weights_only=True)
            backend = optimizer.param_groups[0]["backend"]
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:
                group["backend"] = backend

        self.both(act)

    @rule(mode=st.sampled_from(["hard", "soft"]), states=st.sampled_from([None, "all"]))
    def reset(self, mode, states):
        self.both(lambda optimizer: optimizer.reset_state(states=states, mode=mode))

    @rule(weights=st.sampled_from([None, "int8", "int4+4"]))
    def trade(self, weights):
        self.both(lambda optimizer: ml.trade_momentum_(optimizer, weights))

    @rule()
    def forget(self):
        self.both(lambda optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0], None))

    @rule()
    def remove_and_add(self):
        def act(optimizer):
            groups = optimizer.param_groups
            if len(groups) == 1 and len(groups[0]["params"]) == len(SHAPES):
                p, name = groups[0]["params"].pop(), groups[0]["param_names"].pop()
                optimizer.add_param_group({"params": [(name, p)], "lr": 0.05})

        self.both(act)

    @invariant()
    def they_agree(self):
        if hasattr(self, "pair"):
            left, right = (_tensors(optimizer) for optimizer in self.pair)
            assert left.keys() == right.keys()
            assert [k for k in left if _bytes(left[k]) != _bytes(right[k])] == []


Machine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    derandomize="MASTERLESS_MACHINE_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TestMachine = pytest.mark.timeout(0)(Machine.TestCase)
