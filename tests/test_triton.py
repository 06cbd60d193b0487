"""The GPU kernels against the specification, byte by byte, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize(
    ("suite", "count"),
    [
        ("main", 1),
        ("covering", 34),
        ("hostile", 8),
        ("rows", 1),
        ("roots", 1),
        ("decoding", 1),
        ("stopping", 1),
        ("optimizing", 1),
        ("by_device", 1),
    ],
)
def test_the_interpreter_equals_the_reference(suite, count):
    worker = Path(__file__).parent / "triton_worker.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(worker), suite, str(count)], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
