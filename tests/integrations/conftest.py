"""Real packages on tiny models, offline; their own deprecation warnings are not ours to fail on."""

import os
from importlib.util import find_spec

import pytest

PACKAGES = ("transformers", "accelerate", "peft", "trl", "lightning", "compressed_tensors", "gguf")
MISSING = [name for name in PACKAGES if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")


def pytest_report_header(config):
    return f"tests/integrations left out, without {', '.join(MISSING)}: make test installs them" if MISSING else ""


def pytest_collection_modifyitems(items):
    for item in items:
        if "integrations" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny models: a second thread only waits for the first."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
