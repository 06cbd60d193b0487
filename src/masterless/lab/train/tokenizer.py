"""A byte-level BPE tokenizer, by the ``tokenizers`` library, trained on the training side of a corpus.

Contract:
    * Token 0 ends a document, as the byte 0 does in a corpus of bytes; every text can be encoded and comes back.
    * The split between training and validation is that of the bytes: the tokenizer has not seen what is held out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masterless.interop.files import FileError, read_bytes, reason_of

from .corpus import END_OF_DOCUMENT, Corpus, CorpusError

_END = "<end>"
_CHUNK = 1 << 16  # characters encoded at a time: one long document must not become one long call


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise CorpusError(
            "--vocab",
            "needs the library 'tokenizers', which is not installed",
            "pip install tokenizers, or leave it out",
        ) from None
    return tokenizers


def train_tokenizer(corpus: Corpus, vocab: int) -> Any:
    """A tokenizer of at most `vocab` tokens for a corpus of bytes."""
    if not corpus.is_bytes:
        raise CorpusError(f"--vocab {vocab}", "the data is token ids already", "leave --vocab out, or pass text")
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[_END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus.train), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Any:
    """A tokenizer that a run stored."""
    try:
        return _library().Tokenizer.from_buffer(read_bytes(path, 1 << 28))
    except FileError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise CorpusError(path, f"not a tokenizer ({reason_of(error)})", "restore it") from error


def tokenize(corpus: Corpus, tokenizer: Any) -> Corpus:
    """The corpus in the tokenizer's ids."""
    vocab = tokenizer.get_vocab_size()
    sides = [_encode(side, tokenizer) for side in (corpus.train, corpus.validation)]
    per_token = len(corpus.train) / max(1, len(sides[0]))
    description = f"{corpus.description}, BPE of {vocab:,} tokens ({per_token:.2f} bytes per token)"
    return dataclasses.replace(
        corpus,
        train=sides[0],
        validation=sides[1],
        vocab_size=vocab,
        description=description,
        is_bytes=False,
        tokenizer=tokenizer,
    )


def _encode(side: Tensor, tokenizer: Any) -> Tensor:
    end = np.array([tokenizer.token_to_id(_END)], dtype=np.int32)
    parts = []
    for text in _texts(side):
        chunks = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
        parts += [np.array(encoding.ids, dtype=np.int32) for encoding in tokenizer.encode_batch_fast(chunks)]
        parts.append(end)
    return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *parts]))


def _texts(side: Tensor) -> Iterator[str]:
    """The documents of one side; a character that the split cut in two reads as U+FFFD."""
    for document in side.numpy().tobytes().split(bytes([END_OF_DOCUMENT])):
        if document:
            yield document.decode(errors="replace")
