"""Outside language: handwritten digits with a small convolutional network, and pole balancing by policy gradient.

The papers measured language models only. Digits: scikit-learn's 8 x 8 images (1797, a fifth held out), shifted by up to
a pixel in training; 1000 steps of 64 images; held-out loss and errors. Pole balancing: the classic cart and pole, 64 of
them side by side, advantage actor-critic; the mean number of steps the pole stands (at most 200) over the last fifth of
training.

    pip install scikit-learn
    python benchmarks/tasks_study.py [--table]
"""

from __future__ import annotations

import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jobs import Job, Row, command
from torch import Tensor, nn

from masterless import AdamW, quantize_
from masterless.optim.presets import PRESETS

RESULTS = Path(__file__).parent / "results" / "tasks.jsonl"
SEEDS = (0, 1, 2)
FP32_STATES = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
NAIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "int4, nearest, error dropped": (
        "int4",
        {**FP32_STATES, "error_compensation": False, "weight_rounding": "nearest"},
    ),
    "int4, stochastic, error dropped": ("int4", {**FP32_STATES, "error_compensation": False}),
}
RECIPES = {**{name: (p.weights, dict(p.options)) for name, p in PRESETS.items()}, **NAIVE}


def optimizer_for(model: nn.Module, recipe: dict[str, Any], lr: float, seed: int) -> AdamW:
    """Quantizes the model as the recipe says and returns its optimizer."""
    if recipe["weights"] is not None:
        quantize_(model, recipe["weights"])
    options = {**recipe["options"], "betas": tuple(recipe["options"].get("betas", (0.9, 0.95)))}
    return AdamW(model.named_parameters(), lr=lr, weight_decay=0.01, seed=seed, **options)


# --- digits -----------------------------------------------------------------------------------------------------


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image moved by -1, 0 or 1 pixels each way, zeros coming in."""
    padded = F.pad(images, (1, 1, 1, 1))
    dy, dx = torch.randint(3, (2, len(images), 1, 1), generator=generator)
    rows, columns = torch.arange(8).view(1, 8, 1) + dy, torch.arange(8).view(1, 1, 8) + dx
    return padded[torch.arange(len(images)).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)


def digits(job: Job) -> Row:
    """Held-out loss and error rate of a small convolutional network."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    generator = torch.Generator().manual_seed(job["seed"])
    torch.manual_seed(job["seed"])
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    steps = job["steps"]
    optimizer = optimizer_for(model, job, 1e-3, job["seed"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)))
    train_images, train_labels = images[~held_out], labels[~held_out]
    for _ in range(steps):
        chosen = torch.randint(len(train_labels), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(shifted(train_images[chosen], generator)), train_labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits = model(images[held_out])
    wrong = (logits.argmax(1) != labels[held_out]).float().mean()
    return {"loss": F.cross_entropy(logits, labels[held_out]).item(), "score": 100 * wrong.item()}


# --- pole balancing ---------------------------------------------------------------------------------------------


class Poles:
    """Carts with poles side by side: the equations of Barto, Sutton and Anderson, 0.02 s a step."""

    LIMIT = 200

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = self._fresh(count)
        self.age = torch.zeros(count)

    def _fresh(self, count: int) -> Tensor:
        return torch.rand(count, 4, generator=self.generator) * 0.1 - 0.05

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Pushes left (0) or right (1); returns which poles fell, and which episodes ended (fell or time is up)."""
        x, speed, angle, turn = self.state.T
        force = 20.0 * action - 10.0
        cos, sin = angle.cos(), angle.sin()
        pushed = (force + 0.05 * turn**2 * sin) / 1.1
        turning = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        moving = pushed - 0.05 * turning * cos / 1.1
        self.state = torch.stack(
            (x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning), 1
        )
        self.age += 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * math.pi / 180)
        return fell, fell | (self.age >= self.LIMIT)

    def restart(self, ended: Tensor) -> None:
        """New episodes where the old ones ended."""
        self.state = torch.where(ended.unsqueeze(1), self._fresh(len(ended)), self.state)
        self.age = torch.where(ended, torch.zeros(()), self.age)


def poles(job: Job) -> Row:
    """Mean length of the episodes in the last fifth of training; `loss` is what is missing to the longest, 200."""
    generator = torch.Generator().manual_seed(job["seed"])
    torch.manual_seed(job["seed"])
    trunk = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    model = nn.Sequential(trunk, nn.Linear(128, 3))  # two actions and the value
    optimizer = optimizer_for(model, job, 1e-3, job["seed"])
    world, lengths = Poles(64, generator), []
    for update in range(job["steps"]):
        values, chosen, falls, ends, entropies = [], [], [], [], []
        for _ in range(16):
            out = model(world.state)
            logs = out[:, :2].log_softmax(1)
            action = torch.multinomial(logs.exp(), 1, generator=generator)
            fell, ended = world.step(action.squeeze(1).float())
            if update >= job["steps"] * 4 // 5:
                lengths += world.age[ended].tolist()
            values.append(out[:, 2]), chosen.append(logs.gather(1, action).squeeze(1))
            falls.append(fell), ends.append(ended), entropies.append(-(logs.exp() * logs).sum(1))
            world.restart(ended)
        with torch.no_grad():
            future, targets = model(world.state)[:, 2], []
            for fell, ended, value in zip(falls[::-1], ends[::-1], values[::-1], strict=True):
                # Time being up is no fall: the value of going on stands in for what would have come.
                future = torch.where(fell, 0.0, torch.where(ended, value, future)) * 0.98 + (~fell).float() * 0.05
                targets.append(future)
            target = torch.stack(targets[::-1])
        advantage = target - torch.stack(values)
        loss = -(torch.stack(chosen) * advantage.detach()).mean() + advantage.square().mean()
        optimizer.zero_grad()
        (loss - 0.01 * torch.stack(entropies).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    lengths += world.age[world.age >= Poles.LIMIT / 2].tolist()
    length = statistics.mean(lengths)
    return {"loss": Poles.LIMIT - length, "score": length}


# --- the study --------------------------------------------------------------------------------------------------

TASKS = {"digits": (digits, 1000), "poles": (poles, 600)}


def jobs() -> list[Job]:
    """Every recipe on every task, three seeds."""
    return [
        {"task": task, "label": label, "weights": weights, "options": options, "steps": steps, "seed": seed}
        for task, (_, steps) in TASKS.items()
        for seed in SEEDS
        for label, (weights, options) in RECIPES.items()
    ]


def run(job: Job) -> Row:
    """One run."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return TASKS[job["task"]][0](job)


def scores(rows: list[Row], decimals: int) -> str:
    """The mean score, and each seed's."""
    each = [row["score"] for row in sorted(rows, key=lambda row: row["seed"])]
    return f"{statistics.mean(each):.{decimals}f} ({' '.join(f'{score:.{decimals}f}' for score in each)})"


def table(rows: list[Row]) -> str:
    """A markdown table, a line a recipe: means over seeds, and the spread."""
    if not rows:
        return "(not run yet)"
    lines = [
        "| run | digits: held-out loss | digits: errors, % (each seed) | poles: steps upright of 200 (each seed) |",
        "|---|---|---|---|",
    ]
    for label in RECIPES:
        digit = [r for r in rows if r["label"] == label and r["task"] == "digits"]
        pole = [r for r in rows if r["label"] == label and r["task"] == "poles"]
        if digit and pole:
            loss = f"{statistics.mean(r['loss'] for r in digit):.4f}"
            errors, lengths = scores(digit, 2), scores(pole, 0)
            lines.append(f"| {label} | {loss} | {errors} | {lengths} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, jobs(), run, RESULTS, table)
