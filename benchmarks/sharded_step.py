"""The optimizer's step on shards: FSDP2 on two ranks, the compiled kernel against the reference, preset by preset.

    python benchmarks/sharded_step.py [--json]

Every rank has one thread and half of 12 matrices of 768 x 3072; the time is the slower rank's, the minimum of repeats,
the two backends in turn. A factored second moment needs the row and column sums of all ranks: only these cross.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import masterless as ml
from masterless.lab.bench.processors import processor

PRESETS = ("2-byte", "1.3-byte", "1-byte")
RANKS, LAYERS, SHAPE, REPEATS = 2, 12, (768, 3072), 5


def optimizer_of(preset: str, backend: str) -> ml.AdamW:
    """A sharded model's optimizer, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SHAPE[1], SHAPE[0], bias=False) for _ in range(LAYERS)))
    opt_class = ml.PRESETS[preset]
    if opt_class.weights:
        ml.quantize_(model, opt_class.weights)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = ml.AdamW(model.named_parameters(), lr=1e-4, backend=backend, **opt_class.options)
    for p in model.parameters():
        local = torch.randn(p._local_tensor.shape)  # type: ignore[attr-defined]
        p.grad = type(p.data).from_local(local, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return optimizer


def measure(rank: int, port: int, queue: mp.SimpleQueue) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    rows = []
    for preset in PRESETS:
        optimizers = {backend: optimizer_of(preset, backend) for backend in ("auto", "reference")}
        best = dict.fromkeys(optimizers, float("inf"))
        for repeat in range(REPEATS + 1):
            for backend, optimizer in optimizers.items():
                dist.barrier()
                started = time.perf_counter()
                optimizer.step()
                taken = torch.tensor(time.perf_counter() - started)
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                if repeat:  # the first makes the plan
                    best[backend] = min(best[backend], float(taken))
        kernels = {type(entry.backend).__name__ for entry in optimizers["auto"].plan.entries.values()}
        rows.append({"preset": preset, "milliseconds": 1e3 * best["auto"], "reference": 1e3 * best["reference"]})
        rows[-1]["backends"] = sorted(kernels)
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--port", type=int, default=29731)
    arguments = parser.parse_args()
    queue = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(measure, (arguments.port, queue), nprocs=RANKS, join=False)
    rows = queue.get()
    while not context.join():
        pass
    if arguments.json:
        print(json.dumps({"cpu": processor(), "ranks": RANKS, "rows": rows}))
        return
    print(f"{processor()}, {RANKS} ranks of one thread, {LAYERS} matrices of {SHAPE[0]} x {SHAPE[1]}, ms per step")
    for row in rows:
        ratio = row["reference"] / row["milliseconds"]
        print(f"{row['preset']:15} {row['milliseconds']:8.1f}   reference {row['reference']:8.1f}   {ratio:5.1f} times")


if __name__ == "__main__":
    main()
