"""Tensor shapes of real models, for benchmarks."""

from __future__ import annotations

Shape = tuple[int, ...]


def gpt2_small() -> list[Shape]:
    """All 148 tensors of GPT-2 small (124M parameters, output head tied)."""
    d = 768
    block: list[Shape] = [
        (d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,),
        (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,),
    ]  # fmt: skip
    return [(50257, d), (1024, d), *(block * 12), (d,), (d,)]


SIZES: dict[str, list[Shape]] = {
    "gpt2": gpt2_small(),
    "odd": [(5000, 6500)],  # no power of two anywhere
    "tiny": [(4, 33)] * 250 + [(33,)] * 250,  # nothing to compute: what remains is the overhead of a step
    "rows": [(50304, 96)],  # rows shorter than a chunk
    "short": [(64, 33)] * 250 + [(33,)] * 250,  # rows much shorter than a chunk of the kernel
    "moe": [(8, 1408, 512), (8, 512, 1408), (8, 512)],
    "test": [(40, 130), (33,)],
}


def choose(names: list[str]) -> dict[str, list[Shape]]:
    """The sizes of these names; a ValueError names what there is."""
    for name in names:
        if name not in SIZES:
            raise ValueError(f"--sizes {name!r}: no such size; choose from {', '.join(SIZES)}")
    return {name: SIZES[name] for name in names}
