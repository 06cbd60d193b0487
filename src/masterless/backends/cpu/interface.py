"""The kernel's structs as numpy record types, from the kernel's own description of them (`csrc/abi.h`)."""

from __future__ import annotations

import ctypes
import json
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from masterless.backends.cpu import library


class Interface(NamedTuple):
    """The compiled library and its vocabulary: records with the fields of `csrc/abi.h`, enumerations by name."""

    library: ctypes.CDLL
    storage: np.dtype[Any]
    task: np.dtype[Any]
    kinds: dict[str, int]
    scale_kinds: dict[str, int]
    policies: dict[str, int]
    roundings: dict[str, int]
    rules: dict[str, int]


@cache
def interface() -> Interface:
    """The interface of the compiled library; a RuntimeError if there is none."""
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"the compiled CPU kernel is not there: {library.describe().reason}")
    described = json.loads(loaded.ml_interface())
    storage = _record(described["MlStorage"], {})
    return Interface(
        loaded,
        storage,
        _record(described["MlTask"], {"MlStorage": storage}),
        described["MlKind"],
        described["MlScaleKind"],
        described["MlScalePolicy"],
        described["MlRounding"],
        described["MlRule"],
    )


def _record(struct: dict[str, Any], structs: dict[str, np.dtype[Any]]) -> np.dtype[Any]:
    fields = struct["fields"]
    return np.dtype(
        {
            "names": list(fields),
            "formats": [structs.get(kind) or _number(kind, size) for kind, _, size in fields.values()],
            "offsets": [offset for _, offset, _ in fields.values()],
            "itemsize": struct["size"],
        }
    )


def _number(kind: str, size: int) -> np.dtype[Any]:
    return np.dtype(f"{'u' if kind == 'p' else kind}{size}")  # a pointer is an unsigned integer of its size
