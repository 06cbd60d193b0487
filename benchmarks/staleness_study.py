"""Stalls measured against stalls predicted in a real training run, and what resets do to the loss.

    python benchmarks/staleness_study.py --workers 2          # run what is missing (resumable), both parts
    python benchmarks/staleness_study.py --part stalls        # only one
    python benchmarks/staleness_study.py --table              # tables from the finished runs
    python benchmarks/update_docs.py                          # tables and figure into the documentation

The model is the byte-level GPT of `masterless.lab.models` on the standard library's source; only the second moment is
rounded (m in fp32), beta2 = 0.999. Part "stalls" samples the inner matrices with `masterless.Monitor`. Part "resets"
compares final validation losses with and without resets, the last arms with INT4 weights under error compensation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from jobs import Job, Row, load, run_missing

from masterless import AdamW, Monitor, quantize_
from masterless.insight.monitor import totals
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import TrainSettings, stdlib_corpus, train
from masterless.optim import NonFiniteGradientError
from masterless.step import staleness

RESULTS = Path(__file__).parent / "results" / "staleness.jsonl"
BETA2 = 0.999
STEPS = {"stalls": 2000, "resets": 2000}
SAMPLES = 40  # measured steps of a run of part "stalls"


def stall_jobs() -> list[Job]:
    formats = ("bf16", "fp8", "fp8:128:pow2", "log2")
    return [
        {"part": "stalls", "format": format, "rounding": rounding, "reset": None, "weights": None}
        for format in formats
        for rounding in ("nearest", "stochastic")
    ]


def reset_jobs() -> list[Job]:
    def arm(format: str, rounding: str, *resets: Any, weights: str | None = None) -> list[Job]:
        fixed = {"part": "resets", "format": format, "rounding": rounding, "weights": weights}
        return [{**fixed, "reset": reset} for reset in (None, *resets)]

    # The scale of the paper's model stands still but for powers of two; the default bf16 one is rounded up at each
    # step. Log codes have no planned period ("auto" leaves them alone): the period of E4M3 is given by hand.
    jobs = arm("fp32", "nearest") + arm("bf16", "nearest", "auto:hard")
    jobs += arm("fp8:128:pow2", "nearest", "auto:hard", "auto:soft")
    jobs += arm("fp4:128:pow2", "nearest", "auto:hard", "auto:soft")
    jobs += arm("fp8", "nearest", "auto:hard")
    jobs += arm("fp8", "stochastic", f"{staleness.reset_period('fp8', BETA2, 'stochastic')}:hard")
    jobs += arm("log2", "stochastic", "320:hard")
    jobs += arm("fp32", "nearest", "320:hard", "320:soft", weights="int4")
    return jobs


def run(job: Job) -> Row:
    """One run: its loss, what resets cleared, and the stalls of the inner matrices over time."""
    torch.set_num_threads(1)
    settings = TrainSettings(
        steps=job["steps"], warmup=min(50, job["steps"]), betas=(0.9, BETA2), seed=job["seed"], eval_batches=64
    )
    model = GPT(GPTConfig(), torch.Generator().manual_seed(job["seed"]))
    if job["weights"]:
        quantize_(model, job["weights"])
    optimizer = AdamW(
        model.named_parameters(),
        **settings.optimizer_arguments(),
        exp_avg="fp32",
        exp_avg_sq=job["format"],
        rounding=job["rounding"],
        reset=job["reset"],
        moment_units="gradient",
        seed=job["seed"],
    )
    every = max(1, job["steps"] // SAMPLES) if job["part"] == "stalls" else job["steps"] + 1
    started = time.perf_counter()
    with Monitor(optimizer, every=every, sample=1 << 14, histogram=False) as monitor:
        try:
            loss = train(model, optimizer, stdlib_corpus(), settings).final_validation_loss
        except NonFiniteGradientError:
            loss = None  # diverged
    row: Row = {"loss": loss}
    row["seconds"] = round(time.perf_counter() - started, 1)
    row["cleared"] = sum(optimizer.reset_counts.values())
    row["series"] = [_inner(sample) for sample in monitor.samples]
    return row


def _inner(sample: dict[str, Any]) -> dict[str, Any]:
    """One sample's totals over the matrices of the blocks (embedding rows that no batch meets see no gradient)."""
    parameters = {n: e for n, e in sample["parameters"].items() if n.startswith("blocks.") and "norm" not in n}
    entry = totals(parameters).get("exp_avg_sq", {})
    kept = ("stalled_codes", "stalled_values", "predicted", "predicted_here")
    return {"step": sample["step"], **{key: entry.get(key) for key in kept}}


# --- tables and figure --------------------------------------------------------------------------------------


