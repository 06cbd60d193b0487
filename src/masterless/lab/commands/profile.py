"""``masterless profile``: what one training step holds in memory, phase by phase, against what was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from masterless.lab.bench.processors import processor
from masterless.lab.commands.common import with_options
from masterless.lab.train.config import FIELDS, read_toml, resolve

if TYPE_CHECKING:
    from masterless.lab.profile.measure import Profile

_PHASES = ("load", "forward", "backward", "step")


@with_options(FIELDS)
def profile(
    *,
    config: Annotated[Path | None, typer.Option(help="Options from a TOML file; flags win over it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw resident memory over time into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    **options: Any,
) -> None:
    """Measure the memory of one training step by phase, and compare its peak with the prediction.

    Takes the options of `train` and runs two steps in this process; Linux only.
    """
    from masterless.lab.profile.measure import profile_step

    given = {name: value for name, value in options.items() if value is not None and value != []}
    resolved = resolve(given, {} if config is None else read_toml(config))
    if resolved.threads is not None:
        torch.set_num_threads(resolved.threads)
    measured = profile_step(resolved)
    if plot is not None:
        draw(measured, plot)
    if as_json:
        typer.echo(json.dumps(describe(measured, resolved)))
    else:
        _show(measured)


def describe(profile: Profile, config: Any = None) -> dict[str, Any]:
    """A profile as plain data, in bytes."""
    predicted = profile.predicted
    expected = {name: profile.base + getattr(predicted, name) for name in ("forward", "backward", "step")}
    phases = {}
    for name in _PHASES:
        last = next(p for p in reversed(profile.recorder.phases) if p.name == name)
        phases[name] = {"before": last.before, "after": last.after, "peak": last.peak, "seconds": last.seconds}
        if name in expected:
            phases[name]["predicted"] = expected[name]
    return {
        "parameters": profile.parameters,
        "options": {} if config is None else {k: getattr(config, k) for k in _SHOWN},
        "base": profile.base,
        "static": {"predicted": predicted.static, "live": profile.static, "resident": profile.held},
        "phases": phases,
        "peak": {"measured": profile.measured, "predicted": profile.expected},
        "machine": {"cpu": processor(), "threads": torch.get_num_threads()},
    }


_SHOWN = ("layers", "width", "heads", "hidden", "experts", "seq_len", "batch", "preset", "step_in_backward")


def _show(profile: Profile) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(
        title=f"{profile.parameters:,} parameters; resident MB (10^6 bytes) of the process",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("phase", "before", "after", "peak", "predicted", "off by", "seconds"):
        table.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
    for name, phase in describe(profile)["phases"].items():
        cells = [f"{phase[key] / 1e6:,.0f}" for key in ("before", "after", "peak")]
        predicted = phase.get("predicted")
        guess = (
            ["-", "-"] if predicted is None else [f"{predicted / 1e6:,.0f}", f"{predicted / phase['peak'] - 1:+.1%}"]
        )
        table.add_row(name, *cells, *guess, f"{phase['seconds']:.2f}")
    console.print(table)
    static = profile.predicted.static
    lines = (
        f"process without a model: {profile.base / 1e6:,.0f} MB",
        f"weights and states: {static / 1e6:,.1f} MB predicted, {profile.static / 1e6:,.1f} live, "
        f"{profile.held / 1e6:,.1f} resident",
        f"peak: {profile.measured / 1e6:,.0f} MB measured, {profile.expected / 1e6:,.0f} predicted "
        f"({profile.expected / profile.measured - 1:+.1%})",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False)


def draw(profile: Profile, path: Path) -> None:
    """Resident memory over time, with the phases and the predicted peak."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"plot={str(path)!r}: needs matplotlib; pip install 'masterless[plot]'") from error
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([t for t, _ in profile.recorder.samples], [b / 1e6 for _, b in profile.recorder.samples], lw=1)
    axes.axhline(profile.expected / 1e6, ls="--", lw=1, color="tab:red", label="predicted peak")
    axes.axhline(
        (profile.base + profile.predicted.static) / 1e6, ls=":", lw=1, color="grey", label="weights and states"
    )
    for phase in profile.recorder.phases:
        axes.axvspan(phase.began, phase.began + phase.seconds, alpha=0.08, color=_COLOURS[phase.name])
        axes.annotate(phase.name, (phase.began, 0), fontsize=7, rotation=90, va="bottom")
    axes.set(xlabel="seconds", ylabel="resident MB", ylim=(0, None))
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


_COLOURS = {"load": "tab:grey", "forward": "tab:blue", "backward": "tab:orange", "step": "tab:green"}
