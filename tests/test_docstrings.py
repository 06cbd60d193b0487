"""Examples in docstrings run, and every public name has one or is explained by one."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import masterless as ml

SOURCE = Path(ml.__file__).parent
MODULES = [
    ".".join(["masterless", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text()
]
OPTIONAL = {"masterless.integrations": "transformers"}  # what some packages' modules cannot do without


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    for package, needs in OPTIONAL.items():
        if name.startswith(package):
            pytest.importorskip(needs)
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0 and failed == 0


OPTIMIZERS = [ml.SGD, ml.AdaBelief, ml.Adafactor, ml.Adam, ml.AdamW, ml.Lion, ml.RMSprop]


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_an_optimizers_signature_says_what_the_library_is_for(cls):
    options = inspect.signature(cls).parameters
    for name in ("params", "lr", "rounding", "weight_rounding", "error_compensation", "quantize_states", "nonfinite"):
        assert name in options
    assert {cls.first_name, cls.second_name} - {None} <= set(options)
    assert all(p.kind is not p.VAR_KEYWORD for p in options.values())
    assert ("moment_units" in options) == issubclass(cls, ml.Adam)
    assert ">>> " in (cls.__doc__ or "")


@pytest.mark.parametrize("name", [n for n in ml.__all__ if inspect.isfunction(getattr(ml, n))])
def test_public_functions_have_an_example(name):
    assert ">>> " in (inspect.getdoc(getattr(ml, name)) or ""), name
