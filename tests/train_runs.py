"""``masterless train`` in processes of its own: begun, interrupted, compared."""

import random
import subprocess
import sys

import torch

from masterless.lab.train.run_files import read_checkpoint

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--seq-len", "32", "--eval-batches", "2", "--threads", "1"]


def command(*arguments):
    return [sys.executable, "-m", "masterless", *map(str, arguments)]


def run(*arguments, timeout=250):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout)


def interrupt(number, *arguments):
    """Starts a run and sends it a signal after its first evaluation."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=250)
    assert first, err
    return process.returncode, first + out, err


def differences(folder, other, step):
    """The names of what two runs have not the same at a step, to the bit: stored weights and optimizer state."""
    ours, theirs = (_tensors(read_checkpoint(f / "checkpoints" / f"step-{step:08}.pt")) for f in (folder, other))
    assert ours.keys() == theirs.keys() and ours
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def _tensors(checkpoint):
    found = {}
    for name, p in checkpoint["model"].items():
        stored = getattr(p, "stored", None)
        for key, tensor in ({"values": p} if stored is None else stored.tensors).items():
            found[f"{name}.{key}"] = tensor
    for index, state in checkpoint["optimizer"]["state"].items():
        found.update({f"state {index} {key}": torch.as_tensor(value) for key, value in state.items()})
    return found


def write_text(path):
    """A small text to train on."""
    words = "the quick brown fox jumps over a lazy dog while seven wizards boil quartz".split()
    source = random.Random(0)
    path.write_text(" ".join(source.choice(words) for _ in range(8000)))
    return path
