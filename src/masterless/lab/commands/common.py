"""What `train` and `compare` share: flags made from the options of `RunConfig`, and the way errors end a command."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin

import typer

from masterless.lab.train.config import FIELDS, TYPES


def with_options(names: Iterable[str], **defaults: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function's ``**options`` become one flag for each of these options of `RunConfig`.

    A flag that is not given is passed as None, so that a config file and a preset can still decide. `defaults` are
    what the help says where the command's default is not the option's own.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [_parameter(name, defaults.get(name)) for name in names]
        function.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in (*own, *made)}
        return function

    return decorate


def _parameter(name: str, shown: str | None) -> inspect.Parameter:
    field = FIELDS[name]
    hint = TYPES[name]
    plain = next((t for t in get_args(hint) if t is not type(None)), hint) if get_origin(hint) is not tuple else hint
    annotation: Any = list[str] | None if get_origin(plain) is tuple else plain | None
    default = field.default
    shown = shown or field.metadata["shown"] or (str(default).lower() if isinstance(default, bool) else str(default))
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if plain is bool else flag,
        help=f"{field.metadata['help']} Default: {shown}.",
        show_default=False,
        rich_help_panel=field.metadata["section"].capitalize(),
    )
    option.default = None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def one_line_warnings() -> None:
    """Warnings of the library go to stderr as one line each, without the code that raised them."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"masterless: warning: {message}", file=sys.stderr)

    warnings.showwarning = show


def fail(message: str, code: int = 1) -> typer.Exit:
    """Prints one line on stderr and returns the exception that ends the command."""
    print(f"masterless: {' '.join(message.split())}", file=sys.stderr)
    return typer.Exit(code)
