"""A tour of ten minutes: quantize a model, train it, look inside, plan memory, save, resume, export.

Run ``python examples/tour.py``. Every part prints what it found; read the code beside it.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import masterless as ml
from masterless.lab.models import GPT, GPTConfig
from masterless.lab.train import batch, stdlib_corpus

SHAPE = GPTConfig(n_layer=2, n_head=4, d_model=128, seq_len=128)


def headline(text: str) -> None:
    """Prints a heading."""
    print(f"\n--- {text} {'-' * (90 - len(text))}")


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, text: Tensor, first: int, last: int) -> float:
    """An ordinary training loop."""
    loss = torch.zeros(())
    for step in range(first, last):
        loss = model(*batch(text, seed=0, step=step, batch_size=8, seq_len=SHAPE.seq_len))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return loss.item()


def main() -> None:
    """The tour."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each training run")
    steps = parser.parse_args().steps
    text = stdlib_corpus().train

    headline("1. Formats: a number is stored under a name")
    x = torch.randn(4, 256)
    for name in ("int8", "int4", "int4+4", "fp8"):
        q = ml.QuantizedTensor.from_dense(x, name)
        error = (q.dequantize() - x).abs().max()
        print(f"{name:7} {q.format.bits_per_element:6.3f} bits per number, largest error {error:.4f}")

    headline("2. A model: one call quantizes it, and says what it did")
    torch.manual_seed(0)
    dense = GPT(SHAPE)
    model = copy.deepcopy(dense)
    opt = ml.prepare(model, preset="2-byte", lr=2e-3, weight_decay=0.1)
    print(opt.quantization_report)

    headline("3. Train it, and the same model with fp32 AdamW")
    loss = train(model, opt, text, 0, steps)
    exact = torch.optim.AdamW(dense.parameters(), lr=2e-3, weight_decay=0.1)
    print(f"loss after {steps} steps: {loss:.3f}; fp32 AdamW: {train(dense, exact, text, 0, steps):.3f}")

    headline("4. What it costs, counted on the live tensors")
    measured = ml.memory.measure(opt)
    names = [name for name, p in model.named_parameters() if isinstance(p, ml.QuantizedTensor)]
    inner = sum((measured[name] for name in names[1:]), start=measured[names[0]])
    print(f"{inner.per_parameter:.2f} bytes per parameter in {len(names)} matrices; fp32 AdamW: 12")

    headline("5. Look inside: do the averages still move?")
    with ml.Monitor(opt, every=1) as monitor:
        train(model, opt, text, steps, steps + 3)
    for moment in ("exp_avg", "exp_avg_sq"):
        steps_seen, shares = monitor.series(moment, "stalled_codes")
        print(f"{moment}: {shares[-1]:.0%} of the codes did not change in step {steps_seen[-1]}")
    print("random rounding makes up for it on average; `masterless stall` says when it cannot")

    headline("6. Save and resume, to the bit")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, path)
        train(model, opt, text, steps + 3, steps + 8)
        other = GPT(SHAPE)
        opt2 = ml.prepare(other, preset="2-byte", lr=2e-3, weight_decay=0.1)
        state = torch.load(path, weights_only=True)
        other.load_state_dict(state["model"])
        opt2.load_state_dict(state["optimizer"])
        train(other, opt2, text, steps + 3, steps + 8)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    same = all(torch.equal(a.detach().dequantize(), b.detach().dequantize()) for a, b in pairs)
    print(f"resumed to the bit: {same}")

    headline("7. Will a larger one fit?")
    for shape in ((4096, 4096), (4096, 11008)):
        print(shape, f"{ml.memory.predict(shape, 'int8', 'int4', 'log4').per_parameter:.3f} bytes per parameter")
    print("the whole of a model: masterless plan --params 7B --memory 24GB")

    headline("8. And back to a dense model, for any other tool")
    ml.dequantize_(model)
    print(f"{sum(isinstance(p, ml.QuantizedTensor) for p in model.parameters())} quantized parameters left")


if __name__ == "__main__":
    main()
