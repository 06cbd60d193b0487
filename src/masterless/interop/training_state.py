"""The whole state of a training run in one safetensors file, written and read without a second copy in memory.

Contract:
    * The file holds every tensor of the model (quantized ones as they are stored) and of the optimizer's state, and in
      its metadata the options of the param groups, whatever the caller adds, and a SHA-256 of all of it.
    * It is written from the tensors' own memory beside its place and moved there: whole or absent.
    * Loading verifies names, shapes, types and the SHA-256 before it changes anything, then copies tensor by tensor
      into the memory that is there. A run that goes on from it is the uninterrupted run to the bit.
    * Nothing is converted: another format, group or parameter is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from masterless import __version__
from masterless.interop.files import FileError, StrPath, open_regular, reason_of, replacing
from masterless.interop.safetensors import digest_of, library, listing
from masterless.optim.base import LowBitOptimizer

LAYOUT = 1
ABOUT, DIGEST = "masterless.training", "masterless.training.sha256"


def save_training_state(
    path: StrPath, model: nn.Module, optimizer: LowBitOptimizer, extra: dict[str, Any] | None = None
) -> None:
    """Writes a model and its optimizer to a file, in one move.

    Args:
        path: the file; it is replaced when everything has been written.
        model: any module.
        optimizer: over the model's parameters. What a backward pass has accumulated is not saved: save after a step.
        extra: anything that JSON holds: the number of the step, the position in the data.
    """
    tensors = _tensors(model, optimizer)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        about = json.dumps({"layout": LAYOUT, "version": __version__, "groups": groups, "extra": extra or {}})
    except TypeError as error:
        raise ValueError(
            f"the param groups or extra hold what JSON cannot ({error}); keep plain numbers, names and lists there"
        ) from None
    metadata = {"format": "pt", ABOUT: about, DIGEST: digest_of(about, tensors, tensors.__getitem__)}
    with replacing(path) as part:
        library("safetensors.torch").save_file(tensors, part, metadata=metadata)


def load_training_state(path: StrPath, model: nn.Module, optimizer: LowBitOptimizer) -> dict[str, Any]:
    """Loads what `save_training_state` wrote into a model and optimizer that were built the same way.

    Returns:
        The caller's `extra`.

    Raises:
        ValueError: if the file is damaged or of another model or optimizer; both are then unchanged.
    """
    open_regular(path).close()
    st = library("safetensors")

    def opened() -> Any:
        try:
            return st.safe_open(path, framework="pt", device="cpu")
        except (st.SafetensorError, OSError) as error:
            raise FileError(f"{path}: no safetensors file, or damaged ({reason_of(error)}); save it again") from error

    def read(name: str) -> Tensor:
        # Opened anew for every tensor: what stays mapped counts as this process's memory.
        with opened() as file:
            return file.get_tensor(name)

    with opened() as file:
        metadata = file.metadata() or {}
        found = {name: (tuple(s.get_shape()), s.get_dtype()) for name in file.keys() if (s := file.get_slice(name))}
    if ABOUT not in metadata:
        raise FileError(f"{path}: holds no training state; pass a file of save_training_state")
    about = json.loads(metadata[ABOUT])
    if about["layout"] > LAYOUT:
        raise FileError(f"{path}: written by masterless {about['version']}, a later version; upgrade masterless")
    fresh = not optimizer.state
    for group, p, _ in optimizer.parameters():
        optimizer.state_storage(p, group)
    try:
        targets = _tensors(model, optimizer)
        _check(path, targets, found, about["groups"], optimizer, read)
        if digest_of(metadata[ABOUT], found, read) != metadata[DIGEST]:
            raise FileError(f"{path} is damaged: its SHA-256 is not the one it was saved with; restore it from a copy")
    except Exception:
        if fresh:
            optimizer.state.clear()
        raise
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(read(name))
    for own, saved in zip(optimizer.param_groups, about["groups"], strict=True):
        for key, value in saved.items():
            own[key] = tuple(value) if isinstance(own.get(key), tuple) else value
    return about["extra"]


def _tensors(model: nn.Module, optimizer: LowBitOptimizer) -> dict[str, Tensor]:
    """All tensors by name, sharing memory with the model and the optimizer; tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or hasattr(tensor, "_local_tensor"):
            raise ValueError(
                f"{name!r} of the model is no plain tensor of this process; use torch.distributed.checkpoint for "
                f"sharded models"
            )
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            found[f"model.{name}"] = tensor.detach()
    for _, p, name in optimizer.parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"optimizer.{name}|{key}"] = value
    return {name: tensor.contiguous() for name, tensor in found.items()}


_NAMES = {"torch.uint8": "U8", "torch.int16": "I16", "torch.int64": "I64", "torch.bool": "BOOL"} | {
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
}


def _check(
    path: StrPath,
    targets: dict[str, Tensor],
    found: dict[str, tuple[tuple[int, ...], str]],
    groups: list[dict[str, Any]],
    optimizer: LowBitOptimizer,
    read: Callable[[str], Tensor],
) -> None:
    missing, foreign = set(targets) - set(found), set(found) - set(targets)
    if missing or foreign:
        which = f"lacks {listing(missing)}" if missing else f"also holds {listing(foreign)}"
        raise ValueError(
            f"{path}: of another model or optimizer: it {which}; build both as they were when it was saved"
        )
    for name, target in targets.items():
        own = (tuple(target.shape), _NAMES.get(str(target.dtype), str(target.dtype)))
        if found[name] != own:
            raise ValueError(
                f"{path}: {name!r} is {found[name]} in the file and {own} here; build the model and the optimizer with "
                f"the formats they had when it was saved"
            )
        # The description of a quantized parameter: the same bytes in another format would mean other numbers.
        if own[1] == "U8" and len(own[0]) == 1 and f"{name}.codes" in targets and not torch.equal(target, read(name)):
            raise ValueError(
                f"{path}: {name.removeprefix('model.')!r} is stored as {bytes(read(name).tolist()).decode()} in the "
                f"file and as {bytes(target.tolist()).decode()} here; quantize the model as it was when it was saved"
            )
    formats = [name for name in (optimizer.first_name, optimizer.second_name) if name]
    saved = [(g.get("param_names"), *(g.get(name) for name in formats)) for g in groups]
    here = [(g.get("param_names"), *(g.get(name) for name in formats)) for g in optimizer.param_groups]
    if saved != here:
        raise ValueError(
            f"{path}: its param groups hold other parameters or formats than this optimizer's; build it with the same"
        )
