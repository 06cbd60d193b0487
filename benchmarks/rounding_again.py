"""Do presets train as well since random bits are loaded and numbers multiplied by reciprocals?

Every run here is one that the study of recipes has, from before: the same preset, setting, learning rate, initial
weights and data. What differs is how numbers are rounded, so a pair differs by chance, and its mean should be none.
(At 37k both runs of a pair were made on one day by the same trainer, the one before with the kernel of a4a6896 in
MASTERLESS_KERNEL; what `run` adds takes the study's row for it.)

    python benchmarks/rounding_again.py run --size 150k --seeds 0 1 2     # resumable; several may run side by side
    python benchmarks/rounding_again.py table
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from recipes import groups, trainer
from recipes.recipe import Job
from recipes.store import Store

RESULTS = Path(__file__).parent / "results" / "rounding_again.jsonl"
PRESETS = ("2-byte", "1.6-byte", "1.3-byte")
LR = 0.008  # the best of all three, in both settings
SETTINGS = {"37k": groups.SMALL, "150k": groups.MIDDLE}


def rows() -> list[dict[str, object]]:
    """What has been run."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run(size: str, seeds: list[int], presets: list[str]) -> None:
    """Runs again what the study has of these, and appends both losses."""
    torch.set_num_threads(1)
    recipes = {recipe.label: recipe for recipe in groups.presets()}
    before, done = Store().rows(), {row["key"] for row in rows()}
    for seed in seeds:
        for preset in presets:
            job = Job(recipes[f"preset {preset}"], SETTINGS[size], LR, seed)
            if job.key in done or job.key not in before:
                continue
            loss = trainer.train(job, checkpoints=None)["loss"]
            row = {"key": job.key, "size": size, "preset": preset, "seed": seed, "before": before[job.key]["loss"]}
            with RESULTS.open("a") as file:
                file.write(json.dumps({**row, "after": loss}) + "\n")


def table() -> str:
    """The mean change of the loss and its standard error, by setting and preset."""
    found: dict[tuple[object, object], list[float]] = {}
    for row in rows():
        change = 100 * (float(str(row["after"])) / float(str(row["before"])) - 1)
        for key in ((row["size"], row["preset"]), (row["size"], "all")):
            found.setdefault(key, []).append(change)
    lines = ["| setting | preset | pairs | change of the loss |", "| --- | --- | --- | --- |"]
    for (size, preset), changes in sorted(found.items(), key=str):
        if len(changes) > 1:
            error = statistics.stdev(changes) / len(changes) ** 0.5
            lines.append(f"| {size}@20 | {preset} | {len(changes)} | {statistics.mean(changes):+.2f}% ± {error:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--size", choices=tuple(SETTINGS), default="37k")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    options = parser.parse_args()
    if options.what == "run":
        run(options.size, options.seeds, options.presets)
    print(table())
