"""``masterless train`` through real processes: interrupted, killed, resumed to the bit; bad input; configuration."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from train_runs import TINY, command, differences, interrupt, run, write_text

from masterless.lab.train import run_files as checkpoints
from masterless.lab.train.config import FIELDS, ConfigError, RunConfig, read_toml, resolve, to_toml
from masterless.tensor.state import joined


@pytest.fixture
def cli(monkeypatch, capsys):
    """The command line in this process, for what ends before a step is taken."""
    from masterless.lab.cli import app

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            app(list(map(str, arguments)), prog_name="masterless")
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    yield call
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """An uninterrupted run, begun with a config file and flags that win over it."""
    folder = tmp_path_factory.mktemp("finished")
    config = folder / "run.toml"
    config.write_text('steps = 7\nlr = 0.004\n[formats]\npreset = "1-byte-int4"\nexp_avg_sq = "log4"\n')
    out = folder / "run"
    flags = ["--steps", 60, "--eval-every", 10, "--save-every", 7, "--exp-avg", "int8"]
    done = run("train", "--config", config, "--data", text, "--out", out, "--json", "--sample", 20, *TINY, *flags)
    assert done.returncode == 0, done.stderr
    return out, done


def lines_of(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_json_and_run_directory(finished):
    out, done = finished
    *evaluations, end = lines_of(done)
    assert [e["step"] for e in evaluations] == list(range(10, 61, 10))
    assert all(e["event"] == "evaluation" for e in evaluations)
    assert evaluations[-1]["validation_loss"] < evaluations[0]["validation_loss"] < 5.6
    assert end["event"] == "end" and end["status"] == "finished" and len(end["sample"]) > 0
    assert end["bytes_per_parameter"] == end["predicted_bytes_per_parameter"] < 3
    assert {p.name for p in out.iterdir()} >= {"config.toml", "metrics.jsonl", "checkpoints", "report.html"}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert 0 < rows[9]["stalls"]["exp_avg_sq"]["stalled_codes"] < 1
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["manifest.json", "step-00000056.pt", "step-00000060.pt"]


def test_config_precedence(finished):
    """Flags, then the file, then the preset, then the defaults; and the result is stored."""
    stored = read_toml(finished[0] / "config.toml")
    assert stored["steps"] == 60 and stored["exp_avg"] == "int8"  # flags
    assert stored["lr"] == 0.004 and stored["exp_avg_sq"] == "log4"  # file
    assert stored["weights"] == "int4" and stored["beta1"] == 0.8  # preset
    assert stored["weight_decay"] == 0.1 and stored["min_lr"] == 0.0004 and stored["warmup"] == 6  # defaults


def test_interrupted_and_killed_runs_resume_to_the_bit(finished, text, tmp_path):
    reference, _ = finished
    out = tmp_path / "run"
    flags = ["--config", reference / "config.toml", "--out", out, "--json"]
    code, _, err = interrupt(signal.SIGKILL, "train", *flags)
    assert code == -signal.SIGKILL
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) >= 7
    code, printed, err = interrupt(signal.SIGINT, "train", "--resume", out, "--json")
    assert code == 130 and f"--resume {out}" in err and "Traceback" not in err
    end = json.loads(printed.splitlines()[-1])
    assert end["status"] == "interrupted" and 0 < end["step"] < 60
    manifest = json.loads((out / "checkpoints" / "manifest.json").read_text())
    assert manifest["checkpoints"][-1]["step"] == end["step"]
    code, _, err = interrupt(signal.SIGTERM, "train", "--resume", out, "--json")
    assert code == 143, err
    last = run("train", "--resume", out, "--json")
    assert last.returncode == 0, last.stderr
    assert (out / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert differences(out, reference, 60) == []


def copied(folder, target):
    import shutil

    shutil.copytree(folder, target)
    return target


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_corrupt_checkpoint(finished, tmp_path, cli, how):
    out = copied(finished[0], tmp_path / "run")
    path = out / "checkpoints" / "step-00000060.pt"
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-100] if how == "cut" else content)
    before = tree(out)
    code, _, err = cli("train", "--resume", out)
    assert code == 2 and err.count("\n") == 1
    assert "step-00000060.pt" in err and "--from-step 56" in err
    assert ("bytes instead of" in err) == (how == "cut") and ("SHA-256" in err) == (how == "flipped")
    assert tree(out) == before


def test_resume_from_an_older_step(finished, tmp_path):
    out = copied(finished[0], tmp_path / "run")
    metrics = (out / "metrics.jsonl").read_bytes()
    (out / "checkpoints" / "step-00000060.pt").write_bytes(b"")
    done = run("train", "--resume", out, "--from-step", 56)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 56" in done.stdout and "finished after 60 steps" in done.stdout
    assert (out / "metrics.jsonl").read_bytes() == metrics


def test_bad_resumes(finished, tmp_path, cli):
    code, _, err = cli("train", "--resume", tmp_path)
    assert code == 2 and "not a run directory" in err
    code, _, err = cli("train", "--resume", finished[0], "--lr", "1")
    assert code == 2 and "--lr" in err and "--init" in err
    code, _, err = cli("train", "--resume", finished[0], "--from-step", "3")
    assert code == 2 and "no checkpoint of step 3" in err and "56, 60" in err
    out = copied(finished[0], tmp_path / "changed")
    text = tmp_path / "changed.txt"
    text.write_text("something else entirely " * 200)
    config = (out / "config.toml").read_text().splitlines()
    (out / "config.toml").write_text(
        "\n".join(f'data = ["{text}"]' if line.startswith("data =") else line for line in config)
    )
    code, _, err = cli("train", "--resume", out)
    assert code == 2 and "the text is not what this run was trained on" in err
    (out / "checkpoints" / "manifest.json").write_text("{")
    code, _, err = cli("train", "--resume", out)
    assert code == 2 and "manifest.json" in err and "damaged" in err


BAD = {
    "missing file": (["--data", "{dir}/none.txt"], "no such file"),
    "empty text": (["--data", "{dir}/empty.txt"], "empty text"),
    "binary file": (["--data", "{dir}/binary.txt"], "binary"),
    "bad json": (["--data", "{dir}/bad.jsonl"], "not valid JSON"),
    "sequence longer than the text": (["--data", "{dir}/short.txt"], "shorter than a sequence"),
    "no such format": (["--weights", "int5"], "unknown format 'int5'"),
    "impossible weight": (["--weights", "log2"], "holds no negative values"),
    "impossible moment": (["--exp-avg-sq", "int4"], "int4"),
    "no buffer": (["--exp-avg", "none"], "exp_avg='none'"),
    "no such preset": (["--preset", "9-byte"], "unknown preset '9-byte'"),
    "no such optimizer": (["--optimizer", "Adamw"], "optimizer='Adamw'"),
    "no such reset": (["--reset", "often"], "reset='often'"),
    "no steps": (["--steps", "0"], "steps=0"),
    "warm-up too long": (["--steps", "5", "--warmup", "6"], "warmup=6"),
    "heads": (["--heads", "3"], "n_head=3"),
    "no such flag": (["--stepz", "3"], "--stepz"),
    "not a number": (["--steps", "many"], "'--steps'"),
    "nothing hidden": (["--show-hidden", "0.5"], "have no hidden bits to show; pass --weights int4+4"),
    "hidden for ever": (["--show-hidden", "1", "--weights", "int4+4"], "show-hidden=1.0"),
    "missing config": (["--config", "{dir}/none.toml"], "no such file"),
    "broken config": (["--config", "{dir}/broken.toml"], "not valid TOML"),
    "typo in config": (["--config", "{dir}/typo.toml"], "did you mean 'steps'"),
    "type in config": (["--config", "{dir}/type.toml"], "steps='many'"),
    "missing init": (["--init", "{dir}/none.pt"], "no such file"),
    "foreign init": (["--init", "{dir}/short.txt"], "not a checkpoint"),
    "unwritable": (["--out", "{dir}/short.txt/run"], "not a directory"),
    "run exists": (["--out", "{dir}/taken"], "not overwritten"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, tmp_path, text, cli):
    arguments, message = BAD[name]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "bad.jsonl").write_text("{]\n")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.toml").write_text("steps = \n")
    (tmp_path / "typo.toml").write_text("step = 3\n")
    (tmp_path / "type.toml").write_text('steps = "many"\n')
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.toml").write_text("precious")
    before = tree(tmp_path)
    data = [] if "--data" in arguments else ["--data", text]
    out = [] if "--out" in arguments else ["--out", tmp_path / "run"]
    tiny = [a for i, a in enumerate(TINY) if not {TINY[i - i % 2]} & set(arguments)]
    code, printed, err = cli("train", *tiny, *data, *out, *(a.format(dir=tmp_path) for a in arguments))
    assert code == 2 and printed == ""
    assert err.startswith("masterless: ") and err.count("\n") == 1 and message in err
    assert tree(tmp_path) == before and not (tmp_path / "run").exists()


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files as POSIX does")
def test_full_disk(finished, tmp_path, text):
    """A disk that takes no more: one line, exit code 2, no half-written file, and what was there is untouched."""
    out = tmp_path / "run"
    limit = 40_000  # bytes a file; a checkpoint is larger
    script = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    script += "from masterless.lab.cli import main; main()"
    arguments = ["train", "--data", text, "--out", out, "--steps", 6, "--eval-every", 2, *TINY]
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr and "--resume" in done.stderr
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["manifest.json"]
    again = run("train", "--resume", out)  # there is space again
    assert again.returncode == 0 and "finished after 6 steps" in again.stdout


def test_full_disk_says_so(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def write(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(checkpoints.CheckpointError, match=r"no space left on device.*free space"):
        checkpoints.write_atomically(path, write)
    assert path.read_bytes() == b"before" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_from_the_start(tmp_path, text, cli, monkeypatch):
    """Not even the first files fit: one line, and no half-made run that could be neither resumed nor started again."""

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints.os, "fsync", fail)
    code, printed, err = cli("train", "--data", text, "--out", tmp_path / "run", *TINY)
    assert code == 2 and printed == "" and err.count("\n") == 1
    assert "no space left on device" in err and "free space on the disk, then start it again" in err
    assert list(tmp_path.iterdir()) == []


def test_one_writer_at_a_time(finished, tmp_path, cli):
    fcntl = pytest.importorskip("fcntl")
    out = copied(finished[0], tmp_path / "run")
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = cli("train", "--resume", out)
    assert code == 2 and "another process" in err


def test_moe_from_a_checkpoint_with_steps_in_backward(finished, text, tmp_path):
    """Shapes come from the checkpoint, formats are converted, training goes on from where its loss was."""
    out = tmp_path / "run"
    flags = ["--steps", 6, "--eval-every", 3, "--preset", "1.8-byte", "--lr", "1e-4", "--step-in-backward"]
    done = run("train", "--init", finished[0], "--data", text, "--out", out, "--json", *flags)
    assert done.returncode == 0, done.stderr
    loss = lines_of(finished[1])[-1]["validation_loss"]
    assert lines_of(done)[-1]["validation_loss"] == pytest.approx(loss, abs=0.3)
    stored = read_toml(out / "config.toml")
    assert stored["width"] == 32 and stored["seq_len"] == 32 and stored["weights"] == "int8"
    moe = run(
        "train", "--data", text, "--out", tmp_path / "moe", "--experts", 4, "--accumulate", 2, "--steps", 4, *TINY
    )
    assert moe.returncode == 0, moe.stderr
    assert "4 experts" in moe.stdout and "step 4/4" in moe.stdout and "bytes/parameter" in moe.stdout


def test_int4_for_the_last_half_accumulated_in_backward_and_resumed(text, tmp_path):
    """The forward pass sees all eight bits first; a run resumed before or after that ends is the uninterrupted one."""
    out = tmp_path / "run"
    flags = ["--preset", "2-byte-int4", "--show-hidden", 0.5, "--step-in-backward", "--accumulate", 2, "--keep", 4]
    done = run("train", "--data", text, "--out", out, "--steps", 8, "--save-every", 2, *flags, *TINY)
    assert done.returncode == 0, done.stderr
    metrics = (out / "metrics.jsonl").read_bytes()
    formats = {
        step: {str(p.format) for p in joined(content["model"]).values() if hasattr(p, "stored")}
        for step in (2, 4, 6, 8)
        for content in [checkpoints.read_checkpoint(out / "checkpoints" / f"step-{step:08}.pt")]
    }
    assert formats == {2: {"int4++4"}, 4: {"int4++4"}, 6: {"int4+4"}, 8: {"int4+4"}}
    for step in (2, 4, 6):
        again = copied(out, tmp_path / f"from {step}")
        done = run("train", "--resume", again, "--from-step", step)
        assert done.returncode == 0, done.stderr
        assert (again / "metrics.jsonl").read_bytes() == metrics
        assert differences(again, out, 8) == []


def test_one_byte_is_traded_for_int8_at_the_end_and_resumed(text, tmp_path):
    """A run resumed before or after the trade is the uninterrupted one; the monitor looks at the very step."""
    out = tmp_path / "run"
    sized = ("--steps", 12, "--eval-every", 1, "--save-every", 4, "--keep", 3)
    done = run("train", "--data", text, *TINY, *sized, "--preset", "1-byte-int8", "--trade-last", 0.5, "--out", out)
    assert done.returncode == 0, done.stderr
    weights = joined(checkpoints.load_weights(out))
    formats = {str(w.format) for w in weights.values() if hasattr(w, "stored")}
    assert formats == {"int8:row"}
    for step in (4, 8):
        again = copied(out, tmp_path / f"from {step}")
        done = run("train", "--resume", again, "--from-step", step)
        assert done.returncode == 0, done.stderr
        assert (again / "metrics.jsonl").read_bytes() == (out / "metrics.jsonl").read_bytes()
        assert differences(again, out, 12) == []


def test_what_cannot_be_traded_is_refused_before_a_run_is_made(text, tmp_path, cli):
    for flags in (("--preset", "2-byte"), ("--preset", "fp32"), ("--preset", "1-byte-int8", "--optimizer", "Lion")):
        code, _, err = cli("train", "--data", text, *flags, "--trade-last", 0.3, "--out", tmp_path / "none")
        assert code and "trade-last=0.3" in err and "--trade-last 0" in err and not (tmp_path / "none").exists()
    code, _, err = cli(
        "train", "--data", text, "--preset", "1-byte-int8", "--trade-last", 1, "--out", tmp_path / "none"
    )
    assert code and "trade-last=1" in err and "below 1" in err
    one = ("train", "--data", text, "--preset", "1-byte-int8", "--out", tmp_path / "none")
    for flags, said in (
        (("--trade-for", "int4"), "no more bits"),
        (("--trade-for", "int8", "--trade-last", 0), "--trade-last 0.15"),
        (("--preset", "1.3-byte", "--exp-avg", "int3", "--weights", "int4", "--trade-last", 0.2), "7 bits"),
    ):
        code, _, err = cli(*one, *flags)
        assert code and said in err and not (tmp_path / "none").exists()


def test_bpe(text, tmp_path, cli):
    flags = ["--data", text, "--out", tmp_path / "run", "--vocab", 300, "--steps", 4, *TINY]
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        code, _, err = cli("train", *flags)
        assert code == 2 and "pip install tokenizers" in err and not (tmp_path / "run").exists()
        return
    done = run("train", *flags, "--seq-len", 16, "--sample", 10)
    assert done.returncode == 0, done.stderr
    assert "BPE of" in done.stdout and (tmp_path / "run" / "tokenizer.json").exists()
    assert run("train", "--resume", tmp_path / "run").returncode == 0


# --- configuration ----------------------------------------------------------------------------------------


def test_trained_weights_are_rounded_as_suits_them():
    def rounding(**flags):
        return resolve({"preset": "1.6-byte", **flags}).weight_rounding

    assert rounding() == "nearest" and rounding(init="run") == "stochastic"
    assert rounding(init="run", weight_rounding="nearest") == "nearest"
    assert resolve({"preset": "2-byte", "init": "run"}).weight_rounding == "stochastic"


def test_toml_round_trip(tmp_path):
    config = resolve({"data": ["a b", 'c"\\\n\x7f', "ü"], "lr": 1e-5, "reset": "500:hard", "tie_embeddings": True})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert RunConfig(**read_toml(path)) == config
    assert resolve({}, read_toml(path)) == config


def test_resolve():
    config = resolve({"optimizer": "Lion", "steps": 20})
    assert (config.lr, config.beta2, config.warmup, config.eval_every) == (3e-4, 0.99, 2, 1)
    assert resolve({"reset": "none"}, {"reset": 500}).reset is None
    assert resolve({}, {"width": 64}, {"width": 32, "layers": 3}).width == 64
    with pytest.raises(ConfigError, match=r"unknown option 'wdith'.*'width'"):
        resolve({}, {"wdith": 3})
    with pytest.raises(ConfigError, match="vocab=100"):
        resolve({"vocab": 100})


def test_every_option_has_a_help_text():
    assert all(field.metadata["help"].endswith(".") for field in FIELDS.values())


def test_help_names_the_options():
    for arguments in (["--help"], ["compare", "--help"]):
        assert subprocess.run(command(*arguments), capture_output=True, text=True).returncode == 0
    assert "--step-in-backward" in subprocess.run(command("train", "--help"), capture_output=True, text=True).stdout
