"""Codes of 1 to 8 bits to bytes and back.

Contract:
    * A row is packed in chunks of 128 codes (the last one may be shorter), each into whole bytes.
    * A code is cut into planes of 8, 4, 2 and 1 bits, the widest plane taking the highest bits: 3 = 2 + 1,
      6 = 4 + 2.
    * A plane of p bits over n codes is ``ceil(n / f)`` bytes, f = 8 / p: byte i holds codes i, i + h, i + 2h, ...
      (h the number of bytes), the first in the lowest bits. Neighbouring codes thus lie in neighbouring
      bytes, and vector code unpacks with shifts alone.
    * Unused bits of the last bytes are zero. 8 codes of 3 bits take 3 bytes.
    * "Adjacent" codes of 4 bits are those of hardware formats: byte i holds codes 2i (its lower half) and 2i + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masterless.formats.layout import CHUNK


def planes(bits: int) -> list[int]:
    """The plane widths of a code, highest bits first.

    >>> planes(3), planes(6)
    ([2, 1], [4, 2])
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    widths = []
    for width in (8, 4, 2, 1):
        if bits >= width:
            widths.append(width)
            bits -= width
    return widths


def chunk_bytes(n: int, bits: int) -> int:
    """Bytes that n codes of one chunk take."""
    return sum(-(-n * p // 8) for p in planes(bits))


def row_bytes(cols: int, bits: int) -> int:
    """Bytes that a row of codes takes."""
    full, tail = divmod(cols, CHUNK)
    return full * chunk_bytes(CHUNK, bits) + (chunk_bytes(tail, bits) if tail else 0)


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    """[..., n] values below 2**bits to [..., ceil(n * bits / 8)] bytes."""
    n, per_byte = codes.shape[-1], 8 // bits
    if per_byte == 1:
        return codes.to(torch.uint8)
    height = -(-n // per_byte)
    padded = torch.nn.functional.pad(codes, (0, height * per_byte - n))
    shifts = torch.arange(per_byte, device=codes.device) * bits
    return (padded.unflatten(-1, (per_byte, height)) << shifts.unsqueeze(-1)).sum(-2).to(torch.uint8)


def _unpack_plane(data: Tensor, n: int, bits: int) -> Tensor:
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=data.device, dtype=torch.int32) * bits
    codes = (data.to(torch.int32).unsqueeze(-2) >> shifts.unsqueeze(-1)) & (2**bits - 1)
    return codes.flatten(-2)[..., :n]


def _pack_chunks(codes: Tensor, bits: int) -> Tensor:
    parts, low = [], bits
    for width in planes(bits):
        low -= width
        parts.append(_pack_plane((codes >> low) & (2**width - 1), width))
    return torch.cat(parts, dim=-1)


def _unpack_chunks(data: Tensor, n: int, bits: int) -> Tensor:
    codes, start, low = None, 0, bits
    for width in planes(bits):
        low -= width
        size = -(-n * width // 8)
        plane = _unpack_plane(data[..., start : start + size], n, width) << low
        codes = plane if codes is None else codes | plane
        start += size
    assert codes is not None
    return codes


def pack(codes: Tensor, bits: int, adjacent: bool = False) -> Tensor:
    """Packs integer codes ``[rows, cols]`` into bytes ``[rows, row_bytes(cols, bits)]``."""
    rows, cols = codes.shape
    if adjacent and bits == 4:
        low, high = torch.nn.functional.pad(codes, (0, cols % 2)).unflatten(1, (-1, 2)).unbind(-1)
        return (low | high << 4).to(torch.uint8)
    full = cols // CHUNK
    body = _pack_chunks(codes[:, : full * CHUNK].reshape(rows, full, CHUNK), bits).flatten(1)
    if full * CHUNK == cols:
        return body
    return torch.cat([body, _pack_chunks(codes[:, full * CHUNK :], bits)], dim=1)


def unpack(data: Tensor, cols: int, bits: int, adjacent: bool = False) -> Tensor:
    """The integer codes ``[rows, cols]`` (int32) of bytes made by `pack`."""
    if adjacent and bits == 4:
        wide = data.to(torch.int32)
        return torch.stack([wide & 15, wide >> 4], dim=-1).flatten(1)[:, :cols]
    rows, full = data.shape[0], cols // CHUNK
    split = full * chunk_bytes(CHUNK, bits)
    body = _unpack_chunks(data[:, :split].reshape(rows, full, chunk_bytes(CHUNK, bits)), CHUNK, bits)
    body = body.flatten(1)
    if full * CHUNK == cols:
        return body
    return torch.cat([body, _unpack_chunks(data[:, split:], cols - full * CHUNK, bits)], dim=1)
