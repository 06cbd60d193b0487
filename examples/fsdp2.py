"""Train a byte-level GPT in 1.3 bytes per parameter, sharded with FSDP2.

Run it with ``torchrun --nproc-per-node 2 examples/fsdp2.py``; a run that was stopped goes on from its last checkpoint,
with any number of ranks.
"""

import argparse
import datetime

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import masterless as ml
from masterless.distributed import latest, load, local_bytes, save
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import batch, stdlib_corpus


def main() -> None:
    """Quantize, shard, build the optimizer, train."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--checkpoints", default="checkpoints", help="directory that all ranks share")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()

    model = GPT(GPTConfig(d_model=128, n_layer=2), torch.Generator().manual_seed(0))
    ml.quantize_(model, "int4")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)  # gathers codes and scales, never dense weights
    opt = ml.AdamW(model.named_parameters(), lr=2e-3, betas=(0.35, 0.95), exp_avg="int4", exp_avg_sq="log2")

    found = latest(options.checkpoints)
    start = load(found, model, opt)["step"] if found else 0
    corpus = stdlib_corpus().train
    for step in range(start, options.steps):
        inputs, targets = batch(corpus, seed=rank, step=step, batch_size=4, seq_len=128)
        loss = model(inputs, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if (step + 1) % 50 == 0 or step + 1 == options.steps:
            save(options.checkpoints, step + 1, model, opt, extra={"step": step + 1}, keep=2)
    held = local_bytes(*model.parameters()) + opt.state_bytes()
    print(f"rank {rank} of {world} holds {held:,} bytes of weights and states", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
