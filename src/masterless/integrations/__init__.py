"""masterless in other tools: averages, transformers, export to servers. What they need is imported when it is used."""

from __future__ import annotations

from torch import nn

from masterless.tensor import quantize


def _is_of_transformers(model: nn.Module) -> bool:
    # By name: a model of transformers comes with transformers, nobody else pays for importing it.
    return any(
        t.__name__ == "PreTrainedModel" and t.__module__.startswith("transformers.") for t in type(model).__mro__
    )


def _after_quantizing(model: nn.Module) -> None:
    for module in model.modules():
        if _is_of_transformers(module):
            from masterless.integrations import transformers

            transformers.adopt(module)
            break  # the outermost saves all


def _after_dequantizing(model: nn.Module) -> None:
    for module in model.modules():
        if _is_of_transformers(module):
            from masterless.integrations import transformers

            transformers.release(module)


quantize.AFTER_QUANTIZING.append(_after_quantizing)
quantize.AFTER_DEQUANTIZING.append(_after_dequantizing)
