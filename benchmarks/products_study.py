"""What do products in 8 bits cost in loss? The same runs with weights decoded, and with INT8 and FP8 products.

    python benchmarks/products_study.py [--table]        # about ten core-minutes

A byte-level GPT on the source of Python's standard library. A row differs from the one above it only in
`use_products_`: the same weights at the start, batches, optimizer and random bits.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from jobs import Job, Row, command

from masterless import AdamW, quantize_, use_products_
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import TrainSettings, stdlib_corpus, train

RESULTS = Path(__file__).parent / "results" / "products.jsonl"
STEPS = 400


def jobs() -> list[Job]:
    """Both formats, decoded and multiplied as they are, three seeds."""
    return [
        {"weights": kind, "products": products, "seed": seed, "steps": STEPS}
        for seed in (0, 1, 2)
        for kind in ("int8", "fp8")
        for products in (None, kind)
    ]


def run(job: Job) -> Row:
    """One run."""
    torch.set_num_threads(1)
    settings = TrainSettings(steps=job["steps"], seed=job["seed"], eval_batches=64)
    model = GPT(GPTConfig(), torch.Generator().manual_seed(job["seed"]))
    quantize_(model, job["weights"])
    layers = use_products_(model, job["products"])
    optimizer = AdamW(
        model.named_parameters(), **settings.optimizer_arguments(), exp_avg="int8", exp_avg_sq="log4", seed=job["seed"]
    )
    result = train(model, optimizer, stdlib_corpus(), settings)
    return {"loss": result.final_validation_loss, "layers": len(layers)}


def table(rows: list[Row]) -> str:
    """A markdown table of the finished runs."""
    lines = ["| weights | products | loss (each seed) | mean | change of the mean (of each) |", "|---|---|---|---|---|"]
    for kind in ("int8", "fp8"):
        decoded: list[float] = []
        for products in (None, kind):
            found = sorted((r for r in rows if (r["weights"], r["products"]) == (kind, products)), key=_seed)
            if found:
                losses = [r["loss"] for r in found]
                mean, change = statistics.mean(losses), ""
                if products and len(decoded) == len(losses):
                    each = " ".join(f"{x - y:+.4f}" for x, y in zip(losses, decoded, strict=True))
                    change = f"{mean / statistics.mean(decoded) - 1:+.2%} ({each})"
                decoded = losses
                name = f"{products}, {found[0]['layers']} layers" if products else "decoded"
                each = " ".join(f"{x:.4f}" for x in losses)
                lines.append(f"| {kind} | {name} | {each} | {mean:.4f} | {change} |")
    return "\n".join(lines)


def _seed(row: Row) -> int:
    return int(row["seed"])


if __name__ == "__main__":
    command(__doc__, jobs(), run, RESULTS, table)
