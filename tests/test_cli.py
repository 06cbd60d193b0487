"""The command line itself, and the commands `stall` and `formats`: output, JSON, errors, and what is imported."""

import json
import os
import subprocess
import sys

import pytest

import masterless
from masterless import formats
from masterless.step import staleness

typer_testing = pytest.importorskip("typer.testing")
from masterless.lab.cli import app  # noqa: E402

COMMAND = [sys.executable, "-m", "masterless"]
# Wide enough that no table wraps a number, and no colours.
ENVIRONMENT = {**os.environ, "COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"}


def invoke(*args):
    return typer_testing.CliRunner().invoke(app, list(args), env=ENVIRONMENT)


def predict(*args):
    result = invoke("stall", *args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- starting ---------------------------------------------------------------------------------------------


def test_help_imports_no_more_than_the_library_itself():
    code = (
        "import sys, masterless.lab.cli\n"
        "try: masterless.lab.cli.app(['--help'])\n"
        "except SystemExit as error: assert error.code == 0\n"
        "print(sorted({'matplotlib', 'safetensors', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stderr.strip() == "[]" and "stall" in done.stdout and "formats" in done.stdout


def test_python_m_and_the_version():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == f"masterless {masterless.__version__}\n"
    assert invoke("--version").stdout == done.stdout


def test_the_package_is_complete_and_its_import_needs_only_torch_and_numpy():
    code = (
        "import sys, masterless as ml\n"
        "assert 'AdamW' in dir(ml) and 'quantize_' in dir(ml) and ml.parse_format('int4').bits == 4\n"
        "assert not {'typer', 'rich', 'matplotlib', 'safetensors', 'transformers'} & set(sys.modules)\n"
        "assert all(getattr(ml, name) is not None for name in ml.__all__)\n"
        "assert ml.AdamW.__module__ == 'masterless.optim.adam' and ml.staleness.Grid\n"
        "from masterless import *\n"
        "try: ml.no_such_name\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == "module 'masterless' has no attribute 'no_such_name'\n"


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["stall", "--beta2", "1.5"], "beta=1.5: not a moving average's decay; pass a value in [0, 1)"),
        (["stall", "--beta2", "much"], "--beta2"),
        (["stall", "--format", "fp3"], "unknown format 'fp3'; known formats: fp32"),
        (["stall", "--format", "log2"], "pass --typical"),
        (["stall", "--format", "int8"], "use 'log8'"),  # a signed format for a second moment
        (["stall", "--format", "bf16", "--typical", "0.5"], "leave it out"),
        (["stall", "--rounding", "up"], "rounding='up': no such choice; pass nearest, stochastic or both"),
        (["stall", "--moment", "third"], "moment='third'"),
        (["stall", "--snr", "1"], "snr=1.0: the second moment"),
        (["stall", "--steps", "0"], "steps=0"),
        (["stall", "--plot", "curve.docx"], "plot='curve.docx': no such kind of file"),
        (["stall", "--plot", "/no/such/folder/a.png"], "/no/such/folder/a.png"),
        (["stall", "extra"], "extra"),
        (["stall", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, says):
    result = invoke(*args)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("masterless: ") and result.stderr.count("\n") == 1
    assert says in result.stderr


def test_a_real_process_says_the_same():
    command = [*COMMAND, "stall", "--format", "fp3"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("masterless: unknown format 'fp3'")


# --- stall ------------------------------------------------------------------------------------------------


def test_stall_of_a_second_moment():
    data = predict("--format", "fp8", "--beta2", "0.999", "--steps", "500")
    nearest, stochastic = data["roundings"]["nearest"], data["roundings"]["stochastic"]
    assert nearest["reset_period"] == 320 and data["gate"] == pytest.approx(0.9567, abs=1e-4)
    assert stochastic["steady_stall"] == pytest.approx(0.9888, abs=5e-5) and not data["can_fall"]
    assert nearest["startup_window"] == staleness.startup_window("fp8", 0.999, 0.5)
    assert data["steps"][0] == 1 and data["steps"][-1] == 500
    for kind, facts in data["roundings"].items():
        assert len(facts["stall"]) == len(data["steps"])
        assert facts["stall"][-1] == staleness.stall_probability("fp8", 0.999, kind, 500)
    assert nearest["mean_path"][-1] == pytest.approx(staleness.expected_trajectory("fp8", 0.999, 500).corrected[-1])
    assert "every 320 steps" in data["advice"] and "stochastic: no reset is needed" in data["advice"]


def test_stall_below_the_gate_of_one_rounding():
    data = predict("--format", "bf16", "--beta2", "0.95", "--rounding", "nearest")
    assert list(data["roundings"]) == ["nearest"] and data["roundings"]["nearest"]["reset_period"] is None
    assert data["advice"].startswith("no reset is due") and data["steps"][-1] == 60  # three time constants


def test_stall_of_a_first_moment_and_of_a_log_code():
    data = predict("--format", "int4", "--moment", "first", "--snr", "1", "--beta1", "0.8")
    expected = staleness.stall_probability("int4", 0.8, "nearest", moment="first", snr=1.0)
    assert (
        data["roundings"]["nearest"]["steady_stall"] == expected and "reset_period" not in data["roundings"]["nearest"]
    )
    data = predict("--format", "log2", "--typical", "0.001")
    assert data["relative_gap"] == pytest.approx(staleness.grid_of("log2", typical=0.001).gap)


def test_stall_prints_tables_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "curve.png"
    result = invoke("stall", "--format", "fp4", "--plot", str(file))
    assert result.exit_code == 0 and file.read_bytes().startswith(b"\x89PNG")
    for text in ("fp4, second moment, beta2 = 0.999", "224 steps", "●", "1.0 ┤", "on its mean path", f"wrote {file}"):
        assert text in result.stdout.replace("\n", "") or text in result.stdout
    assert invoke("stall", "--moment", "first").exit_code == 0
    assert invoke("stall", "--beta2", "0").exit_code == 0


# --- formats ----------------------------------------------------------------------------------------------


def test_formats_lists_every_format():
    rows = json.loads(invoke("formats", "--json").stdout)
    assert [row["name"] for row in rows] == formats.names()
    by_name = {row["name"]: row for row in rows}
    assert by_name["int4"]["levels"] == 15 and by_name["int4"]["bits_per_element"] == 4.125
    assert by_name["log2"]["levels"] == 4 and by_name["log2"]["uses"] == ["second moment"]
    assert by_name["int4+4"]["uses"] == ["weight"] and by_name["none"]["picture"] == ""
    assert by_name["int2"]["picture"].count("█") == 3  # -1, 0 and 1
    text = invoke("formats").stdout
    assert all(name in text for name in formats.names()) and by_name["fp8"]["picture"] in text
