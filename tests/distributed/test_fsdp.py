"""Whole models under fully_shard: training, communication, memory."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.timeout(260)


def test_training_is_that_of_one_process_but_for_the_order_of_the_reduction(ranks):
    found = ranks.run("jobs_fsdp:end_to_end")
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_steps_inside_the_backward_pass(ranks):
    found = ranks.run("jobs_fsdp:in_backward")
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_gradient_accumulation_and_clipping_by_the_global_norm(ranks):
    for result in ranks.run("jobs_fsdp:accumulation_and_clipping"):
        # fp32 sums of other groupings: some hundred terms at 2^-24 each.
        assert math.isclose(result["norm"], result["expected"], rel_tol=1e-5)
        assert result["worst"] < 1e-5


def test_mixed_precision_policy(ranks):
    for result in ranks.run("jobs_fsdp:mixed_precision"):
        assert result["seen"] == {torch.bfloat16}
        assert result["grads"] == {torch.float32}
        assert result["losses"][-1] < 5


def test_initialisation_on_the_meta_device(ranks, tmp_path):
    found = ranks.run("jobs_fsdp:meta_device", str(tmp_path))
    assert not any(found), "\n".join(line for rank in found for line in rank)


def test_decoded_weights_are_not_kept_of_what_is_sharded(ranks):
    for rank, result in enumerate(ranks.run("jobs_fsdp:decode_cache")):
        assert result["same"]
        assert len(result["refusals"]) == (3 if rank < 2 else 0)
        for message in result["refusals"]:
            assert "is sharded, and FSDP2 refills what it gathers in every pass; pass 0 under FSDP2" in message


def test_bytes_on_the_wire(ranks):
    results = ranks.run("jobs_fsdp:bytes_on_the_wire")
    assert all(result == results[0] for result in results), "a rank sends another number of bytes than the others"
    for sent in results[0].values():
        assert sent["bf16"] / sent["int4"] >= 3.5
        assert sent["int4+4"] == sent["int4"], "hidden bits are the optimizer's"
        assert sent["bf16"] / sent["int8"] >= 1.9
        assert sent["bf16"] / sent["fp8"] >= 1.9


def test_memory_is_one_nth(ranks):
    for result in ranks.run("jobs_fsdp:memory"):
        for n, held in result.items():
            # One slice of padding a parameter: the smallest matrices here have 64 rows, hence at most n/64 more.
            assert all(share <= 1 / n * (1 + n / 64) for share in held.values()), (n, held)
