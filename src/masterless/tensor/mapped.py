"""Tensors that lie in a memory-mapped file: a model loaded from one holds on to all of it.

`from_pretrained` and ``torch.load(mmap=True)`` hand out tensors that are parts of a mapped file. As long as one of them
lives, all pages that were ever read (for quantizing: all) count as resident. `unmap_` gives what is left of a model
memory of its own, so that the file can go.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

_MAPS = Path("/proc/self/maps")


def _mapped_ranges() -> list[tuple[int, int]]:
    """Address ranges of this process that belong to ordinary files; none where the system does not say."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    ranges = []
    for line in lines:
        fields = line.split(maxsplit=5)
        # Shared memory is a file under /dev: cloning it would stop the sharing.
        if len(fields) == 6 and fields[5].startswith("/") and not fields[5].startswith("/dev/"):
            start, _, stop = fields[0].partition("-")
            ranges.append((int(start, 16), int(stop, 16)))
    return sorted(ranges)


@torch.no_grad()
def unmap_(tensors: Iterable[Tensor]) -> int:
    """Copies those of the tensors that lie in a mapped file to memory of their own; returns the bytes copied."""
    plain = [t for t in tensors if type(t.data) is Tensor and t.device.type == "cpu" and t.layout == torch.strided]
    ranges = _mapped_ranges() if plain else []
    starts = [start for start, _ in ranges]
    copied = 0
    for tensor in plain:
        address = tensor.data_ptr()
        at = bisect_right(starts, address) - 1
        if tensor.numel() and at >= 0 and address < ranges[at][1]:
            tensor.data = tensor.detach().clone()
            copied += tensor.nbytes
    return copied
