"""What lies where in a distributed checkpoint, as JSON: torch's own description is a pickle, which can run code.

Contract:
    * `Writer` writes ``metadata.json`` beside the files of `torch.distributed.checkpoint`, with a SHA-256 of itself.
      torch's ``.metadata`` is written too, for other readers of such checkpoints; `Reader` never opens it unless it is
      all there is and the caller trusts it.
    * `Reader` believes nothing: names of files, places in them, types and sizes of tensors are checked before a tensor
      is made, and every piece against the CRC-32 that `torch.save` stored with it.
    * Values that are no tensors are read without running code.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from masterless.interop.files import (
    FileError,
    check_archive,
    check_tensors,
    not_a_checkpoint,
    open_regular,
    read_json,
    reason_of,
    replacing,
)

LAYOUT = 1
METADATA, PICKLED = "metadata.json", ".metadata"
_MOST = 1 << 30  # bytes of a description; a million pieces take about 100 MB
_FILE = re.compile(r"\w[\w.-]*\.distcp")


@dataclass(frozen=True)
class Piece:
    """Where one chunk of a tensor, or one value, is stored; the names are torch's."""

    relative_path: str
    offset: int
    length: int


class Writer(dcp.FileSystemWriter):
    """torch's writer, which also writes our description."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Writes the descriptions, when all ranks have written their data."""
        super().finish(metadata, results)
        text = json.dumps(_describe(metadata))
        with replacing(Path(self.path) / METADATA) as part:
            part.write_text(json.dumps({"sha256": _digest(text), "checkpoint": json.loads(text)}))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(metadata: Metadata) -> dict[str, Any]:
    entries: dict[str, dict[str, Any]] = {}
    for name, about in metadata.state_dict_metadata.items():
        entries[name] = {"pieces": []}
        if isinstance(about, TensorStorageMetadata):
            dtype = str(about.properties.dtype).removeprefix("torch.")
            chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in about.chunks]
            entries[name] |= {"dtype": dtype, "shape": list(about.size), "chunks": chunks}
    for index, piece in metadata.storage_data.items():
        place = None if index.offset is None else list(index.offset)
        entries[index.fqn]["pieces"].append([place, piece.relative_path, piece.offset, piece.length])
    return {"layout": LAYOUT, "entries": entries}


class Reader(dcp.FileSystemReader):
    """Reads checkpoints of `Writer`.

    Args:
        path: the checkpoint's directory.
        trust: whether to read a checkpoint that has only torch's pickled description, and values in it that are
            pickles: whoever wrote it can run code in this process.
    """

    def __init__(self, path: Any, trust: bool = False) -> None:
        super().__init__(path)
        self._trust = trust
        self._folder = Path(path)
        self._entries: dict[str, Any] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the checkpoint."""
        path = self._folder / METADATA
        if path.exists():
            metadata = _parse(path)
        elif not (self._folder / PICKLED).exists():
            raise FileError(f"{self._folder}: holds no distributed checkpoint, {METADATA} is missing; choose another")
        elif self._trust:
            metadata = super().read_metadata(*args, **kwargs)
        else:
            raise FileError(
                f"{self._folder}: has only torch's pickled {PICKLED}, and reading a pickle can run code; if you trust "
                f"who wrote it, pass trust=True (--trust on the command line), and save it again"
            )
        self._entries = dict(metadata.state_dict_metadata)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what a plan asks for into the planner's tensors."""
        for item in plan.items:
            piece = self.storage_data[item.storage_index]
            where = f"{self._folder / piece.relative_path} ({item.storage_index.fqn})"
            raw = self._read(piece, where)
            if item.type == LoadItemType.BYTE_IO:
                # The planner unpickles without looking: it gets only what we have read safely and written ourselves.
                again = io.BytesIO()
                torch.save(self._load(raw, where)[0], again)
                again.seek(0)
                planner.load_bytes(item, again)
                continue
            tensor, records = self._load(raw, where)
            self._check(tensor, item.storage_index, records, where)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != tensor.shape:
                raise FileError(f"{where}: {tuple(tensor.shape)} for {tuple(target.shape)}; the checkpoint is damaged")
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, piece: Any, where: str) -> bytes:
        with open_regular(self._folder / piece.relative_path) as file:
            file.seek(0, 2)
            if piece.offset + piece.length > file.tell():
                raise FileError(f"{where}: ends before its last byte; restore it, or load an earlier checkpoint")
            file.seek(piece.offset)
            return file.read(piece.length)

    def _load(self, raw: bytes, where: str) -> tuple[Any, dict[str, int]]:
        records = check_archive(io.BytesIO(raw), where)
        try:
            value = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=not self._trust)
        except Exception as error:  # crafted archives raise a dozen kinds
            raise not_a_checkpoint(where, error) from error
        check_tensors(value, where)
        return value, records

    def _check(self, tensor: Any, index: MetadataIndex, records: dict[str, int], where: str) -> None:
        """Refuses a tensor that is not the described one, or claims more bytes than there are."""
        entry = self._entries[index.fqn]
        sizes = [chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset]
        found = (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else None
        if not sizes or found != (sizes[0], entry.properties.dtype):
            raise FileError(f"{where}: holds {found}, not what {METADATA} says; restore it")
        stored = [size for name, size in records.items() if re.fullmatch(r"[^/]+/data/\d+", name)]
        if stored != [tensor.untyped_storage().nbytes()]:
            raise FileError(f"{where}: a tensor without its elements; restore it, or load an earlier checkpoint")


def _parse(path: Path) -> Metadata:
    """The description in a file, with every number checked."""
    try:
        document = read_json(path, _MOST)
        about = document["checkpoint"]
        if _digest(json.dumps(about)) != document["sha256"]:
            raise ValueError("its SHA-256 does not fit")
        if about["layout"] != LAYOUT:
            raise ValueError(f"layout {about['layout']!r} of a newer masterless; upgrade")
        tensors: dict[str, Any] = {}
        pieces: dict[MetadataIndex, Piece] = {}
        for name, entry in about["entries"].items():
            tensors[name] = _parse_tensor(entry) if "dtype" in entry else BytesStorageMetadata()
            for place, file, offset, length in entry["pieces"]:
                if not _FILE.fullmatch(file):
                    raise ValueError(f"a file named {file!r}")
                _numbers([offset, length])
                pieces[MetadataIndex(name, None if place is None else _numbers(place))] = Piece(file, offset, length)
            wanted = [c.offsets for c in tensors[name].chunks] if "dtype" in entry else [None]
            if not all(MetadataIndex(name, place) in pieces for place in wanted):
                raise ValueError(f"no place for all of {name!r}")
        return Metadata(tensors, storage_data=pieces)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{path}: damaged ({reason_of(error)}); load an earlier checkpoint") from error


def _parse_tensor(entry: dict[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {entry['dtype']!r}")
    shape = _numbers(entry["shape"])
    chunks = [ChunkStorageMetadata(_numbers(offsets), _numbers(sizes)) for offsets, sizes in entry["chunks"]]
    for chunk in chunks:
        inside = [o + n <= whole for o, n, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)]
        if not all(inside):
            raise ValueError(f"a chunk of {tuple(chunk.sizes)} outside of {tuple(shape)}")
    # Chunks that leave a gap would leave part of a tensor as it was, without a word.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"chunks that do not make up {tuple(shape)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)


def _numbers(values: list[int]) -> torch.Size:
    if not all(type(n) is int and 0 <= n < 2**53 for n in values):
        raise ValueError(f"{str(values)[:60]} as sizes")
    return torch.Size(values)
