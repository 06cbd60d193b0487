"""Ranks that are told different things: run by torchrun in `test_parallel_runs.py`, which reads what they noted."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from masterless.lab import launch

RANK = int(os.environ["RANK"])
MODEL = {"layers": 1, "width": 32, "heads": 2, "seq_len": 32, "eval_batches": 1, "steps": 2, "batch": 2, "threads": 1}


def note(case: str, said: str) -> None:
    with Path(sys.argv[1], f"rank-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps([case, said]) + "\n")


def attempt(name: str, **arguments: object) -> None:
    """Starts a run, and says how that ended on this rank."""
    try:
        launch.run("ddp", **arguments)
        said = "finished"
    except ValueError as error:
        said = str(error)
    note(name, said)


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    text = folder / "text.txt"
    flags = {**MODEL, "data": [str(text)]}
    out = folder / "run"
    mine = folder / f"text-{RANK}.txt"
    mine.write_text(text.read_text() + f"and this is for rank {RANK} alone")
    attempt("lr", flags={**flags, "lr": 1e-3 * (1 + RANK)}, out=out)
    attempt("seed", flags={**flags, "seed": RANK}, out=out)
    attempt("text", flags={**flags, "data": [str(mine)]}, out=out)
    attempt("broken on one rank", flags={**flags, "data": [str(text if RANK else folder / "none")]}, out=out)
    dist.barrier()
    note("nothing is left", str(out.exists()))
    dist.barrier()  # the next one makes the folder
    attempt("good", flags=flags, out=out)
    attempt("again", flags=flags, out=out)
    if RANK == 0:
        lock = (out / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    attempt("held", flags={}, resume=out)
    if RANK == 0:
        lock.close()
        text.write_text(text.read_text() + " changed")
    dist.barrier()  # nobody looks at the text before it has changed
    before = (out / "metrics.jsonl").read_bytes()
    attempt("changed text", flags={}, resume=out)
    assert (out / "metrics.jsonl").read_bytes() == before
    attempt("of one process", flags={}, resume=folder / "single")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
