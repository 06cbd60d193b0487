"""Ideas that might have been better, each against what the library does: tried in a run before anything is built.

* A beta1 that grows or shrinks over the run, for the one-byte recipe (INT4 weights rounded to nearest, their error
  injected into a 4-bit momentum, factored second moment), whose best constant one is 0.35.
* A coefficient of the injection that knows of weight decay: what rounding lost would have decayed by 1 - lr * wd before
  it returns, so the share 1 - 1/b becomes 1 - (1 - lr * wd)/b.

    python benchmarks/ideas_study.py [--table]
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jobs import Job, Row, command

from masterless import AdamW, quantize_
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import TrainSettings, stdlib_corpus, train
from masterless.step.scalars import Scalars

RESULTS = Path(__file__).parent / "results" / "ideas.jsonl"
STEPS = 1500
FP32_STATES = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
SHORT_MOMENTUM = {"exp_avg": "int4", "exp_avg_sq": "factored", "weight_rounding": "nearest"}
# what is varied -> options, beta1 at the start and at the end, whether the coefficient knows of weight decay
ARMS: dict[str, tuple[dict[str, Any], tuple[float, float], bool]] = {
    "one byte, b1 0.35": (SHORT_MOMENTUM, (0.35, 0.35), False),
    "one byte, b1 0.2 to 0.5": (SHORT_MOMENTUM, (0.2, 0.5), False),
    "one byte, b1 0.5 to 0.2": (SHORT_MOMENTUM, (0.5, 0.2), False),
    "int4 ECO stochastic, fp32 states": (FP32_STATES, (0.9, 0.9), False),
    "int4 ECO stochastic, fp32 states, decay in the coefficient": (FP32_STATES, (0.9, 0.9), True),
}


def jobs() -> list[Job]:
    """Every arm with two seeds."""
    return [{"arm": arm, "seed": seed} for seed in (0, 1) for arm in ARMS]


def aware_of_decay(optimizer: AdamW) -> None:
    """Makes the injection's coefficient count the decay that the lost part would have had."""
    rule = optimizer.rule(optimizer.param_groups[0], compensated=True)

    def scalars(group: Mapping[str, Any], t1: int, t2: int) -> Scalars:
        plain, beta1 = rule.scalars(group, t1, t2), group["betas"][0]
        share = (1.0 - plain.decay / beta1) / (1.0 - 1.0 / beta1)
        return plain._replace(inject=plain.inject * share)

    changed, plain_rule = rule._replace(scalars=scalars), optimizer.rule
    optimizer.rule = lambda group, compensated=False: changed if compensated else plain_rule(group)  # type: ignore


def run(job: Job) -> Row:
    """One run."""
    options, (first, last), decays = ARMS[job["arm"]]
    torch.set_num_threads(1)
    settings = TrainSettings(steps=STEPS, lr=1e-3, betas=(first, 0.95), seed=job["seed"], eval_batches=128)
    model = GPT(GPTConfig(), torch.Generator().manual_seed(job["seed"]))
    quantize_(model, "int4")
    optimizer = AdamW(model.named_parameters(), **settings.optimizer_arguments(), **options)
    if decays:
        aware_of_decay(optimizer)

    def move_beta1(report: Any) -> None:
        beta1 = first + (last - first) * (report.step + 1) / STEPS
        for group in optimizer.param_groups:
            group["betas"] = (beta1, 0.95)

    result = train(model, optimizer, stdlib_corpus(), settings, move_beta1)
    return {"loss": result.final_validation_loss}


def table(rows: list[Row]) -> str:
    """A markdown table of the finished runs."""
    lines = ["| what | loss (each seed) | mean |", "|---|---|---|"]
    for arm in ARMS:
        losses = [row["loss"] for row in rows if row["arm"] == arm]
        if losses:
            lines.append(f"| {arm} | {' '.join(f'{x:.4f}' for x in losses)} | {statistics.mean(losses):.4f} |")
    return "\n".join(lines) if len(lines) > 2 else "(not run yet)"


if __name__ == "__main__":
    command(__doc__, jobs(), run, RESULTS, table)
