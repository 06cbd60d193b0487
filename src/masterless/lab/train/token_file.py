"""Batches from a file of token ids that is read where it lies: it may be larger than memory.

A token file is what ``numpy.save`` writes of a vector of unsigned integers (uint8, uint16 or uint32). A batch is a pure
function of (file, seed, step, shape), as in `train.corpus`: a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from masterless.interop.files import FileError, open_regular, reason_of

_DTYPES = (np.uint8, np.uint16, np.uint32)


class TokenFile:
    """The tokens of a file, mapped read-only.

    Args:
        path: a ``.npy`` file.
        vocab_size: ids must lie below it; checked for every batch that is read.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_size: int) -> None:
        open_regular(path).close()
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise FileError(f"{path}: no .npy file ({reason_of(error)}); write one with numpy.save") from error
        if tokens.ndim != 1 or tokens.dtype not in _DTYPES:
            raise FileError(
                f"{path}: holds {tokens.dtype} of shape {tokens.shape}; token ids are a vector of uint8, uint16 or "
                f"uint32"
            )
        self.path, self.tokens, self.vocab_size = Path(path), tokens, vocab_size

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Inputs and the tokens that follow them, int64 ``[batch_size, seq_len]``."""
        places = len(self) - seq_len
        if places < 1:
            raise FileError(
                f"{self.path}: {len(self)} tokens are too few for a sequence of {seq_len} + 1; add text or shorten it"
            )
        generator = np.random.Generator(np.random.Philox(key=[seed, step]))
        starts = generator.integers(places, size=batch_size)
        rows = np.stack([self.tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
        if int(rows.max()) >= self.vocab_size:
            raise FileError(
                f"{self.path}: holds token {int(rows.max())}, the model's vocabulary has {self.vocab_size}; use the "
                f"tokenizer of the model"
            )
        ids = torch.from_numpy(rows)
        return ids[:, :-1], ids[:, 1:]
