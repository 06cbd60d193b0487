"""Two texts that every machine with the library has, as bytes: Python's source, and what packages say about themselves.

Contract:
    * A document is one file; it ends with the byte 0. Which documents are held out is decided by a hash of their path.
    * The order of training is a pure function of (seed, position): the text is cut into windows, each seen once an
      epoch in an order of the seed's own, with cuts that move from epoch to epoch.
    * The validation windows are the same for every run.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .recipe import SEQ_LEN

HELD_OUT = 0.08
VALIDATION_WINDOWS = 4096  # half a million tokens: the sampling error of a gap between two runs is far below 0.1%
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "testing", "benchmarks"}
_DOCUMENTED = ("torch", "numpy", "sympy", "networkx", "matplotlib", "mpmath")  # all come with the library
CACHE = Path(__file__).parents[2] / "runs" / "recipes"


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to train on, and bytes held out; both uint8."""

    train: Tensor
    validation: Tensor

    @property
    def fingerprint(self) -> str:
        """Equal for equal text: rows of different texts are never compared."""
        found = hashlib.blake2b(digest_size=8)
        for side in (self.train, self.validation):
            found.update(side.numpy().tobytes() + b"|")
        return found.hexdigest()

    def order(self, seed: int, batch_size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        """A function from a step's number to its inputs and targets, int64 ``[batch_size, SEQ_LEN]``."""
        windows = (len(self.train) - 1) // SEQ_LEN - 1

        @cache
        def epoch(number: int) -> np.ndarray:
            generator = np.random.default_rng([seed, number])
            return generator.permutation(windows) * SEQ_LEN + int(generator.integers(SEQ_LEN))

        def batch(step: int) -> tuple[Tensor, Tensor]:
            places = range(step * batch_size, (step + 1) * batch_size)
            starts = [int(epoch(place // windows)[place % windows]) for place in places]
            return _windows(self.train, torch.tensor(starts))

        return batch

    def validation_batches(self, batch_size: int, windows: int = VALIDATION_WINDOWS) -> list[tuple[Tensor, Tensor]]:
        """The held-out windows, spread evenly."""
        last = len(self.validation) - SEQ_LEN - 1
        starts = torch.arange(windows) * last // max(1, windows - 1)
        return [_windows(self.validation, part) for part in starts.split(batch_size)]


def _windows(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    found = tokens[starts[:, None] + torch.arange(SEQ_LEN + 1)].long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    yield from sorted((path.relative_to(root).as_posix(), path) for path in found)


def _python_source() -> Iterator[tuple[str, bytes]]:
    """The source text of Python's standard library: about 11 MB."""
    for name, path in _files(Path(sysconfig.get_paths()["stdlib"])):
        yield name, path.read_bytes()


def _package_prose() -> Iterator[tuple[str, bytes]]:
    """The long strings in installed packages, which are their documentation: about 15 MB, mostly English."""
    seen: set[str] = set()
    for package in _DOCUMENTED:
        root = Path(sysconfig.get_paths()["purelib"]) / package
        for name, path in _files(root):
            prose = [text for text in _long_strings(path) if text not in seen]
            seen.update(prose)
            yield f"{package}/{name}", "\n\n".join(prose).encode(errors="replace")


def _long_strings(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    # A space in ten characters: prose and examples, not tables or encoded data.
    return [text for text in strings if len(text) > 200 and 10 * text.count(" ") > len(text)]


CORPORA: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {"python": _python_source, "prose": _package_prose}


def _held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(f"recipes {name}".encode()).digest()[:8], "big") < HELD_OUT * 2**64


@cache
def load(corpus: str) -> Text:
    """The text of this name; kept on disk after the first time, which takes a minute for prose."""
    stored = CACHE / f"{corpus}.npz"
    if not stored.exists():
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for name, content in CORPORA[corpus]():
            if content.strip() and b"\0" not in content:
                sides[_held_out(name)].append(content + b"\0")
        train, validation = (np.frombuffer(b"".join(side), np.uint8) for side in sides)
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = stored.with_suffix(f".{os.getpid()}.npz")
        np.savez(unfinished, train=train, validation=validation)
        unfinished.replace(stored)
    with np.load(stored) as arrays:
        return Text(torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["validation"]))
