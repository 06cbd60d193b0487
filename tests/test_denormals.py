"""`torch.set_flush_denormal(True)` does not show in a step: neither its backend nor its threads do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from masterless.backends.cpu import library

CASES = """
import hashlib, sys, torch
from kernel_cases import Case, at_step, build, copy, step_on_the_kernel, stored
from masterless.step import reference

flush = sys.argv[1] == "flush"
torch.set_flush_denormal(flush)
torch.set_num_threads(int(sys.argv[2]))
torch.ones(1 << 20).add(1)  # starts torch's threads, which inherit the setting
torch.set_flush_denormal(False)
digest = hashlib.sha256()
for weight, first, second, size in (
    ("fp32", "fp32", "fp32", 1e-38), ("int4", "int8", "log2", 1e-37), ("fp8:row", "bf16", "factored", 1e-36),
    ("bf16", "int4", "ufp8", 1e-38), ("int8:tensor", "fp32", "log8", 1e-37),
):
    shape = (301, 260)
    case = Case(weight=weight, first=first, second=second, gradients="tiny", weight_size=size, shape=shape, lr=1e-3)
    torch.set_num_threads(1)
    task = build(case)
    grad = task.grad * 1e-3
    torch.set_num_threads(int(sys.argv[2]))
    for step in (1, 2):
        task = at_step(task, case, step, grad)
        torch.set_flush_denormal(flush)
        step_on_the_kernel([task]) if sys.argv[3] == "kernel" else reference.step(task)
        assert (float(torch.tensor([2.0**-130]) * 1.0) == 0) == flush, "the step must leave the setting as it was"
        torch.set_flush_denormal(False)
    for name, value in sorted(stored(task).items()):
        digest.update(value.numpy().tobytes())
print(digest.hexdigest())
"""


def run(*arguments):
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-c", CASES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(not library.available(), reason="no compiled kernel")
def test_flushing_denormals_shows_in_neither_backend_nor_threads():
    digests = {}
    for flush in ("flush", "keep"):
        for threads in ("1", "2"):
            for backend in ("kernel", "reference"):
                digests[flush, threads, backend] = run(flush, threads, backend)
    assert len(set(digests.values())) == 1, digests
