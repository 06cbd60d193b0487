"""Files that may be anything are read with suspicion; what we write is whole or absent.

Contract:
    * Only regular files are read. A FIFO nobody writes to or a device that never ends is refused, not waited for.
    * Nothing is read that is larger than its reader can use, so that memory is bounded by what a file really holds and
      not by what it claims.
    * `read_torch` checks the CRC-32 that `torch.save` stores with every record, runs no code, and returns only tensors
      that lie wholly inside the file.
    * A file is written beside its place, synced, and moved there in one operation.
    * What cannot be read is a `FileError`: one line with the file, the reason and the remedy.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import stat
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from masterless.tensor.quantized import QuantizedTensor

UNFINISHED = ".partial"
MOST_TEXT = 1 << 24  # bytes of a JSON or TOML file that people or programs write as a description

StrPath = str | os.PathLike[str]


class FileError(ValueError):
    """A file that cannot be read or trusted: says which, why, and what to do."""


# --- reading ------------------------------------------------------------------------------------------------------


def open_regular(path: StrPath) -> IO[bytes]:
    """Opens a regular file; anything else at this place is refused at once."""
    try:
        # Without O_NONBLOCK opening a FIFO waits for somebody to write into it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; check the spelling and the working directory") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise FileError(f"{path}: cannot be read ({reason_of(error)}); check the path and its permissions") from None
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
    raise FileError(f"{path}: is {kind}, not a file; write what it holds to a file and pass that")


def read_bytes(path: StrPath, most: int = MOST_TEXT) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FileError(f"{path}: {size:,} bytes, more than the {most:,} that are read; pass a smaller file")
        try:
            return file.read(size)
        except OSError as error:
            raise FileError(f"{path}: cannot be read ({reason_of(error)}); check the disk") from error


def read_json(path: StrPath, most: int = MOST_TEXT) -> Any:
    """The value in a JSON file."""
    content = read_bytes(path, most)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: syntax, encoding, or a number of too many digits
        raise FileError(f"{path}: is not JSON ({reason_of(error)}); correct it or restore it") from error


def read_json_lines(path: StrPath) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines, none if there is no file; an unfinished line (a killed run) is left out."""
    rows = []
    if os.path.exists(path):
        with open_regular(path) as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def read_torch(path: StrPath) -> Any:
    """What `torch.save` wrote into a file, checked against its checksums, without running code that it may hold.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2)}, f"{folder}/w.pt")
    ...     read_torch(f"{folder}/w.pt")
    {'w': tensor([1., 1.])}

    Raises:
        FileError: it is damaged, not such a file, or describes tensors that it does not hold.
    """
    with open_regular(path) as file:
        check_archive(file, path)
    try:
        # Mapped, a tensor cannot be larger than the file; older versions of torch believe what the file says.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_tensors(content, path)
        return copy.deepcopy(content)  # of its own memory: the file may be replaced while this is in use
    except FileError:
        raise
    except Exception as error:  # damaged and crafted archives raise a dozen kinds
        raise not_a_checkpoint(path, error) from error


def not_a_checkpoint(path: StrPath, error: BaseException) -> FileError:
    """The error for a file that holds no checkpoint."""
    reason = f"{type(error).__name__}: {reason_of(error)[:100]}"
    return FileError(f"{path}: corrupt, or not a checkpoint ({reason}); pass one that torch.save wrote")


def check_archive(file: IO[bytes], path: StrPath) -> dict[str, int]:
    """Checks the checksums of an archive of `torch.save`; returns the sizes of its records."""
    try:
        with zipfile.ZipFile(file) as archive:
            sizes: dict[str, int] = {}
            for record in archive.infolist():
                # torch.save compresses nothing and names nothing twice: a bomb, or two readings of one file.
                if record.compress_type != zipfile.ZIP_STORED or record.filename in sizes:
                    raise zipfile.BadZipFile(f"record {record.filename!r} is compressed or there twice")
                sizes[record.filename] = record.file_size
                with archive.open(record) as stream:
                    while stream.read(1 << 20):  # a wrong CRC-32 raises at the end
                        pass
            return sizes
    except Exception as error:  # damaged archives raise a dozen kinds
        raise not_a_checkpoint(path, error) from error


def check_tensors(content: Any, path: StrPath) -> None:
    """Refuses tensors that claim more than is stored, which would be read from foreign memory or blown up."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:  # no recursion, and everything once: a crafted file nests and repeats as it likes
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            waiting += item
        elif isinstance(item, QuantizedTensor):
            waiting += item.stored.tensors.values()  # a storage that does not fit its format does not exist
        elif isinstance(item, Tensor):
            plain = type(item) in (Tensor, nn.Parameter) and item.layout == torch.strided and item.device.type == "cpu"
            if not plain or item.numel() * item.itemsize > item.untyped_storage().nbytes():
                raise FileError(
                    f"{path}: holds a tensor of shape {tuple(item.shape)} without its elements; save plain tensors"
                )


@cache
def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no POSIX system
        return 1 << 36
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return memory


def sha256(path: StrPath) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def reason_of(error: BaseException) -> str:
    """Why something failed, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


# --- writing ------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Gives a name beside `path` to write to; what was written takes the place of `path` when the block ends well."""
    target = Path(path)
    beside = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, target)
        sync_folder(target.parent)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Waits until the disk knows the names in a folder."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
