"""The pictures that explain, drawn from what the library really does.

python benchmarks/teaching_figures.py       # writes docs/figures/{injection,levels,stalls,memory-7b}.svg
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import masterless as ml
from masterless.formats import codec
from masterless.formats.rounding import dither, stream_key

matplotlib.rcParams |= {
    "svg.hashsalt": "masterless",  # the same picture gives the same bytes
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
FIGURES = Path(__file__).parent.parent / "docs" / "figures"
BLUE, ORANGE, GREY = "#1f6fb4", "#d95f02", "0.45"


def save(figure: Figure, name: str) -> None:
    """Writes a figure without a date in it."""
    path = FIGURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    print(path.relative_to(FIGURES.parent.parent))


# --- what injection does to one weight ----------------------------------------------------------------------------

STEPS, LR, BETA, PULL = 200, 1e-3, 0.9, 0.35


def descend(weights: str | None, **options: object) -> Tensor:
    """Twelve weights that start on one level and are pulled by a constant gradient: ``[steps, weights]``."""
    start = torch.linspace(-1, 1, 128).repeat(12, 1)
    start[:, 64] = 1 / 7
    w = torch.nn.Parameter(start if weights is None else ml.QuantizedTensor.from_dense(start, weights))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dropping the error is the point of two panels
        opt = ml.SGD([("w", w)], lr=LR, momentum=BETA, seed=3, **options)  # type: ignore[arg-type]
    path = []
    for _ in range(STEPS + 1):
        dense = w.detach().dequantize() if isinstance(w, ml.QuantizedTensor) else w.detach()
        path.append(dense[:, 64].clone())
        w.grad = torch.full(start.shape, PULL)
        opt.step()
    return torch.stack(path)


def injection() -> None:
    """The error of rounding to nearest, dropped, and injected."""
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    exact = descend(None)[:, 0].tolist()
    drop: dict[str, object] = {"error_compensation": False}
    for axes, title, options in zip(
        panels,
        (
            "rounded to nearest:\nthe weights never move",
            "rounded at random, error dropped:\nright on average, each one lost",
            "error injected into the momentum:\nevery one follows",
        ),
        ({**drop, "weight_rounding": "nearest"}, drop, {"error_compensation": True}),
        strict=True,
    ):
        paths = descend("int4", **options)
        for level in range(-9, 4):
            axes.axhline(level / 7, color="0.92", zorder=0, linewidth=0.8)
        for other in paths.T[1:]:
            axes.step(range(STEPS + 1), other.tolist(), where="post", color="#a9c9e6", linewidth=0.8)
        axes.step(range(STEPS + 1), paths[:, 0].tolist(), where="post", color=BLUE, linewidth=1.8, label="INT4")
        axes.plot(exact, color="black", linestyle="--", linewidth=1.2, label="fp32")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
    panels[0].set_ylim(-0.95, 0.35)
    panels[0].set_ylabel("twelve weights (grey: INT4's levels)")
    panels[0].legend(frameon=False, loc="lower left")
    save(figure, "injection")


# --- levels -------------------------------------------------------------------------------------------------------


def _rug(axes: Axes, names: list[str], colour: str) -> None:
    for y, name in enumerate(reversed(names)):
        levels = [x / ml.parse_format(name).max_level for x in ml.parse_format(name).levels]
        axes.plot(levels, [y] * len(levels), "|", color=colour, markersize=13)
    axes.set_yticks(range(len(names)), [*reversed(names)], family="monospace")
    axes.set_ylim(-0.6, len(names) - 0.4)


def levels() -> None:
    """What each format can say, as a share of the largest number of its block."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _rug(left, ["int8", "int4", "int3", "int2", "fp8", "fp4", "dynamic4"], BLUE)
    left.set_xlabel("weights and first moments: linear and floating levels")
    x = torch.logspace(-6, 0, 128, base=10)[None]
    names = ["log8", "log4", "log3", "log2"]
    for y, name in enumerate(reversed(names)):
        fmt = ml.parse_format(name)
        found = codec.decode(codec.encode(x, fmt, None), 128, fmt).unique()
        right.plot(found.tolist(), [y] * len(found), "|", color=ORANGE, markersize=13)
    right.set_xscale("log")
    right.set_yticks(range(len(names)), [*reversed(names)], family="monospace")
    right.set_ylim(-0.6, len(names) - 0.4)
    right.set_xlabel("second moments: a logarithmic code\nover the range of its block")
    save(figure, "levels")


