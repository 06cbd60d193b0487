"""Runs the GPU kernels in Triton's interpreter, in a process of its own: `python tests/triton_worker.py SUITE [COUNT]`.

Whether Triton interprets is decided when it is imported, for the whole process.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import kernel_cases
import numpy as np
import torch
import triton
import triton.language as tl
from kernel_cases import SECONDS, WEIGHTS, Case, covering
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import masterless
from masterless.backends.triton import numbers
from masterless.backends.triton.backend import TritonBackend
from masterless.formats import arithmetic, parse
from masterless.formats.storage import Storage
from masterless.lab.bench import parity
from masterless.step import dispatch
from masterless.step.reference import Task

BACKEND = TritonBackend()


def _call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """A call between our kernels' functions.

    Triton would look through all of its language for what to patch, in every call: most of the interpreter's time. It
    is patched already, because a kernel is running.
    """
    if function.fn.__module__.startswith("masterless"):
        return function.rewrite()(*args, **kwargs)
    return _slow_call(function, *args, **kwargs)


_slow_call = interpreter.InterpretedFunction.__call__
interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]


def perform(tasks: Sequence[Task]) -> list[int]:
    """Steps tasks in the interpreter."""
    assert [BACKEND.refusal(task) for task in tasks] == [""] * len(tasks)
    with np.errstate(over="ignore"):  # scalars beyond fp32, which an optimizer refuses
        return BACKEND.step(BACKEND.prepare(tasks), kernel_cases.turn_of(tasks)).bad.tolist()


def check(cases: Sequence[Case]) -> None:
    """Every stored byte equals the reference's, case by case."""
    for case in cases:
        kernel_cases.check([replace(case, steps=2)], perform)


def hostile(count: int, seed: int = 0) -> list[Case]:
    """Cases with results that are huge or not finite."""
    rng = random.Random(1000 + seed)
    return [kernel_cases.hostile_case(rng) for _ in range(count)]


def main_formats() -> list[Case]:
    """What presets use, on tiles without gaps and with them."""
    formats = [
        ("int4", "int4", "log2"),
        ("int4+4", "int2", "factored"),
        ("int8", "int4", "log4"),
        ("fp8", "int4", "log2"),
    ]
    return [
        Case(weight=w, first=m, second=v, shape=shape, grad=torch.bfloat16)
        for w, m, v in formats
        for shape in ((5, 256), (2, 200))
    ]


def long_rows() -> list[Case]:
    """Rows that are one tile and longer than a program."""
    return [
        Case(weight=w, first=m, second=v, shape=(2, 2100), gradients=g)
        for w, m, v, g in (
            ("int4:row", "int8:row", "log4:row", "normal"),
            ("fp32", "int4", "log2:row", "sparse"),
            ("fp8:row", "dynamic4:row", "ufp8", "nan"),
            ("int4:row", "int4", "log4", "normal"),
        )
    ]


def inverse_roots() -> None:
    """Adam where its second moment is not exact, and in part zero: eps is zero, or its square is, or neither."""
    rules = ("adam", "adam_update_units", "adam_weight_units")
    seconds = ("log2", "log4", "factored", "fp8")
    for eps in (0.0, 1e-30, 1e-8):
        groups = {rule: {**kernel_cases.GROUPS[rule], "eps": eps} for rule in rules}
        with mock.patch.dict(kernel_cases.GROUPS, groups):
            check([Case(r, "int4", "fp32", v, (3, 128), gradients="mixed") for r in rules for v in seconds])


