"""``masterless stall``: how often a quantized moving average stops moving, and when to reset it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from masterless import formats
from masterless.step import staleness as s

ROUNDINGS = ("nearest", "stochastic")
MARKS = {"nearest": "●", "stochastic": "○"}
MOST_STEPS = 10_000_000
COLUMNS, ROWS = 60, 10  # of the plot in the terminal


def stall(
    format: str = typer.Option("fp8", help="Format of the moving average: bf16, fp8, fp4, uint8, log2, ..."),
    beta2: float = typer.Option(0.999, help="Decay of the second moment."),
    rounding: str = typer.Option("both", help="nearest, stochastic or both."),
    moment: str = typer.Option("second", help="second, or first (with --beta1 and --snr)."),
    beta1: float = typer.Option(0.9, help="Decay of the first moment."),
    snr: float = typer.Option(0.0, help="Signal-to-noise ratio of the gradient, for the first moment."),
    typical: float | None = typer.Option(
        None, help="Where a typical value lies in its block: v/max(v) for a linear map, x_p/max(v) for a log map."
    ),
    steps: int | None = typer.Option(None, help="Steps to look ahead; by default three time constants."),
    plot: str | None = typer.Option(None, help="Write the curves to this file (png, svg, pdf)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of tables."),
) -> None:
    """Predict stalls of a moving average: probability over steps, start-up window, advised reset period."""
    result = stall_curves(format, beta1, beta2, rounding, moment, snr, typical, steps)
    if plot is not None:
        write_plot(result, Path(plot))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show(result)
        if plot is not None:
            typer.echo(f"wrote {plot}")


def stall_curves(
    format: str,
    beta1: float,
    beta2: float,
    rounding: str,
    moment: str,
    snr: float,
    typical: float | None,
    steps: int | None,
) -> dict[str, Any]:
    """The prediction as plain data: facts of each rounding, and curves over steps."""
    if rounding not in (*ROUNDINGS, "both"):
        raise ValueError(f"rounding={rounding!r}: no such choice; pass nearest, stochastic or both")
    if steps is not None and not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"steps={steps}: nothing to look at; pass a number from 1 to {MOST_STEPS:,}")
    grid = _grid(format, moment, typical)
    beta = beta2 if moment == "second" else beta1
    # The first call checks beta and snr, with the library's own words.
    steady = {r: s.stall_probability(grid, beta, r, moment=moment, snr=snr) for r in ROUNDINGS}
    horizon = steps or min(MOST_STEPS, max(20, round(3 / (1 - beta))))
    at = sorted({round(horizon ** (k / (COLUMNS - 1))) for k in range(COLUMNS)})  # logarithmic: stalls set in early
    result: dict[str, Any] = {
        "format": format,
        "moment": moment,
        "beta": beta,
        "snr": snr if moment == "first" else None,
        "typical": typical,
        "relative_gap": grid.gap,
        "steps": at,
        "roundings": {},
    }
    for kind in ROUNDINGS if rounding == "both" else (rounding,):
        curve = [s.stall_probability(grid, beta, kind, step, moment, snr) for step in at]
        facts: dict[str, Any] = {"steady_stall": steady[kind], "stall": curve}
        if moment == "second":
            facts |= {
                "startup_window": s.startup_window(grid, beta, 0.5, kind),
                "effective_beta": s.effective_beta(grid, beta, kind),
                "reset_period": s.reset_period(grid, beta, kind),
            }
        result["roundings"][kind] = facts
    if moment == "second":
        result |= {"stall_ratio": s.stall_ratio(grid, beta), "gate": s.gate_threshold(grid)}
        result["can_fall"] = s.can_fall(grid, beta)
        if "nearest" in result["roundings"]:
            path = s.expected_trajectory(grid, beta, horizon)
            result["roundings"]["nearest"] |= {
                "mean_path": [float(path.corrected[step - 1]) for step in at],
                "mean_path_stall": [float(path.stall[step - 1]) for step in at],
            }
    result["advice"] = _advice(result)
    return result


def _grid(format: str, moment: str, typical: float | None) -> s.Grid:
    if formats.parse(format).kind == "log" and typical is None:
        raise ValueError(
            f"format={format!r}: the levels of a log code depend on the block; pass --typical with the block's low "
            f"quantile over its maximum, for instance --typical 0.001"
        )
    return s.grid_of(format, moment, typical)


def _advice(result: dict[str, Any]) -> str:
    if result["moment"] == "first":
        return "a first moment forgets within 1/(1-beta1) steps: no resets; a smaller beta1 makes it stall less"
    if result["stall_ratio"] < 1:
        return f"no reset is due: below beta2 = {result['gate']:.4f} this format rarely stalls"
    advice = []
    if "nearest" in result["roundings"]:
        period = result["roundings"]["nearest"]["reset_period"]
        advice.append(f'nearest: reset v every {period} steps (reset="auto")')
    if "stochastic" in result["roundings"]:
        advice.append("stochastic: no reset is needed, the mean keeps its time constant")
    return "; ".join(advice)


# --- output -------------------------------------------------------------------------------------------------


def _show(result: dict[str, Any]) -> None:
    console, second = Console(), result["moment"] == "second"
    name = "beta2" if second else "beta1"
    title = f"{result['format']}, {result['moment']} moment, {name} = {result['beta']:g}"
    if not second:
        title += f", SNR {result['snr']:g}"
    facts = Table(title=title)
    facts.add_column("")
    for kind in result["roundings"]:
        facts.add_column(kind, justify="right")

    def row(label: str, key: str, text: str = "{}", missing: str = "never") -> None:
        values = [f[key] for f in result["roundings"].values()]
        facts.add_row(label, *(missing if value is None else text.format(value) for value in values))

    row("stall probability, steady state", "steady_stall", "{:.4f}")
    if second:
        row("start-up window (P = 0.5)", "startup_window", "{} steps")
        row("effective beta2", "effective_beta", "{:.6f}")
        row("reset period K*", "reset_period", "{} steps", "none is due")
        facts.add_row("gate: stalls matter from beta2 =", *[f"{result['gate']:.4f}"] * len(result["roundings"]))
    console.print(facts)
    console.print(_steps_table(result))
    for line in terminal_plot(result):
        console.print(line, markup=False, highlight=False)
    console.print(result["advice"], markup=False, highlight=False)


def _steps_table(result: dict[str, Any]) -> Table:
    table = Table()
    columns = {f"P {kind}": facts["stall"] for kind, facts in result["roundings"].items()}
    nearest = result["roundings"].get("nearest", {})
    if "mean_path" in nearest:
        columns |= {"on its mean path": nearest["mean_path_stall"], "v / true v": nearest["mean_path"]}
    table.add_column("step", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    last = len(result["steps"]) - 1
    for i in sorted({round(last * k / 9) for k in range(10)}):
        table.add_row(str(result["steps"][i]), *(f"{values[i]:.3f}" for values in columns.values()))
    return table


def terminal_plot(result: dict[str, Any]) -> list[str]:
    """The stall probability over steps, drawn with characters."""
    width = len(result["steps"])
    cells = [[" "] * width for _ in range(ROWS + 1)]
    for kind, facts in result["roundings"].items():
        for column, p in enumerate(facts["stall"]):
            y = ROWS - round(p * ROWS)
            cells[y][column] = "◉" if cells[y][column] not in (" ", MARKS[kind]) else MARKS[kind]
    lines = [f"{1 - y / ROWS:4.1f} ┤{''.join(row)}" for y, row in enumerate(cells)]
    lines.append("     └" + "─" * width)
    lines.append(f"      1{result['steps'][-1]:>{width - 1}} steps (logarithmic)")
    marks = [f"{MARKS[kind]} {kind}" for kind in result["roundings"]]
    return [*lines, "      P(stall): " + ", ".join([*marks, "◉ both"] if len(marks) > 1 else marks)]


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Writes the curves to a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"plot={str(path)!r}: needs matplotlib; pip install 'masterless[plot]'") from error
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"plot={str(path)!r}: no such kind of file; end it in one of {', '.join(sorted(known))}")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for kind, facts in result["roundings"].items():
        axes.plot(result["steps"], facts["stall"], label=kind)
        if "mean_path_stall" in facts:
            axes.plot(result["steps"], facts["mean_path_stall"], "--", label=f"{kind}, on its mean path")
        if facts.get("reset_period"):
            axes.axvline(facts["reset_period"], color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="steps since zero", ylabel="P(stall)", ylim=(-0.02, 1.02))
    axes.set_title(f"{result['format']}, {result['moment']} moment, beta = {result['beta']:g}")
    axes.legend()
    figure.savefig(path, dpi=150)