# --- stalls -------------------------------------------------------------------------------------------------------


def averaged(format: str | None, rounding: str) -> list[float]:
    """The mean of 128 second moments (beta2 = 0.999) after gradients fall to a third."""
    fmt = ml.parse_format(format) if format else None
    v, means = torch.ones(1, 128), []
    generator = torch.Generator().manual_seed(0)
    for step in range(4000):
        scale = 1.0 if step < 500 else 1 / 3
        v = 0.999 * v + 0.001 * (scale * torch.randn(1, 128, generator=generator)).square()
        if fmt is not None:
            u = None if rounding == "nearest" else dither(stream_key(0, step, 0, "exp_avg_sq"), 1, 128)
            v = codec.decode(codec.encode(v, fmt, u, rounding=rounding), 128, fmt)
        means.append(float(v.mean()))
    return means


def stalls() -> None:
    """A nearest-rounded average that stops moving, and one that does not."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(averaged("log4", "nearest"), color=ORANGE, label="4 bits, rounded to nearest: stuck")
    axes.plot(averaged("log4", "stochastic"), color=BLUE, label="4 bits, rounded stochastically: it follows")
    axes.plot(averaged(None, ""), color=GREY, linestyle="--", label="fp32")
    axes.axvline(500, color="0.8", linewidth=1)
    axes.annotate("gradients fall to a third", (520, 1.16), color=GREY)
    axes.set_ylim(0, 1.25)
    axes.set_xlabel("step")
    axes.set_ylabel("mean second moment of a block")
    axes.legend(frameon=False, loc="center right")
    save(figure, "stalls")


# --- memory -------------------------------------------------------------------------------------------------------


def memory() -> None:
    """A model of seven billion parameters, by system."""
    from masterless.lab.plan import Settings, make_plan, model_of_size

    shown = ("torch AdamW", "bitsandbytes 8-bit", "torchao 4-bit", "2-byte", "1-byte")
    settings = Settings(batch=1, seq_len=2048, checkpointing="full")
    rows = {row.system.name: row for row in make_plan(model_of_size(7 * 10**9), settings).rows}
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    names = {"weights": "weights", "master": "master copy", "states": "states", "gradients": "gradients"}
    parts = (("weights", BLUE), ("master", "#8fb9dd"), ("states", ORANGE), ("gradients", "0.7"))
    for y, name in enumerate(reversed(shown)):
        row, start = rows[name], 0.0
        for part, colour in parts:
            # Our presets step in the backward pass: no more than one gradient exists at a time.
            field = "gradients_in_backward" if part == "gradients" and row.system.ours else part
            size = getattr(row, field) / 1e9
            axes.barh(y, size, left=start, color=colour, label=names[part] if y == 0 else None)
            start += size
        axes.text(start + 0.8, y, f"{start:.0f} GB", va="center")
    axes.axvline(24, color="0.3", linewidth=1, linestyle=":")
    axes.text(24.5, len(shown) - 0.45, "24 GB", color="0.3", va="bottom")
    axes.set_yticks(range(len(shown)), [f"{'masterless ' if rows[n].system.ours else ''}{n}" for n in reversed(shown)])
    axes.set_xlabel("GB to train 7 billion parameters, activations apart")
    axes.set_xlim(0, 125)
    axes.legend(frameon=False, loc="lower right")
    save(figure, "memory-7b")


FIGURES_BY_NAME = {"injection": injection, "levels": levels, "stalls": stalls, "memory-7b": memory}

if __name__ == "__main__":
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or FIGURES_BY_NAME:
        FIGURES_BY_NAME[name]()
