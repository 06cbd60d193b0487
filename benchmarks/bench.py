"""The step's speed against torch and other libraries: `masterless bench`, all its flags, with guests.

    python benchmarks/bench.py --out benchmarks/results/bench

`make bench` installs the other libraries first (`benchmarks/peers.txt`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import peer_libraries

from masterless.lab.cli import app
from masterless.lab.commands import bench

if __name__ == "__main__":
    bench.GUESTS.append(peer_libraries)
    app(["bench", *sys.argv[1:]], prog_name="benchmarks/bench.py")
