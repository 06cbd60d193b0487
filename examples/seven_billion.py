"""Trains a model of seven billion parameters, all of them, on a machine with 24 GB and no accelerator.

    python examples/seven_billion.py --model llama-2-7b --preset 1.3-byte --steps 4

The model is built quantized (it never exists dense), every parameter is stepped inside the backward pass, and no
gradient, logit or decoded weight of more than one layer exists at a time. What the process really held is printed. With
--weights a local directory of safetensors files is loaded instead of random weights. With --torch the same model is
trained by torch.optim.AdamW, for comparison. Weights are decoded to, and computed with in, bf16 where the processor can
multiply it, else fp32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import masterless as ml
from masterless.insight.memory import measure
from masterless.interop.shards import Progress, load_dense
from masterless.interop.training_state import load_training_state, save_training_state
from masterless.lab.bench.report import processor
from masterless.lab.models import Llama, LlamaConfig
from masterless.lab.profile import Recorder, resident_bytes, return_freed_memory
from masterless.lab.train.corpus import stdlib_corpus
from masterless.lab.train.token_file import TokenFile

MODELS = {
    "tiny": LlamaConfig(512, 256, 768, 4, 4, 2, 64),
    "tinyllama-1.1b": LlamaConfig(32_000, 2048, 5632, 22, 32, 4, 64),
    "llama-2-7b": LlamaConfig(32_000, 4096, 11_008, 32, 32, 32, 128),
    "moe-12b": LlamaConfig(32_000, 2048, 5632, 22, 32, 4, 64, num_local_experts=16),
    "llama-3-8b": LlamaConfig(128_256, 4096, 14_336, 32, 32, 8, 128, rope_theta=500_000.0),
}
COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-2-7b", help=f"{', '.join(MODELS)}, or a config.json")
    parser.add_argument("--weights", type=Path, help="safetensors file, index or directory to start from")
    parser.add_argument("--preset", default="1.3-byte")
    parser.add_argument("--torch", action="store_true", help="torch.optim.AdamW on a dense model instead")
    parser.add_argument("--compute", choices=COMPUTE, help="default: bf16 if the processor multiplies it, else fp32")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    parser.add_argument("--batches", type=int, default=1, help="different batches; 1 is a batch to be memorised")
    # The first steps of Adam are signs: all outputs of a layer move together, by about lr times its width.
    parser.add_argument("--lr", type=float, help="default: 0.15 / width")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--save", type=Path, help="write the training state here at the end")
    parser.add_argument("--resume", type=Path, help="go on from a training state")
    parser.add_argument("--out", type=Path, help="append the result as a line of JSON")
    options = parser.parse_args()
    options.compute = options.compute or ("bf16" if "bf16" in processor_flags() else "fp32")
    return options


def processor_flags() -> str:
    """What /proc/cpuinfo says of the processor: in software, products in bf16 take three times those in fp32."""
    cpu = Path("/proc/cpuinfo")
    return cpu.read_text() if cpu.exists() else ""


def text_tokens(vocab_size: int, folder: Path) -> TokenFile:
    """The source of Python's standard library as a token file: bytes, or pairs of bytes for a large vocabulary."""
    text = stdlib_corpus().train.numpy()[: 1 << 22]
    tokens = text.view(np.uint16) if vocab_size > 1 << 16 else text
    np.save(folder / "tokens.npy", tokens)
    return TokenFile(folder / "tokens.npy", vocab_size)


def build(options: argparse.Namespace, config: LlamaConfig) -> torch.nn.Module:
    """The model with initial or loaded weights: quantized as it is made, or dense for torch's optimizer."""

    def make() -> Llama:
        generator = torch.Generator().manual_seed(options.seed)
        return Llama(config, generator, checkpointing=not options.no_checkpointing)

    if options.torch:
        return make().to(COMPUTE[options.compute])
    preset = ml.PRESETS[options.preset]
    model, report = ml.build_quantized(
        make,
        preset.weights,
        vocabulary=preset.vocabulary,
        dtype=COMPUTE[options.compute],
        initialise=options.weights is None and options.resume is None,
    )
    print(str(report).splitlines()[-1], flush=True)
    if options.weights is not None:
        load_dense(model, options.weights, show)
    return model


def show(progress: Progress) -> None:
    """A progress bar of one line."""
    end = "\n" if progress.done == progress.total else ""
    print(f"\r{progress.done / progress.total:4.0%} {progress.name:60}", end=end, file=sys.stderr, flush=True)


