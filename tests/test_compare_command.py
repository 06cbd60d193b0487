"""``masterless compare``: the same training under several presets, each run once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from test_train_command import TINY, cli, command, run, text  # noqa: F401

from masterless.lab.commands.compare import SHARED, entry, summarize
from masterless.lab.train.config import ConfigError
from masterless.lab.train.experiment import Experiment
from masterless.lab.train.report import cells, noise_note
from masterless.optim.presets import PRESETS

FLAGS = ["--steps", 12, "--eval-every", 4, "--seeds", 1, *TINY]


@pytest.fixture(scope="module")
def compared(tmp_path_factory, text):  # noqa: F811
    out = tmp_path_factory.mktemp("compare") / "results"
    done = run("compare", "--presets", "fp32,naive-int4", "--data", text, "--out", out, *FLAGS)
    assert done.returncode == 0, done.stderr
    return out, done


def test_table_plot_and_report(compared):
    out, done = compared
    assert "naive-int4" in done.stdout and "+0.00%" in done.stdout and "12.000" in done.stdout
    assert f"report: {out / 'report.html'}" in done.stdout
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert page.count("<svg viewBox") >= 4 and "naive-int4" in page and "Lost updates" in page
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["label"] for row in sorted(rows, key=lambda r: r["label"])] == ["fp32", "naive-int4"]
    assert all(row["peak_bytes"] > 50e6 and row["memory"]["inner_parameters"] == 12288 for row in rows)


def test_finished_runs_are_not_repeated(compared, text, cli):  # noqa: F811
    out, _ = compared
    before = (out / "results.jsonl").read_bytes()
    names = "naive-int4,fp32,fp32/fp32/fp32"  # the last is fp32 by another name
    code, printed, err = cli("compare", "--presets", names, "--data", text, "--out", out, "--json", *FLAGS)
    assert code == 0 and err == ""
    result = json.loads(printed)
    assert (out / "results.jsonl").read_bytes() == before
    naive, full, alias = result["runs"]
    assert full["label"] == "fp32" and full["gap"] == 0 and alias["loss"] == full["loss"]
    assert full["bytes_measured"] == full["bytes_predicted"] == 12.0
    assert naive["bytes_measured"] == naive["bytes_predicted"] < 8.7
    assert naive["gap"] == pytest.approx(naive["loss"] / full["loss"] - 1)
    assert result["report"] == str(out / "report.html")


def test_another_text_is_another_run(compared):
    row = json.loads((compared[0] / "results.jsonl").read_text().splitlines()[0])
    keys = ("label", "weights", "optimizer", "options", "model", "settings", "seed", "data")
    same = Experiment(**{key: row[key] for key in keys})
    assert same.identity == row["id"]
    assert Experiment(**{**{key: row[key] for key in keys}, "data": {}}).identity != row["id"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "fp32,9-byte"], "'9-byte': no such preset"),
        (["--presets", "naive-int5"], "unknown format 'int5'"),
        (["--presets", "int4/int4/log2@much"], "'much' is not a number"),
        (["--presets", ","], "no names"),
        (["--data", "{dir}/none"], "no such file"),
        (["--seeds", "0"], "--seeds"),
        (["--out", "{dir}/file/out"], "cannot be written"),
        (["--config", "{dir}/seed.toml"], "'seed' is not an option"),
    ],
)
def test_bad_input(arguments, message, tmp_path, text, cli):  # noqa: F811
    (tmp_path / "file").write_text("")
    (tmp_path / "seed.toml").write_text("seed = 3\n")
    rest = [] if "--data" in arguments else ["--data", text]
    rest += [] if "--out" in arguments else ["--out", tmp_path / "out"]
    code, printed, err = cli("compare", *rest, *TINY, *(a.format(dir=tmp_path) for a in arguments))
    assert code == 2 and printed == "" and err.count("\n") == 1 and message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_interrupted(text, tmp_path):  # noqa: F811
    arguments = ["compare", "--presets", "fp32", "--data", text, "--out", tmp_path / "out", "--steps", 100_000, *TINY]
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (workers := _children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130 and "finished runs are kept" in err and "Traceback" not in err
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers and not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def _children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return file.read().split()
    except OSError:
        return []


def test_entries():
    assert entry("1.8-byte") == (PRESETS["1.8-byte"].weights, dict(PRESETS["1.8-byte"].options))
    weights, options = entry("naive-int4")
    assert weights == "int4" and options["weight_rounding"] == "nearest" and not options["error_compensation"]
    assert entry("int4/int4/log2@0.35")[1]["betas"] == (0.35, 0.95)
    assert entry("int8/none/factored")[1] == {
        "exp_avg": "none",
        "exp_avg_sq": "factored",
        "betas": (0.0, 0.95),
        "error_compensation": False,
    }
    with pytest.raises(ConfigError):
        entry("int4/int4")
    assert "seed" not in SHARED and "lr" in SHARED


def test_summary_of_seeds_and_of_divergence():
    memory = {
        "measured_per_parameter": 2.0,
        "predicted_per_parameter": 2.0,
        "inner_parameters": 10,
        "inner_bytes": {"weights": 20},
    }
    common = {"memory": memory, "peak_bytes": 1, "seconds": 2.0, "settings": {"steps": 4}}
    rows = [
        {"label": "other", "loss": 2.2, **common},
        {"label": "other", "loss": None, **common},
        {"label": "fp32", "loss": 2.0, **common},
        {"label": "fp32", "loss": 2.2, **common},
    ]
    other, full = summarize(rows)
    assert other["loss"] is None and other["gap"] is None and other["losses"] == [2.2]
    assert full["loss"] == pytest.approx(2.1) and full["loss_spread"] == pytest.approx(0.1414, rel=1e-3)
    assert full["gap"] == 0 and full["seconds_per_step"] == 0.5
    rows[1]["loss"] = 2.42
    other, full = summarize(rows)
    assert other["gap"] == pytest.approx(0.1) and other["gap_spread"] == pytest.approx(0, abs=1e-9), "10% on each seed"
    assert full["gap_spread"] is None and "2 seeds" in noise_note([other, full]) and "1%" in noise_note([other, full])
    assert cells({**other, "gap_spread": 0.01})["gap"] == "+10.00% ±1.00%"
    assert "no spread is known" in noise_note(summarize(rows[:1]))


def test_a_spread_over_seeds_is_the_default(text, tmp_path):  # noqa: F811
    """Without --seeds the table has a standard deviation; what it costs is in `STEPS`."""
    done = run(
        "compare", "--presets", "fp32,1-byte-int4", "--data", text, "--out", tmp_path / "out", "--steps", 6, *TINY
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert sorted((row["label"], row["seed"]) for row in rows) == [
        (name, seed) for name in ("1-byte-int4", "fp32") for seed in (0, 1)
    ]
    assert done.stdout.count("±") >= 4 and "standard deviation over 2 seeds" in done.stdout
    assert "standard deviation over 2 seeds" in (tmp_path / "out" / "report.html").read_text()


def test_identity_of_earlier_results_is_unchanged():
    """Results in the repository were made before experiments could name a text; they must stay known."""
    assert Experiment("x").identity == Experiment("y", data={}).identity == "349b10602ae6f8b9"
