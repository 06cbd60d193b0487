"""Fine-tuning in INT4: quantize a trained model, continue on other text, and see what each way of rounding keeps.

A byte-level GPT is trained in fp32 on Python's standard library (1500 steps), its inner matrices are quantized to INT4
in groups of 128, and training goes on for 600 steps on C++ (the headers that come with torch) at a tenth of the
learning rate.

    python benchmarks/finetune_study.py [--table]
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from masterless import AdamW
from masterless.models import GPT, GPTConfig
from masterless.quantize import quantize_
from masterless.train import TrainSettings, stdlib_corpus, train
from masterless.train.corpus import Corpus, text_corpus, validation_batches
from masterless.train.loop import evaluate

RESULTS = Path(__file__).parent / "results" / "finetune.jsonl"
BASE = Path(__file__).parent.parent / "runs" / "finetune"
FP32 = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
DROP = {"error_compensation": False}

RUNS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "fp32": (None, FP32),
    "int4 master weights (QAT)": ("int4+32", FP32),
    "int4 naive nearest": ("int4", {**FP32, **DROP, "weight_rounding": "nearest"}),
    "int4 naive stochastic": ("int4", {**FP32, **DROP}),
    "int4 ECO stochastic": ("int4", FP32),
    "int4 ECO nearest, b1 .35": ("int4", {**FP32, "weight_rounding": "nearest", "betas": (0.35, 0.95)}),
    "int4 ECO stochastic, int4 m (b1 .82), log2 v": (
        "int4",
        {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.82, 0.95)},
    ),
    "int4+4, no m, factored v": ("int4+4", {**DROP, "exp_avg": "none", "exp_avg_sq": "factored", "betas": (0.0, 0.95)}),
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
        torch.save(model.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def run(job: tuple[str, int]) -> dict[str, Any]:
    label, seed = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    weights, options = RUNS[label]
    model = base_model(seed)
    if weights is not None:
        quantize_(model, weights)
    settings = TrainSettings(steps=600, lr=2e-4, warmup=20, weight_decay=0.0, seed=seed, eval_batches=128)
    corpus = headers()
    before = evaluate(model, validation_batches(corpus.validation, 128, settings.batch_size, settings.seq_len))
    arguments = {**settings.optimizer_arguments(), **options}
    optimizer = AdamW(model.named_parameters(), seed=seed, **arguments)
    result = train(model, optimizer, corpus, settings)
    return {"label": label, "seed": seed, "before": before, "loss": result.final_validation_loss}


def table(rows: list[dict[str, Any]]) -> str:
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


def load() -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs and stop")
    arguments = parser.parse_args()
    rows = load()
    done = {(r["label"], r["seed"]) for r in rows}
    jobs = [(label, seed) for seed in (0, 1) for label in RUNS if (label, seed) not in done]
    if jobs and not arguments.table:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            list(pool.map(_prepare, {seed for _, seed in jobs}))
            for row in pool.map(run, jobs):
                rows.append(row)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(rows))


def _prepare(seed: int) -> None:
    torch.set_num_threads(1)
    base_model(seed)


if __name__ == "__main__":
    main()
