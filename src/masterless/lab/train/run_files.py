"""The files of a run: a directory that one process holds, and checkpoints that are whole or absent.

Contract:
    * A process removes from a run directory only what it made itself, and only while it holds the directory's lock.
    * ``config.toml`` is written last: a directory without one, of a start that was killed, may be taken by a new run.
    * A file is written beside its place, synced, and moved there in one operation; then the manifest is, likewise. A
      run that is killed at any moment leaves a manifest that names complete files only.
    * The manifest holds each file's size and SHA-256, and how long ``metrics.jsonl`` was: `load` checks the first two
      before it reads, and a resumed run cuts the metrics to the third.
    * A checkpoint that does not match is an error, never silently passed over; another can be asked for by its step.
    * Files that no manifest names (an older checkpoint, an interrupted write) are removed after the next good one.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from masterless.interop.files import UNFINISHED, FileError, read_json, read_torch, reason_of, replacing, sha256

from .config import ConfigError

CONFIG, MANIFEST, LOCK, TOKENIZER = "config.toml", "manifest.json", ".lock", "tokenizer.json"
CHECKPOINTS, DISTRIBUTED = "checkpoints", "distributed"  # of one process, of several ranks
_NAME = re.compile(r"step-\d{8,15}\.pt")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointError(FileError):
    """A checkpoint that cannot be written or read: says which, why, and what to do."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Calls `write` with a file that takes the place of `path` when it is complete and on the disk."""
    try:
        with replacing(path) as beside, beside.open("wb") as file:
            write(file)
    except (OSError, RuntimeError) as error:  # torch.save reports a failed write as either
        origin = origin_of(error)
        raise CheckpointError(f"{path}: cannot be written ({reason_of(origin)}); {remedy_for(origin)}") from error


def write_text(path: Path, text: str) -> None:
    """As `write_atomically`, a text."""
    write_atomically(path, lambda file: file.write(text.encode()))


def origin_of(error: BaseException) -> BaseException:
    """The error of the operating system behind another one (of torch's archive writer, say), if there is one."""
    current: BaseException | None = error
    while current is not None and not isinstance(current, OSError):
        current = current.__cause__ or current.__context__
    return current or error


