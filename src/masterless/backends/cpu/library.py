"""The compiled CPU kernel: found and loaded on first use, so that importing masterless stays cheap.

Contract:
    * The library is a plain C library, ``_masterless_cpu.so``, which ``pip install`` builds into this package (an
      editable install keeps it in site-packages, hence the search along ``__path__``).
    * Without it everything works on the reference implementation, many times slower; `load` says so once,
      through `warnings`.
    * For developers: ``MASTERLESS_KERNEL=/path/to/_masterless_cpu.so`` loads that file, and
      ``MASTERLESS_ISA=portable|avx2|avx512|neon`` picks an instruction set.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from masterless.backends import cpu

_FILE_NAME = "_masterless_cpu.so"


@dataclass(frozen=True)
class Description:
    """What runs: the instruction set, the threads of a step, the file; or why there is no kernel."""

    available: bool
    instruction_set: str
    threads: int
    openmp: bool
    path: str
    reason: str


@cache
def _open() -> tuple[ctypes.CDLL | None, str, str]:
    """The library, its path, and the reason if there is none."""
    override = os.environ.get("MASTERLESS_KERNEL")
    candidates = [Path(override)] if override else [Path(d) / _FILE_NAME for d in cpu.__path__]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        looked = ", ".join(str(p) for p in candidates)
        return None, "", f"it was not built when the package was installed (looked for {looked})"
    try:
        library = ctypes.CDLL(str(path))
        library.ml_instruction_set.restype = library.ml_interface.restype = ctypes.c_char_p
        library.ml_thread_bytes.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        return None, str(path), f"{path} could not be loaded ({error})"
    return library, str(path), ""


@cache
def _warn_once() -> None:
    warnings.warn(
        f"masterless runs without its compiled CPU kernel and is many times slower: {_open()[2]}. Install a C++ "
        f"compiler (g++ or clang++) and reinstall the package: pip install --force-reinstall --no-deps masterless",
        RuntimeWarning,
        stacklevel=3,
    )


def available() -> bool:
    """Whether the compiled kernel can be used; never warns."""
    return _open()[0] is not None


def load() -> ctypes.CDLL | None:
    """The compiled kernel; None, with one warning that says why, if there is none."""
    library = _open()[0]
    if library is None:
        _warn_once()
    return library


def describe() -> Description:
    """Which kernel runs, on which instruction set and how many threads."""
    library, path, reason = _open()
    if library is None:
        return Description(False, "none", 1, False, path, reason)
    return Description(
        True,
        library.ml_instruction_set().decode(),
        torch.get_num_threads(),
        bool(library.ml_has_openmp()),
        path,
        "",
    )
