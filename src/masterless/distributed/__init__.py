"""Beyond one process: quantized weights and low-bit states under PyTorch's own distributed engine.

FSDP2's `fully_shard` needs nothing from here: quantize the model, shard it, build the optimizer. More is in
`docs/distributed.md`.
"""

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
from masterless.distributed.sharding import local_bytes

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