def fingerprint(model: torch.nn.Module, optimizer: ml.AdamW) -> str:
    """A hash of every byte of the weights and states."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    for _, p, name in sorted(optimizer.parameters(), key=lambda member: member[2]):
        for key, value in sorted(optimizer.state[p].items()):
            digest.update(f"{name} {key}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main() -> None:
    """Builds, trains, measures, saves."""
    options = arguments()
    if "amx" in processor_flags():
        # Some virtual machines announce AMX and trap on it; a run of hours should not end that way. oneDNN looks at
        # its first product.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    return_freed_memory()
    started = resident_bytes()
    config = MODELS.get(options.model)
    if config is None:
        config = LlamaConfig.from_json(json.loads(Path(options.model).read_text()))
    lr = options.lr or 0.15 / config.hidden_size
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Recorder(every=0.5) as recorder:
        data = text_tokens(config.vocab_size, Path(folder))
        with recorder.phase("build"):
            model = build(options, config)
        count = sum(p.numel() for p in model.parameters())
        print(f"{options.model}: {count:,} parameters, built in {recorder.phases[-1].seconds:.0f} s", flush=True)
        if options.torch:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
        else:
            optimizer = ml.prepare(model, options.preset, lr, whole_model=True)
            ml.step_in_backward(model, optimizer)
        first = 0
        if options.resume is not None:
            with recorder.phase("resume"):
                first = load_training_state(options.resume, model, optimizer)["step"]
        for step in range(first, first + options.steps):
            ids, targets = data.batch(options.seed, step % options.batches, options.batch, options.tokens)
            with recorder.phase("forward"):
                loss = model(ids, targets)
            with recorder.phase("backward and step" if not options.torch else "backward"):
                loss.backward()
            losses.append(loss.item())
            seconds = sum(phase.seconds for phase in recorder.phases[-2:])
            del loss
            if options.torch:
                with recorder.phase("step"):
                    optimizer.step()
                    optimizer.zero_grad()
                seconds += recorder.phases[-1].seconds
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {seconds:.1f} s, {recorder.peak / 1e9:.2f} GB", flush=True)
        with recorder.phase("evaluation"), torch.no_grad():
            after = model(ids, targets).item()
        print(f"after {options.steps} steps: loss {after:.4f}", flush=True)
        result = {
            "model": options.model,
            "optimizer": f"torch AdamW {options.compute}" if options.torch else options.preset,
            "compute": options.compute,
            "formats": options.compute if options.torch else formats_of(model, optimizer),
            "parameters": count,
            "tokens": options.batch * options.tokens,
            "steps": options.steps,
            "lr": lr,
            "first_step": first,
            "losses": [*losses, after],
            "peak_bytes": recorder.peak,
            "python_bytes": started,
            "phases": summary(recorder),
            "seconds_per_step": step_seconds(recorder, first, options.steps),
            "checkpointing": not options.no_checkpointing,
            "threads": torch.get_num_threads(),
            "cpu": processor(),
            "torch": torch.__version__,
        }
        if not options.torch:
            result["static_bytes"] = sum(part.total for part in measure(optimizer).values())
        if options.save is not None and not options.torch:
            with recorder.phase("save"):
                save_training_state(options.save, model, optimizer, {"step": first + options.steps})
            result["save_peak_bytes"], result["save_seconds"] = recorder.phases[-1].peak, recorder.phases[-1].seconds
            result["saved_bytes"] = options.save.stat().st_size
            result["fingerprint"] = fingerprint(model, optimizer)
    print(json.dumps({k: v for k, v in result.items() if k != "phases"}, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")


def formats_of(model: torch.nn.Module, optimizer: ml.AdamW) -> dict[str, list[str]]:
    """What weights and moments are stored as: presets may change their meaning, results should not."""
    weights = sorted({str(p.format) for p in model.parameters() if isinstance(p, ml.QuantizedTensor)})
    moments = {name: sorted({g[name] for g in optimizer.param_groups}) for name in ("exp_avg", "exp_avg_sq")}
    return {"weights": weights, **moments}


def step_seconds(recorder: Recorder, first: int, steps: int) -> float:
    """Mean of all steps but the very first, which also allocates the states."""
    names = ("forward", "backward", "backward and step", "step")
    spent = [phase.seconds for phase in recorder.phases if phase.name in names]
    each = len(spent) // steps
    skipped = each if steps > 1 else 0
    return sum(spent[skipped:]) / (len(spent[skipped:]) / each)


def summary(recorder: Recorder) -> dict[str, dict[str, float]]:
    """The last of each phase, with the highest peak of its name."""
    found: dict[str, dict[str, float]] = {}
    for phase in recorder.phases:
        peak = max(phase.peak, int(found.get(phase.name, {}).get("peak", 0)))
        found[phase.name] = {"before": phase.before, "after": phase.after, "peak": peak, "seconds": phase.seconds}
    return found


if __name__ == "__main__":
    main()