def stalls_table(rows: list[dict[str, Any]]) -> str:
    """Means over the second half of each run, and over seeds."""
    lines = [
        "| v | rounding | stalled codes | predicted here | from age | difference (here, age) | stalled values |",
        "|---|---|---|---|---|---|---|",
    ]
    for job in stall_jobs():
        found = [r for r in rows if all(r[k] == v for k, v in job.items())]
        late = [s for r in found for s in r["series"][len(r["series"]) // 2 :]]
        if not late:
            continue

        def mean(key: str, late: list[dict[str, Any]] = late) -> float:
            return statistics.mean(s[key] for s in late if s[key] is not None)

        codes, here, age = mean("stalled_codes"), mean("predicted_here"), mean("predicted")
        lines.append(
            f"| {job['format']} | {job['rounding']} | {codes:.3f} | {here:.3f} | {age:.3f} | "
            f"{codes - here:+.3f}, {codes - age:+.3f} | {mean('stalled_values'):.3f} |"
        )
    return "\n".join(lines)


def resets_table(rows: list[dict[str, Any]]) -> str:
    """Final validation losses; differences are means over seeds, against fp32 v and against no resets."""
    rows = [r for r in rows if r["part"] == "resets"]
    if not rows:
        return "(not run yet)"

    def loss(format: str, rounding: str, reset: Any, weights: str | None) -> dict[int, float]:
        wanted = (format, rounding, reset, weights)
        return {r["seed"]: r["loss"] for r in rows if (r["format"], r["rounding"], r["reset"], r["weights"]) == wanted}

    lines = [
        "| weights | v | rounding | reset | validation loss (each seed) | against fp32 v | against no reset |",
        "|---|---|---|---|---|---|---|",
    ]
    for job in reset_jobs():
        own = loss(job["format"], job["rounding"], job["reset"], job["weights"])
        if not own:
            continue
        named = f"| {job['weights'] or 'fp32'} | {job['format']} | {job['rounding']} | {job['reset'] or ''} |"
        if None in own.values():
            lines.append(f"{named} diverged | | |")
            continue

        def against(other: dict[int, float], own: dict[int, float] = own) -> str:
            shared = [100 * (own[seed] / other[seed] - 1) for seed in own if seed in other]
            return f"{statistics.mean(shared):+.2f}%" if shared and own != other else ""

        exact = loss("fp32", "nearest", None, job["weights"])
        plain = loss(job["format"], job["rounding"], None, job["weights"])
        each = " ".join(f"{own[seed]:.4f}" for seed in sorted(own))
        lines.append(f"{named} {each} | {against(exact)} | {against(plain)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    jobs = stall_jobs()
    columns = len({job["format"] for job in jobs})
    figure = Figure(figsize=(3.1 * columns, 5.4), layout="constrained")
    axes = figure.subplots(2, columns, sharex=True, sharey=True).T.flatten()
    for panel, job in zip(axes, jobs, strict=True):
        found = next((r for r in rows if all(r[k] == v for k, v in job.items()) and r["series"]), None)
        panel.set_title(f"{job['format']}, {job['rounding']}", fontsize="small")
        if found is None:
            continue
        steps = [s["step"] for s in found["series"]]
        for key, style, label in (
            ("stalled_codes", "C0-", "measured (codes)"),
            ("stalled_values", "C0:", "measured (values)"),
            ("predicted_here", "C1--", "predicted, this step's v and gradient"),
            ("predicted", "C2--", "predicted, from the age alone"),
        ):
            panel.plot(
                steps, [s[key] if s[key] is not None else float("nan") for s in found["series"]], style, label=label
            )
        panel.set(ylim=(-0.02, 1.02))
    axes[0].set_ylabel("share of v that stalls")
    axes[1].set(xlabel="step", ylabel="share of v that stalls")
    axes[0].legend(fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("stalls", "resets", "both"), default="both")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2, help="seeds of part resets (part stalls has one)")
    parser.add_argument("--steps", type=int, help="shorter runs, for a try; use another --out with it")
    parser.add_argument("--first", type=int, help="only so many jobs of each part, for a try")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the result file")
    parser.add_argument("--table", action="store_true", help="print the tables of the finished runs and stop")
    arguments = parser.parse_args()
    rows = load(arguments.out)
    if arguments.table:
        print(stalls_table(rows), resets_table(rows), sep="\n\n")
        return
    parts = {"stalls": (stall_jobs(), 1), "resets": (reset_jobs(), arguments.seeds)}
    jobs = [
        {**job, "seed": seed, "steps": arguments.steps or STEPS[part]}
        for part, (listed, seeds) in parts.items()
        if arguments.part in (part, "both")
        for seed in range(seeds)
        for job in listed[: arguments.first]
    ]
    for row in run_missing(jobs, run, arguments.out, arguments.workers):
        name = " ".join(str(row[k]) for k in ("part", "weights", "format", "rounding", "reset", "seed"))
        print(f"{name}: {row['loss']} in {row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
