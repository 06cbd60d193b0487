"""Distributed checkpoints: any number of ranks to any other, stock state dicts, asynchronous."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(260)


@pytest.mark.parametrize("name", ["2-byte-int4", "1-byte-int4", "adafactor, int4", "reset", "bf16 states"])
def test_saved_at_n_ranks_loaded_at_m_to_the_bit(ranks, tmp_path, name):
    found = ranks.run("jobs_checkpoint:trips", str(tmp_path), name)
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_stock_state_dicts_change_nothing(ranks):
    found = ranks.run("jobs_checkpoint:stock_state_dicts")
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_a_single_process_state_dict_loads_into_shards(ranks):
    found = ranks.run("jobs_checkpoint:whole_files")
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_asynchronous_save(ranks, tmp_path):
    found = ranks.run("jobs_checkpoint:asynchronous", str(tmp_path))
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_log_states_can_be_gathered(ranks):
    found = ranks.run("jobs_checkpoint:gathered_states")
    assert not any(found), "\n".join(line for rank in found for line in rank)
