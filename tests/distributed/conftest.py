"""One pool of four ranks for all tests of the folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the ranks: two cores, four of them

from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.stop()
