"""Memory of loading a dense checkpoint into a quantized model: the quantized size, one tensor, and little else.

    python benchmarks/loading_memory.py --out benchmarks/results/big_models.jsonl

Writes a TinyLlama-shaped bf16 checkpoint of random weights (2.2 GB, two shards) to a temporary folder, loads it in a
process of its own, and deletes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import masterless as ml
from masterless.interop.shards import INDEX, load_dense
from masterless.lab.models import Llama, LlamaConfig
from masterless.lab.profile import Recorder, resident_bytes, return_freed_memory

SHAPE = LlamaConfig(32_000, 2048, 5632, 22, 32, 4, 64)


def write(folder: Path) -> int:
    """A checkpoint of two shards; returns the bytes of its largest tensor."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Llama(SHAPE).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    names, largest, places = list(shapes), 0, {}
    for shard in range(2):
        part = {}
        for name in names[shard::2]:
            part[name] = torch.empty(shapes[name], dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
            places[name] = f"model-{shard + 1:05}-of-00002.safetensors"
            largest = max(largest, part[name].nbytes)
        save_file(part, folder / f"model-{shard + 1:05}-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return largest


def load(folder: Path) -> dict[str, float]:
    return_freed_memory()
    ml.build_quantized(lambda: Llama(LlamaConfig(96, 64, 128, 1, 4, 2, 16)), "int8")  # what torch imports on the way
    base = resident_bytes()
    with Recorder() as recorder, recorder.phase("load"):
        model, report = ml.build_quantized(
            lambda: Llama(SHAPE), "int8", vocabulary="int8", dtype=torch.bfloat16, initialise=False
        )
        load_dense(model, folder)
    phase = recorder.phases[0]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "quantized_bytes": report.stored_bytes,
        "peak_bytes": phase.peak - base,
        "after_bytes": phase.after - base,
        "seconds": phase.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.load)))
        return
    with tempfile.TemporaryDirectory() as folder:
        largest = write(Path(folder))
        command = [sys.executable, __file__, "--load", folder]
        measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    allowed = measured["quantized_bytes"] + largest + 100_000_000
    row = {"what": "loading", "model": "tinyllama-1.1b", "largest_tensor_bytes": largest, **measured}
    row["allowed_bytes"] = allowed
    print(json.dumps(row, indent=1))
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
