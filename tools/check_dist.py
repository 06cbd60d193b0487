"""Builds sdist and wheel, installs each into a fresh environment, and trains with what was installed.

Run ``python tools/check_dist.py`` (``make dist``); the two files are left in build/dist.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "dist"
TRIAL = """
import masterless as ml, torch
from masterless.backends.cpu import library
layer = torch.nn.Linear(256, 256)
opt = ml.prepare(layer, preset="2-byte", lr=1e-2)
x, losses = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)), []
for _ in range(30):
    loss = (layer(x) - x).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
print(ml.__version__, "from", ml.__file__, "kernel:", library.describe().instruction_set)
"""


def call(*command: str | Path, cwd: Path = ROOT) -> None:
    """Runs a command; its failure is ours."""
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=environment)


def main() -> None:
    """Build, install, try."""
    shutil.rmtree(OUT, ignore_errors=True)
    call(sys.executable, "-m", "pip", "install", "-q", "build")
    call(sys.executable, "-m", "build", "--outdir", OUT)
    for artefact in sorted(OUT.iterdir()):
        with TemporaryDirectory() as folder:
            place = Path(folder)
            venv.create(place / "env", with_pip=True)
            python = place / "env" / "bin" / "python"
            call(python, "-m", "pip", "install", "-q", artefact)
            print(artefact.name, end=": ", flush=True)
            call(python, "-c", TRIAL, cwd=place)  # outside of the source tree: what runs is what was installed


if __name__ == "__main__":
    main()
