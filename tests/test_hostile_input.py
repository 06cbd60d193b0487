"""Input that lies, never ends or asks for the absurd: one line, exit code 2, nothing left behind and nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_train_command import TINY, cli, copied, finished, run, text, tree  # noqa: F401

from masterless.lab.train import run as runs
from masterless.lab.train.config import ConfigError, resolve
from masterless.lab.train.limits import machine_memory, parameter_count, require_affordable
from masterless.lab.train.run_files import RunFolder

pytestmark = pytest.mark.timeout(120)
DEEP = "[" * 100_000 + "]" * 100_000


# --- damaged manifests --------------------------------------------------------------------------------------------


def _manifests():
    """A manifest that was good, with one thing wrong."""
    good = {"file": "step-00000060.pt", "step": 60, "bytes": 9, "sha256": "a" * 64, "metrics_bytes": 5}
    wrong = {
        "file": [None, 3, "", "../../step-00000060.pt", "/etc/passwd", "step-00000060.pt/../x", ["step-00000060.pt"]],
        "step": [None, "60", -1, 6.5, True, 10**30],
        "bytes": [None, "many", -1, [1]],
        "sha256": [None, 5, "short", "g" * 64],
        "metrics_bytes": [None, -5, "5", {}],
    }
    for key, values in wrong.items():
        yield f"no {key}", {"checkpoints": [{k: v for k, v in good.items() if k != key}]}
        for value in values:
            yield f"{key} {value!r}"[:40], {"checkpoints": [{**good, key: value}]}
    for content in (None, 3, [], {}, "text", {"checkpoints": 3}, {"checkpoints": [3]}, {"checkpoints": {"a": 1}}):
        yield f"{content!r}"[:40], content
    yield "twice", {"checkpoints": [good, good]}


@pytest.mark.parametrize("content", [c for _, c in _manifests()], ids=[name for name, _ in _manifests()])
def test_damaged_manifests(content, finished, tmp_path, cli):  # noqa: F811
    out = copied(finished[0], tmp_path / "run")
    manifest = out / "checkpoints" / "manifest.json"
    manifest.write_text(json.dumps(content))
    before = tree(out)
    code, printed, err = cli("train", "--resume", out)
    assert code == 2 and printed == "" and err.count("\n") == 1 and "manifest.json: missing or damaged" in err
    assert tree(out) == before


@pytest.mark.parametrize("content", [DEEP, '{"checkpoints": ' + "9" * 5000 + "}", "\ud800", ""])
def test_manifests_that_are_no_json(content, finished, tmp_path, cli):  # noqa: F811
    out = copied(finished[0], tmp_path / "run")
    (out / "checkpoints" / "manifest.json").write_bytes(content.encode(errors="surrogatepass"))
    code, _, err = cli("train", "--resume", out)
    assert code == 2 and err.count("\n") == 1 and "missing or damaged" in err


# --- files --------------------------------------------------------------------------------------------------------


def _array(path, shape, dtype="<i4", data=b"\0" * 4000):
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
        file.write(data)


def _write(folder):
    (folder / "deep.toml").write_text(f"x = {DEEP}")
    (folder / "keys.toml").write_text("a." * 200_000 + "a = 1")
    (folder / "digits.toml").write_text("steps = " + "9" * 5000)
    (folder / "deep.jsonl").write_text('{"text": ' + DEEP + "}\n")
    (folder / "digits.jsonl").write_text('{"text": "a", "n": ' + "9" * 5000 + "}\n")
    _array(folder / "huge.npy", (1 << 60,))
    _array(folder / "short.npy", (2000,))
    _array(folder / "negative.npy", (-5,))
    _array(folder / "overflow.npy", (1 << 200,))
    _array(folder / "seconds.npy", (500,), "<m8[s]")
    (folder / "code.npy").write_bytes(b"\x93NUMPY\x01\x00\x00\x10" + b"-" * 4000 + b"1".ljust(96))
    for name in ("sparse.txt", "sparse.toml", "sparse.pt", "sparse.npy", "sparse.jsonl"):
        with open(folder / name, "wb") as file:
            file.truncate(1 << 42)
    for name in ("pipe.txt", "pipe.toml", "pipe.pt", "pipe.npy", "pipe.jsonl"):
        os.mkfifo(folder / name)
    (folder / "pipes").mkdir()
    os.mkfifo(folder / "pipes" / "a.txt")


FILES = {
    "deep toml": (["--config", "{dir}/deep.toml"], "not valid TOML"),
    "dotted toml": (["--config", "{dir}/keys.toml"], "keys.toml: "),
    "digits in toml": (["--config", "{dir}/digits.toml"], "not valid TOML"),
    "deep jsonl": (["--data", "{dir}/deep.jsonl"], "not valid JSON"),
    "digits in jsonl": (["--data", "{dir}/digits.jsonl"], "not valid JSON"),
    "npy larger than its file": (["--data", "{dir}/huge.npy"], "elements of int32 in 4,000 bytes"),
    "npy cut short": (["--data", "{dir}/short.npy"], "not a readable .npy"),
    "npy of negative size": (["--data", "{dir}/negative.npy"], "not a readable .npy"),
    "npy beyond numbers": (["--data", "{dir}/overflow.npy"], "not a readable .npy"),
    "npy of durations": (["--data", "{dir}/seconds.npy"], "save a 1-D array of integers"),
    "npy with code": (["--data", "{dir}/code.npy"], "not a readable .npy"),
    "device as text": (["--data", "/dev/zero"], "is a device"),
    "device as config": (["--config", "/dev/zero"], "is a device"),
    "device as init": (["--init", "/dev/zero"], "is a device"),
    "sparse text": (["--data", "{dir}/sparse.txt"], "more text than a quarter"),
    "sparse jsonl": (["--data", "{dir}/sparse.jsonl"], "more text than a quarter"),
    "sparse npy": (["--data", "{dir}/sparse.npy"], "sparse.npy: "),
    "sparse config": (["--config", "{dir}/sparse.toml"], "more than the"),
    "sparse init": (["--init", "{dir}/sparse.pt"], "not a checkpoint"),
    "pipe as text": (["--data", "{dir}/pipe.txt"], "is a pipe"),
    "pipe as jsonl": (["--data", "{dir}/pipe.jsonl"], "is a pipe"),
    "pipe as npy": (["--data", "{dir}/pipe.npy"], "is a pipe"),
    "pipe in a folder": (["--data", "{dir}/pipes"], "is a pipe"),
    "pipe as config": (["--config", "{dir}/pipe.toml"], "is a pipe"),
    "pipe as init": (["--init", "{dir}/pipe.pt"], "is a pipe"),
    "no name": (["--data", ""], "an empty name"),
    "no name of weights": (["--init", ""], "an empty name"),
    "width": (["--width", "1000000"], "this machine has"),
    "width beyond numbers": (["--width", str(10**30)], "absurdly large"),
    "layers": (["--layers", "1000000000"], "this machine has"),
    "batch": (["--batch", "1000000000"], "this machine has"),
    "experts": (["--experts", "1000000000"], "this machine has"),
    "evaluation": (["--eval-batches", "10000000000"], "this machine has"),
    "threads": (["--threads", "1000000"], "threads=1000000: must lie between"),
    "seed": (["--seed", str(2**64)], "absurdly large"),
    "not a number": (["--weight-decay", "nan"], "is no number"),
}


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices of POSIX")
@pytest.mark.parametrize("name", FILES)
def test_train_refuses(name, tmp_path, text, cli):  # noqa: F811
    arguments, message = FILES[name]
    _write(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    data = [] if "--data" in arguments else ["--data", text]
    tiny = [a for i, a in enumerate(TINY) if not {TINY[i - i % 2]} & set(arguments)]
    out = ["--out", tmp_path / "a" / "run"]
    code, printed, err = cli("train", *tiny, *data, *out, *(a.format(dir=tmp_path) for a in arguments))
    assert code == 2 and printed == "" and err.count("\n") == 1 and message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_estimate_of_a_model_is_its_size():
    from masterless.lab.models import GPT, GPTConfig

    for flags in ({}, {"experts": 4, "hidden": 100}, {"tie_embeddings": True, "layers": 5, "width": 64}):
        config = resolve(flags)
        shape = {"n_layer": config.layers, "d_model": config.width, "d_ff": config.hidden, "n_experts": config.experts}
        model = GPT(GPTConfig(**shape, tie_embeddings=config.tie_embeddings))
        matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        assert parameter_count(config, 256) == matrices
    assert machine_memory() > 1 << 28
    require_affordable(resolve({"width": 1024, "layers": 24, "heads": 16}), 256)  # 300M parameters fit anywhere


@pytest.mark.parametrize("content", ["weights", "list", "numbers", "shapes", "lie"])
def test_weights_that_lie(content, tmp_path, text, cli):  # noqa: F811
    lies = {
        "weights": {"model": {"embed.weight": 3}},
        "list": [1, 2],
        "numbers": {1: torch.zeros(2)},
        "shapes": {"model": {"embed.weight": torch.zeros(3, 3)}},
        "lie": {"embed.weight": torch.zeros(1).expand(1 << 20, 1 << 20)},
    }
    torch.save(lies[content], tmp_path / "init.pt")
    code, printed, err = cli("train", *TINY, "--data", text, "--out", tmp_path / "run", "--init", tmp_path / "init.pt")
    assert code == 2 and printed == "" and err.count("\n") == 1 and "init.pt: " in err
    assert not (tmp_path / "run").exists()


# --- the run directory --------------------------------------------------------------------------------------------


def test_a_run_that_another_process_finished_meanwhile_is_not_touched(tmp_path, text, cli, monkeypatch):  # noqa: F811
    """Another process begins and finishes the same run while this one still reads its text, and then this one fails."""
    out = tmp_path / "run"

    def meanwhile(config, tokenizer=None):
        # What another process would have done before we had made the directory, had we not made it first.
        assert out.is_dir(), "the directory is made before anything that takes time"
        with pytest.raises(ConfigError, match="another process is training here"):
            RunFolder.claim(out)
        (out / "precious.txt").write_text("of somebody else")
        raise ValueError("--data: something is wrong")

    monkeypatch.setattr(runs, "build_corpus", meanwhile)
    code, _, err = cli("train", *TINY, "--data", text, "--out", out)
    assert code == 2 and "something is wrong" in err
    assert [p.name for p in out.iterdir()] == ["precious.txt"], "only what this process made may go"


def test_two_starts_at_once_make_one_run(tmp_path, text):  # noqa: F811
    """Real processes that are given the same directory: one trains, the others say so, and its run is whole."""
    arguments = ["train", *TINY, "--data", text, "--out", tmp_path / "run", "--steps", 4, "--eval-every", 2]
    command = [sys.executable, "-m", "masterless", *map(str, arguments)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    ends = [(p.communicate(timeout=110)[1].decode(), p.returncode) for p in processes]
    assert sorted(code for _, code in ends) == [0, 2, 2], ends
    assert all("another process" in err or "there already" in err for err, code in ends if code == 2), ends
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 4


KILLED = """
import os, signal, sys
at, replace = int(sys.argv.pop(1)), os.replace
def count(*names):
    global at
    if not at:
        os.kill(os.getpid(), signal.SIGKILL)
    at -= 1
    return replace(*names)
