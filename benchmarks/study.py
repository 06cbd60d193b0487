"""Studies: families of small training runs, resumable at any kill, with their tables.

    python benchmarks/study.py states            # run (or go on with) one study, then print its table
    python benchmarks/study.py weights --table   # only print the table of what is there

Every finished run is a line of a file in ``benchmarks/results``; runs that are in any of them are not repeated. All
runs train a byte-level GPT on the standard library's source text: unless a row says otherwise 2 layers, d = 128, 393k
parameters in the inner matrices, 512 tokens per step, cosine schedule. Losses are on held-out documents; runs of one
seed see the same batches.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import frontier

from masterless.interop.files import read_json_lines
from masterless.lab.train.experiment import Experiment, run_all
from masterless.optim.presets import PRESETS

RESULTS = Path(__file__).parent / "results"

FP32_STATES = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
STANDARD = {"steps": 1500, "lr": 2e-3, "betas": (0.9, 0.95), "eval_batches": 128}
NO_MOMENTUM = {"exp_avg": "none", "exp_avg_sq": "factored", "betas": (0.0, 0.95)}
DROP = {"error_compensation": False}


def states_study() -> list[Experiment]:
    """States alone, dense fp32 weights: what do few bits in m and v cost?"""
    rows: list[tuple[str, dict[str, Any]]] = [
        ("fp32 / fp32", FP32_STATES),
        ("int8 / log8", {"exp_avg": "int8", "exp_avg_sq": "log8"}),
        ("int8 / log8, m in update units", {"exp_avg": "int8", "exp_avg_sq": "log8", "moment_units": "update"}),
        ("int4 / log4", {"exp_avg": "int4", "exp_avg_sq": "log4"}),
        ("int4 / log2", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
        ("int4 / log2, m in gradient units", {"exp_avg": "int4", "exp_avg_sq": "log2", "moment_units": "gradient"}),
        ("int4 / log2, b1 .82", {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.82, 0.95)}),
        ("fp32 / log2, unbiased dither", {"exp_avg": "fp32", "exp_avg_sq": "log2"}),
        (
            "fp32 / log2, dither of the logarithm",
            {"exp_avg": "fp32", "exp_avg_sq": "log2", "rounding": "stochastic-log"},
        ),
        ("dynamic4 / log2", {"exp_avg": "dynamic4", "exp_avg_sq": "log2"}),
        ("int4 / factored", {"exp_avg": "int4", "exp_avg_sq": "factored"}),
        ("int2 / log2, b1 .53", {"exp_avg": "int2", "exp_avg_sq": "log2", "betas": (0.527, 0.95)}),
        ("fp32 / fp32, b1 .53", {**FP32_STATES, "betas": (0.527, 0.95)}),
    ]
    return [Experiment(label, options=options, settings=STANDARD, seed=s) for s in (0, 1) for label, options in rows]


def weights_study() -> list[Experiment]:
    """Weights without a master copy: drop, inject, keep; nearest and stochastic; scale held and recomputed."""
    rows: list[tuple[str, str | None, dict[str, Any]]] = [("fp32", None, FP32_STATES)]
    for fmt in ("fp8", "int4"):
        rows.append((f"{fmt} master weights (QAT)", f"{fmt}+32", FP32_STATES))
        for policy in ("held", "recompute"):
            for rounding in ("nearest", "stochastic"):
                for compensate in (False, True):
                    label = f"{fmt} {'ECO' if compensate else 'naive'} {rounding}, scale {policy}"
                    options = {"scale_policy": policy, "weight_rounding": rounding, "error_compensation": compensate}
                    rows.append((label, fmt, {**FP32_STATES, **options}))
    rows += [
        ("int4 ECO stochastic, power-of-two scale", "int4:128:pow2", FP32_STATES),
        ("fp32, b1 .35", None, {**FP32_STATES, "betas": (0.35, 0.95)}),
        ("fp32, b1 0", None, {**FP32_STATES, "exp_avg": "none", "betas": (0.0, 0.95)}),
        ("int4 master weights (QAT), b1 .35", "int4+32", {**FP32_STATES, "betas": (0.35, 0.95)}),
        ("int4 ECO nearest, b1 .35", "int4", {**FP32_STATES, "betas": (0.35, 0.95), "weight_rounding": "nearest"}),
        ("int4 ECO stochastic, b1 .35", "int4", {**FP32_STATES, "betas": (0.35, 0.95)}),
        ("int8, no m, factored v", "int8", {**NO_MOMENTUM, **DROP}),
        ("int4+4, no m, factored v", "int4+4", {**NO_MOMENTUM, **DROP}),
        (
            "int8 ECO, int2 m (b1 .53), factored v",
            "int8",
            {"exp_avg": "int2", "exp_avg_sq": "factored", "betas": (0.527, 0.95)},
        ),
        (
            "int8 drop, int2 m (b1 .53), factored v",
            "int8",
            {"exp_avg": "int2", "exp_avg_sq": "factored", "betas": (0.527, 0.95), **DROP},
        ),
        (
            "int4 ECO nearest, int4 m (b1 .35), log2 v",
            "int4",
            {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.35, 0.95), "weight_rounding": "nearest"},
        ),
        (
            "int4 ECO stochastic, int4 m (b1 .35), log2 v",
            "int4",
            {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.35, 0.95)},
        ),
        (
            "fp8 ECO stochastic, int4 m (b1 .82), log2 v",
            "fp8",
            {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.82, 0.95)},
        ),
        ("int4+4 ECO, int4 m, log2 v", "int4+4", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    ]
    # A second seed for the rows that conclusions rest on; the rest shows what not to do.
    once = {"fp32, b1 .35", "fp32, b1 0", "int4 ECO stochastic, power-of-two scale"}
    once |= {label for label, _, _ in rows if label.endswith("nearest, scale recompute")}
    return [
        Experiment(label, weights=fmt, options=options, settings=STANDARD, seed=seed)
        for seed in (0, 1)
        for label, fmt, options in rows
        if seed == 0 or label not in once
    ]


def moe_study() -> list[Experiment]:
    """A sparse mixture of experts, 8 experts, top-2: FP8 and INT4 experts without master weights."""
    model = {"n_experts": 8, "d_ff": 256}
    settings = {**STANDARD, "steps": 1000}
    rows: list[tuple[str, str | None, dict[str, Any]]] = [
        ("MoE fp32", None, FP32_STATES),
        ("MoE fp8 ECO stochastic", "fp8", FP32_STATES),
        ("MoE int4 ECO stochastic", "int4", FP32_STATES),
        ("MoE int4 naive stochastic", "int4", {**FP32_STATES, **DROP}),
        ("MoE int4 naive nearest", "int4", {**FP32_STATES, **DROP, "weight_rounding": "nearest"}),
        (
            "MoE fp8 ECO, int4 m (b1 .82), log2 v",
            "fp8",
            {"exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.82, 0.95)},
        ),
        ("MoE int8, no m, factored v", "int8", {**NO_MOMENTUM, **DROP}),
    ]
    return [Experiment(label, weights=fmt, options=o, model=model, settings=settings) for label, fmt, o in rows]


STUDIES = {"states": states_study, "weights": weights_study, "moe": moe_study, **frontier.PARTS}


def results_file(study: str) -> Path:
    """Where new rows of a study go; the parts of the frontier share rows and a file."""
    return RESULTS / f"{'frontier' if study in frontier.PARTS else study}.jsonl"


def finished(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """The rows of these experiments, from whatever study ran them."""
    wanted = {experiment.identity for experiment in experiments}
    found = (row for path in sorted(RESULTS.glob("*.jsonl")) for row in read_json_lines(path))
    return list({row["id"]: row for row in found if row.get("id") in wanted}.values())


def is_full_precision(row: dict[str, Any]) -> bool:
    """Dense weights, and states that are fp32 or not there at all."""
    states = {row["options"].get("exp_avg"), row["options"].get("exp_avg_sq")}
    return row["weights"] is None and "fp32" in states and states <= {"fp32", "none"}


def preset_of(row: dict[str, Any]) -> str:
    """The preset that a row was trained with; empty if it was none."""
    usual = {"betas": [0.9, 0.95]}
    options = {name: value for name, value in row["options"].items() if (name, value) != ("moment_units", "update")}
    for preset in PRESETS.values():
        if [row["weights"], {**usual, **options}] == json.loads(
            json.dumps([preset.weights, {**usual, **preset.options}])
        ):
            return preset.name
    return ""


def comparable(row: dict[str, Any]) -> str:
    """What two rows must share for their losses to be compared: model, text seen, length."""
    settings = {key: row["settings"].get(key) for key in ("steps", "batch_size", "min_lr_ratio")}
    return json.dumps([row["model"], settings], sort_keys=True)


def mean_loss(rows: Sequence[dict[str, Any]]) -> float:
    """The mean over seeds; infinite if a run diverged."""
    return statistics.mean(math.inf if row["loss"] is None else row["loss"] for row in rows)


def gap(rows: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> str:
    """How far the mean loss lies above the reference's, over the seeds that both have; empty if there are none.

    From three seeds on with the standard error of that, a run being compared with the reference of its seed.
    """
    losses = {row["seed"]: row["loss"] for row in reference}
    shared = [row for row in rows if losses.get(row["seed"]) is not None]
    if not shared or mean_loss(shared) == math.inf:
        return ""
    mean = 100 * (mean_loss(shared) / statistics.mean(losses[row["seed"]] for row in shared) - 1)
    if len(shared) < 3 or rows is reference:
        return f"{mean:+.2f}%"
    each = [100 * (row["loss"] / losses[row["seed"]] - 1) for row in shared]
    return f"{mean:+.2f}% ± {statistics.stdev(each) / math.sqrt(len(each)):.2f}"


def grouped(rows: Sequence[dict[str, Any]], experiments: Sequence[Experiment]) -> dict[str, list[dict[str, Any]]]:
    """The finished rows by their label in this study, in its order."""
    by_id = {row["id"]: row for row in rows}
    groups: dict[str, list[dict[str, Any]]] = {}
    for experiment in experiments:
        if experiment.identity in by_id:
            groups.setdefault(experiment.label, []).append(by_id[experiment.identity])
    return groups


def references(groups: dict[str, list[dict[str, Any]]]) -> dict[str, list[list[dict[str, Any]]]]:
    """The full-precision rows of each comparable set: the first listed, then the best with as many seeds."""
    candidates: dict[str, list[list[dict[str, Any]]]] = {}
    for found in groups.values():
        if is_full_precision(found[0]):
            candidates.setdefault(comparable(found[0]), []).append(found)
    return {
        key: [sets[0], min((rows for rows in sets if len(rows) == len(sets[0])), key=mean_loss)]
        for key, sets in candidates.items()
    }


def table(rows: Sequence[dict[str, Any]], experiments: Sequence[Experiment]) -> str:
    """A markdown table, one line per label: gaps to the first full-precision row, and to the best if it is another."""
    groups = grouped(rows, experiments)
    if not groups:
        return "(not run yet)"
    known = references(groups)
    several = any(first is not best for first, best in known.values())
    headings = ["run", "bytes/param", "loss (each seed)", "mean", "gap", *(["gap to the best fp32"] if several else [])]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for label, found in groups.items():
        each = " ".join("diverged" if row["loss"] is None else f"{row['loss']:.4f}" for row in found)
        mean = "" if mean_loss(found) == math.inf else f"{mean_loss(found):.4f}"
        gaps = [gap(found, reference) for reference in known.get(comparable(found[0]), ((), ()))[: 1 + several]]
        cost = f"{found[0]['bytes_per_parameter']:.2f}"
        lines.append(f"| {' | '.join((label, cost, each, mean, *gaps))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "studies", nargs="+", choices=[*STUDIES, "all"], metavar="STUDY", help=", ".join((*STUDIES, "all"))
    )
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs and stop")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one thread each")
    arguments = parser.parse_args()
    for name in STUDIES if "all" in arguments.studies else arguments.studies:
        experiments = STUDIES[name]()
        if not arguments.table:
            known = {row["id"] for row in finished(experiments)}
            missing = [experiment for experiment in experiments if experiment.identity not in known]
            for row in run_all(missing, results_file(name), arguments.workers):
                loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
                print(f"{row['label']:60} seed {row['seed']}  {loss}  {row.get('seconds', 0):.0f} s", flush=True)
        print(f"\n{name}\n{table(finished(experiments), experiments)}", flush=True)


if __name__ == "__main__":
    main()
