"""Distributed checkpoints: saved at N ranks, loaded at M, or in one process, to the bit.

Contract:
    * `torch.distributed.checkpoint` sees ordinary tensors: a quantized parameter ``w`` is saved as ``w.codes``,
      ``w.scale`` (and ``w.hidden``, ``w.master``), each cut along dimension 0 like the parameter. Any reader of such
      checkpoints can open the files.
    * Loading runs no code that a file may hold and notices damage (`metadata`); a checkpoint that only torch described,
      with a pickle, is refused unless the caller trusts it.
    * A checkpoint is a directory ``step-<number>``. It is written under another name and renamed when all ranks are
      done: whatever dies in between, a directory of that name is complete.
    * Loading fills the live tensors in place; nothing is encoded anew.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from masterless.distributed.metadata import METADATA, PICKLED, Reader, Writer
from masterless.formats.storage import COUNTERS, tensor_specs
from masterless.interop.files import FileError, reason_of
from masterless.optim.base import LowBitOptimizer
from masterless.sharding.place import Place
from masterless.tensor.pieces import piece
from masterless.tensor.quantized import QuantizedTensor, local_of
from masterless.tensor.state import joined, names_in

_NAME = re.compile(r"step-(\d+)")


def plain_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state dict with every quantized parameter replaced by its stored tensors, which it shares.

    Hand it to `torch.distributed.checkpoint`: what is loaded into it is loaded into the model.

    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> from masterless import quantize_
    >>> report = quantize_(model, "int4")
    >>> sorted(plain_state_dict(model.state_dict()))
    ['0.bias', '0.weight.codes', '0.weight.scale']
    """
    plain: dict[str, Any] = {}
    described = set(names_in(state_dict))  # in parts already; `load` compares their shapes and dtypes
    for name, value in state_dict.items():
        if name in described:
            continue
        local = local_of(value) if isinstance(value, Tensor) else value
        if not isinstance(local, QuantizedTensor):
            plain[name] = value
            continue
        specs = tensor_specs(local.format, value.shape)
        for part, tensor in local.stored.tensors.items():
            shared = Place.of(value).wrap(tensor, part, specs[part][0]) if isinstance(value, DTensor) else tensor
            plain[f"{name}.{part}"] = shared
    return plain


