"""Which implementation of the step an optimizer test runs on: the specification and, where built, the kernel."""

import pytest

from masterless.backends.cpu import library as kernels
from masterless.optim.base import COMMON_DEFAULTS


@pytest.fixture
def reference_backend(monkeypatch):
    """Optimizers step on the specification (`test_kernel.py` holds the kernel to it, byte by byte)."""
    monkeypatch.setitem(COMMON_DEFAULTS, "backend", "reference")


@pytest.fixture(
    params=[
        "reference",
        pytest.param("auto", marks=pytest.mark.skipif(not kernels.available(), reason="no compiled kernel")),
    ]
)
def every_backend(request, monkeypatch):
    """Optimizers step on the specification, then on the compiled kernel: what users meet must hold on both."""
    monkeypatch.setitem(COMMON_DEFAULTS, "backend", request.param)
    return request.param
