"""Is subtractive dither worth having as a third rounding of states? Is a rotation worth having before coding?

Subtractive dither adds a random fraction of a quantum before rounding and takes the same fraction off when decoding,
replayed from the counter: an error of constant variance 1/12 quantum^2, where stochastic rounding has up to 1/4.
The price: exact zeros no longer stay zero, and decoding needs to know in which step a block was last written.

A Hadamard rotation of every block of 128 spreads what is large in one element over all of them, so that the block's
scale, which its largest element sets, becomes smaller. The price is two transforms a step.

This measures what they buy, before they are built: a first moment in fp32 passes through the quantizer after every
step, with the library's own scales and random bits: with stochastic rounding, with subtractive dither, and rotated.

    python benchmarks/dither_study.py [--table]
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from jobs import Job, Row, command

from masterless import AdamW
from masterless.formats import codec, parse
from masterless.formats.rounding import dither, parameter_id, stream_key, threshold
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import TrainSettings, stdlib_corpus, train

RESULTS = Path(__file__).parent / "results" / "dither.jsonl"


KINDS = ("exact", "stochastic", "subtractive", "rotated")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Every block of 128 columns times the normalized Hadamard matrix, which is its own inverse."""
    blocks, h = x.unflatten(1, (-1, 128)), torch.ones(1, 1)
    for _ in range(7):
        h = torch.kron(h, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return (blocks @ (h / 128**0.5)).flatten(1)


def quantized(m: torch.Tensor, bits: int, kind: str, key: int) -> torch.Tensor:
    """What a first moment becomes when it is stored in `bits` bits and read again."""
    fmt = parse(f"int{bits}")
    x = m.reshape(m.shape[0], -1)
    if kind == "rotated":
        return rotated(quantized(rotated(x), bits, "stochastic", key)).view_as(m)
    u = dither(key, *x.shape)
    scale = codec.scale_for(codec.block_peak(x, fmt), fmt)
    if kind == "stochastic":
        return codec.decode(codec.encode(x, fmt, u, scale=scale), x.shape[1], fmt).view_as(m)
    offset = (threshold(u) - 0.5) * scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    rounded = codec.decode(codec.encode(x + offset, fmt, None, scale=scale), x.shape[1], fmt)
    return (rounded - offset).view_as(m)


def jobs() -> list[Job]:
    """Every kind at 4 and 2 bits with the beta1 that goes with them, two seeds."""
    return [
        {"bits": bits, "beta1": beta1, "kind": kind, "seed": seed}
        for seed in (0, 1)
        for bits, beta1 in ((4, 0.9), (2, 0.527))
        for kind in KINDS
    ]


def run(job: Job) -> Row:
    """One run."""
    bits, beta1, kind, seed = job["bits"], job["beta1"], job["kind"], job["seed"]
    torch.set_num_threads(1)
    settings = TrainSettings(steps=1500, lr=2e-3, betas=(beta1, 0.95), seed=seed, eval_batches=128)
    model = GPT(GPTConfig(), torch.Generator().manual_seed(seed))
    optimizer = AdamW(
        model.named_parameters(),
        **settings.optimizer_arguments(),
        exp_avg="fp32",
        exp_avg_sq="fp32",
        moment_units="update",
    )

    def requantize(*_: Any) -> None:
        for _, p, name in optimizer.parameters():
            if p.dim() == 2:
                state = optimizer.state[p]
                key = stream_key(seed, int(state["step"]), parameter_id(name), "exp_avg")
                state["exp_avg"].copy_(quantized(state["exp_avg"], bits, kind, key))

    if kind != "exact":
        optimizer.register_step_post_hook(requantize)
    result = train(model, optimizer, stdlib_corpus(), settings)
    return {"loss": result.final_validation_loss}


def table(rows: list[Row]) -> str:
    """A markdown table of the finished runs."""
    lines = ["| m | b1 | rounding | loss (each seed) | mean |", "|---|---|---|---|---|"]
    for bits in (4, 2):
        for kind in KINDS:
            found = [r for r in rows if r["bits"] == bits and r["kind"] == kind]
            if found:
                losses = [r["loss"] for r in found]
                each = " ".join(f"{x:.4f}" for x in losses)
                name = "fp32, no rounding" if kind == "exact" else f"int{bits}"
                lines.append(f"| {name} | {found[0]['beta1']} | {kind} | {each} | {statistics.mean(losses):.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, jobs(), run, RESULTS, table)