def load_whole_(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Loads a state dict of one process (dense or quantized, `torch.load`ed or fresh) into a sharded model.

    Each rank copies its own rows. A dense tensor is rounded to nearest where the model's parameter is quantized, which
    is what `quantize_` would have stored: it initialises a model that was built on the meta device.

    Args:
        model: sharded or not, on a real device.
        state_dict: the whole tensors, by the model's names; all of them.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = set(model.state_dict(keep_vars=True))
    state_dict = joined(state_dict)
    if set(state_dict) != wanted:
        odd = sorted(wanted ^ set(state_dict))[:4]
        raise ValueError(f"the state dict and the model differ, for instance in {odd}; pass the whole state dict")
    with torch.no_grad():
        for name, target in own.items():
            if name not in state_dict:
                continue
            source = state_dict[name]
            if isinstance(target, DTensor):
                place = Place.of(target)
                if place.dim is not None:
                    start, stop = min(place.start, len(source)), min(place.start + place.slices, len(source))
                    source = piece(source, start, stop) if isinstance(source, QuantizedTensor) else source[start:stop]
            local = local_of(target)
            if not local.numel():
                continue
            if isinstance(local, QuantizedTensor) and not isinstance(source, QuantizedTensor):
                local.encode_(source)
            else:
                local.copy_(source)


# --- saving and loading ------------------------------------------------------------------------------------------


def _state(model: nn.Module, optimizer: LowBitOptimizer | None, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": plain_state_dict(model.state_dict())}
    if optimizer is not None:
        for group, p, _ in optimizer.parameters():
            if p.requires_grad:
                optimizer.state_storage(p, group)  # a parameter that has not been stepped yet is saved as it is: zeros
        state["optim"] = get_optimizer_state_dict(model, optimizer)
    if extra is not None:
        state["extra"] = dict(extra)
    return state


def save(
    directory: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: LowBitOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Saves a checkpoint ``directory/step-<step>``; all ranks must call it.

    Args:
        directory: of all checkpoints of a run, on a file system that all ranks share.
        step: the number that names the checkpoint.
        model: sharded, replicated or in one process.
        optimizer: of this library.
        extra: anything else of yours, by name (the position in the data, say), the same on all ranks.
        keep: remove all but the last so many complete checkpoints.
        process_group: the ranks that save; all by default.
    """
    target, temporary = _prepare(Path(directory), step, keep, process_group)
    state = _state(model, optimizer, extra)
    with _alone() as no_dist:
        dcp.save(state, storage_writer=Writer(temporary), process_group=process_group, no_dist=no_dist)
    _publish(temporary, target, keep, process_group)
    _barrier(process_group)
    return target


class PendingSave:
    """A checkpoint that is being written while training goes on."""

    def __init__(self, future: Future[Any], target: Path, group: dist.ProcessGroup) -> None:
        self._future, self.target, self._group = future, target, group

    def done(self) -> bool:
        """Whether this rank has finished, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is complete and returns its directory; all ranks must call it."""
        self._future.result(timeout)
        dist.barrier(self._group)  # the first rank renames it when all have written
        return self.target


_pending: PendingSave | None = None


def async_save(
    directory: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: LowBitOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> PendingSave:
    """As `save` by all ranks, but returns as soon as everything is copied; the files are written by a thread.

    `PendingSave.wait` for it before the next one, and before the process ends.
    """
    if not dist.is_initialized():
        raise RuntimeError("async_save needs torch.distributed.init_process_group; in one process use save")
    target, temporary = _prepare(Path(directory), step, keep, None)
    state = _state(model, optimizer, extra)
    # The thread's messages must not mix with those of the training: they have a group of their own.
    own = _writers()
    response = dcp.async_save(state, storage_writer=Writer(temporary), process_group=own)
    finished: Future[Any] = Future()

    def finish(written: Future[Any]) -> None:
        try:
            written.result()
            _publish(temporary, target, keep, own)
            finished.set_result(target)
        except BaseException as error:
            finished.set_exception(error)

    upload: Any = getattr(response, "upload_completion", response)
    upload.add_done_callback(finish)
    global _pending
    _pending = PendingSave(finished, target, own)
    return _pending


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The last complete checkpoint of a run; None if there is none yet."""
    found = _complete(Path(directory))
    return found[-1] if found else None


def load(
    checkpoint: str | os.PathLike[str],
    model: nn.Module,
    optimizer: LowBitOptimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Loads a checkpoint, saved at any number of ranks, into a model and its optimizer; all ranks must call it.

    Args:
        checkpoint: a directory that `save` returned, or `latest`.
        model: with the formats that it was saved with.
        optimizer: likewise; fresh or used.
        process_group: the ranks that load; all by default.
        trust: read pickles too, which can run code of whoever wrote them; for checkpoints that torch alone wrote.

    Returns:
        What was saved as `extra`.

    Raises:
        ValueError: it is damaged, needs trust, or was saved of another model; the same on all ranks.
    """
    reader = Reader(checkpoint, trust)
    stored = reader.read_metadata().state_dict_metadata
    state = _state(model, optimizer, None)
    extra = {key.removeprefix("extra."): None for key in stored if key.startswith("extra.")}
    if extra:
        state["extra"] = extra
    if optimizer is not None:
        _expect_counters(state["optim"]["state"], stored)
    _compare(state, stored, Path(checkpoint))
    try:
        with _alone() as no_dist:
            dcp.load(state, storage_reader=reader, process_group=process_group, no_dist=no_dist)
    except CheckpointException as error:  # of any rank, raised on all of them
        rank, (cause, _) = next(iter(error.failures.items()))
        raise FileError(f"{checkpoint}: cannot be loaded, rank {rank}: {reason_of(cause)}") from cause
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optim"])
    return state.get("extra", {})


def _expect_counters(states: dict[str, dict[str, Any]], stored: Mapping[str, Any]) -> None:
    """Makes room for the counters of resets, which exist only after one, and drops those the checkpoint has not."""
    for name, own in states.items():
        for key in [key for key in own if key.endswith(COUNTERS) and f"optim.state.{name}.{key}" not in stored]:
            del own[key]
        prefix = f"optim.state.{name}."
        for key, found in stored.items():
            short = key.removeprefix(prefix)
            if key.startswith(prefix) and short.endswith(COUNTERS) and short not in own:
                assert isinstance(found, TensorStorageMetadata)
                own[short] = torch.zeros((), dtype=found.properties.dtype)


def _compare(state: dict[str, Any], stored: Mapping[str, Any], checkpoint: Path) -> None:
    """Raises a ValueError if the checkpoint does not hold the tensors that are wanted, in their formats."""
    tensors = {f"model.{name}": t for name, t in state["model"].items()}
    for name, own in state.get("optim", {}).get("state", {}).items():
        tensors.update({f"optim.state.{name}.{key}": value for key, value in own.items()})
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        found = stored.get(key)
        if found is None:
            raise ValueError(
                f"checkpoint {checkpoint} has no {key!r}: it belongs to another model, or weights and states were "
                f"saved in other formats; quantize the model and build the optimizer as for the run that saved it"
            )
        if isinstance(found, TensorStorageMetadata) and (found.size, found.properties.dtype) != (
            tensor.shape,
            tensor.dtype,
        ):
            raise ValueError(
                f"checkpoint {checkpoint} has {key!r} as {tuple(found.size)} {found.properties.dtype}, but "
                f"{tuple(tensor.shape)} {tensor.dtype} is wanted; use the formats of the run that saved it"
            )


# --- directories -------------------------------------------------------------------------------------------------


def _complete(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and _described(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _described(path: Path) -> bool:
    return (path / METADATA).exists() or (path / PICKLED).exists()


def _prepare(directory: Path, step: int, keep: int | None, group: dist.ProcessGroup | None) -> tuple[Path, Path]:
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: at least the checkpoint that is being saved is kept; pass None to keep all")
    if _pending is not None and not _pending.done():
        raise RuntimeError(f"{_pending.target} is still being written; call wait() on what async_save returned first")
    target = directory / f"step-{step:08d}"
    temporary = directory / f".incomplete-step-{step:08d}"
    if _first(group):
        directory.mkdir(parents=True, exist_ok=True)
        for left_over in directory.glob(".incomplete-step-*"):  # of a run that died
            shutil.rmtree(left_over, ignore_errors=True)
    _barrier(group)
    return target, temporary


def _publish(temporary: Path, target: Path, keep: int | None, group: dist.ProcessGroup | None) -> None:
    if not _first(group):
        return
    if target.exists():  # a run that was resumed from an earlier checkpoint saves this step again
        old = target.with_name(f".incomplete-{target.name}-old")
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(target)
    if keep is not None:
        for path in _complete(target.parent)[:-keep]:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _alone() -> Iterator[bool]:
    """Whether this is the only process, which torch warns about and we mean."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield not dist.is_initialized()


def _first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


@cache
def _writers() -> dist.ProcessGroup:
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    return made
