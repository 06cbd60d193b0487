"""Text to train on: the standard library's own source by default, or a user's files.

Contract:

* A *document* is one file (one line of a ``.jsonl`` file). Text is used as raw bytes, one token a byte, and
  each document ends with the byte 0, which no text contains.
* The split is by document, decided by a hash of its path inside the folder: the same on every machine,
  unchanged by the documents around it. If that would hold out less than 2% or more than 25% of the tokens,
  as it does with a single file, the last 8% of every document is held out instead; `Corpus.description` says
  which.
* Text must fit into memory: a file that is larger than a quarter of it is refused before it is read.
* A batch is a pure function of (tokens, seed, step, shape). No global generator is read or advanced, so a
  resumed run sees the batches that the uninterrupted run would have seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from masterless.interop.files import FileError, machine_memory, open_regular, read_bytes

END_OF_DOCUMENT = 0
VALIDATION_SHARE = 0.08
ACCEPTED_SHARE = (0.02, 0.25)  # outside of it, whole documents make a poor split
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".npy")
# The library's tests are left out: they are more than half of it, repetitive, and often not installed.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

StrPath: TypeAlias = "str | os.PathLike[str]"


class CorpusError(FileError):
    """A text that cannot be trained on: says which, why, and what to do."""

    def __init__(self, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{value}: {reason}; {remedy}")


class DocumentCounts(NamedTuple):
    """Number of documents on each side of the split (a document cut in two counts on both)."""

    train: int
    validation: int


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out.

    Attributes:
        train: 1-D tensor of token ids, uint8 (int32 if the vocabulary is larger than 256).
        validation: The same, from held-out text.
        documents: Number of documents on each side.
        vocab_size: Number of token ids a model needs.
        description: One line that says what this is and how it was split.
        is_bytes: Whether a token is a byte of text; otherwise it is an id of a tokenizer.
        tokenizer: The tokenizer, if it is known: an object with ``encode`` and ``decode`` (see `train.tokenizer`).
    """

    train: Tensor
    validation: Tensor
    documents: DocumentCounts
    vocab_size: int
    description: str
    is_bytes: bool = True
    tokenizer: Any = None

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens of both sides: equal for equal text."""
        digest = hashlib.blake2b(digest_size=16)
        for side in (self.train, self.validation):
            digest.update(f"{len(side)} {side.dtype} ".encode())
            digest.update(side.numpy().data)
        return digest.hexdigest()

    def encode(self, text: str) -> Tensor:
        """Return the int64 tokens of ``text``."""
        if self.tokenizer is not None:
            return torch.tensor(self.tokenizer.encode(text).ids, dtype=torch.long)
        if not self.is_bytes:
            raise CorpusError(repr(text[:40]), "the tokenizer of this corpus is unknown", "encode it yourself")
        return torch.tensor(list(text.encode()), dtype=torch.long)

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the text of ``tokens``.

        An end of document reads as a newline, broken UTF-8 as U+FFFD, ids of an unknown tokenizer as numbers.
        """
        ids = tokens.reshape(-1).tolist() if isinstance(tokens, Tensor) else list(tokens)
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(ids))
        if not self.is_bytes:
            return " ".join(map(str, ids))
        return bytes(ids).replace(bytes([END_OF_DOCUMENT]), b"\n").decode(errors="replace")


class _Document(NamedTuple):
    name: str
    tokens: np.ndarray


