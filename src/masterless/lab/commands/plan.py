"""``masterless plan``: will it fit? Bytes of training a model under the usual systems and our presets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from masterless.lab.plan import Advice, Plan, Row, Settings, advise, load_model, make_plan, model_of_size
from masterless.lab.plan.table import gigabytes

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BYTES = (
    {"B": 1}
    | {f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}
    | {f"{u}IB": 1024**i for i, u in enumerate("KMGT", 1)}
)


def plan(
    source: str | None = typer.Argument(
        None, help="A Hugging Face config.json, a safetensors file, or a directory of either.", show_default=False
    ),
    params: str | None = typer.Option(None, help="Instead of a model: a Llama-like one of about this size, e.g. 7B."),
    memory: str | None = typer.Option(
        None, help="What a device has, e.g. 24GB (10^9 bytes) or 24GiB: marks what fits."
    ),
    batch: int = typer.Option(1, help="Sequences per device and step."),
    seq_len: int = typer.Option(2048, help="Tokens of a sequence."),
    checkpointing: str = typer.Option("none", help="Of activations: none, or full (every layer is recomputed)."),
    shards: int = typer.Option(1, help="Devices that share the parameters (FSDP2); numbers are the largest rank's."),
    dtype: str = typer.Option("bf16", help="Of what stays dense beside quantized matrices: bf16 or fp32."),
    preset: list[str] | None = typer.Option(None, help="Only this preset; can be repeated.", show_default=False),  # noqa: B008
    include: list[str] | None = typer.Option(  # noqa: B008
        None, help="Also quantize parameters of this name pattern, as quantize_(include=).", show_default=False
    ),
    whole_model: bool = typer.Option(
        False, "--whole-model", help="Embeddings and heads quantized too, the loss computed in slices (our presets)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document, in bytes, instead of tables."),
) -> None:
    """Show what training a model takes in bytes, system by system, and what fits."""
    if (source is None) == (params is None):
        raise ValueError("give either a model (config.json, safetensors file or directory) or --params 7B")
    count = None if params is None else parse_count(params)
    limit = None if memory is None else parse_bytes(memory)
    settings = Settings(batch, seq_len, checkpointing, shards, dtype, tuple(include or ()), whole_model)
    model = load_model(source) if source is not None else model_of_size(count or 0)
    made = make_plan(model, settings, tuple(preset or ()))
    advice = None if limit is None else advise(made, limit)
    if as_json:
        typer.echo(json.dumps(describe(made, limit, advice)))
    else:
        _show(made, limit, advice)


def parse_count(text: str) -> int:
    """A number of parameters: ``7B``, ``350M``, ``1.5T``, ``7000000``."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)([KMBGT]?)", text.strip().replace(",", "").replace("_", "").upper())
    if not match:
        raise ValueError(f"--params {text[:60]!r} is no number of parameters; write e.g. 7B, 350M or 1.5T")
    count = round(float(match[1]) * _UNITS[match[2]])
    if count > 10**15:
        raise ValueError(f"--params {text!r}: more than 1000T is no model to plan for; write e.g. 7B or 1T")
    return count


