"""Sharding changes nothing: 1 to 4 ranks give the codes, scales and states of one process, to the bit."""

from __future__ import annotations

import pytest
from zoo import configurations

pytestmark = pytest.mark.timeout(150)


def test_every_configuration_steps_alike_on_any_number_of_ranks(ranks):
    found = ranks.run("jobs_step:parity", list(configurations()), timeout=120)
    assert not any(found), "\n".join(line for rank in found for line in rank)
