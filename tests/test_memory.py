"""Memory is a number: predicted bytes are live bytes, and the issue's figures hold."""

import itertools

import pytest
import torch
from backends import reference_backend  # noqa: F401
from torch import nn

import masterless as ml
from masterless.formats import as_first_moment, as_second_moment, names, parse
from masterless.formats.storage import Storage, predicted_bytes

pytestmark = pytest.mark.usefixtures("reference_backend")

AWKWARD = [(), (1,), (0,), (33,), (3, 0), (1, 1), (5, 31), (5, 32), (3, 129), (2, 1000), (7, 3, 3, 3), (2, 5, 257)]


def allowed(role) -> list[str]:
    found = []
    for name in names():
        try:
            role(name)
        except ml.FormatError:
            continue
        found.append(name)
    return found


FIRST = [n for n in allowed(as_first_moment) if n != "none"]
SECOND = allowed(as_second_moment)


@pytest.mark.parametrize("name", names())
def test_predicted_bytes_are_live_bytes_for_every_format_and_granularity(name):
    fmt = parse(name)
    free = fmt.scaled and not fmt.fixed
    options = ["", ":32", ":1024", ":row", ":tensor"] if free else [""]
    kinds = ["", ":fp32", ":pow2", ":e8m0"] if free and fmt.kind != "log" else [""]
    for option, kind, shape in itertools.product(options, kinds, AWKWARD):
        full = parse(name + option + kind)
        live = sum(t.numel() * t.element_size() for t in Storage.zeros(full, shape).tensors.values())
        assert predicted_bytes(full, shape) == live, (str(full), shape)


@pytest.mark.parametrize("quantize", ["matrices", "all"])
@pytest.mark.parametrize(("first", "second"), [*((f, "log2") for f in FIRST), *(("int4", s) for s in SECOND)])
def test_an_optimizers_prediction_is_what_it_then_allocates(first, second, quantize):
    params = [nn.Parameter(torch.ones(shape)) for shape in AWKWARD]
    optimizer = ml.AdamW(params, exp_avg=first, exp_avg_sq=second, quantize_states=quantize)
    predicted = optimizer.predicted_state_bytes()
    assert not optimizer.state  # nothing was allocated for that
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert predicted == optimizer.predicted_state_bytes() == optimizer.state_bytes()
    everything = sum(
        value.numel() * value.element_size() for state in optimizer.state.values() for value in state.values()
    )
    assert everything == predicted + 8 * len(params)  # beside the moments: one step counter each


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ml.SGD, {}),
        (ml.SGD, {"momentum": 0.9}),
        (ml.RMSprop, {}),
        (ml.RMSprop, {"momentum": 0.9}),
        (ml.Lion, {}),
        (ml.AdaBelief, {}),
        (ml.Adafactor, {}),
        (ml.Adafactor, {"beta1": 0.9}),
        (ml.AdamW, {"betas": (0.0, 0.9), "exp_avg": "none"}),
    ],
)
def test_the_other_optimizers_too(cls, options):
    params = [nn.Parameter(torch.ones(shape)) for shape in AWKWARD]
    optimizer = cls(params, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.predicted_state_bytes() == optimizer.state_bytes()


@pytest.mark.parametrize(
    ("first", "second", "largest", "exact"),
    [
        # rows of 1000: 7 blocks of 128 and a tail of 104. int4: 500 bytes and 8 scales; int2: 250; log2: 250 and 32
        ("int4", "log2", 0.82, 1024 * (500 + 16 + 250 + 32)),
        ("int2", "log2", 0.57, 1024 * (250 + 16 + 250 + 32)),
    ],
)
def test_state_bytes_of_the_issue(first, second, largest, exact):
    p = nn.Parameter(torch.zeros(1024, 1000))
    optimizer = ml.AdamW([p], exp_avg=first, exp_avg_sq=second)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state_bytes() == optimizer.predicted_state_bytes() == exact
    assert optimizer.state_bytes() / p.numel() <= largest


@pytest.mark.parametrize("name", names())
def test_long_rows_cost_what_the_format_says(name):
    """On rows of 2^20 elements the prediction is bits_per_element to the metadata of a row, tensor or column."""
    fmt = parse(name)
    rows, cols = 64, 2**20
    bits = predicted_bytes(fmt, (rows, cols)) * 8 / (rows * cols)
    slack = 32 * (rows + cols) / (rows * cols) if fmt.kind == "factored" else 32 / cols if fmt.two_level else 0.0
    assert fmt.bits_per_element <= bits <= fmt.bits_per_element + slack


def test_predicting_allocates_nothing():
    """A matrix of 10^12 elements: 4.125 bits each."""
    assert predicted_bytes(parse("int4"), (2**20, 2**20)) == 2**40 * 4.125 / 8