def parse_bytes(text: str) -> int:
    """A number of bytes: ``24GB`` (10^9), ``24GiB`` (2^30), ``512MB``."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,30})?)\s*([KMGT]?I?B)", text.strip().upper())
    size = round(float(match[1]) * _BYTES.get(match[2], 0)) if match else 0
    if not size:
        raise ValueError(f"--memory {text[:60]!r} is no size in bytes; write e.g. 24GB, 80GiB or 512MB")
    return size


def describe(plan: Plan, memory: int | None = None, advice: Advice | None = None) -> dict[str, Any]:
    """A plan as plain data, in bytes."""
    result: dict[str, Any] = {
        "model": plan.model.name,
        "parameters": plan.model.numel,
        "quantized_parameters": plan.quantized,
        "left_alone": plan.left,
        "notes": list(plan.model.notes),
        "settings": asdict(plan.settings),
        "systems": [_describe_row(row, memory) for row in plan.rows],
    }
    if memory is not None and advice is not None:
        result |= {"memory": memory, "advice": asdict(advice)}
    return result


def _describe_row(row: Row, memory: int | None) -> dict[str, Any]:
    names = ["weights", "master", "states", "gradients", "gradients_in_backward", "activations", "workspace", "total"]
    names += ["total_in_backward", "gathered", "reduced", "bytes_per_parameter"]
    fits = {} if memory is None else {"fits": row.fits(memory)}
    return {
        "name": row.system.name,
        "summary": row.system.summary,
        "preset": row.system.ours,
        **{name: getattr(row, name) for name in names},
        **fits,
    }


# column -> its cell; what a narrow terminal has no room for is dropped in the order of `_DROPPED`
_COLUMNS: dict[str, Callable[[Row], int | None]] = {
    "weights": lambda row: row.weights,
    "master": lambda row: row.master,
    "states": lambda row: row.states,
    "grads": lambda row: row.gradients,
    "activ.": lambda row: row.activations,
    "workspace": lambda row: row.workspace,
    "total": lambda row: row.total,
    "in backward": lambda row: row.total_in_backward,
    "gather": lambda row: row.gathered,
    "reduce": lambda row: row.reduced,
}
_DROPPED = ("workspace", "activ.", "master", "grads", "reduce", "gather")


def _show(plan: Plan, memory: int | None, advice: Advice | None) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe or a file has no width to fit into
    columns = [name for name in _COLUMNS if plan.settings.shards > 1 or name not in ("gather", "reduce")]
    dropped: list[str] = []
    table = _table(plan, columns, memory, advice)
    for name in _DROPPED:
        if Measurement.get(console, console.options.update(max_width=1000), table).minimum <= console.width:
            break
        if name in columns:
            columns.remove(name)
            dropped.append(name)
            table = _table(plan, columns, memory, advice)
    console.print(table, markup=False)
    for line in _notes(plan, dropped, advice):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(plan: Plan, columns: list[str], memory: int | None, advice: Advice | None) -> Table:
    per = f"one of {plan.settings.shards} ranks" if plan.settings.shards > 1 else "one device"
    what = ", all quantized" if plan.settings.whole_model else ""
    title = f"{plan.model.name}: {plan.model.numel:,} parameters{what}; GB (10^9 bytes) on {per}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("system", no_wrap=True)
    for column in ("B/param", *columns):
        table.add_column(column, justify="right", no_wrap=column != "in backward")
    if memory is not None:
        table.add_column(f"fits {memory / 1e9:.4g} GB")
    ours = False
    for row in plan.rows:
        if row.system.ours and not ours:
            table.add_section()
        ours = row.system.ours
        values = [_COLUMNS[column](row) for column in columns]
        cells = ["?" if value is None else gigabytes(value) if value else "-" for value in values]
        fits = [] if memory is None else [row.fits(memory)]
        style = "bold" if advice and advice.preset == row.system.name else ""
        table.add_row(row.system.name, f"{row.bytes_per_parameter:.2f}", *cells, *fits, style=style)
    return table


def _notes(plan: Plan, dropped: list[str], advice: Advice | None) -> list[str]:
    settings = plan.settings
    left = ", ".join(f"{reason} {count:,}" for reason, count in sorted(plan.left.items(), key=lambda item: -item[1]))
    tokens = f"batch {settings.batch}, {settings.seq_len} tokens, checkpointing {settings.checkpointing}"
    lines = [
        f"quantized: {plan.quantized:,} parameters; left in {settings.dtype}: {left or 'nothing'}",
        f"activ. (a model): {tokens if plan.model.geometry else 'unknown, not in the totals'}",
        "in backward: the total if each step is taken inside the backward pass",
        "B/param: weights, master copies and states of the whole model",
        "not counted: the device's own context, fragmentation, step counters",
    ]
    if settings.shards > 1:
        lines.append("gather, reduce: bytes a rank receives for weights and sends for gradients in one step")
    if dropped:
        lines.append(f"no room in this terminal for {', '.join(dropped)}: widen it (every total is complete)")
    lines += [f"note: {note}" for note in plan.model.notes]
    return [*lines, *([f"-> {advice.text}"] if advice else [])]
