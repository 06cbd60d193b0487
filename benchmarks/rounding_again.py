"""Do presets train as well since numbers are rounded otherwise? Two changes of the specification were asked so.

Every run here is one that was made before: the same preset, setting, learning rate, initial weights and data. What
differs is how numbers are rounded, so a pair differs by chance, and its mean should be none.

* "ring": random bits are loaded and numbers multiplied by reciprocals. (At 37k both runs of a pair were made on one day
  by the same trainer, the one before with the kernel of a4a6896 in MASTERLESS_KERNEL; what `run` adds takes the row of
  the study of recipes for it.)
* "fma": sums of products are rounded once. The run before is the one after the ring: kernels in between changed no bit.

    python benchmarks/rounding_again.py run --size 37k --seeds 0 1 2 --change fma   # resumable; several side by side
    python benchmarks/rounding_again.py table --change fma
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from recipes import groups, trainer
from recipes.recipe import Job
from recipes.store import Store

RESULTS = Path(__file__).parent / "results"
FILES = {"ring": RESULTS / "rounding_again.jsonl", "fma": RESULTS / "rounding_fma.jsonl"}
PRESETS = ("2-byte", "1.6-byte", "1.3-byte")
LR = 0.008  # the best of all three, in both settings
SETTINGS = {"37k": groups.SMALL, "150k": groups.MIDDLE}


Row = dict[str, Any]


def rows(change: str) -> list[Row]:
    """What has been run after a change."""
    path = FILES[change]
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses_before(change: str) -> dict[str, float]:
    """Of every run that can be made again: its loss before the change."""
    if change == "ring":
        return {key: row["loss"] for key, row in Store().rows().items()}
    return {row["key"]: row["after"] for row in rows("ring")}


def run(change: str, size: str, seeds: list[int], presets: list[str]) -> None:
    """Runs again what there is of these, and appends both losses."""
    torch.set_num_threads(1)
    recipes = {recipe.label: recipe for recipe in groups.presets()}
    before, done = losses_before(change), {row["key"] for row in rows(change)}
    for seed in seeds:
        for preset in presets:
            job = Job(recipes[f"preset {preset}"], SETTINGS[size], LR, seed)
            if job.key in done or job.key not in before:
                continue
            loss = trainer.train(job, checkpoints=None)["loss"]
            row = {"key": job.key, "size": size, "preset": preset, "seed": seed, "before": before[job.key]}
            with FILES[change].open("a") as file:
                file.write(json.dumps({**row, "after": loss}) + "\n")


def table(change: str) -> str:
    """The mean change of the loss and its standard error, by setting and preset."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows(change):
        percent = 100 * (row["after"] / row["before"] - 1)
        for key in ((row["size"], row["preset"]), (row["size"], "all")):
            found.setdefault(key, []).append(percent)
    lines = ["| setting | preset | pairs | change of the loss |", "| --- | --- | --- | --- |"]
    for (size, preset), changes in sorted(found.items()):
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
    parser.add_argument("--change", choices=tuple(FILES), default="fma")
    options = parser.parse_args()
    if options.what == "run":
        run(options.change, options.size, options.seeds, options.presets)
    print(table(options.change))
