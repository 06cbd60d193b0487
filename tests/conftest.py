"""Before any test imports torch: some virtual machines announce matrix units (AMX) that they do not have."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import settings

_PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def _announces_amx() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "amx_bf16" in cpu.read_text()


# There a bf16 product of torch ends the process with an illegal instruction: keep oneDNN from using them.
if "ONEDNN_MAX_CPU_ISA" not in os.environ and _announces_amx():
    if subprocess.run([sys.executable, "-c", _PROBE], capture_output=True).returncode == -signal.SIGILL:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

# What lands must not hang on luck: the same examples on every run. `make explore` draws new ones, and many more.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
