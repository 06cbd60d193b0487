"""A killed run that resumes from its last checkpoint ends with the very bits of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import masterless.tensor.quantized  # noqa: F401  (lets torch.load read quantized tensors)

STEPS, EVERY = 30, 7

# A process that imports everything once and then forks a fresh process for every run it is asked for.
LAUNCHER = """
import json, os, sys, time, traceback
import torch, torch._dynamo  # torch imports the latter with the first optimizer, which takes a while
import masterless as ml
from masterless.optim.backward import step_in_backward

ml.AdamW, ml.SGD, ml.quantize_  # imported on first use; better once than in every process


def save(state, path):
    torch.save(state, path + ".part")
    os.replace(path + ".part", path)  # a reader sees the old file or the new one, never half of one


def train(folder, kind, steps, every, pace):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    ml.quantize_(model, {"int4": "int4", "fp8": "fp8", "hidden": "int4+4"}[kind])
    options = {"lr": 1e-2, "seed": 3, "backend": "reference"}
    if kind == "fp8":
        optimizer = ml.SGD(model.named_parameters(), momentum=0.9, momentum_buffer="bf16", **options)
    else:
        second = "factored" if kind == "hidden" else "log2"
        optimizer = ml.AdamW(model.named_parameters(), exp_avg="int4", exp_avg_sq=second, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    if kind == "hidden":
        step_in_backward(model, optimizer)
    done, checkpoint = 0, os.path.join(folder, "checkpoint.pt")
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        done = saved["done"]
    print("from", done, flush=True)
    for step in range(done, steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % every == 0:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            save({"done": step + 1, **{name: part.state_dict() for name, part in parts.items()}}, checkpoint)
        print("did", step + 1, flush=True)
        time.sleep(pace)
    weights = {}
    for name, p in model.named_parameters():
        tensors = p.detach().stored.tensors if hasattr(p, "stored") else {"values": p.detach()}
        weights.update({name + "." + key: tensor for key, tensor in tensors.items()})
    save({"weights": weights, "state": optimizer.state_dict()["state"]}, os.path.join(folder, "final.pt"))


torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(*json.loads(line))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    print("pid", child, flush=True)
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Launcher:
    def __init__(self):
        source = str(Path(__file__).parent.parent / "src")
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", LAUNCHER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def run(self, folder, kind, kill_after=None):
        """Trains in a process of its own, kills it with SIGKILL after a step if asked to; returns what it said."""
        request = [str(folder), kind, STEPS, EVERY, 0.02 if kill_after else 0.0]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        said, child = [], None
        while not said or not said[-1].startswith("exit"):
            line = self.process.stdout.readline().strip()
            assert line, "the launcher ended"
            said.append(line)
            child = int(line.split()[1]) if line.startswith("pid") else child
            if kill_after and line == f"did {kill_after}":
                os.kill(child, signal.SIGKILL)
        assert said[-1] == (f"exit {-signal.SIGKILL}" if kill_after else "exit 0")
        return said

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.close()


def final(folder):
    return torch.load(folder / "final.pt", weights_only=True)


def differing(a, b):
    weights = [name for name in a["weights"] if not torch.equal(a["weights"][name], b["weights"][name])]
    states = [
        (i, k) for i, state in a["state"].items() for k, v in state.items() if not torch.equal(v, b["state"][i][k])
    ]
    return weights, states


@pytest.mark.parametrize("kind", ["int4", "fp8", "hidden"])
def test_killed_and_resumed_is_uninterrupted_to_the_bit(kind, launcher, tmp_path):
    """INT4 with 4- and 2-bit states, FP8 with a bf16 buffer, INT4 with hidden bits stepped in backward."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    assert "from 0" in launcher.run(whole, kind)
    said = launcher.run(broken, kind, kill_after=17)  # between the checkpoints after 14 and 21 steps
    assert "from 0" in said and "did 21" not in said and not (broken / "final.pt").exists()
    said = launcher.run(broken, kind)
    assert "from 14" in said and f"did {STEPS}" in said
    assert differing(final(whole), final(broken)) == ([], [])


def test_the_comparison_can_fail(launcher, tmp_path):
    """Forgetting one momentum buffer of one matrix, or one step of the random bits, gives other weights."""
    launcher.run(tmp_path, "int4", kill_after=15)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    launcher.run(tmp_path, "int4")
    expected = final(tmp_path)
    names = saved["optimizer"]["param_groups"][0]["param_names"]
    state = saved["optimizer"]["state"][names.index("0.weight")]
    codes = state["exp_avg.codes"]
    for forget in ("momentum", "step"):
        if forget == "momentum":
            state["exp_avg.codes"] = torch.full_like(codes, 0x88)  # zero
        else:
            state["exp_avg.codes"], state["step"] = codes, state["step"] - 1
        torch.save(saved, tmp_path / "checkpoint.pt")
        launcher.run(tmp_path, "int4")
        assert "0.weight.codes" in differing(expected, final(tmp_path))[0]
