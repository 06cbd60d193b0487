"""The default rounding of the log code: Adam's steps have the length that an exact second moment gives them.

`benchmarks/log_rounding.py` has the experiment and its table; this holds its result within bands.
"""

import sys
from pathlib import Path

import pytest
import torch

from masterless.formats import parse

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import log_rounding


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(log_rounding, "ROWS", 8)
    monkeypatch.setattr(log_rounding, "COLS", 512)


def factor(name, rounding, beta2, spread):
    return log_rounding.step_factor(parse(name), log_rounding.shipped(rounding), beta2, spread)


# At two bits a seventh of a block lies below the lowest level, is raised to it and takes shorter steps.
BANDS = {"log2": (0.90, 1.08), "log3": (0.95, 1.08), "log4": (0.96, 1.06), "log8": (0.98, 1.02)}


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("beta2", log_rounding.BETAS)
@pytest.mark.parametrize("spread", log_rounding.SPREADS)
def test_steps_are_as_long_as_with_an_exact_second_moment(name, beta2, spread):
    low, high = BANDS[name]
    assert low < factor(name, "stochastic", beta2, spread) < high


def test_the_other_roundings_are_hidden_learning_rate_factors():
    """The check above can fail: at two bits, columns of different scales, steps are 1.8 and 0.75 times as long."""
    assert factor("log2", "stochastic-value", 0.95, 1.0) > 1.5
    assert factor("log2", "stochastic-log", 0.95, 1.0) < 0.85


def test_every_size_of_gradient_has_the_same_factor():
    """Not only the mean: columns of each size, but for the smallest eighth, which is raised to the lowest level."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randn(512, generator=generator)
    scale, store = torch.exp(order), log_rounding.shipped("stochastic")(parse("log2"))
    exact = stored = torch.zeros(8, 512)
    ratios = torch.zeros(8, 512)
    for step in range(1, 201):
        squares = (torch.randn(8, 512, generator=generator) * scale) ** 2
        exact, used = 0.95 * exact + 0.05 * squares, 0.95 * stored + 0.05 * squares
        stored = store(used, step)
        if step > 160:
            ratios += (exact / used).sqrt() / 40
    bins = [float(ratios[:, order.argsort()[i : i + 64]].mean()) for i in range(0, 512, 64)]
    assert all(0.9 < found < 1.1 for found in bins[1:]) and 0.5 < bins[0] < 0.8
