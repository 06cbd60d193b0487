"""Fine-tuning in INT4: quantize a trained model, continue on other text, and see what each way of rounding keeps.

A byte-level GPT is trained in fp32 on Python's standard library (1500 steps), its inner matrices are quantized to INT4
in groups of 128, and training goes on for 600 steps on C++ (the headers that come with torch) at a tenth of the
learning rate.

    python benchmarks/finetune_study.py [--table]
"""

from __future__ import annotations

import os
import statistics
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jobs import Job, Row, command

from masterless import AdamW
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import TrainSettings, stdlib_corpus, train
from masterless.lab.train.corpus import Corpus, text_corpus, validation_batches
from masterless.lab.train.loop import evaluate
from masterless.tensor.quantize import quantize_

RESULTS = Path(__file__).parent / "results" / "finetune.jsonl"
BASE = Path(__file__).parent.parent / "runs" / "finetune"
FP32 = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
DROP = {"error_compensation": False}


def states(first: str, beta1: float, second: str) -> dict[str, Any]:
    """Options of AdamW: two state formats and beta1."""
    return {"exp_avg": first, "exp_avg_sq": second, "betas": (beta1, 0.95)}


RUNS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "fp32": (None, FP32),
    "int4 master weights (QAT)": ("int4+32", FP32),
    "int4 naive nearest": ("int4", {**FP32, **DROP, "weight_rounding": "nearest"}),
    "int4 naive stochastic": ("int4", {**FP32, **DROP}),
    "int4 ECO stochastic": ("int4", FP32),
    "int4 ECO nearest, b1 .35": ("int4", {**FP32, "weight_rounding": "nearest", "betas": (0.35, 0.95)}),
    "int4 ECO nearest, b1 .1": ("int4", {**FP32, "weight_rounding": "nearest", "betas": (0.1, 0.95)}),
    "int4 ECO stochastic, int4 m (b1 .82), log2 v": ("int4", states("int4", 0.82, "log2")),
    "int4 ECO stochastic, int4 m (b1 .82), factored v": ("int4", states("int4", 0.82, "factored")),
    "int4 naive stochastic, int4 m (b1 .82), factored v": ("int4", {**states("int4", 0.82, "factored"), **DROP}),
    "int4 ECO nearest, int4 m (b1 .35), factored v": (
        "int4",
        {**states("int4", 0.35, "factored"), "weight_rounding": "nearest"},
    ),
    "int4+4, no m, factored v": ("int4+4", {**DROP, **states("none", 0.0, "factored")}),
    "int8, no m, factored v": ("int8", {**DROP, **states("none", 0.0, "factored")}),
    "int8 naive stochastic, int2 m (b1 .53), factored v": ("int8", {**DROP, **states("int2", 0.527, "factored")}),
    "int4+4 naive stochastic, int2 m (b1 .53), factored v": ("int4+4", {**DROP, **states("int2", 0.527, "factored")}),
    "fp8 ECO stochastic, int4 m (b1 .82), log2 v": ("fp8", states("int4", 0.82, "log2")),
}


@cache
def headers() -> Corpus:
    """The C++ headers of the installed torch: real text of another kind, on every machine that can run this."""
    folder = Path(torch.__file__).parent / "include" / "ATen"
    return text_corpus([p for p in sorted(folder.rglob("*.h")) if p.stat().st_size > 2000][:800])


def base_model(seed: int) -> GPT:
    """The fp32 model all runs of a seed start from, trained once and kept in runs/."""
    path = BASE / f"base-{seed}.pt"
    model = GPT(GPTConfig(), torch.Generator().manual_seed(seed))
    if not path.exists():
        settings = TrainSettings(steps=1500, lr=2e-3, seed=seed)
        optimizer = AdamW(model.named_parameters(), **settings.optimizer_arguments(), **FP32)
        train(model, optimizer, stdlib_corpus(), settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")  # two runs of a seed may train it at once: the same to the bit
        torch.save(model.state_dict(), beside)
        beside.replace(path)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def jobs() -> list[Job]:
    """Every way of rounding, two seeds; seeds alternate, so that two workers train the two bases side by side."""
    return [
        {"label": label, "weights": weights, "options": options, "steps": 600, "seed": seed}
        for label, (weights, options) in RUNS.items()
        for seed in (0, 1)
    ]


def run(job: Job) -> Row:
    """One fine-tuning, with the losses on the new text before and after."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    weights, options, seed = job["weights"], job["options"], job["seed"]
    model = base_model(seed)
    if weights is not None:
        quantize_(model, weights)
    settings = TrainSettings(steps=job["steps"], lr=2e-4, warmup=20, weight_decay=0.0, seed=seed, eval_batches=128)
    corpus = headers()
    before = evaluate(model, validation_batches(corpus.validation, 128, settings.batch_size, settings.seq_len))
    arguments = {**settings.optimizer_arguments(), **options}
    optimizer = AdamW(model.named_parameters(), seed=seed, **arguments)
    result = train(model, optimizer, corpus, settings)
    return {"before": before, "loss": result.final_validation_loss}


def table(rows: list[Row]) -> str:
    """A markdown table; the gap is to fp32 fine-tuning."""
    if not rows:
        return "(not run yet)"
    lines = ["| run | before | after (each seed) | mean | gap |", "|---|---|---|---|---|"]
    reference = None
    for label in RUNS:
        found = sorted((r for r in rows if r["label"] == label), key=lambda r: r["seed"])
        if found:
            mean = statistics.mean(r["loss"] for r in found)
            reference = reference or mean
            before = statistics.mean(r["before"] for r in found)
            each = " ".join(f"{r['loss']:.4f}" for r in found)
            lines.append(f"| {label} | {before:.4f} | {each} | {mean:.4f} | {100 * (mean / reference - 1):+.2f}% |")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, jobs(), run, RESULTS, table)
