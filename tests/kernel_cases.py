"""Random steps for the kernel's tests: build a task, copy it, compare what two backends stored."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masterless.backends.cpu.backend import CpuBackend
from masterless.formats import SCALE_BITS, Format, as_first_moment, as_second_moment, names, parse, scaling
from masterless.formats.rounding import PURPOSES, ROUNDINGS, parameter_id, stream_key
from masterless.formats.storage import Storage
from masterless.step import reference
from masterless.step.dispatch import Turn
from masterless.step.reference import Task
from masterless.step.rules import RULES

WEIGHTS = [n for n in names() if parse(n).signed and parse(n).kind not in ("none", "factored")]
FIRSTS = [n for n in WEIGHTS if not parse(n).hidden and not parse(n).two_level] + ["none"]
SECONDS = [
    n
    for n in names()
    if parse(n).kind != "none" and not (parse(n).signed and parse(n).scaled and parse(n).family not in ("fp8", "fp4"))
]
# Vectors, tails of every kind, rows shorter than a chunk, stacks, and a row just above one span of the kernel.
SHAPES: list[tuple[int, ...]] = [
    (1,),
    (7,),
    (130,),
    (3, 128),
    (5, 200),
    (4, 33),
    (2, 1100),
    (3, 4, 48),
    (2, 3, 5, 5),
    (6, 384),
    (2, 9, 161),
]

GRADIENTS = ["zeros", "sparse", "constant", "denormal", "tiny", "huge", "mixed", "nan", "inf", "overflow"]

GROUPS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.99), "eps": 1e-8, "decoupled_weight_decay": True},
    "adam_update_units": {"betas": (0.8, 0.95), "eps": 1e-8, "decoupled_weight_decay": False},
    "adabelief": {"betas": (0.9, 0.999), "eps": 1e-16, "decoupled_weight_decay": True},
    "rmsprop": {"momentum": 0.9, "alpha": 0.99, "eps": 1e-8},
    "sgd": {"momentum": 0.9, "dampening": 0.1, "nesterov": False},
    "sgd_nesterov": {"momentum": 0.9, "dampening": 0.0, "nesterov": True},
    "lion": {"betas": (0.9, 0.99)},
    "adafactor": {"beta1": 0.9, "beta2_decay": -0.8, "eps": (1e-20, 1e-3), "d": 1.0},
}
GROUPS |= {f"{name}_weight_units": GROUPS[name] for name in ("adam", "rmsprop", "sgd", "sgd_nesterov", "adafactor")}


@dataclass
class Case:
    """A parameter's history: what is stored how, and what the gradients look like."""

    rule: str = "adam_weight_units"
    weight: str = "fp32"
    first: str = "int8"
    second: str = "log8"
    shape: tuple[int, ...] = (5, 200)
    rounding: str = "stochastic"
    weight_rounding: str = "stochastic"
    inject: bool = True
    policy: str = "held"
    grad: torch.dtype = torch.float32
    gradients: str = "normal"
    maximize: bool = False
    weight_decay: float = 0.1
    lr: float = 0.01
    weight_size: float = 0.05
    no_eps: bool = False
    first_row: int = 0
    seed: int = 0
    steps: int = 3

    def generator(self) -> torch.Generator:
        """A generator that depends on all of the case."""
        return torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))


def gradient(case: Case, generator: torch.Generator) -> Tensor:
    """One step's gradient of the kind that the case asks for."""
    g = torch.randn(case.shape, generator=generator) * torch.rand(case.shape, generator=generator).pow(4)
    kind = case.gradients
    if kind == "zeros":
        g.zero_()
    elif kind == "sparse":
        g *= torch.rand(case.shape, generator=generator) < 0.3
    elif kind == "constant":
        g.fill_(0.37)
    elif kind == "denormal":
        g *= 1e-41
    elif kind == "tiny":
        g *= 1e-19
    elif kind == "huge":
        g *= 1e18
    elif kind == "mixed":
        g *= 10.0 ** torch.randint(-30, 8, case.shape, generator=generator)
    elif kind in ("nan", "inf", "overflow"):
        bad = torch.rand(case.shape, generator=generator) < 0.002
        bad.view(-1)[-1] = True
        g[bad] = {"nan": float("nan"), "inf": float("inf"), "overflow": 1e20}[kind]
    return g.to(case.grad)


def _first(case: Case) -> Storage | None:
    return Storage.zeros(as_first_moment(case.first), case.shape) if RULES[case.rule].first else None


def _second(case: Case) -> Storage | None:
    if RULES[case.rule].second is None:
        return None
    fmt: Format = as_second_moment(case.second)
    if fmt.kind == "factored" and (len(case.shape) < 2 or case.rule == "adabelief"):
        fmt = parse("fp32")
    return Storage.zeros(fmt, case.shape)


