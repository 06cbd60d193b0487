"""Checkpoints that are whole or absent.

Contract:
    * A file is written beside its place, synced, and moved there in one operation; then the manifest is, likewise. A
      run that is killed at any moment leaves a manifest that names complete files only.
    * The manifest holds each file's size and SHA-256, and how long ``metrics.jsonl`` was: `load` checks the first two
      before it reads, and a resumed run cuts the metrics to the third.
    * A checkpoint that does not match is an error, never silently passed over; another can be asked for by its step.
    * Files that no manifest names (an older checkpoint, an interrupted write) are removed after the next good one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

MANIFEST = "manifest.json"
_UNFINISHED = ".partial"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: says which, why, and what to do."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Calls `write` with a file that takes the place of `path` when it is complete and on the disk."""
    beside = path.with_name(path.name + _UNFINISHED)
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a failed write as either
        with suppress(OSError):
            beside.unlink()
        origin = origin_of(error)
        raise CheckpointError(f"{path}: cannot be written ({reason_of(origin)}); {remedy_for(origin)}") from error


def origin_of(error: BaseException) -> BaseException:
    """The error of the operating system behind another one (of torch's archive writer, say), if there is one."""
    current: BaseException | None = error
    while current is not None and not isinstance(current, OSError):
        current = current.__cause__ or current.__context__
    return current or error


def reason_of(error: BaseException) -> str:
    """Why something failed, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def remedy_for(error: BaseException, begun: bool = True) -> str:
    """What to do about a file that could not be written, of a run that has begun or one that could not begin."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder you may write to with --out"
    if number in (errno.ENOTDIR, errno.ENOENT):
        return "choose another folder with --out"
    if not begun:
        return "free space on the disk, then start it again"
    return "free space on the disk, then go on with --resume; what was saved before is intact"


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints of one run, oldest first.

    Args:
        folder: where they are; made by `create`.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self.manifest: dict[str, Any] = {"checkpoints": []}

    def create(self, **facts: Any) -> None:
        """Makes the folder and an empty manifest that also records `facts`."""
        self.folder.mkdir(parents=True)
        self.manifest = {**facts, "checkpoints": []}
        self._write_manifest()

    def open(self) -> None:
        """Reads the manifest."""
        path = self.folder / MANIFEST
        try:
            self.manifest = json.loads(path.read_text())
            self.manifest["checkpoints"] = list(self.manifest["checkpoints"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: missing or damaged ({reason_of(error)}), nothing can be resumed; start a new run with --out"
            ) from error

    def save(self, step: int, metrics_bytes: int, content: dict[str, Any]) -> None:
        """Writes a checkpoint; the previous ones are untouched until it is complete."""
        path = self.folder / f"step-{step:08d}.pt"
        write_atomically(path, lambda file: torch.save({"step": step, **content}, file))
        entry = {
            "file": path.name,
            "step": step,
            "bytes": path.stat().st_size,
            "sha256": _digest(path),
            "metrics_bytes": metrics_bytes,
        }
        earlier = [e for e in self.manifest["checkpoints"] if e["step"] < step]
        self.manifest["checkpoints"] = [*earlier, entry][-self.keep :]
        self._write_manifest()
        named = {e["file"] for e in self.manifest["checkpoints"]}
        for file in self.folder.iterdir():
            stale = file.suffix == ".pt" and file.name not in named
            if stale or file.name.endswith(_UNFINISHED):
                with suppress(OSError):
                    file.unlink()

    def entry(self, step: int | None = None) -> dict[str, Any] | None:
        """The manifest's entry of a step, or of the newest checkpoint; None if there is none yet."""
        entries = self.manifest["checkpoints"]
        if step is None:
            return entries[-1] if entries else None
        for entry in entries:
            if entry["step"] == step:
                return entry
        known = ", ".join(str(e["step"]) for e in entries) or "none"
        raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; it has those of steps {known}")

    def load(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The content of a checkpoint, after its size and checksum were found right."""
        path = self.folder / entry["file"]
        others = [e["step"] for e in self.manifest["checkpoints"] if e["step"] != entry["step"]]
        remedy = f"go on from the one before with --from-step {others[-1]}" if others else "start a new run with --out"
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"{path}: corrupt checkpoint, {size:,} bytes instead of {entry['bytes']:,}; {remedy}"
                )
            if _digest(path) != entry["sha256"]:
                raise CheckpointError(f"{path}: corrupt checkpoint, its SHA-256 is not the manifest's; {remedy}")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({reason_of(error)}); {remedy}") from error
        return read_checkpoint(path)

    def _write_manifest(self) -> None:
        text = json.dumps(self.manifest, indent=1) + "\n"
        write_atomically(self.folder / MANIFEST, lambda file: file.write(text.encode()))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What is in a file written by torch.save, without running any code that it might hold."""
    import masterless.tensor.quantized  # noqa: F401 - registers the quantized parameter as safe to load

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; check the spelling and the working directory") from None
    except Exception as error:  # damaged archives raise a dozen kinds
        raise CheckpointError(
            f"{path}: corrupt, or not a checkpoint ({type(error).__name__}); pass one that torch.save wrote"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; pass a checkpoint or a state dict")
    return content


def load_weights(path: Path) -> dict[str, Any]:
    """The model's state dict in a run directory, a checkpoint or a plain state dict file."""
    if path.is_dir():
        checkpoints = Checkpoints(path / "checkpoints")
        checkpoints.open()
        entry = checkpoints.entry()
        if entry is None:
            raise CheckpointError(f"{path}: this run has saved no checkpoint yet; resume it first")
        return checkpoints.load(entry)["model"]
    content = read_checkpoint(path)
    return content["model"] if isinstance(content.get("model"), dict) else content
