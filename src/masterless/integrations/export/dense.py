"""A dense copy: what the forward pass saw, as an ordinary checkpoint of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from masterless.integrations.export.checkpoint import Report
from masterless.tensor.quantize import dequantize_
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.selection import owned_parameters


def obstacle(name: str, module: nn.Module, q: QuantizedTensor) -> str:
    """Everything can be dense."""
    return ""


def write(model: Any, folder: Path, report: Report, source: Path | None) -> None:
    """Writes the folder."""
    for name, _, _, p in owned_parameters(model):
        if isinstance(p, QuantizedTensor):
            report.exported[name] = str(p.dtype).removeprefix("torch.")
    dense: Any = dequantize_(copy.deepcopy(model))
    dense.save_pretrained(folder)
