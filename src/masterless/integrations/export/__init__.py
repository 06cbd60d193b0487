"""Trained models for servers: compressed-tensors (vLLM, SGLang, transformers), GGUF (llama.cpp, ollama), or dense.

Contract:
    * Lossless, or refused with the reason: what a server decodes is what the forward pass of the trained model saw, to
      the bit. Hidden bits and master copies are the optimizer's and are not exported.
    * `requantize` is the explicit way out: it names the format that refused matrices are rounded to first.
    * The folder is complete: config, generation config and the tokenizer's files beside the weights. It is written
      under another name and moved: it is there whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from masterless.integrations.export.checkpoint import Report
from masterless.integrations.export.checkpoint import copy_tokenizer as _copy_tokenizer
from masterless.integrations.export.checkpoint import load_folder as _load_folder
from masterless.integrations.export.checkpoint import requantized as _requantized

TARGETS = ("compressed-tensors", "gguf", "dense")


def export(
    model: Any, path: str | os.PathLike[str], to: str = "compressed-tensors", *, requantize: str | None = None
) -> Report:
    """Writes a trained transformers model for a server.

    Args:
        model: a transformers model with quantized parameters, or the folder that its `save_pretrained` wrote (from
            which the tokenizer's files are copied, too).
        path: the new folder; for "gguf" a file is written in it. It must not exist.
        to: "compressed-tensors", "gguf" or "dense".
        requantize: round matrices whose grid the target cannot hold to this format ("int8", "int4:32", ...) instead of
            refusing them. The model itself is not changed.

    Returns:
        What was written, which matrices were rounded anew, and what a server may not like. Print it.

    Raises:
        ValueError: if a matrix cannot be exported without loss, with its name, the reason and the remedy.

    >>> import tempfile
    >>> from masterless import quantize_
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    >>> report = quantize_(model, "int8")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = export(model, f"{folder}/served")
    """
    if to not in TARGETS:
        raise ValueError(f"to={to!r}: choose one of {', '.join(TARGETS)}")
    target = Path(path)
    if target.exists():
        raise ValueError(f"{target} exists already; name a new folder, or remove it")
    folder: Path | None = None
    if isinstance(model, (str, os.PathLike)):
        folder = Path(model)
        model = _load_folder(folder)
    report = Report(to, target)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.mkdir(parents=True)
        if to == "dense":
            from masterless.integrations.export import dense as writer
        elif to == "gguf":
            from masterless.integrations.export import gguf as writer  # type: ignore[no-redef]
        else:
            from masterless.integrations.export import compressed as writer  # type: ignore[no-redef]
        writer.write(_requantized(model, writer.obstacle, requantize, report), part, report, folder)
        if folder is not None and to != "gguf":
            _copy_tokenizer(folder, part)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return report


__all__ = ["TARGETS", "Report", "export"]
