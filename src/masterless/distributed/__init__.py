"""Beyond one process: quantized weights and low-bit states under PyTorch's own distributed engine.

FSDP2's `fully_shard` needs nothing from here: quantize the model, shard it, build the optimizer. More is in
`docs/distributed.md`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from masterless.distributed.checkpoint import (
        PendingSave,
        async_save,
        latest,
        load,
        load_whole_,
        plain_state_dict,
        save,
    )
    from masterless.distributed.ddp import fingerprint, replicate, synchronize_
    from masterless.tensor.quantized import local_bytes

__all__ = [
    "PendingSave",
    "async_save",
    "fingerprint",
    "latest",
    "load",
    "load_whole_",
    "local_bytes",
    "plain_state_dict",
    "replicate",
    "save",
    "synchronize_",
]

# Nothing is imported before it is used: torch.distributed is large, and one process does without.
_HOMES = {"fingerprint": "distributed.ddp", "replicate": "distributed.ddp", "synchronize_": "distributed.ddp"} | {
    "local_bytes": "tensor.quantized"
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(f"masterless.{_HOMES.get(name, 'distributed.checkpoint')}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