@triton.jit
def _arithmetic_kernel(a, b, c, sums, roots, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    tl.store(sums + i, numbers.fma(x, tl.load(b + i), tl.load(c + i)))
    tl.store(roots + i, numbers.inverse_root(tl.abs(x)))


def sums_of_products() -> None:
    """The interpreter has no fused multiply-add of its own: ours is the specification's, and so are inverse roots.

    Numbers of few bits make sums that are halves of a last place; a bit far below them then decides.
    """
    generator = torch.Generator().manual_seed(0)
    n = 1 << 15

    def drawn(bits: int, spread: int) -> torch.Tensor:
        whole = torch.randint(1 - (1 << bits), 1 << bits, (n,), generator=generator)
        return whole * torch.exp2(torch.randint(-spread, spread + 1, (n,), generator=generator).float())

    sign = torch.sign(drawn(2, 0) + 0.5)
    one, tie = sign * (1.0 + drawn(22, 0).abs() * 2.0**-22), [2.0**-12 * (1.0 + drawn(2, 0) * 2.0**-23) for _ in "ab"]
    ends = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 2.0**-149, 2.0**-126, 1.0])
    some = [ends[torch.randint(len(ends), (n,), generator=generator)] for _ in range(3)]
    bits = [torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32) for _ in range(3)]
    for a, b, c in (
        (drawn(24, 20), drawn(24, 20), drawn(24, 40)),
        (drawn(4, 20), drawn(4, 20), drawn(24, 20)),
        (tie[0], tie[1], one),
        (tie[0], tie[1], one + 2.0**-23),
        (drawn(24, 10) * 2.0**-80, drawn(24, 10) * 2.0**-80, drawn(24, 10) * 2.0**-140),
        (some[0], some[1], some[2]),
        (bits[0].view(torch.float32), bits[1].view(torch.float32), bits[2].view(torch.float32)),
    ):
        sums, roots = torch.empty(2, n)
        with np.errstate(all="ignore"):
            _arithmetic_kernel[(1,)](a, b, c, sums, roots, n)
        for found, expected in ((sums, arithmetic.fma(a, b, c)), (roots, arithmetic.inverse_root(a.abs()))):
            ours, theirs = (torch.where(x.isnan(), 7.0, x).view(torch.int32) for x in (found, expected))
            assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(ours, theirs)


def decoding() -> None:
    """Every format decodes to the bit."""
    generator = torch.Generator().manual_seed(1)
    for name in sorted({*WEIGHTS, *SECONDS} - {"factored", "fp32", "bf16"}):
        for shape in ((3, 128), (2, 3, 50)):
            x = torch.randn(shape, generator=generator)
            storage = Storage.zeros(parse(name), x.shape).encode_(x if parse(name).signed else x.abs())
            for visible in (True, False):
                expected = storage.decode(visible)
                assert torch.equal(BACKEND.decode(storage, torch.float32, visible), expected), (name, shape)
                half = BACKEND.decode(storage, torch.bfloat16, visible)
                assert torch.equal(half, expected.to(torch.bfloat16)), (name, shape)


def every_code() -> None:
    """Small floats are made of their bits: every byte decodes as the table says, also those that no encoder writes."""
    for name in ("fp8", "ufp8", "mxfp8", "mxfp8-e5m2", "fp8+32"):
        storage = Storage.zeros(parse(name), (2, 128)).encode_(torch.ones(2, 128))
        storage.tensors["codes"].copy_(torch.arange(256).view(2, 128))
        found, expected = BACKEND.decode(storage, torch.float32), storage.decode(visible=True)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), name


