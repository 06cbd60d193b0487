"""The reference gives the same bits on every device: it uses no operation whose result torch leaves to the device.

On a GPU torch divides a tensor by a Python number by multiplying with the reciprocal, and adds and averages floats in
another order. This looks at every operation of real steps, not at the source: what is not called cannot differ.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import Case, at_step, build, gradient, random_case
from torch import Tensor
from torch.overrides import TorchFunctionMode

from masterless.formats import names, parse
from masterless.formats.storage import Storage
from masterless.step import reference

DIVISIONS = {"__truediv__", "__itruediv__", "div", "div_", "true_divide", "divide"}
REVERSED = {"__rtruediv__", "__rdiv__", "reciprocal", "rsqrt"}
# Not correctly rounded, or dependent on an order, in fp32.
INEXACT = {
    "exp",
    "exp2",
    "log",
    "log2",
    "pow",
    "__pow__",
    "tanh",
    "mean",
    "norm",
    "prod",
    "cumsum",
    "matmul",
    "addcdiv",
}


class Watch(TorchFunctionMode):
    """Raises an AssertionError for an operation on floats that devices compute differently."""

    def __init__(self) -> None:
        super().__init__()
        self.divisions = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            assert name not in REVERSED, f"{name}: divide a tensor by a tensor"
            if name in DIVISIONS:
                assert isinstance(args[1], Tensor), f"{name} by the number {args[1]}: divide by x.new_tensor(...)"
                self.divisions += 1
            assert name not in INEXACT or result.dtype == torch.float64, f"{name} of fp32 numbers"
            if name == "sum" and result.dtype == torch.float32:
                assert torch.equal(args[0], args[0].round()), "a sum of fractions: its order shows"
            if name == "sqrt":
                assert result.dtype == torch.float64, "sqrt of fp32 numbers: use formats.arithmetic.exact_sqrt"
        return result


def test_the_watch_sees_what_it_should():
    x = torch.ones(3)
    for forbidden in (
        lambda: x / 3.0,
        lambda: x.div(3),
        lambda: 1.0 / x,
        lambda: x.exp(),
        lambda: (x * 0.3).sum(),
        lambda: x.sqrt(),
    ):
        with pytest.raises(AssertionError), Watch():
            forbidden()
    with Watch() as watch:
        x / x.new_tensor(3.0)
    assert watch.divisions == 1


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_random_cases(seed):
    """60 cases over all rules, formats and roundings; three steps each."""
    rng = random.Random(seed)
    watch = Watch()
    for case in (random_case(rng) for _ in range(15)):
        task, generator = build(case), case.generator()
        for step in range(1, 4):
            task = at_step(task, case, step, gradient(case, generator))
            with watch:
                reference.step(task)
    assert watch.divisions > 0


@pytest.mark.parametrize("rule", ["adam", "adafactor", "adafactor_weight_units"])
def test_steps_with_statistics_of_the_whole(rule):
    case = Case(rule=rule, weight="int8:tensor", first="int4", second="factored", shape=(2, 9, 161))
    task = at_step(build(case), case, 1, gradient(case, case.generator()))
    with Watch() as watch:
        reference.step(task)
    assert watch.divisions > 0


@pytest.mark.parametrize("name", [n for n in names() if parse(n).kind != "none"])
def test_encoding_and_decoding(name):
    x = torch.randn(4, 3, 200, generator=torch.Generator().manual_seed(0)).abs()
    with Watch():
        Storage.zeros(parse(name), x.shape).encode_(x).decode()