def build(case: Case) -> Task:
    """The task of the first step, over freshly initialised storage."""
    generator = case.generator()
    weight = Storage.zeros(parse(case.weight), case.shape)
    weight.encode_((torch.randn(case.shape, generator=generator) * case.weight_size).clamp(-3e38, 3e38))
    second, rule = _second(case), RULES[case.rule]
    group = {"lr": case.lr, "weight_decay": case.weight_decay, **GROUPS[case.rule]}
    if case.no_eps:
        group["eps"] = (0.0, 1e-3) if "beta1" in group else 0.0
    if case.first == "none":
        group |= {"betas": (0.0, 0.99), "momentum": 0.0, "beta1": 0.0, "nesterov": False}
    return Task(
        name="case",
        rule=rule,
        scalars=rule.scalars(group, 1, 1),
        group=group,
        grad=gradient(case, generator),
        weight=weight,
        first=_first(case),
        second=second,
        rounding={"weight": case.weight_rounding, "exp_avg": case.rounding, "exp_avg_sq": case.rounding},
        keys=dict.fromkeys(PURPOSES, 0),
        inject=case.inject and rule.compensable,
        maximize=case.maximize,
        scale_policy=scaling.FROZEN if case.lr == 0.0 else case.policy,
        first_row=case.first_row,
    )


def at_step(task: Task, case: Case, step: int, grad: Tensor) -> Task:
    """The same parameter's task at a later step."""
    keys = {p: stream_key(case.seed, step, parameter_id("case"), p) for p in PURPOSES}
    return replace(task, scalars=task.rule.scalars(task.group, step, step), grad=grad, keys=keys)


def copy(task: Task) -> Task:
    """The task over storage of its own."""

    def clone(storage: Storage | None) -> Storage | None:
        if storage is None:
            return None
        return Storage(storage.format, storage.shape, {k: t.clone() for k, t in storage.tensors.items()})

    weight = clone(task.weight)
    assert weight is not None
    return replace(task, weight=weight, first=clone(task.first), second=clone(task.second))


def stored(task: Task) -> dict[str, Tensor]:
    """Every stored tensor as raw bytes, by name."""
    roles = {"weight": task.weight, "first": task.first, "second": task.second}
    return {
        f"{role}.{name}": tensor.contiguous().view(-1).view(torch.uint8)
        for role, storage in roles.items()
        if storage is not None
        for name, tensor in storage.tensors.items()
    }


def differences(expected: Task, actual: Task) -> list[str]:
    """The stored tensors in which two tasks differ."""
    right, left = stored(expected), stored(actual)
    return [f"{k}: {int((right[k] != left[k]).sum())} bytes" for k in right if not torch.equal(right[k], left[k])]


def turn_of(tasks: Sequence[Task]) -> Turn:
    """The turn of tasks that are complete, as the oracle takes them."""
    keys = np.array([[task.keys[purpose] for purpose in PURPOSES] for task in tasks], dtype=np.uint64)
    numbers = [(task.scalars, task.group, task.scale_policy) for task in tasks]
    return Turn([task.grad for task in tasks], keys.reshape(-1, len(PURPOSES)), numbers, range(len(tasks)), [False])


def step_on_the_kernel(tasks: Sequence[Task]) -> list[int]:
    """Performs the tasks on the compiled kernel; returns the counts of bad gradient elements."""
    cpu = CpuBackend()
    assert [cpu.refusal(task) for task in tasks] == [""] * len(tasks)
    with np.errstate(over="ignore"):  # scalars beyond fp32, which an optimizer refuses
        return cpu.step(cpu.prepare(tasks), turn_of(tasks)).bad.tolist()


def check(cases: Sequence[Case], perform: Callable[[Sequence[Task]], list[int]] = step_on_the_kernel) -> None:
    """Runs all cases for some steps on the reference and on a kernel, and asserts that every byte agrees."""
    expected = [build(case) for case in cases]
    actual = [copy(task) for task in expected]
    generators = [case.generator() for case in cases]
    for step in range(1, max(case.steps for case in cases) + 1):
        grads = [gradient(case, g) for case, g in zip(cases, generators, strict=True)]
        expected = [at_step(t, c, step, g) for t, c, g in zip(expected, cases, grads, strict=True)]
        actual = [at_step(t, c, step, g) for t, c, g in zip(actual, cases, grads, strict=True)]
        counts = [reference.step(task) for task in expected]
        assert perform(actual) == counts
        for case, right, left in zip(cases, expected, actual, strict=True):
            assert not differences(right, left), f"step {step} of {case}: {differences(right, left)}"


# Whole chunks, and even ends of rows.
CHUNK_SHAPES = [(40, 384), (2, 2176), (3, 576), (37, 96), (50, 32), (9, 192), (2, 1120)]
CHUNK_WEIGHTS = ["fp32", "bf16", "int8", "int8:128", "int6", "int4", "int4+4", "int4+4:32", "fp8", "int4:32"]