def stopping() -> None:
    """One launch over tensors of several kinds: a gradient that must be finite stops all of them, and only then."""
    cases = [
        Case(weight="int4", first="int4", second="log2", shape=(3, 200)),
        Case(weight="int4", first="int4", second="log2", shape=(4, 128)),
        Case(weight="int8:tensor", first="int4", second="factored", shape=(4, 128)),
        Case(weight="fp32", first="fp32", second="fp32", shape=(7,), rule="adafactor"),
    ]
    kernel_cases.check(cases, perform)
    tasks = [kernel_cases.at_step(kernel_cases.build(c), c, 1, kernel_cases.build(c).grad) for c in cases]
    tasks[1].grad[0, 5] = float("nan")
    before = [kernel_cases.copy(task) for task in tasks]
    prepared = BACKEND.prepare(tasks)
    turn = replace(kernel_cases.turn_of(tasks), must_be_finite=[True, True, False, True])
    survey = BACKEND.step(prepared, turn, only_survey=True)
    assert (survey.bad.tolist(), survey.moved) == ([0, 1, 0, 0], False)
    outcome = BACKEND.step(prepared, turn)
    assert (outcome.bad.tolist(), outcome.moved) == ([0, 1, 0, 0], False)
    assert [kernel_cases.differences(a, b) for a, b in zip(before, tasks, strict=True)] == [[]] * 4
    outcome = BACKEND.step(prepared, replace(turn, must_be_finite=[True, False, True, True]))
    assert (outcome.bad.tolist(), outcome.moved) == ([0, 1, 0, 0], True)
    assert all(kernel_cases.differences(a, b) for a, b in zip(before, tasks, strict=True))


def optimizing() -> None:
    """An optimizer whose device runs behind: nothing bad is written, and the next call says so and takes it back."""
    dispatch.register("cpu", BACKEND)
    for nonfinite in ("raise", "raise-now", "skip"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 1))
        masterless.quantize_(model, "int4")
        opt = masterless.AdamW(model.named_parameters(), exp_avg="int4", exp_avg_sq="log2", nonfinite=nonfinite)
        x = torch.randn(8, 128)

        def backward(model: torch.nn.Module = model, x: torch.Tensor = x) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        backward()
        opt.step()
        assert (opt.plan.unsettled == []) == (nonfinite == "raise-now")
        backward()
        model[0].weight.grad[1, 3] = float("nan")
        before = _bytes(model, opt)
        if nonfinite == "raise-now":
            assert "No weight and no state has changed" in _error(opt.step)
            assert _bytes(model, opt) == before
            continue
        opt.step()  # runs ahead
        if nonfinite == "skip":
            opt.synchronize()
            assert opt.nonfinite_counts == {"0.weight": 1}
            continue
        backward()
        assert "0.weight (1 elements)" in _error(opt.step)
        assert _bytes(model, opt) == before
        opt.step()
        opt.synchronize()
        assert {int(state["step"]) for state in opt.state.values()} == {2}
        assert opt.state_dict()["state"]


