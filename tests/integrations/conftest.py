"""Real packages on tiny models, offline; their own deprecation warnings are not ours to fail on."""

import os

import pytest

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")


def pytest_collection_modifyitems(items):
    for item in items:
        if "integrations" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
