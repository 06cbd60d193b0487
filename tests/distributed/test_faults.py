"""Ranks that die: no hang, no broken checkpoint, and a restart with fewer ranks goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pool import free_port

from masterless.distributed import latest

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent


def torchrun(ranks: int, script: Path | str, *arguments: str, timeout: float = 250) -> tuple[int, str]:
    """Runs a script on some ranks; returns the exit code and what was printed. A run that hangs fails the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), *str(script).split("\n"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks, a session of their own
        output, _ = process.communicate()
        pytest.fail(f"torchrun did not end within {timeout} s:\n{output[-3000:]}")
    return process.returncode, output


def test_killed_in_a_save_killed_in_training_and_resumed_with_fewer_ranks(tmp_path):
    script = HERE / "faulty.py"
    directory = tmp_path / "run"

    code, output = torchrun(4, script, str(directory), "--die-in-save", "4")
    assert code != 0, output
    assert "SIGKILL" in output
    last = latest(directory)
    assert last is not None and last.name == "step-00000002", f"{last}: a save that was interrupted must not show"
    assert list(directory.glob(".incomplete-*")), "the interrupted save has left its files, under another name"

    code, output = torchrun(2, script, str(directory), "--die-in-training", "5")
    assert code != 0, output
    assert "starts at 2" in output and "SIGKILL" in output
    last = latest(directory)
    assert last is not None and last.name == "step-00000004"

    code, output = torchrun(1, script, str(directory))
    assert code == 0, output
    assert "starts at 4" in output
    assert "as uninterrupted: True" in output
    assert not list(directory.glob(".incomplete-*"))


def test_the_example_runs(tmp_path):
    example = HERE.parents[1] / "examples" / "fsdp2.py"
    code, output = torchrun(2, example, "--steps", "3", "--checkpoints", str(tmp_path))
    assert code == 0, output
    assert "rank 1 of 2 holds" in output
    assert len(example.read_text().splitlines()) <= 60


def test_the_command_line_trains_and_resumes_in_parallel(tmp_path):
    """FSDP on two ranks, resumed as DDP on one: the losses are those of one process but for the last digits."""
    run, options = tmp_path / "run", "--layers 1 --width 64 --heads 2 --seq-len 32 --batch 2 --steps 4 --threads 1"
    common = [*options.split(), "--eval-every", "2", "--eval-batches", "1", "--preset", "2-byte-int4"]
    code, output = torchrun(2, "-m\nmasterless", "train", "--parallel", "fsdp", "--out", str(run), *common)
    assert code == 0, output
    first = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in first] == [1, 2, 3, 4]
    shutil.rmtree(run / "distributed" / "step-00000004")
    code, output = torchrun(1, "-m\nmasterless", "train", "--parallel", "ddp", "--resume", str(run))
    assert code == 0, output
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert again[:2] == first[:2]
    # The gradients of two rows are summed in another order: fp32, and now and then another stochastic rounding.
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in first], rel=1e-2)
    assert json.loads((run / "summary.json").read_text())["ranks"] == 1