os.replace = count
from masterless.lab.cli import main
main()
"""


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_start_that_is_killed_leaves_a_folder_that_can_be_used(at, tmp_path, text):  # noqa: F811
    """Killed before the manifest, before the configuration, before the first checkpoint."""
    out = tmp_path / "run"
    arguments = ["train", *TINY, "--data", text, "--out", out, "--steps", 4, "--eval-every", 2]
    done = subprocess.run([sys.executable, "-c", KILLED, str(at), *map(str, arguments)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (out / "config.toml").exists() == (at == 2)
    again = run("train", "--resume", out) if at == 2 else run(*arguments)
    assert again.returncode == 0 and "finished after 4 steps" in again.stdout, again.stderr
    assert not list(out.rglob("*.partial"))


def test_an_empty_folder_may_be_used_and_stays_if_the_start_fails(tmp_path, text, cli):  # noqa: F811
    out = tmp_path / "run"
    out.mkdir()
    code, _, _ = cli("train", *TINY, "--data", tmp_path / "none", "--out", out)
    assert code == 2 and list(out.iterdir()) == []
    (out / ".lock").touch()
    (out / "mine.txt").touch()
    code, _, err = cli("train", *TINY, "--data", text, "--out", out)
    assert code == 2 and "not overwritten" in err and (out / "mine.txt").exists()
