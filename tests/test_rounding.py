"""The random bits: what the contract says in Python integers, uniform, pure, and independent.

All keys are fixed, so every statistical bound below either holds for ever or never.
"""

import itertools

import pytest
import torch

from masterless.formats.rounding import (
    PURPOSES,
    RING,
    ROUNDINGS,
    check_rounding,
    dither,
    parameter_id,
    ring,
    stream_key,
    threshold,
)

MASK64 = 2**64 - 1


def splitmix64(z: int) -> int:
    """Steele, Lea and Flood's generator: one output for one state."""
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def on_the_ring(place: int) -> int:
    return (985 * place + 368 * place**2) % 1024


def dither_by_the_contract(key: int, row: int, col: int, cols: int) -> int:
    """One element's bits in Python integers, from the module's docstring."""
    chunk, element = row * -(-cols // 128) + col // 128, col % 128
    word = splitmix64((key + chunk * 0x9E3779B97F4A7C15) & MASK64)  # the state advances by the golden ratio
    start = (word >> (6 * (element // 16))) % 1024
    return on_the_ring((start + element % 16) % 1024) * 64 + (word >> 58)


def key_of(seed=0, step=1, name="w", purpose="weight"):
    return stream_key(seed, step, parameter_id(name), purpose)


# --- the bits are those of the contract, and stay those they are ------------------------------------------


def test_dither_is_the_contracts_in_python_integers():
    for key, (rows, cols) in itertools.product(
        (0, 1, MASK64, key_of()), ((1, 1), (3, 127), (2, 128), (2, 129), (1, 700))
    ):
        expected = [[dither_by_the_contract(key, row, col, cols) for col in range(cols)] for row in range(rows)]
        assert dither(key, rows, cols).tolist() == expected


def test_keys_chain_splitmix_over_seed_step_parameter_and_purpose():
    key = splitmix64(7)
    for part in (11, parameter_id("layer.weight"), PURPOSES["exp_avg_sq"]):
        key = splitmix64(key ^ part)
    assert stream_key(7, 11, parameter_id("layer.weight"), "exp_avg_sq") == key


GOLDEN_ID = 18127671354823465387
GOLDEN = {  # seed, step, name, purpose -> key, and the bits of row 1 of [2, 130] at a few places
    (0, 1, "layer.weight", "weight"): (0xF867D9FC8D07F0CA, [5600, 45088, 608, 33056, 461, 7181]),
    (0, 2, "layer.weight", "exp_avg"): (0xF5493536CA132245, [35073, 47937, 42369, 3585, 23401, 17833]),
    (42, 1000, "#3", "exp_avg_sq"): (0x11AD617D9ADA612C, [53219, 10787, 15459, 17571, 53682, 62450]),
    (2**63 - 1, 10**9, "b", "exp_avg_sq"): (0x1CA8D746A3F8F9D2, [47850, 46378, 26474, 15338, 22798, 35662]),
}


def test_golden_values():
    """Frozen since random bits are read from a ring: a run is promised to resume bit for bit."""
    assert parameter_id("layer.weight") == GOLDEN_ID
    for (seed, step, name, purpose), (key, bits) in GOLDEN.items():
        assert stream_key(seed, step, parameter_id(name), purpose) == key
        assert dither(key, 2, 130)[1, [0, 1, 2, 127, 128, 129]].tolist() == bits


# --- purity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [1, 31, 128, 200, 300])
def test_a_shard_of_rows_sees_what_the_whole_saw(cols):
    whole = dither(key_of(), 9, cols)
    for first, last in itertools.combinations(range(10), 2):
        assert torch.equal(dither(key_of(), last - first, cols, first_row=first), whole[first:last])


def test_nothing_else_enters():
    """Neither torch's generator nor an earlier call changes the bits, and none is consumed."""
    torch.manual_seed(0)
    before = dither(key_of(), 4, 200)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(dither(key_of(), 4, 200), before)
    assert torch.equal(torch.rand(1), expected)


def test_a_longer_row_begins_with_the_same_bits_within_its_first_chunks():
    assert torch.equal(dither(key_of(), 1, 300)[:, :200], dither(key_of(), 1, 200))


def test_far_rows_do_not_overflow_into_near_ones():
    near, far = dither(key_of(), 1, 128), dither(key_of(), 1, 128, first_row=2**40)
    assert not torch.equal(near, far)
    assert far.tolist() == [[dither_by_the_contract(key_of(), 2**40, c, 128) for c in range(128)]]


# --- uniform ----------------------------------------------------------------------------------------------


def test_every_element_is_exactly_uniform():
    """Every number stands in the ring once, and the place where an element reads it is uniform, as its lower bits."""
    assert torch.equal(ring().sort().values, torch.arange(RING))


@pytest.mark.parametrize("seed", range(4))
def test_chi_square(seed):
    """In 256 bins, chi-square has mean 255 and deviation sqrt(510): five deviations either way.

    A clumped and a suspiciously even generator both fail. By the upper byte one element of each sixteen counts, for
    those were read together; by the lower byte one of each chunk, for all of a chunk share most of it.
    """
    u = dither(key_of(seed=seed), 2**15, 128)
    for byte in (u[:, seed::16] >> 8, u[:, 40 * seed + 3] & 255):
        expected = byte.numel() / 256
        chi_square = ((byte.flatten().bincount(minlength=256).double() - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 255) < 5 * 510**0.5


@pytest.mark.parametrize("lag", [16, 17, 31, 57, 64, 68, 107])
def test_pairs_fill_the_square(lag):
    """How far the joint distribution of two elements' upper 4 bits is from independent: phi below 2%.

    phi^2 = (chi-square - 255) / n is the squared distance; it bounds the correlation of any functions of the two.
    Measured: 0 to 0.6%. (Elements that were read together are neighbours in a ring of 1024: see below.)
    """
    u = dither(key_of(seed=5), 2**15, 128) >> 12
    pairs = (u[:, :-lag] * 16 + u[:, lag:]).flatten()
    counts = pairs.bincount(minlength=256).double()
    expected = pairs.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert (chi_square - 255) / pairs.numel() < 0.02**2


@pytest.mark.parametrize("lag", [16, 17, 64, 68, 107])
def test_differences_of_pairs_are_uniform(lag):
    """Modulo 2^16, in 64 bins: all within 10% of the expected count."""
    u = dither(key_of(seed=7), 2**15, 128)
    bins = (((u[:, lag:] - u[:, :-lag]) & 0xFFFF) >> 10).flatten().bincount(minlength=64).double()
    assert (bins / bins.mean() - 1).abs().max() < 0.1


def test_whether_two_elements_go_up_is_nearly_independent_where_they_were_read_together():
    """Of the ring itself, exactly: the correlation of going up with a probability of k/16, at distances 1 ... 15.

    Below 3.4% each; and what they add up to, the variance of how many of sixteen go up, is a binomial's within 2.6%.
    That of their mean is right to 1%.
    """
    fraction = (ring().double() + 0.5) / RING
    for k in range(1, 16):
        p = k / 16
        up = ((fraction < p).double() - p) / (p * (1 - p)) ** 0.5
        correlations = torch.stack([(up * up.roll(-lag)).mean() for lag in range(1, 16)])
        assert correlations.abs().max() < 0.034
        assert abs((2 * correlations * (16 - torch.arange(1, 16)) / 16).sum()) < 0.026
    z = (fraction - 0.5) * 12**0.5
    correlations = torch.stack([(z * z.roll(-lag)).mean() for lag in range(1, 16)])
    assert correlations.abs().max() < 0.007
    assert abs((2 * correlations * (16 - torch.arange(1, 16)) / 16).sum()) < 0.01


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.5, 0.9])
def test_the_number_of_round_ups_in_a_chunk_varies_nearly_as_a_binomial(probability):
    """Over n = 2^15 chunks the estimate has a relative deviation of sqrt(2 / n) = 0.8%; bound: 8%, measured 0 to 6%.

    (The rarer, the more it matters that a ring has neighbours: 12% less at 0.95.)
    """
    ups = (dither(key_of(seed=8), 2**15, 128) < probability * 2**16).double().sum(1)
    assert abs(ups.var().item() / (128 * probability * (1 - probability)) - 1) < 0.08


# --- independent ------------------------------------------------------------------------------------------


def standardized(key: int, rows: int = 2**13, cols: int = 128) -> torch.Tensor:
    """The bits with the mean and deviation of a uniform variable taken out, fp64."""
    return (dither(key, rows, cols).double() + 0.5) / 2**16 * 12**0.5 - 3**0.5


def assert_uncorrelated(x: torch.Tensor, y: torch.Tensor) -> None:
    """|r| below 5 / sqrt(n): five standard deviations of the correlation of n independent pairs."""
    assert abs((x * y).mean().item()) < 5 / x.numel() ** 0.5


def test_elements_of_a_chunk_are_nearly_uncorrelated():
    """|r| below 1% at all distances up to 127.

    Measured: 0.5%, and 0.2% where they cannot have been read together (0.4% at 127, of one pair a chunk). The five
    standard errors of this smaller sample are added. One percent of correlation at one distance is one percent of the
    rounding noise's variance.
    """
    z = standardized(key_of(seed=3), rows=2**15)
    for lag in range(1, 128):
        x, y = z[:, :-lag], z[:, lag:]
        assert abs((x * y).mean().item()) < 0.01 + 5 / x.numel() ** 0.5


def test_neighbouring_rows_and_chunks_are_uncorrelated():
    z = standardized(key_of(seed=4), cols=256)
    assert_uncorrelated(z[:-1], z[1:])
    assert_uncorrelated(z[:, :128], z[:, 128:])


def test_the_mean_of_a_chunk_is_as_quiet_as_that_of_independent_bits():
    """The variance of a chunk's mean sums up all pairs at once.

    Over n = 2^14 chunks its estimate has a relative deviation of sqrt(2 / n) = 1.1%; bound: five of them.
    """
    means = standardized(key_of(seed=6), rows=2**14).mean(1)
    assert abs(means.square().mean().item() * 128 - 1) < 5 * (2 / 2**14) ** 0.5


def test_steps_seeds_parameters_and_purposes_are_independent():
    base = standardized(key_of(seed=0, step=1, name="w", purpose="weight"))
    others = [
        *(key_of(step=step) for step in (2, 3, 4, 1000)),
        *(key_of(seed=seed) for seed in (1, 2, 3)),
        *(key_of(name=name) for name in ("v", "w.0", "#0", "#1")),
        *(key_of(purpose=purpose) for purpose in ("exp_avg", "exp_avg_sq")),
    ]
    for key in others:
        assert_uncorrelated(base, standardized(key))


def of_purposes(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """The bits of weight and moments as a step draws them."""
    return {p: dither(key_of(seed=seed, purpose=p), rows, 128) for p in PURPOSES}


@pytest.mark.parametrize("pair", list(itertools.combinations(PURPOSES, 2)))
@pytest.mark.parametrize("lag", [0, 1, 16, 68])
def test_two_purposes_fill_the_square(pair, lag):
    """An element's bits of two purposes, and those of two elements: every pair of upper 4 bits equally often.

    Of a chunk one pair counts: then the n = 2^17 pairs are independent, and chi-square has mean 255, deviation
    sqrt(510); bound: five deviations.
    """
    u = of_purposes(9, 2**17)
    pairs = (u[pair[0]][:, 5] >> 12) * 16 + (u[pair[1]][:, 5 + lag] >> 12)
    expected = pairs.numel() / 256
    chi_square = ((pairs.bincount(minlength=256).double() - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 5 * 510**0.5


def test_the_three_purposes_of_an_element_fill_the_cube():
    """As above, of three: 2^12 cells of upper 4 bits, mean 4095, deviation sqrt(8190)."""
    u = [bits[:, 77] >> 12 for bits in of_purposes(10, 2**17).values()]
    counts = (u[0] * 256 + u[1] * 16 + u[2]).bincount(minlength=2**12).double()
    chi_square = ((counts - 2**5) ** 2 / 2**5).sum().item()
    assert abs(chi_square - 4095) < 5 * 8190**0.5


def test_a_chunks_sum_of_products_of_two_purposes_has_no_mean():
    """What rounding errors of weight and moment would add up to if they knew of each other.

    Over n = 2^14 chunks the mean lies within five of its standard errors.
    """
    z = [(u.double() + 0.5) / 2**16 * 12**0.5 - 3**0.5 for u in of_purposes(11, 2**14).values()]
    for x, y in itertools.combinations(z, 2):
        of_chunks = (x * y).mean(1)
        assert abs(of_chunks.mean().item()) < 5 * of_chunks.std().item() / 2**7


def test_one_element_is_uncorrelated_over_successive_steps():
    """What a slow average integrates: one coordinate's bits over 4096 steps, at distances 1 ... 16."""
    z = torch.cat([standardized(key_of(step=step), rows=1, cols=32) for step in range(1, 4097)])
    for lag in range(1, 17):
        assert_uncorrelated(z[:-lag], z[lag:])


def test_swapped_numbers_do_not_collide():
    """Seed, step and parameter are chained, not added: (1, 2) is not (2, 1)."""
    keys = [
        stream_key(seed, step, parameter, purpose)
        for seed, step, parameter in itertools.product(range(6), repeat=3)
        for purpose in PURPOSES
    ]
    assert len(set(keys)) == len(keys)


# --- thresholds and names ---------------------------------------------------------------------------------


def test_thresholds_are_exact_and_never_zero_or_one():
    u = torch.arange(2**16, dtype=torch.int32)
    exact = (u.double() + 0.5) / 2**16
    assert torch.equal(threshold(u).double(), exact)
    assert threshold(u).min() == 2.0**-17
    assert threshold(u).max() == 1 - 2.0**-17


def test_rounding_names():
    for rounding in ROUNDINGS:
        check_rounding(rounding)
    with pytest.raises(ValueError, match="'up'; choose one of nearest, stochastic, stochastic-log, stochastic-value"):
        check_rounding("up")


def test_going_up_from_the_difference_to_the_threshold_is_stochastic_rounding():
    """`LinearGrid<true>` of csrc/grid.h, `_whole` of Triton's codecs: a rounded subtraction and a ceiling, below 2^7.

    Where they could differ: numbers a few ulps around an integer plus a threshold, and those between -1/2 and 0, whose
    distance to -1 is rounded.
    """
    for below in (*range(-127, 127, 9), -2, -1, 0, 1, 126):
        u = torch.arange(0 if below in (-1, 0) else below % 61, 1 << 16, 1 if below in (-1, 0) else 61)
        limit = threshold(u)
        middle = (limit.double() + below).float()
        for ulps in range(-3, 4):
            t = (middle.view(torch.int32) + ulps).view(torch.float32)
            integer = t.floor()
            expected = torch.where(t - integer > limit, integer + 1, integer)
            assert torch.equal((t - limit).ceil(), expected), (below, ulps)
