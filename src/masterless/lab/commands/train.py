"""``masterless train``: a GPT on your text, in the formats you choose, into a run directory that can be resumed."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from masterless.lab.commands.common import fail, one_line_warnings, with_options
from masterless.lab.train import display as displays
from masterless.lab.train import run as runs
from masterless.lab.train.config import FIELDS, read_toml, resolve
from masterless.lab.train.report import write_run_report
from masterless.lab.train.signals import StopFlag
from masterless.optim import NonFiniteGradientError


@with_options(FIELDS)
def train(
    *,
    out: Annotated[Path | None, typer.Option(help="The run directory to make. Default: runs/PRESET.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = None,
    from_step: Annotated[int | None, typer.Option(help="Resume from this step's checkpoint, not the newest.")] = None,
    config: Annotated[Path | None, typer.Option(help="Options from a TOML file; flags win over it.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Print this many tokens that the model writes at the end.")] = 0,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: ddp or fsdp; the ranks share each batch.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="With --parallel --resume: read a pickled .metadata, which can run code.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events as well.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per evaluation and a final one.")
    ] = False,
    **options: Any,
) -> None:
    """Train a GPT, dense or mixture-of-experts, without master weights.

    Trains on the source text of Python's standard library unless --data names your own. Ctrl-C saves and exits.
    """
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if resume is None:
        if from_step is not None:
            raise ValueError("--from-step: means nothing without --resume; add it")
    elif given or out is not None or config is not None:
        name = next(iter(given), "config" if config is not None else "out").replace("_", "-")
        raise ValueError(
            f"--{name}: a resumed run keeps its configuration; leave it out, or start a new run from these weights "
            f"with --init {resume}"
        )
    if tensorboard and find_spec("tensorboard") is None:
        raise ValueError("--tensorboard: TensorBoard is not installed; pip install tensorboard, or leave it out")
    one_line_warnings()
    if parallel is not None:
        if sample or tensorboard or from_step is not None:
            raise ValueError("--parallel: goes without --sample, --tensorboard and --from-step; leave them out")
        from masterless.lab import launch  # torch.distributed is large, and one process does without

        summary = launch.run(parallel, given, None if config is None else read_toml(config), out, resume, trust)
        if launch.is_first():
            print(json.dumps(summary), flush=True)
        return
    if trust:
        raise ValueError("--trust: means nothing without --parallel and --resume; leave it out")
    stop = StopFlag()
    if resume is not None:
        run = runs.resume(resume, from_step)
    else:
        file = {} if config is None else read_toml(config)
        start_from = given.get("init", file.get("init"))
        shape = {} if start_from is None else runs.inherited(Path(start_from))
        resolved = resolve(given, file, shape)
        run = runs.start(resolved, out or _free_folder(Path("runs"), resolved.preset))
    for note in run.notes:
        typer.echo(f"masterless: note: {note}", err=True)
    try:
        summary = runs.execute(run, displays.choose(as_json), stop, sample, tensorboard)
    except NonFiniteGradientError as error:
        reason = str(error).split(". ")[0]
        raise fail(
            f"{run.folder}: training diverged, {reason}; lower --lr or lengthen --warmup (what was saved is intact)"
        ) from None
    report = write_run_report(run.folder)
    summary["report"] = str(report)
    if as_json:
        print(json.dumps({"event": "end", **summary}), flush=True)
    else:
        typer.echo(displays.summary_line(summary))
        if "sample" in summary:
            typer.echo(f"--- a sample ---\n{summary['sample']}\n---")
        typer.echo(f"report: {report}")
    if summary["status"] == "interrupted":
        typer.echo(
            f"masterless: interrupted, saved at step {summary['step']}; "
            f"go on with: masterless train --resume {run.folder}",
            err=True,
        )
        raise typer.Exit(128 + (stop.signal or 2))


def _free_folder(parent: Path, name: str) -> Path:
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(parent / name for name in names if not (parent / name).exists())
