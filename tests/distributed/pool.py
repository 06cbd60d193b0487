"""Real processes for the tests: a pool of ranks that stays up between jobs, and dies with the first failure.

A job is a function of `jobs_*.py`, called on every rank; it returns something that can be pickled. If a rank fails or
the time is up, the pool is killed (no test can hang) and the next job starts a new one.
"""

from __future__ import annotations

import datetime
import importlib
import os
import queue
import socket
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(rank: int, world: int, port: int, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=200))
    while True:
        name, args = jobs.get()
        module, _, function = name.partition(":")
        try:
            value = getattr(importlib.import_module(module), function)(rank, world, *args)
            results.put((rank, None, value))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))


class Pool:
    """`world` ranks with gloo on localhost."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.processes: list[Any] = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.jobs = [context.Queue() for _ in range(self.world)]
        port = free_port()
        self.processes = [
            context.Process(target=_worker, args=(r, self.world, port, self.jobs[r], self.results), daemon=True)
            for r in range(self.world)
        ]
        for process in self.processes:
            process.start()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self.processes = []

    def run(self, job: str, *args: Any, timeout: float = 240) -> list[Any]:
        """Runs ``module:function(rank, world, *args)`` on all ranks; returns their values in order."""
        if not self.processes:
            self._start()
        for q in self.jobs:
            q.put((job, args))
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(values) < self.world:
            try:
                rank, error, value = self.results.get(timeout=min(1.0, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                dead = [p.exitcode for p in self.processes if not p.is_alive()]
                if dead or time.monotonic() > deadline:
                    self.stop()
                    reason = f"ranks died with {dead}" if dead else f"no answer within {timeout} s"
                    raise AssertionError(f"{job}: {reason}; ranks {sorted(values)} had finished") from None
                continue
            if error is not None:
                self.stop()
                raise AssertionError(f"{job} failed on rank {rank}:\n{error}")
            values[rank] = value
        return [values[r] for r in range(self.world)]
