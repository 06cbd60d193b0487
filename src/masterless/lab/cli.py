"""The command line: ``masterless stall``, ``masterless formats``, ...

Contract:
    * A command imports plots, other projects' libraries and torch.distributed when it needs them.
    * Results go to stdout, as a table or with ``--json`` as one JSON document. Errors are one line on stderr.
    * Exit codes: 0 done, 2 the input cannot be honoured (the line says value, reason and remedy).

A command is a function in `masterless.lab.commands`, registered in `app` below. It raises a ValueError (as the library
does) for input that it cannot honour.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    raise SystemExit("masterless: the command line needs typer and rich; pip install 'masterless[cli]'") from None

import masterless
from masterless.lab.commands.bench import bench
from masterless.lab.commands.compare import compare
from masterless.lab.commands.doctor import doctor
from masterless.lab.commands.export import export
from masterless.lab.commands.formats import formats
from masterless.lab.commands.plan import plan
from masterless.lab.commands.profile import profile
from masterless.lab.commands.stall import stall
from masterless.lab.commands.train import train


class OneLineErrors(TyperGroup):
    """Reports wrong usage and values as one line on stderr, with exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        """Runs the command line, as the parent does."""
        try:
            result = super().main(*args, **kwargs, standalone_mode=False)  # type: ignore[misc]
        except (ValueError, OSError) as error:
            message = str(error)
        except MemoryError:
            message = "there is not enough memory for this; choose smaller numbers or less text"
        except Exception as error:
            if "can't allocate memory" in str(error):  # torch's RuntimeError
                message = f"not enough memory ({' '.join(str(error).split())[:120]}); choose a smaller model or batch"
            elif not hasattr(error, "format_message"):  # what typer raises for wrong usage
                raise
            elif type(error).__name__ == "NoArgsIsHelpError":
                sys.exit(2)  # the help has been printed
            else:
                message = error.format_message()
        else:
            if standalone_mode:
                sys.exit(result if isinstance(result, int) else 0)
            return result
        print(f"masterless: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)


app = typer.Typer(
    cls=OneLineErrors,
    help="Train neural networks in one to two bytes per parameter: plan, explain, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"masterless {masterless.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    pass


for _command in (train, compare, stall, formats, plan, profile, bench, export, doctor):
    app.command()(_command)


def main() -> None:
    """The entry point."""
    app(prog_name="masterless")
