"""`train --parallel`: all ranks agree or all stop, a resumed run is checked, and no file of a checkpoint runs code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from test_faults import torchrun
from torch import nn

import masterless as ml
from masterless.distributed import checkpoint
from masterless.distributed.metadata import METADATA, PICKLED, _digest
from masterless.interop import FileError
from masterless.lab.cli import app

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent
TEXT = "seven wizards boil quartz over a lazy fire while the quick brown fox looks on. " * 120


def test_ranks_agree_or_all_stop(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "single" / "checkpoints").mkdir(parents=True)
    (tmp_path / "single" / "config.toml").write_text("steps = 3\nthreads = 1\nbatch = 2\n")
    code, output = torchrun(2, HERE / "disagree.py", str(tmp_path), timeout=250)
    assert code == 0, output
    files = [tmp_path / f"rank-{rank}.jsonl" for rank in range(2)]
    said, other = (dict(json.loads(line) for line in file.read_text().splitlines()) for file in files)
    assert said == other
    expected = {
        "lr": "lr: 0.001 on rank 0 and 0.002 on rank 1",
        "seed": "seed: 0 on rank 0 and 1 on rank 1",
        "text": "data: ",
        "broken on one rank": "rank 0: ",
        "nothing is left": "False",
        "good": "finished",
        "again": "a run is there already",
        "held": "another process is training here",
        "changed text": "the text is not what this run was trained on",
        "of one process": "a run of one process",
    }
    assert said.keys() == expected.keys()
    for case, words in expected.items():
        assert words in said[case], f"{case}: {said[case]}"
    # What ranks wrote is not for one process, which would begin anew and cut the metrics.
    done = subprocess.run(
        [sys.executable, "-m", "masterless", "train", "--resume", str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "a run of several ranks" in done.stderr


# --- files that would run code, and damaged ones ------------------------------------------------------------------


class Evil:
    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self):
        return os.system, (f"touch {self.where}",)


def built(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 33), nn.GELU(), nn.Linear(33, 40))
    ml.quantize_(model, "int4")
    opt = ml.AdamW(model.named_parameters(), lr=1e-2, exp_avg="int4", exp_avg_sq="factored")
    model(torch.ones(2, 40)).sum().backward()
    opt.step()
    return model, opt


def tensors(model, opt):
    found = dict(checkpoint.plain_state_dict(model.state_dict()))
    for i, state in enumerate(opt.state.values()):
        found.update({f"{i}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)})
    return {key: value.detach().clone() for key, value in found.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def saved(tmp_path):
    model, opt = built()
    return checkpoint.save(tmp_path / "run", 3, model, opt, extra={"step": 3, "names": ["a"]}), tensors(model, opt)


def test_a_pickled_description_is_refused_and_does_not_run(saved, tmp_path):
    where, expected = saved
    ran = tmp_path / "ran"
    good = (where / PICKLED).read_bytes()
    (where / PICKLED).write_bytes(pickle.dumps(Evil(ran)))
    model, opt = built(1)
    assert checkpoint.load(where, model, opt) == {"step": 3, "names": ["a"]}  # ours is read, torch's is not opened
    assert same(tensors(model, opt), expected)
    (where / METADATA).unlink()
    with pytest.raises(FileError, match=r"pickled \.metadata.*trust=True \(--trust"):
        checkpoint.load(where, *built(1))
    assert not ran.exists()
    (where / PICKLED).write_bytes(good)
    model, opt = built(1)
    assert checkpoint.load(where, model, opt, trust=True)["step"] == 3
    assert same(tensors(model, opt), expected)


def test_a_pickled_value_is_refused_and_does_not_run(tmp_path):
    ran = tmp_path / "ran"
    where = checkpoint.save(tmp_path / "run", 3, *built(), extra={"step": Evil(ran)})
    with pytest.raises(FileError, match="corrupt, or not a checkpoint"):
        checkpoint.load(where, *built(1))
    assert not ran.exists()


def test_the_command_line_does_not_run_a_pickle(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = "--layers 1 --width 32 --heads 2 --seq-len 32 --batch 2 --steps 2 --threads 1 --eval-batches 1"
    common = ["train", "--parallel", "fsdp", "--data", str(tmp_path / "text.txt"), *options.split()]
    code, output = torchrun(1, "-m\nmasterless", *common, "--out", str(tmp_path / "run"))
    assert code == 0, output
    where = checkpoint.latest(tmp_path / "run" / "distributed")
    (where / METADATA).unlink()
    (where / PICKLED).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    code, output = torchrun(1, "-m\nmasterless", "train", "--parallel", "fsdp", "--resume", str(tmp_path / "run"))
    assert code != 0 and "--trust on the command line" in output and not (tmp_path / "ran").exists()


def test_damaged_checkpoints_are_refused_or_the_same(saved, tmp_path):
    """One bit flipped anywhere in a checkpoint: an error, or exactly what was saved."""
    where, expected = saved
    source, refused = Random(0), 0
    for i in range(120):
        copy = tmp_path / "copy"
        shutil.copytree(where, copy)
        file = copy / METADATA if i % 3 == 0 else next(copy.glob("*.distcp"))
        content = bytearray(file.read_bytes())
        place = source.randrange(8 * len(content))
        content[place // 8] ^= 1 << place % 8
        file.write_bytes(content)
        model, opt = built(1)
        try:
            extra = checkpoint.load(copy, model, opt)
            assert same(tensors(model, opt), expected) and extra == {"step": 3, "names": ["a"]}, f"{file.name}: {place}"
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
        shutil.rmtree(copy)
    assert refused > 70


@pytest.mark.parametrize("lie", ["traversal", "outside", "gap", "short", "type", "layout"])
def test_a_description_that_lies_is_refused(saved, lie):
    """With the right checksum, as an attacker would write it."""
    where, _ = saved
    about = json.loads((where / METADATA).read_text())["checkpoint"]
    entry = about["entries"]["model.0.weight.codes"]
    piece = entry["pieces"][0]
    if lie == "traversal":
        piece[1] = "../../secret.distcp"
    elif lie == "outside":
        piece[3] = 1 << 40
    elif lie == "gap":
        entry["chunks"][0][1][0] -= 1
    elif lie == "short":
        piece[2] += 8
    elif lie == "type":
        entry["dtype"] = "load"
    else:
        about["layout"] = 99
    (where / METADATA).write_text(json.dumps({"sha256": _digest(json.dumps(about)), "checkpoint": about}))
    with pytest.raises(ValueError, match=r"step-00000003"):
        checkpoint.load(where, *built(1))


def test_trust_is_for_parallel_runs(capsys):
    with pytest.raises(SystemExit):
        app(["train", "--trust"], prog_name="masterless")
    assert "--trust: means nothing without" in capsys.readouterr().err
