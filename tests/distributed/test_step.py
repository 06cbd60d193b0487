"""Sharding changes nothing: 1 to 4 ranks give the codes, scales and states of one process, to the bit."""

from __future__ import annotations

import pytest
from zoo import configurations

pytestmark = pytest.mark.timeout(260)


@pytest.mark.parametrize("names", [list(configurations())[i::4] for i in range(4)], ids=", ".join)
def test_every_configuration_steps_alike_on_any_number_of_ranks(ranks, names):
    found = ranks.run("jobs_step:parity", names)
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_gradients_that_are_not_finite_stop_the_same_tiles(ranks):
    found = ranks.run("jobs_step:bad_gradients")
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_all_ranks_raise_when_one_has_a_bad_gradient(ranks):
    for message in ranks.run("jobs_step:one_rank_has_a_bad_gradient"):
        assert "even (1 elements)" in message


def test_refusals_name_reason_and_remedy(ranks):
    for messages in ranks.run("jobs_step:refusals"):
        assert "use 'int4' or 'int4:row'" in messages["one scale a tensor"]
        assert "quantize_states='matrices'" in messages["vectors"]
        assert "pass 'auto' or a number of steps" in messages["adaptive resets"]
        assert "Shard with fully_shard alone" in messages["columns"]
        assert "in one process" in messages["factoring on shards"]


def test_factored_second_moments_stay_on_the_kernel_and_shards_are_counted_as_shards(ranks):
    for result in ranks.run("jobs_step:on_the_kernel"):
        assert set(result["backends"].values()) == {"CpuBackend"}
        for name in ("even", "uneven"):
            measured = result["measured"][name]
            assert measured == result["predicted"][name]
            assert measured.weights < 1.1 * measured.parameters  # a byte each and scales, of this shard's elements
