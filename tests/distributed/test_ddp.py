"""Replicas under DistributedDataParallel stay identical to the bit."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(260)


def test_initial_synchronisation_copies_bytes(ranks):
    assert ranks.run("jobs_ddp:synchronisation") == [[]] * 4


def test_decoded_weights_that_are_kept_follow_the_synchronisation(ranks):
    assert ranks.run("jobs_ddp:synchronisation_of_kept_copies") == [True] * 4


def test_ddps_own_broadcast_is_refused(ranks):
    for message in ranks.run("jobs_ddp:stock_ddp_is_refused"):
        assert "masterless.distributed.replicate" in message


def test_replicas_stay_identical_for_hundreds_of_steps(ranks):
    results = ranks.run("jobs_ddp:replicas", 200, 2)[:2] + ranks.run("jobs_ddp:replicas", 10, 4)
    for result in results:
        assert all(result["alike"])
        assert result["same"], "steps in the communication hook differ from ordinary ones"
        assert result["left"] == 0, "gradients are left after the backward pass"
        assert result["after removal"]
