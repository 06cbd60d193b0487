"""``masterless export``: a trained Hugging Face model for a server, without loss."""

from __future__ import annotations

import json

import typer


def export(
    folder: str = typer.Argument(help="What save_pretrained wrote: a checkpoint of Trainer, for instance."),
    out: str = typer.Option(..., "--out", help="The new folder."),
    to: str = typer.Option("compressed-tensors", "--to", help="compressed-tensors (vLLM), gguf (llama.cpp) or dense."),
    requantize: str = typer.Option(
        "", "--requantize", help="Round matrices that the target cannot hold to this format instead of refusing them."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Write a trained model for vLLM, SGLang, llama.cpp or ollama, equal to the bit to what was trained."""
    from masterless.integrations.export import export as write

    try:
        report = write(folder, out, to, requantize=requantize or None)
    except ImportError as error:
        raise ValueError(f"{error}; pip install 'masterless[hf]'") from error
    if as_json:
        about = {"path": str(report.path), "to": report.to, "exported": report.exported}
        typer.echo(json.dumps({**about, "rounded": report.rounded, "notes": report.notes}))
    else:
        typer.echo(str(report))
