"""A seeded, bounded run of ``benchmarks/fuzz_files.py``: whatever a file holds, reading it ends well or in an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fuzz_files.py"


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="measures memory as Linux does")
def test_no_file_does_more_than_raise_an_error():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cases", "320", "--seed", "7", "--json"], capture_output=True, text=True
    )
    result = json.loads(done.stdout or "{}")
    assert done.returncode == 0, done.stderr or "\n".join(map(str, result["findings"]))
    assert result["cases"] == 320 and len(result["targets"]) == 16, "every kind of file, twenty times"
