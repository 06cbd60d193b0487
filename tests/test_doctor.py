"""`masterless doctor`: what it reports is what is there, and wrong bits end it with an error."""

import json

import pytest
import torch

typer_testing = pytest.importorskip("typer.testing")
from masterless.backends.cpu import library  # noqa: E402
from masterless.lab.bench import parity  # noqa: E402
from masterless.lab.cli import app  # noqa: E402


def invoke(*args):
    return typer_testing.CliRunner().invoke(app, ["doctor", *args])


def test_report_of_the_cpu():
    result = invoke("--json", "--no-speed")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["versions"]["torch"].startswith(torch.__version__)
    cpu = found["devices"][0]
    assert (cpu["device"], cpu["differences"], cpu["steps"]) == ("cpu", [], [])
    described = library.describe()
    assert (described.instruction_set if described.available else described.reason) in cpu["kernel"]


def test_wrong_bits_are_named_and_end_with_an_error(monkeypatch):
    def differs(*args, **kwargs):
        return iter([f"{args[0]}: 3 of 7 tensors after 3 steps"])

    monkeypatch.setattr(parity, "_differences", differs)
    result = invoke()
    assert result.exit_code == 1
    assert "AdamW, INT4, int4/log2: 3 of 7 tensors" in result.stdout
    assert "ms" not in result.stdout  # no speed of wrong results