def remedy_for(error: BaseException, begun: bool = True) -> str:
    """What to do about a file that could not be written, of a run that has begun or one that could not begin."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder you may write to with --out"
    if number in (errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG):
        return "choose another folder with --out"
    if not begun:
        return "free space on the disk, then start it again"
    return "free space on the disk, then go on with --resume; what was saved before is intact"


# --- the directory ------------------------------------------------------------------------------------------------


class RunFolder:
    """A run directory that this process holds until it ends, however it ends: made by `claim` or `hold`."""

    def __init__(self, path: Path, made: list[Path]) -> None:
        self.path, self._made, self._handle = path, made, None  # type: ignore[var-annotated]
        try:
            import fcntl
        except ImportError:  # Windows
            return
        lock = path / LOCK
        self._handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the file between our opening and locking it.
            if os.fstat(self._handle).st_ino != os.stat(lock).st_ino:
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise ConfigError(f"{path}: another process is training here; wait for it or stop it") from None
        for left_over in path.glob(f"*{UNFINISHED}"):  # of a process that was killed: nobody else writes here now
            left_over.unlink(missing_ok=True)

    @classmethod
    def hold(cls, path: Path) -> RunFolder:
        """The directory of a run that has begun."""
        return cls(path, [])

    @classmethod
    def claim(cls, path: Path) -> RunFolder:
        """A directory for a new run: made now, or an empty one, or what a start that was killed left behind."""
        made: list[Path] = []
        try:
            for folder in reversed([f for f in (path, *path.parents) if not f.exists()]):
                with suppress(FileExistsError):
                    os.mkdir(folder)  # one process only can have made it
                    made.insert(0, folder)
            if path not in made:
                _refuse_taken(path)
            claimed = cls(path, made)
            _refuse_taken(path)  # another may have begun, or even finished, before we had the lock
            return claimed
        except OSError as error:
            _remove_empty(made)
            raise ConfigError(
                f"{path}: cannot be made ({reason_of(error)}); {remedy_for(error, begun=False)}"
            ) from error

    def abandon(self) -> None:
        """Takes back what `claim` and the start of a run made; a directory that holds anything else stays."""
        files = [self.path / TOKENIZER, self.path / LOCK]
        folders = [self.path / CHECKPOINTS, self.path / DISTRIBUTED]
        for file in [*(folder / MANIFEST for folder in folders), *files]:
            with suppress(OSError):
                file.unlink()
        _remove_empty([*folders, *self._made])

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()  # refuses one that is not empty: nobody's files are lost


def _refuse_taken(path: Path) -> None:
    """Raises an error unless the directory is empty or the remains of a start that was killed."""
    if not path.is_dir():
        raise ConfigError(f"{path}: something is there already and is not overwritten; choose another --out")
    known = {LOCK, TOKENIZER, CHECKPOINTS, DISTRIBUTED, MANIFEST}
    inside = [p for p in (*path.iterdir(), *path.glob(f"{CHECKPOINTS}/*"), *path.glob(f"{DISTRIBUTED}/*"))]
    names = {p.name for p in inside if not p.name.endswith(UNFINISHED)}
    if names and not (names <= known and LOCK in names):
        run = CONFIG in names
        what = "a run" if run else "something"
        go_on = f"go on with --resume {path}, or " if run else ""
        raise ConfigError(f"{path}: {what} is there already and is not overwritten; {go_on}choose another --out")


# --- checkpoints --------------------------------------------------------------------------------------------------


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
        self.folder.mkdir(exist_ok=True)
        self.manifest = {**facts, "checkpoints": []}
        self._write_manifest()

    def open(self) -> None:
        """Reads the manifest."""
        path = self.folder / MANIFEST
        try:
            manifest = read_json(path)
            entries = manifest["checkpoints"]
            if not all(map(_is_entry, entries)):
                raise ValueError("an entry is not one of ours")
            if sorted({e["step"] for e in entries}) != [e["step"] for e in entries]:
                raise ValueError("its steps are not in order")
            self.manifest = {**manifest, "checkpoints": list(entries)}
        except (ValueError, KeyError, TypeError) as error:
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
            "sha256": sha256(path),
            "metrics_bytes": metrics_bytes,
        }
        earlier = [e for e in self.manifest["checkpoints"] if e["step"] < step]
        self.manifest["checkpoints"] = [*earlier, entry][-self.keep :]
        self._write_manifest()
        named = {e["file"] for e in self.manifest["checkpoints"]}
        for file in self.folder.iterdir():
            stale = _NAME.fullmatch(file.name) and file.name not in named
            if stale or file.name.endswith(UNFINISHED):
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
            if sha256(path) != entry["sha256"]:
                raise CheckpointError(f"{path}: corrupt checkpoint, its SHA-256 is not the manifest's; {remedy}")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({reason_of(error)}); {remedy}") from error
        return read_checkpoint(path)

    def _write_manifest(self) -> None:
        write_text(self.folder / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")


def _is_entry(entry: dict[str, Any]) -> bool:
    numbers = [entry[key] for key in ("step", "bytes", "metrics_bytes")]
    good = all(type(n) is int and 0 <= n < 2**53 for n in numbers)
    return good and bool(_NAME.fullmatch(entry["file"]) and _SHA256.fullmatch(entry["sha256"]))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What is in a file written by torch.save, without running any code that it might hold."""
    content = read_torch(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; pass a checkpoint or a state dict")
    return content


def load_weights(path: Path) -> dict[str, Any]:
    """The model's state dict in a run directory, a checkpoint or a plain state dict file."""
    if path.is_dir():
        checkpoints = Checkpoints(path / CHECKPOINTS)
        checkpoints.open()
        entry = checkpoints.entry()
        if entry is None:
            raise CheckpointError(f"{path}: this run has saved no checkpoint yet; resume it first")
        content = checkpoints.load(entry)
    else:
        content = read_checkpoint(path)
    weights = content["model"] if isinstance(content.get("model"), dict) else content
    odd = [name for name, value in weights.items() if not (isinstance(name, str) and isinstance(value, torch.Tensor))]
    if odd:
        raise CheckpointError(f"{path}: its entry {str(odd[0])[:60]!r} is no tensor; pass a checkpoint or a state dict")
    return weights