def stdlib_corpus() -> Corpus:
    """Return the source of the running Python's standard library, about 12 MB that every user already has.

    Runs on different Python versions see slightly different text; the description names the version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in _walk(root, (".py",), _SKIPPED_FOLDERS):
        content = path.read_bytes()
        if content:
            documents.append(_text_document(path.relative_to(root).as_posix(), content, path))
    if not documents:
        raise CorpusError(root, "no source files of the standard library", "pass your own text to text_corpus()")
    label = f"source of the Python {sysconfig.get_python_version()} standard library"
    return _split(documents, label, is_bytes=True)


def text_corpus(paths: StrPath | Iterable[StrPath], seq_len: int = 128) -> Corpus:
    """Return a corpus made of the user's files and folders.

    Folders are searched for ``.txt``, ``.md``, ``.py``, ``.jsonl`` and ``.npy`` (hidden or empty files are
    skipped); a file named directly may have any suffix if it is text. A line of ``.jsonl`` is an object with
    a ``"text"`` field. A ``.npy`` file is a 1-D array of bytes (uint8) or of token ids (any other integer
    type); bytes and token ids do not mix.

    Args:
        paths: One path or several.
        seq_len: The sequence length to train with; both sides of the split must hold at least one sequence.

    Raises:
        FileError: A file is missing, empty, binary, malformed or too large, or there is too little text.
    """
    chosen = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    label = ", ".join(map(str, chosen)) if 0 < len(chosen) <= 3 else f"{len(chosen)} paths"
    documents: list[_Document] = []
    seen: set[Path] = set()
    room = machine_memory() // 4  # the text is held as documents and joined, and a model needs room beside it
    for path in chosen:
        if not path.exists():
            raise CorpusError(path, "no such file or folder", "check the spelling and the working directory")
        if path.is_dir():
            files = [(file.relative_to(path).as_posix(), file) for file in _walk(path, TEXT_SUFFIXES)]
        else:
            files = [(path.name, path)]
        for name, file in files:
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            room -= file.stat().st_size
            if room < 0:
                reason = f"with it there is more text than a quarter of this machine's {machine_memory():,} bytes"
                raise CorpusError(file, reason, "pass a part of it")
            found = _read(name, file)
            # An empty file in a folder is nobody's mistake (an __init__.py); one that was named directly is.
            if not found and file is path:
                raise CorpusError(path, "empty text", "remove it from the list or fill it")
            documents += found
    if not documents:
        raise CorpusError(label, "no text found", f"name a folder with {', '.join(TEXT_SUFFIXES)} files")
    # What is not uint8 is token ids; see _read.
    kinds = {document.tokens.dtype == np.uint8 for document in documents}
    if len(kinds) > 1:
        raise CorpusError(label, "mixes text with arrays of token ids", "encode the text with your tokenizer")
    corpus = _split(documents, label, is_bytes=kinds.pop())
    shortest = min(len(corpus.train), len(corpus.validation))
    if shortest <= seq_len:
        total = len(corpus.train) + len(corpus.validation)
        reason = f"{total} tokens leave a part of {shortest}, shorter than a sequence of {seq_len} + 1"
        raise CorpusError(label, reason, "add text or lower seq_len")
    return corpus


def batch(tokens: Tensor, seed: int, step: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one training step, a pure function of the arguments.

    Args:
        tokens: 1-D tensor of token ids.
        seed: The run's seed.
        step: The step's number; each step draws its own windows.
        batch_size: Number of windows.
        seq_len: Length of a window.

    Returns:
        Two int64 tensors ``[batch_size, seq_len]``; the targets are the inputs moved on by one token.
    """
    _require_sequence(tokens, seq_len)
    # A hash rather than seed + step: neighbouring seeds must not share the batches of neighbouring steps.
    digest = hashlib.blake2b(f"masterless batch {seed} {step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    starts = torch.randint(len(tokens) - seq_len, (batch_size,), generator=generator)
    return _windows(tokens, starts, seq_len)


def validation_batches(tokens: Tensor, n: int, batch_size: int, seq_len: int) -> list[tuple[Tensor, Tensor]]:
    """Return ``n`` batches of windows spaced evenly over ``tokens``, the same at every call.

    The windows overlap if there are fewer than ``n * batch_size * seq_len`` tokens.
    """
    _require_sequence(tokens, seq_len)
    last = len(tokens) - seq_len - 1
    starts = torch.arange(n * batch_size) * last // max(1, n * batch_size - 1)
    return [_windows(tokens, row, seq_len) for row in starts.view(n, batch_size)]


def _windows(tokens: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    positions = (starts[:, None] + torch.arange(seq_len + 1)).to(tokens.device)
    windows = tokens[positions].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _require_sequence(tokens: Tensor, seq_len: int) -> None:
    if len(tokens) <= seq_len:
        reason = f"shorter than a sequence of {seq_len} + 1"
        raise CorpusError(f"{len(tokens)} tokens", reason, "add text or lower seq_len")


def _walk(root: Path, suffixes: tuple[str, ...], skipped: Iterable[str] = ("__pycache__",)) -> Iterator[Path]:
    """Yield the files under ``root`` with one of the suffixes, sorted by their path inside it."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        visible = [name for name in names if name.endswith(suffixes) and not name.startswith(".")]
        found += [Path(folder, name) for name in visible]
    # By the path as hashed, not by Path's own order, which differs between operating systems.
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _refuse_binary(content: bytes, source: object) -> None:
    if END_OF_DOCUMENT in content:
        raise CorpusError(source, "binary, it contains NUL bytes", "pass UTF-8 text, or token ids as .npy")


def _text_document(name: str, content: bytes, source: object) -> _Document:
    _refuse_binary(content, source)
    return _Document(name, np.frombuffer(content + bytes([END_OF_DOCUMENT]), dtype=np.uint8))


def _read(name: str, path: Path) -> list[_Document]:
    """Read one file, an empty one as no documents; bytes come back as uint8, token ids as int32."""
    if path.suffix == ".npy":
        array = _read_array(path)
        return [_Document(name, array)] if array.size else []
    with open_regular(path) as file:
        _refuse_binary(file.read(1 << 16), path)  # before all of a huge file is read
    content = read_bytes(path, machine_memory())
    if path.suffix == ".jsonl":
        return list(_read_lines(name, path, content))
    return [_text_document(name, content, path)] if content.strip() else []


def _read_lines(name: str, path: Path, content: bytes) -> Iterator[_Document]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(where, "not valid JSON", "write one JSON object per line") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise CorpusError(where, 'no "text" field with a string', 'write lines like {"text": "..."}')
        if record["text"].strip():
            # "replace" for lone surrogates, which JSON can spell and UTF-8 cannot.
            yield _text_document(f"{name}:{number}", record["text"].encode(errors="replace"), where)


def _read_array(path: Path) -> np.ndarray:
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with open_regular(path) as file:
        try:
            shape, _, dtype = headers[np.lib.format.read_magic(file)](file)
        except Exception as error:  # the header is a Python literal, and a damaged one raises a dozen kinds
            raise CorpusError(path, "not a readable .npy array", "write it with numpy.save") from error
        if len(shape) != 1 or dtype.kind not in "iu":
            raise CorpusError(path, f"array of shape {shape} and type {dtype}", "save a 1-D array of integers")
        # What the header says is compared with what there is before room is made for it.
        there = os.fstat(file.fileno()).st_size - file.tell()
        if shape[0] * dtype.itemsize != there:
            reason = f"not a readable .npy array, {shape[0]:,} elements of {dtype} in {there:,} bytes"
            raise CorpusError(path, reason, "write it with numpy.save")
        array = np.fromfile(file, dtype)
    if array.dtype == np.uint8 or array.size == 0:
        return array
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31 - 1:
        raise CorpusError(path, f"token ids from {low} to {high}", "ids must lie between 0 and 2**31 - 2")
    return array.astype(np.int32)


def _held_out(name: str) -> bool:
    digest = hashlib.sha256(f"masterless {name}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def _split(documents: list[_Document], label: str, is_bytes: bool) -> Corpus:
    train = [document.tokens for document in documents if not _held_out(document.name)]
    validation = [document.tokens for document in documents if _held_out(document.name)]
    total = sum(len(document.tokens) for document in documents)
    share = sum(map(len, validation)) / total
    how = "by document"
    if not ACCEPTED_SHARE[0] <= share <= ACCEPTED_SHARE[1]:
        cuts = [len(document.tokens) - int(len(document.tokens) * VALIDATION_SHARE) for document in documents]
        train = [document.tokens[:cut] for document, cut in zip(documents, cuts, strict=True)]
        validation = [document.tokens[cut:] for document, cut in zip(documents, cuts, strict=True)]
        validation = [tail for tail in validation if len(tail)]
        how = "from the end of each document"
    vocab_size = 256 if is_bytes else 1 + max(int(document.tokens.max()) for document in documents)
    dtype = np.uint8 if vocab_size <= 256 else np.int32
    sides = [torch.from_numpy(_join(side, dtype)) for side in (train, validation)]
    held_out = len(sides[1]) / total
    unit = "bytes" if is_bytes else "tokens"
    plural = "" if len(documents) == 1 else "s"
    size = f"{total:,} {unit} in {len(documents):,} document{plural}"
    description = f"{label}: {size}, {held_out:.1%} held out {how}"
    counts = DocumentCounts(len(train), len(validation))
    return Corpus(sides[0], sides[1], counts, vocab_size, description, is_bytes)


def _join(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    # The empty start makes an empty side legal here; callers refuse it with the numbers.
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
