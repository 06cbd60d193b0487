"""Workers: processes that take the first run nobody is at, train it, add its row, and look again."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

from .plan import Cell, missing
from .recipe import Job
from .store import Store

Event = dict[str, Any]
WAIT_SECONDS = 5.0


def work(cells: Sequence[Cell], store: Store, report: Callable[[Event], None], **options: Any) -> None:
    """Runs what is missing until nothing is, waiting for others where their rows decide what comes next."""
    from .trainer import train

    while True:
        waiting = False
        for cell, job in missing(cells, store.rows()):
            with store.claim(job.key) as mine:
                if not mine:
                    waiting = True
                    continue
                if job.key in store.rows():  # finished between the plan and the claim
                    break
                report({"kind": "start", "job": _name(cell, job)})
                row = train(job, progress=lambda step, steps: report({"kind": "step", "at": step / steps}), **options)
                store.add(cell.group, row)
                report({"kind": "row", "job": _name(cell, job), "row": row})
                break
        else:
            if not waiting:
                return
            time.sleep(WAIT_SECONDS)


def _name(cell: Cell, job: Job) -> str:
    noise = "".join(f" {name} {value}" for name in ("order", "dither") if (value := getattr(job, name)) is not None)
    return f"{cell.group} | {job.setting.name} | {job.recipe.label} | lr {job.lr:g} seed {job.seed}{noise}"


def _process(number: int, cells: Sequence[Cell], store: Store, events: Any, parent: int, niceness: int) -> None:
    import torch

    from .trainer import train  # noqa: F401  (imported here so that an error in it comes before the first claim)

    torch.set_num_threads(1)
    os.nice(max(0, niceness - os.nice(0)))

    def report(event: Event) -> None:
        if os.getppid() != parent:
            os._exit(1)  # the command was killed: nobody wants more rows
        events.put({"worker": number, **event})

    work(cells, store, report)
    events.put({"worker": number, "kind": "end"})


def run(cells: Sequence[Cell], store: Store, workers: int, show: Callable[[Event], None], niceness: int = 19) -> None:
    """Runs what is missing in `workers` processes, one thread each; events go to `show`."""
    context = get_context("spawn")
    events: Any = context.Queue()
    crowd = [
        context.Process(target=_process, args=(n, cells, store, events, os.getpid(), niceness)) for n in range(workers)
    ]
    for process in crowd:
        process.start()
    try:
        while any(process.is_alive() for process in crowd) or not events.empty():
            with contextlib.suppress(queue.Empty):
                show(events.get(timeout=1.0))
        failed = [process.exitcode for process in crowd if process.exitcode]
        if failed:
            raise RuntimeError(f"{len(failed)} of {workers} workers failed: see their messages above")
    finally:
        for process in crowd:
            process.terminate()