CHUNK_MOMENTS = [
    *itertools.product(("int4", "int2", "int8", "dynamic4"), ("log2", "log4", "log8", "factored")),
    ("int4:row", "log2:row"),
    ("int4", "log4:row"),
]


def chunk_cases(weight: str, shape: tuple[int, int]) -> list[Case]:
    """What presets are made of, in even chunks: rules, moments, gradients, rounding, eps."""
    rng = random.Random(f"{weight}{shape}")
    return [
        Case(
            rule,
            weight,
            first,
            second,
            shape,
            weight_rounding=rng.choice(("nearest", "stochastic")),
            inject=rule == "adam_weight_units" and rng.random() < 0.7,
            grad=torch.float32 if weight == "fp32" or rng.random() < 0.5 else torch.bfloat16,
            gradients=rng.choice(("normal", "normal", "zeros", "sparse", "tiny", "huge", "mixed")),
            no_eps=rng.random() < 0.3,
            maximize=rng.random() < 0.1,
            lr=rng.choice((0.01, 1e-4)),
        )
        for rule in ("adam", "adam_update_units", "adam_weight_units")
        for first, second in CHUNK_MOMENTS
    ]


def random_case(rng: random.Random) -> Case:
    """Any rule with any formats, granularities, scale kinds, roundings, policies, shapes and gradients."""

    def variant(name: str, *granularities: str) -> str:
        fmt = parse(name)
        if not fmt.scaled or fmt.fixed:
            return name
        granularity = rng.choice(["", "", "", ":32", ":64", ":256", ":1024", ":row", *granularities])
        scale = rng.choice(["", "", ":fp32", ":pow2", ":e8m0"]) if fmt.kind != "log" else ""
        return name + granularity + scale

    first, rule = rng.choice(FIRSTS), rng.choice(list(RULES))
    return Case(
        rule=rule,
        weight=variant(rng.choice(WEIGHTS), ":tensor", ":tensor"),
        first=variant(first),
        second=variant(rng.choice(SECONDS)),
        shape=rng.choice(SHAPES),
        rounding=rng.choice(ROUNDINGS),
        weight_rounding=rng.choice(["nearest", "stochastic"]),
        inject=rng.random() < 0.7 and first != "none" and RULES[rule].compensable,
        policy=rng.choice(["held", "recompute"]),
        grad=rng.choice([torch.float32, torch.bfloat16]),
        gradients=rng.choice(["normal", "normal", *GRADIENTS]),
        maximize=rng.random() < 0.2,
        weight_decay=rng.choice([0.0, 0.1]),
        lr=rng.choice([0.3, 0.01, 1e-4, 0.0]),
        weight_size=rng.choice([0.05, 0.05, 1e-25, 1e25]),
        first_row=rng.choice([0, 7]),
        seed=rng.randrange(1000),
    )


def hostile_case(rng: random.Random) -> Case:
    """As `random_case`, with learning rates, denominators and weights that make huge or non-finite results."""
    return replace(
        random_case(rng),
        lr=rng.choice([0.01, 1e10, 1e30, 1e38, 3e38, float("inf"), float("nan")]),
        no_eps=rng.random() < 0.5,
        weight_size=rng.choice([0.05, 1e-38, 1e30, 1e37, 1e38]),
        gradients=rng.choice(["normal", "sparse", "zeros", "tiny", "huge", "mixed", "nan"]),
        steps=2,
    )


def covering(count: int, seed: int = 0, shapes: Sequence[tuple[int, ...]] = ()) -> list[Case]:
    """Random cases in which every format, rule, rounding, shape and kind of gradient has its turn."""
    rng = random.Random(seed)
    named = [WEIGHTS, FIRSTS, SECONDS, RULES, shapes or SHAPES, [*GRADIENTS, "normal", "normal"], ROUNDINGS]
    lists: list[list[Any]] = [list(values) for values in named]
    for values in lists:
        rng.shuffle(values)
    cases = []
    for i in range(count):
        weight, first, second, rule, shape, gradients, rounding = (values[i % len(values)] for values in lists)
        drawn = random_case(rng)

        def variant(name: str, like: str) -> str:
            fmt = parse(name)
            options = like.split(":")[1:] if fmt.scaled and not fmt.fixed else []
            return ":".join([name, *(o for o in options if not (fmt.kind == "log" and o in SCALE_BITS))])

        inject = drawn.inject and first != "none" and RULES[rule].compensable
        second = variant(second, drawn.second.replace(":tensor", ""))
        first = variant(first, drawn.first.replace(":tensor", ""))
        chosen = replace(drawn, weight=variant(weight, drawn.weight), first=first, second=second, rule=rule)
        cases.append(replace(chosen, shape=shape, gradients=gradients, rounding=rounding, inject=inject))
    return cases
