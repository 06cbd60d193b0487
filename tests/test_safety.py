"""Bad gradients touch nothing stored, and coordinates without gradient never move."""

import pytest
import torch
from backends import every_backend  # noqa: F401
from torch import Tensor, nn

import masterless as ml
from masterless.formats import parse
from masterless.formats.layout import CHUNK
from masterless.formats.packing import chunk_bytes
from masterless.formats.storage import Storage

pytestmark = pytest.mark.usefixtures("every_backend")

ROWS, COLS = 4, 700  # six chunks a row, the last of 60
SQUARE_OVERFLOWS = 1.9e19  # finite, but its square is not
LARGEST = 1.8e19  # its square is the largest that is finite
CONFIGURATIONS = {
    "AdamW fp32": (ml.AdamW, {"exp_avg": "fp32", "exp_avg_sq": "fp32"}),
    "AdamW bf16": (ml.AdamW, {"exp_avg": "bf16", "exp_avg_sq": "bf16"}),
    "AdamW int4/log2": (ml.AdamW, {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "AdamW int3/log3": (ml.AdamW, {"exp_avg": "int3", "exp_avg_sq": "log3", "moment_units": "gradient"}),
    "AdamW int8:32/log8": (ml.AdamW, {"exp_avg": "int8:32", "exp_avg_sq": "log8"}),
    "AdamW int4:256/log4": (ml.AdamW, {"exp_avg": "int4:256:fp32", "exp_avg_sq": "log4"}),
    "AdamW dynamic2/fp4:row": (ml.AdamW, {"exp_avg": "dynamic2", "exp_avg_sq": "fp4:row:pow2"}),
    "AdamW none/log2:64": (ml.AdamW, {"exp_avg": "none", "exp_avg_sq": "log2:64", "betas": (0.0, 0.9)}),
    "Adam fp8/fp8 L2": (ml.Adam, {"exp_avg": "fp8", "exp_avg_sq": "fp8", "weight_decay": 0.1}),
    "AdaBelief": (ml.AdaBelief, {"exp_avg": "dynamic4", "exp_avg_var": "log2"}),
    "SGD": (ml.SGD, {"momentum": 0.9, "momentum_buffer": "int2"}),
    "SGD plain": (ml.SGD, {}),
    "RMSprop": (ml.RMSprop, {"momentum": 0.9, "momentum_buffer": "fp4", "square_avg": "udynamic8"}),
    "Lion": (ml.Lion, {"exp_avg": "int6"}),
}
WHOLE = {  # one bad gradient keeps the whole parameter from moving
    "AdamW factored": (ml.AdamW, {"exp_avg": "int8", "exp_avg_sq": "factored"}),
    "Adafactor": (ml.Adafactor, {}),
    "Adafactor log2": (ml.Adafactor, {"exp_avg_sq": "log2", "beta1": 0.9}),
}
BAD = {(0, 5): float("nan"), (2, 300): float("inf"), (2, 301): -float("inf"), (3, 699): SQUARE_OVERFLOWS}


def build(name: str, params, **options):
    cls, chosen = {**CONFIGURATIONS, **WHOLE}[name]
    return cls(params, lr=1e-2, **chosen, **options)


def gradient(step: int, dtype=torch.float32) -> Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(step)).to(dtype)


def trained(name: str, dtype=torch.float32, **options):
    p = nn.Parameter(gradient(1000, dtype))
    other = nn.Parameter(torch.ones(3, 40, dtype=dtype))
    optimizer = build(name, [("weight", p), ("other", other)], **options)
    for step in range(2):
        p.grad, other.grad = gradient(step, dtype), torch.ones_like(other)
        optimizer.step()
    return p, other, optimizer


def storages(optimizer, p) -> dict[str, Storage]:
    weight = Storage(parse("fp32" if p.dtype == torch.float32 else "bf16"), tuple(p.shape), {"values": p.detach()})
    states = optimizer.state_storage(p, optimizer.param_groups[0])
    return {"weight": weight, **{k: s for k, s in states.items() if s.format.kind != "none"}}


def chunks_of(storage: Storage) -> list[list[list[Tensor]]]:
    """Everything stored, by row and chunk of 128 elements: copies of the bytes that a chunk's elements are made of."""
    fmt, found = storage.format, []
    for row in range(storage.layout.rows):
        found.append([])
        for chunk in range(storage.layout.chunks_per_row):
            parts = []
            for name in storage.tensors:
                line = storage.rows_of(name)[row]
                if name == "codes":
                    size = chunk_bytes(CHUNK, fmt.bits)
                    parts.append(line[chunk * size : (chunk + 1) * size].clone())
                elif name == "values":
                    parts.append(line[chunk * CHUNK : (chunk + 1) * CHUNK].clone())
                else:
                    line = line.view(torch.int16) if name == "step" else line
                    block = storage.layout.block(fmt)
                    first, last = chunk * CHUNK // block, ((chunk + 1) * CHUNK - 1) // block
                    parts.append(line[first : last + 1].clone())
            found[-1].append(parts)
    return found


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- gradients that are not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_affected_tile_and_only_it_keeps_every_byte(name, dtype):
    """Against the bytes before, and against a twin that got zeros in the place of the bad elements."""
    p, other, optimizer = trained(name, dtype, nonfinite="skip")
    q, other_q, twin = trained(name, dtype)
    before = {k: chunks_of(s) for k, s in storages(optimizer, p).items()}
    g = gradient(2, dtype)
    clean = g.clone()
    for place, value in BAD.items():
        g[place], clean[place] = value, 0.0
    p.grad, q.grad, other.grad, other_q.grad = g, clean, torch.ones_like(other), torch.ones_like(other)
    optimizer.step()
    assert optimizer.nonfinite_counts == {"weight": 4}
    twin.step()
    formats = [s.format for s in storages(optimizer, p).values()]
    rows_only = any(f.granularity == "row" and f.scaled for f in formats)
    width = max(1, *(f.granularity // CHUNK for f in formats if f.scaled and f.granularity != "row"), 1)
    bad_tiles = {(row, -1 if rows_only else col // CHUNK // width) for row, col in BAD}
    after = {k: chunks_of(s) for k, s in storages(optimizer, p).items()}
    expected = {k: chunks_of(s) for k, s in storages(twin, q).items()}
    moved = 0
    for key in after:
        for row in range(ROWS):
            for chunk in range(6):
                bad = (row, -1 if rows_only else chunk // width) in bad_tiles
                reference = before if bad else expected
                assert equal(after[key][row][chunk], reference[key][row][chunk]), (key, row, chunk)
                moved += not equal(after[key][row][chunk], before[key][row][chunk])
    assert moved > 0  # the rest of the parameter did step
    assert torch.equal(other, other_q)
    assert p.grad is g and g[0, 5].isnan()


@pytest.mark.parametrize("name", [*CONFIGURATIONS, *WHOLE])
def test_raising_changes_nothing_at_all_and_a_retry_is_one_step(name):
    """Neither weights nor states nor counters, of no parameter: what comes after is as if the call had not been."""
    p, other, optimizer = trained(name)
    q, other_q, twin = trained(name)
    p.grad, other.grad = gradient(2), torch.ones_like(other)
    for place, value in BAD.items():
        p.grad[place] = value
    with pytest.raises(ml.NonFiniteGradientError) as caught:
        optimizer.step()
    assert "weight (4 elements)" in str(caught.value) and "other" not in str(caught.value)
    assert "No weight and no state has changed" in str(caught.value) and "nonfinite='skip'" in str(caught.value)
    assert optimizer.nonfinite_counts == {}
    for retried, never in ((p, q), (other, other_q)):
        assert torch.equal(retried, never)
        states, expected = optimizer.state[retried], twin.state[never]
        assert states.keys() == expected.keys() and equal(list(states.values()), list(expected.values()))
        retried.grad = never.grad = gradient(3) if retried is p else torch.ones_like(other)
    optimizer.step()
    twin.step()
    assert torch.equal(p, q) and int(optimizer.state[p]["step"]) == int(twin.state[q]["step"]) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), SQUARE_OVERFLOWS])
@pytest.mark.parametrize("name", WHOLE)
def test_a_factored_moment_makes_the_whole_parameter_one_tile(name, value):
    p, other, optimizer = trained(name, nonfinite="skip")
    before = {k: [t.clone() for t in s.tensors.values()] for k, s in storages(optimizer, p).items()}
    moved = other.detach().clone()
    p.grad = gradient(2)
    p.grad[1, 7] = value
    optimizer.step()
    assert optimizer.nonfinite_counts == {"weight": 1}
    for key, storage in storages(optimizer, p).items():
        assert equal(list(storage.tensors.values()), before[key]), key
    assert not torch.equal(other, moved)


def test_skip_only_counts():
    p, other, optimizer = trained("AdamW int4/log2", nonfinite="skip")
    for step in range(3):
        p.grad = gradient(step)
        p.grad[0, step] = float("nan")
        p.grad[1, :2] = float("inf")
        other.grad = torch.ones_like(other)
        optimizer.step()
    assert optimizer.nonfinite_counts == {"weight": 9}
    p.grad = gradient(9)
    optimizer.step()
    assert optimizer.nonfinite_counts == {"weight": 9}
    assert p.isfinite().all()


def test_skip_is_an_option_of_a_group():
    a, b = (nn.Parameter(torch.ones(2, 40)) for _ in range(2))
    groups = [{"params": [("a", a)], "nonfinite": "skip"}, {"params": [("b", b)]}]
    optimizer = ml.AdamW(groups)
    a.grad = b.grad = torch.full((2, 40), float("nan"))
    with pytest.raises(ml.NonFiniteGradientError) as caught:
        optimizer.step()
    assert "b (80 elements)" in str(caught.value) and "a (80" not in str(caught.value)
    assert optimizer.nonfinite_counts == {}
    b.grad = torch.ones(2, 40)
    optimizer.step()
    assert optimizer.nonfinite_counts == {"a": 80}


def test_many_bad_parameters_are_summed_up():
    params = [(f"p{i}", nn.Parameter(torch.ones(2, 40))) for i in range(11)]
    optimizer = ml.SGD(params, lr=0.1)
    for _, p in params:
        p.grad = torch.full((2, 40), float("inf"))
    with pytest.raises(ml.NonFiniteGradientError, match=r"p7 \(80 elements\) and 3 more"):
        optimizer.step()
    assert isinstance(ml.NonFiniteGradientError(""), RuntimeError)


def test_nameless_parameters_are_named_by_position():
    params = [nn.Parameter(torch.ones(2, 40)) for _ in range(2)]
    optimizer = ml.AdamW(params)
    params[0].grad, params[1].grad = torch.ones(2, 40), torch.full((2, 40), float("nan"))
    with pytest.raises(ml.NonFiniteGradientError, match=r"#1 \(80 elements\)"):
        optimizer.step()


# --- values that are finite stay finite -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [LARGEST, 1e-22, 1e-38, 2.0**-149, 0.0, 1.0])
@pytest.mark.parametrize("name", [*CONFIGURATIONS, *WHOLE])
def test_huge_tiny_and_constant_gradients_keep_everything_finite(name, value):
    p = nn.Parameter(torch.ones(2, 140))
    optimizer = build(name, [p], nonfinite="skip")  # a second moment above 2^126 is not stored
    for _ in range(5):
        p.grad = torch.full((2, 140), value)
        p.grad[:, ::7] = 0.0
        optimizer.step()
        for key, storage in storages(optimizer, p).items():
            assert storage.decode().isfinite().all(), key


@pytest.mark.parametrize("name", ["AdamW fp32", "AdamW int4/log2", "AdaBelief", "RMSprop", "Lion", "Adafactor"])
def test_a_sign_flip_of_the_largest_gradient_keeps_everything_finite(name):
    """What a rule squares can be larger than the gradient (AdaBelief's deviation): a log code's top stays finite."""
    p = nn.Parameter(torch.ones(2, 140))
    optimizer = build(name, [p], nonfinite="skip")
    for step in range(24):
        p.grad = torch.full((2, 140), LARGEST if step < 20 else -LARGEST)
        optimizer.step()
    for key, storage in storages(optimizer, p).items():
        assert storage.decode().isfinite().all(), key


# --- coordinates without gradient -----------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "stochastic-log", "stochastic-value"])
@pytest.mark.parametrize("name", [n for n in CONFIGURATIONS if "L2" not in n])
def test_a_coordinate_without_gradient_never_moves_and_has_an_exactly_zero_state(name, rounding):
    silent = torch.zeros(ROWS, COLS, dtype=torch.bool)
    silent[0, ::3] = True  # scattered,
    silent[1, 128:256] = True  # a whole block,
    silent[2, 640:] = True  # the tail,
    silent[3] = True  # and a whole row
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(gradient(1000, dtype))
        start = p.detach().clone()
        optimizer = build(name, [p], rounding=rounding, **({"weight_decay": 0.0} if "SGD" not in name else {}))
        for step in range(12):
            p.grad = torch.where(silent, 0.0, gradient(step)).to(dtype)
            optimizer.step()
        assert torch.equal(p[silent], start[silent])
        assert not torch.equal(p[~silent], start[~silent])
        for key, storage in storages(optimizer, p).items():
            if key != "weight":
                assert (storage.decode()[silent] == 0).all(), key


@pytest.mark.parametrize("name", ["AdamW int4/log2", "AdaBelief", "Lion"])
def test_decoupled_decay_still_moves_it_exactly_so(name):
    """By the factor 1 - lr * wd in fp32 at every step, and by nothing else."""
    p = nn.Parameter(torch.linspace(-3, 3, 280).view(2, 140))
    expected = p.detach().clone()
    optimizer = build(name, [p], weight_decay=0.5)
    factor = torch.tensor(1 - 1e-2 * 0.5, dtype=torch.float32)
    for _ in range(10):
        p.grad = torch.zeros(2, 140)
        optimizer.step()
        expected = expected * factor
    assert torch.equal(p.detach(), expected)
    for key, storage in storages(optimizer, p).items():
        assert key == "weight" or (storage.decode() == 0).all()


def test_a_late_first_gradient_starts_a_coordinate():
    """An exact zero is no trap: the first gradient is stored, and the coordinate moves with it."""
    p = nn.Parameter(torch.zeros(2, 256))
    optimizer = ml.AdamW([p], lr=1e-2, exp_avg="int4", exp_avg_sq="log2", weight_decay=0.0)
    for step in range(6):
        p.grad = torch.ones(2, 256)
        if step < 4:
            p.grad[:, 100] = 0.0
        optimizer.step()
        assert bool((p[:, 100] != 0).all()) == (step >= 4)
    states = storages(optimizer, p)
    assert (states["exp_avg_sq"].decode()[:, 100] > 0).all()
