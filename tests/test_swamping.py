"""Swamping: a 2-bit second moment at b2 = 0.999 moves with fp32's time constant; nearest rounding freezes.

The mean of v itself is the subject here, hence the rounding that is unbiased in v. (The default keeps the mean of
1/sqrt(v): `test_log_rounding.py`.)

Every block holds an anchor, a coordinate whose second moment stays where it is and which fixes the block's
scale; all others shall decay to an eighth or grow to the double. In half a time constant (500 steps) fp32 goes
``1 - 0.999^500`` = 39% of the way. Squared gradients are deterministic: what moves or freezes is the code.
"""

import pytest
import torch
from torch import Tensor

import masterless as ml
from masterless.formats import codec, parse
from masterless.formats.rounding import dither

BETA2 = 0.999
BLOCKS = 64
STEPS = 500
EXPECTED = 1 - BETA2**STEPS  # the share of the way that an exact average goes
FACTORS = {"decaying": 1 / 8, "growing": 2.0}


def start_and_target(factor: float) -> tuple[Tensor, Tensor]:
    """Lognormal second moments below an anchor of 1 in column 0, and where they shall go."""
    start = (torch.randn(BLOCKS, 128, generator=torch.Generator().manual_seed(0)) * 0.5).exp()
    start = start / start.amax(1, keepdim=True) * 0.4
    target = start * factor
    start[:, 0] = target[:, 0] = 1.0
    return start, target


def average(name: str, rounding: str, factor: float, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Per block, the share of the way to the target gone after `steps`; and which coordinates ever moved."""
    fmt = parse(name)
    start, target = start_and_target(factor)

    def store(v: Tensor, step: int) -> Tensor:
        u = None if rounding == "nearest" else dither(step, *v.shape)
        return codec.decode(codec.encode(v, fmt, u, rounding=rounding), 128, fmt)

    first = v = store(start, 0)
    moved = torch.zeros(BLOCKS, 128, dtype=torch.bool)
    for step in range(1, steps + 1):
        v = store(v * BETA2 + target * (1 - BETA2), step)
        moved |= v != first
    gone, whole = ((x - first)[:, 1:].double().mean(1) for x in (v, target))
    return gone / whole, moved[:, 1:]


@pytest.mark.parametrize("course", FACTORS)
def test_two_bits_keep_fp32s_time_constant(course):
    """The mean over independent blocks is fp32's, within four of its own standard errors.

    The standard error is measured from the blocks and bounded, so that the test has teeth. A systematic remainder
    of 0.01 is allowed beside it: some elements lie below the lowest level and are raised to it.
    """
    shares, moved = average("log2", "stochastic-value", FACTORS[course])
    error = (shares.std() / BLOCKS**0.5).item()
    assert error < 0.015
    assert abs(shares.mean().item() - EXPECTED) < 4 * error + 0.01
    assert moved.double().mean() > 0.25  # a 2-bit code moves rarely, and far


@pytest.mark.parametrize(("name", "course", "largest_error"), [("log4", "decaying", 0.015), ("log8", "growing", 0.002)])
def test_more_bits_are_closer(name, course, largest_error):
    shares, _ = average(name, "stochastic-value", FACTORS[course])
    error = (shares.std() / BLOCKS**0.5).item()
    assert error < largest_error
    assert abs(shares.mean().item() - EXPECTED) < 4 * error + 0.002


@pytest.mark.parametrize("course", FACTORS)
@pytest.mark.parametrize("name", ["uint2", "uint4", "uint8", "udynamic2", "udynamic4", "udynamic8", "ufp8"])
def test_linear_and_dynamic_maps_freeze_under_nearest_rounding(name, course):
    """Not one coordinate moves in one step, and so never: without dither a step is a function of the state alone."""
    shares, moved = average(name, "nearest", FACTORS[course], steps=1)
    assert not moved.any()
    assert (shares == 0).all()


def test_frozen_really_means_frozen():
    """The argument above, spelled out once: 300 steps of uint8, where fp32 goes 26% of the way."""
    _, moved = average("uint8", "nearest", FACTORS["decaying"], steps=300)
    assert not moved.any()


def test_fp32_itself():
    """The ruler: fp32 goes the share that the formula says, to its own rounding (2^-24 a step, either way)."""
    for factor in FACTORS.values():
        shares, moved = average("fp32", "nearest", factor)
        assert moved.all()
        assert torch.allclose(shares, torch.full_like(shares, EXPECTED), atol=STEPS * 2.0**-24)


def test_the_log_code_needs_its_dither_too():
    """Nearest rounding in the log domain: growth is frozen, as in SOLO's analysis of every map."""
    _, moved = average("log2", "nearest", FACTORS["growing"], steps=1)
    assert not moved.any()


def test_log_dither_moves_but_with_a_bias():
    """SOLO's dither never freezes, but raises the mean: it decays at less than 0.8 of the fp32 rate here."""
    shares, moved = average("log2", "stochastic-log", FACTORS["decaying"])
    assert moved.double().mean() > 0.8
    assert 0.4 * EXPECTED < shares.mean() < 0.8 * EXPECTED


def test_the_optimizer_tracks_random_gradients_up_and_down():
    """The same, through `AdamW` and with Gaussian gradients: 500 steps up from zero, then 500 down to an eighth.

    fp32 on the same gradients is the reference. The mean of v (which large coordinates dominate, as they do in
    training) must agree within 5%: over seeds of the random bits it scatters by 4.5% with 32 blocks (16 seeds), so
    512 should scatter by about a fourth of that. Averaged per coordinate it is up to 15% higher, because a
    seventh of every block is raised to its lowest level.
    """
    p = torch.nn.Parameter(torch.zeros(512, 128))
    options = {"exp_avg": "none", "exp_avg_sq": "log2", "rounding": "stochastic-value", "backend": "reference"}
    opt = ml.AdamW([p], lr=0.0, betas=(0.0, BETA2), **options)
    generator = torch.Generator().manual_seed(1)
    sigma = (torch.randn(512, 128, generator=generator) * 0.6).exp()  # of the gradients, coordinate by coordinate
    exact = torch.zeros(512, 128, dtype=torch.float64)
    for scale, expected in ((1.0, 1 - BETA2**500), (8.0**-0.5, (1 - BETA2**500) * (BETA2**500 + 1 / 8))):
        for _ in range(500):
            p.grad = torch.randn(512, 128, generator=generator) * sigma * scale
            exact = exact * BETA2 + p.grad.double() ** 2 * (1 - BETA2)
            opt.step()
        found = opt.state_storage(p, opt.param_groups[0])["exp_avg_sq"].decode().double()
        assert (exact / sigma.double() ** 2).mean().item() == pytest.approx(expected, rel=0.02)  # 65536 averages
        assert found.mean().item() == pytest.approx(exact.mean().item(), rel=0.05)
        assert (found / sigma.double() ** 2).mean().item() == pytest.approx(expected, rel=0.15)
