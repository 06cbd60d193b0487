"""``masterless compare``: the same training under several presets, as a table, a plot and a report."""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from masterless.interop.files import read_json_lines
from masterless.lab.commands.common import fail, one_line_warnings, with_options
from masterless.lab.train.build import build_corpus, build_settings, model_options
from masterless.lab.train.config import FIELDS, ConfigError, RunConfig, read_toml, resolve
from masterless.lab.train.experiment import Experiment, load_results, run_all
from masterless.lab.train.report import cells, noise_note, write_comparison_report
from masterless.optim.presets import PRESETS

DEFAULT = "fp32,2-byte,1.3-byte,2-byte-int4,naive-int4"
STEPS = 900  # with two seeds as long as one seed of 1500 steps on two cores, and the table shows its own noise
_NOT_SHARED = set("init vocab optimizer beta1 beta2 step_in_backward save_every keep seed".split())
SHARED = [n for n, field in FIELDS.items() if n not in _NOT_SHARED and field.metadata["section"] != "formats"]
_PLAIN_STATES = {"exp_avg": "fp32", "exp_avg_sq": "fp32", "betas": (0.9, 0.95)}


@with_options(SHARED, steps=str(STEPS), eval_batches="64", threads="1 per run")
def compare(
    *,
    presets: Annotated[
        str,
        typer.Option(
            help="Names of presets, naive-FORMAT (nearest rounding, error dropped, fp32 states), or "
            "WEIGHTS/FIRST/SECOND formats such as int4/int4/log2@0.35 (with beta1)."
        ),
    ] = DEFAULT,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per preset; with one there is no spread.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of results, plot and report.")] = Path("runs/compare"),
    workers: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    config: Annotated[Path | None, typer.Option(help="Options from a TOML file; flags win over it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    **options: Any,
) -> None:
    """Train the same model under several presets and compare loss, bytes, memory and time.

    Runs that are finished in --out are not repeated.
    """
    one_line_warnings()
    given = {name: value for name, value in options.items() if value is not None and value != []}
    file = {} if config is None else read_toml(config)
    for name in file:
        if name not in SHARED:
            raise ConfigError(f"{config}: {name!r} is not an option that runs of a comparison share; remove it")
    resolved = resolve(given, {"eval_batches": 64, "steps": STEPS, **file})
    experiments, text = plan_experiments(resolved, [p.strip() for p in presets.split(",") if p.strip()], seeds)
    results = out / "results.jsonl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        results.open("a").close()
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    try:
        with _stoppable():
            _run(experiments, results, workers, resolved.threads or 1, as_json)
    except _Stopped as stopped:
        raise fail(
            f"interrupted; finished runs are kept in {out}, the same command goes on", 128 + stopped.number
        ) from None
    except RuntimeError as error:
        raise fail(str(error)) from None
    found = {row["id"]: row for row in load_results(results)}
    for e in experiments:
        if e.identity not in found:
            raise ConfigError(f"{results}: the row of {_name(e)} is damaged; remove that line, or choose another --out")
    # A row may have been made under another name for the same configuration.
    rows = [{**found[e.identity], "label": e.label} for e in experiments]
    table = summarize(rows)
    shared = {name: getattr(resolved, name) for name in SHARED if name != "threads"}
    report = write_comparison_report(out, rows, table, shared, text)
    plot = _plot(table, out / "comparison.png")
    if as_json:
        print(json.dumps({"runs": table, "report": str(report), "plot": plot and str(plot), "options": shared}))
        return
    _print_table(table, resolved)
    if plot is not None:
        typer.echo(f"plot:   {plot}")
    typer.echo(f"report: {report}")


def plan_experiments(config: RunConfig, names: Sequence[str], seeds: int) -> tuple[list[Experiment], str]:
    """The runs of a comparison and a line about their text.

    Each is built once, so that what cannot be is refused before anything is trained.
    """
    if not names:
        raise ConfigError(f"--presets: no names; pass for instance {DEFAULT}")
    settings = dataclasses.asdict(build_settings(config))
    for unused in ("seed", "betas"):
        del settings[unused]
    if not config.show_hidden:
        del settings["show_hidden"]  # runs that were finished before there was this option stay known
    del settings["trade_last"], settings["trade_for"]  # each preset's own
    model = model_options(config)
    data: dict[str, Any] = {}
    corpus = build_corpus(config)
    if config.data:
        data = {"paths": [str(Path(p).resolve()) for p in config.data], "text": corpus.fingerprint}
        model["vocab_size"] = corpus.vocab_size
    experiments = []
    for name in dict.fromkeys(names):
        weights, options = entry(name, config.batch * config.seq_len * config.accumulate)
        for seed in range(seeds):
            experiments.append(
                Experiment(name, weights, "AdamW", options, model, {**settings, **_trade(name)}, seed, data)
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            experiments[-1].build()
    return experiments, corpus.description


def entry(name: str, tokens_per_step: int | None = None) -> tuple[str | None, dict[str, Any]]:
    """The weight format and AdamW's options that a name of a comparison stands for."""
    if name in PRESETS:
        return PRESETS[name].weights, dict(PRESETS[name].for_steps_of(tokens_per_step).options)
    if name.startswith("naive-"):
        lossy = {"error_compensation": False, "weight_rounding": "nearest"}
        return name.removeprefix("naive-"), {**_PLAIN_STATES, **lossy}
    formats, _, beta = name.partition("@")
    if formats.count("/") == 2:
        weights, first, second = formats.split("/")
        try:
            beta1 = float(beta) if beta else 0.0 if first == "none" else 0.9
        except ValueError:
            raise ConfigError(
                f"{name!r}: {beta!r} is not a number; write the first moment's beta, as in @0.35"
            ) from None
        options: dict[str, Any] = {"exp_avg": first, "exp_avg_sq": second, "betas": (beta1, 0.95)}
        if beta1 == 0.0:
            options["error_compensation"] = False
        return None if weights == "fp32" else weights, options
    raise ConfigError(
        f"{name!r}: no such preset; choose from {', '.join(PRESETS)}, or write naive-int4, or formats as int4/int4/log2"
    )


def _trade(name: str) -> dict[str, Any]:
    preset = PRESETS.get(name)
    return {"trade_last": preset.trade_last, "trade_for": preset.trade_for} if preset and preset.trade_last else {}


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per label: means over seeds, and the gap to fp32 (or to the first entry, if fp32 is not there).

    The gap's spread is over seeds of the same number: they share initial weights and batches, so it is smaller than the
    losses' own.
    """
    table: list[dict[str, Any]] = []
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = [row for row in rows if row["label"] == label]
        losses = [row["loss"] for row in mine if row["loss"] is not None]
        complete = len(losses) == len(mine)
        memory = mine[0]["memory"]
        roles = {role: count for role, count in _inner_roles(mine[0]).items() if count}
        table.append(
            {
                "label": label,
                "loss": statistics.mean(losses) if complete else None,
                "loss_spread": statistics.stdev(losses) if complete and len(losses) > 1 else None,
                "losses": losses,
                "gap": None,
                "gap_spread": None,
                "bytes_measured": memory["measured_per_parameter"],
                "bytes_predicted": memory["predicted_per_parameter"],
                "peak_bytes": max(row["peak_bytes"] for row in mine),
                "seconds_per_step": (
                    statistics.mean(row["seconds"] / row["settings"]["steps"] for row in mine) if complete else None
                ),
                "roles": roles,
            }
        )
    reference = next((e for e in table if e["label"] == "fp32"), table[0])
    for e in table:
        if e["loss"] is not None and reference["loss"] is not None:
            e["gap"] = e["loss"] / reference["loss"] - 1
            gaps = [a / b for a, b in zip(e["losses"], reference["losses"], strict=False)]
            if e is not reference and len(gaps) > 1:
                e["gap_spread"] = statistics.stdev(gaps)
    return table


def _inner_roles(row: Mapping[str, Any]) -> dict[str, float]:
    inner = row["memory"]["inner_bytes"]
    return {role: count / row["memory"]["inner_parameters"] for role, count in inner.items()}


# --- running and showing ------------------------------------------------------------------------------------


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM end the block with an exception, so that the workers are ended too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(experiments: Sequence[Experiment], results: Path, workers: int, threads: int, as_json: bool) -> None:
    known = {row.get("id") for row in read_json_lines(results)}
    todo = [e for e in experiments if e.identity not in known]
    console = Console(stderr=as_json, highlight=False)
    if len(todo) < len(experiments) and not as_json:
        console.print(f"{len(experiments) - len(todo)} of {len(experiments)} runs are finished already", markup=False)
    text, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (text, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
    bars: dict[str, Any] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        overall = progress.add_task("[bold]all runs", total=sum(e.settings["steps"] for e in todo), note="steps")
        steps_done: dict[str, int] = {}

        def advance(e: Experiment, step: int, loss: float) -> None:
            if e.identity not in bars:
                bars[e.identity] = progress.add_task(_name(e), total=e.settings["steps"], note="")
            progress.update(bars[e.identity], completed=step, note=f"loss {loss:.3f}")
            steps_done[e.identity] = step
            progress.update(overall, completed=sum(steps_done.values()))

        by_id = {e.identity: e for e in todo}
        for row in run_all(experiments, results, workers, advance, threads):
            finished = by_id[row["id"]]
            steps_done[row["id"]] = finished.settings["steps"]
            if row["id"] in bars:
                progress.remove_task(bars[row["id"]])
            loss = "diverged" if row["loss"] is None else f"loss {row['loss']:.4f}"
            if console.is_terminal or not as_json:
                progress.console.print(f"{_name(finished)}: {loss}", markup=False)
    sys.stdout.flush()


def _name(e: Experiment) -> str:
    return f"{e.label}, seed {e.seed}"


def _print_table(table: Sequence[Mapping[str, Any]], config: RunConfig) -> None:
    tokens = config.batch * config.accumulate * config.seq_len
    shown = Table(
        title=f"{config.steps} steps of {tokens} tokens",
        caption="loss: validation, nats per token; bytes: weight and both moments of an inner matrix, scales included\n"
        + noise_note(table),
    )
    headings = {"loss": "loss", "gap": "gap", "measured": "bytes/param", "predicted": "predicted"}
    headings |= {"peak": "peak memory", "time": "step"}
    shown.add_column("run", no_wrap=True)
    for heading in headings.values():
        shown.add_column(heading, justify="right", no_wrap=True)
    for e in table:
        text = cells(e)
        shown.add_row(e["label"], *(text[key] for key in headings))
    Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(shown)


def _plot(table: Sequence[Mapping[str, Any]], path: Path) -> Path | None:
    """Draws loss against bytes; None if matplotlib is not installed (the report has the same figure)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.add_subplot()
    shown = sorted((e for e in table if e["loss"] is not None), key=lambda e: e["bytes_measured"])
    for i, e in enumerate(shown):
        axes.errorbar(e["bytes_measured"], e["loss"], yerr=e["loss_spread"], fmt="o", color=f"C{i}", markersize=7)
        # Above and below in turns: neighbours on the axis are often close in loss, too.
        place: dict[str, Any] = {"xytext": (0, -16 if i % 2 else 9), "textcoords": "offset points", "ha": "center"}
        axes.annotate(e["label"], (e["bytes_measured"], e["loss"]), **place)
    axes.set(xlabel="bytes per parameter, measured", ylabel="validation loss", xscale="log")
    axes.set_xticks([x for x in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.margins(x=0.18, y=0.12)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    return path