class NoWaiting(TorchDispatchMode):
    """Refuses every operation whose result the host would have to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_assert_async")
        assert func._schema.name.removeprefix("aten::") not in waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def by_device() -> None:
    """A step that the device repeats by itself equals the one that the host computes, and never waits."""
    dispatch.register("cpu", BACKEND)
    with NoWaiting():
        assert "waits for the device" in _error(lambda: float(torch.ones(2).sum()))
    low = {"exp_avg": "int4", "exp_avg_sq": "log2"}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (masterless.AdamW, low),
        (masterless.Adam, {**low, "weight_decay": 0.1, "error_compensation": False, "exp_avg_sq": "factored"}),
        (masterless.SGD, {"momentum": 0.9, "dampening": 0.2, "momentum_buffer": "int4", "weight_decay": 0.01}),
        (masterless.SGD, {"momentum": 0.9, "nesterov": True, "momentum_buffer": "int8", "nonfinite": "skip"}),
        (masterless.RMSprop, {"momentum": 0.8, "momentum_buffer": "int4", "square_avg": "log4"}),
        (masterless.Lion, {"exp_avg": "int4", "error_compensation": False, "scale_policy": "recompute"}),
    ]
    for kind, options in kinds:
        sides = []
        for _ in range(2):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(128, 32, bias=kind is masterless.AdamW))
            masterless.quantize_(model, "int4")
            lr = torch.tensor(1e-2)
            sides.append((model, kind(model.named_parameters(), **{"lr": lr, "seed": 7, **options}), lr))
        (model, opt, _), (twin, other, _) = sides
        step, rates = None, [1e-2, 0.0, 1e-3, float("inf")]
        for i, rate in enumerate(rates):
            for net, _, lr in sides:
                lr.fill_(rate)
                net.zero_grad()
                x = torch.randn(8, 128, generator=torch.Generator().manual_seed(i))
                net(x).square().mean().backward()
                if i == 2:
                    net[0].weight.grad[2, 3] = float("nan")
            try:
                opt.step()
                opt.synchronize()
            except (RuntimeError, ValueError) as error:
                expected = str(error)
            else:
                expected = ""
            step = step or other.device_step()
            with NoWaiting(), np.errstate(all="ignore"):
                step()
            found = _error(other.synchronize) if expected else other.synchronize()
            if i == 2:
                assert (opt.nonfinite_counts == other.nonfinite_counts) and (expected == (found or ""))
            if rate == float("inf"):
                assert "would not be finite" in expected and "would not have been finite" in str(found)
            assert _bytes(model, opt) == _bytes(twin, other), (kind, options, i)
        for _, _, lr in sides:
            lr.fill_(2e-3)
        opt.step()  # and on with the host's steps, from the device's counts
        other.step()
        opt.step()
        step()
        opt.synchronize(), other.synchronize()
        assert _bytes(model, opt) == _bytes(twin, other), (kind, options)
        other.load_state_dict(other.state_dict())
        assert "call device_step() again" in _error(step)
        assert {int(s["step"]) for s in other.state.values()} == {5 if options.get("nonfinite") == "skip" else 4}


def refusing() -> None:
    """What cannot be left to the device is said when the step is made."""
    dispatch.register("cpu", BACKEND)
    lr = {"lr": torch.tensor(1e-2)}
    for kind, options, message in (
        (masterless.AdamW, {"lr": 1e-2}, "lr=0.01 would never change; pass lr=torch.tensor"),
        (masterless.AdamW, {**lr, "nonfinite": "raise-now"}, "use 'raise' or 'skip'"),
        (masterless.AdamW, {**lr, "reset": 10, "exp_avg_sq": "uint8"}, "pass reset=None"),
        (masterless.Adafactor, lr, "rule 'adafactor' are computed on the host"),
    ):
        model = torch.nn.Linear(128, 32, bias=False)
        opt = kind(model.parameters(), **options)
        assert "run a backward pass first" in _error(opt.device_step)
        model(torch.ones(1, 128)).sum().backward()
        found = _error(opt.device_step)
        assert message in found, found


def doctor() -> None:
    """What `masterless doctor` checks on a GPU, as far as there are no graphs here."""
    assert parity.recorded_differences("cpu") == []


def _bytes(model: torch.nn.Module, opt: masterless.AdamW) -> dict[str, bytes]:
    tensors = {f"w.{k}": t for k, t in model[0].weight.stored.tensors.items()}
    tensors |= {f"{i}.{k}": t for i, state in enumerate(opt.state.values()) for k, t in state.items()}
    return {k: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for k, t in tensors.items()}


def _error(step: Callable[[], object]) -> str:
    try:
        step()
    except (RuntimeError, ValueError, AssertionError) as error:
        return str(error)
    raise AssertionError("no error")


SUITES = {
    "main": lambda count: check(main_formats()),
    "covering": lambda count: check(covering(count)),
    "hostile": lambda count: check(hostile(count)),
    "rows": lambda count: check(long_rows()),
    "roots": lambda count: (sums_of_products(), inverse_roots()),
    "decoding": lambda count: (decoding(), every_code()),
    "stopping": lambda count: stopping(),
    "optimizing": lambda count: optimizing(),
    "by_device": lambda count: (refusing(), by_device(), doctor()),
    "sweep": lambda count: [check([*covering(20, seed), *hostile(10, seed)]) for seed in range(count)],
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    SUITES[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) > 2 else 1)
