"""Names, dtypes and shapes of the tensors in safetensors files; only the headers are read.

A file starts with the header's length (8 bytes, little endian) and the header, a JSON object that maps each tensor's
name to its dtype, shape and place. A model in several files has an index, a JSON object whose ``weight_map`` maps names
to files.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from masterless.interop.files import open_regular, read_json, reason_of

_LONGEST = 100_000_000  # the format's own limit for a header
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8}
_BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "F32": 32, "I32": 32, "U32": 32, "F64": 64, "I64": 64, "U64": 64}

FLOATS = frozenset(name for name in _BITS if name.startswith(("F", "BF")))

Header = dict[str, tuple[str, tuple[int, ...]]]


def safetensors_files(path: Path) -> list[Path]:
    """The safetensors files that a path names: itself, those of an index, or those of a directory; else none."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        return _files_of_index(indices[0]) if indices else sorted(path.glob("*.safetensors"))
    if path.name.endswith(".index.json"):
        return _files_of_index(path)
    return [path] if path.suffix == ".safetensors" else []


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(index, _LONGEST)["weight_map"].values()))
        if not all("/" not in name and "\\" not in name for name in names):
            raise ValueError("it names files of other folders")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: is no safetensors index ({reason_of(error)}); give the files themselves") from error
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"{index}: names {missing[0]}, which is not there; complete the download")
    return files


def read_headers(files: list[Path]) -> Header:
    """Dtype and shape of every tensor in these files, by name."""
    tensors: Header = {}
    for file in files:
        tensors |= _read(file)
    return tensors


def _read(file: Path) -> Header:
    def corrupt(reason: str) -> ValueError:
        return ValueError(f"{file}: corrupt safetensors file ({reason}); download or save it again")

    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8:
            raise corrupt(f"{size} bytes, shorter than the length of its header")
        if length > _LONGEST or 8 + length > size:
            raise corrupt(f"a header of {length:,} bytes in a file of {size:,}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"its header is not JSON: {reason_of(error)}") from error
    if not isinstance(header, dict):
        raise corrupt("its header is not an object")
    tensors = {name: _entry(name, entry, corrupt) for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise corrupt(f"its header describes {8 + length + end:,} bytes, the file has {size:,}")
    return tensors


def _entry(name: str, entry: Any, corrupt: Any) -> tuple[str, tuple[int, ...]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sizes = (*shape, start, stop)
        good = isinstance(dtype, str) and all(type(n) is int and 0 <= n < 2**53 for n in sizes)
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise corrupt(f"tensor {name!r} has no proper dtype, shape and place")
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != 8 * (stop - start):
        raise corrupt(f"tensor {name!r} of shape {str(list(shape))[:60]} and dtype {dtype} in {stop - start} bytes")
    return dtype, shape
