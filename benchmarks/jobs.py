"""Runs of any kind as jobs: a list of dictionaries, each run once, its row remembered as a line of JSON.

The studies that train the byte-level GPT from scratch use `masterless.lab.train.experiment`; this is for the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Row = dict[str, Any]


def identity(job: Job) -> str:
    """A digest of the whole job: a changed job is another one."""
    return hashlib.blake2b(json.dumps(job, sort_keys=True).encode(), digest_size=8).hexdigest()


def load(path: Path) -> list[Row]:
    """The rows of the finished jobs."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def end_with_parent(parent: int) -> None:
    """Ends this process soon after its parent was killed: nobody would take its result."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_missing(jobs: Sequence[Job], run: Callable[[Job], Row], path: Path, workers: int = 2) -> Iterator[Row]:
    """Runs what is not in the file yet, each job in one of `workers` processes; rows are appended as they come."""
    done = {row["id"] for row in load(path)}
    todo = [job for job in jobs if identity(job) not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent, (os.getpid(),)) as pool:
        waiting = {pool.submit(run, job): job for job in todo}
        for future in as_completed(waiting):
            job = waiting[future]
            row = {"id": identity(job), **job, **future.result()}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            yield row


def command(
    description: str | None,
    jobs: Sequence[Job],
    run: Callable[[Job], Row],
    path: Path,
    table: Callable[[list[Row]], str],
) -> None:
    """The command line of a study: run what is missing, or only print the table of what is there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs and stop")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one thread each")
    arguments = parser.parse_args()
    if not arguments.table:
        for row in run_missing(jobs, run, path, arguments.workers):
            print(*(f"{value}" for key, value in row.items() if key != "id"), flush=True)
    print(table(load(path)))
