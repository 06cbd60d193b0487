"""``masterless doctor``: what runs on this machine and why, whether it computes the right bits, and how fast."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from torch.nn import Parameter

import masterless as ml
from masterless.backends.cpu import library as cpu_kernel
from masterless.backends.triton.backend import missing as missing_triton
from masterless.lab.bench import parity
from masterless.lab.bench.processors import processor

_SHAPES = [(1024, 1024)] * 3 + [(4096, 1024)]
_REPEATS = 5
_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "INT4, int4/log2": ("int4", {"exp_avg": "int4", "exp_avg_sq": "log2"}),
    "INT8, int4/log4": ("int8", {"exp_avg": "int4", "exp_avg_sq": "log4"}),
    "int4+4, int2/factored": ("int4+4", {"exp_avg": "int2", "exp_avg_sq": "factored", "betas": (0.53, 0.95)}),
}


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of text."),
    speed: bool = typer.Option(True, help="Also measure steps against torch's fused AdamW."),
) -> None:
    """Check this machine: versions, kernels, their bits against the reference, and speed; made to be pasted."""
    found: dict[str, Any] = {"versions": versions(), "devices": [examine(device, speed) for device in devices()]}
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(_text(found))
    if any(device["differences"] for device in found["devices"]):
        raise typer.Exit(1)


def versions() -> dict[str, str]:
    """What a report must name."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = f"none: {missing_triton()}"
    return {
        "masterless": ml.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (cuda {torch.version.cuda}, hip {torch.version.hip})",
        "triton": triton_version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def devices() -> list[str]:
    """The CPU, and every accelerator that torch sees and a backend is registered for."""
    found = ["cpu"]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found += [f"{kind}:{i}" for i in range(module.device_count())]
    return found


def examine(device: str, speed: bool) -> dict[str, Any]:
    """Everything about one device."""
    differences = parity.differences(device)
    if device != "cpu" and not missing_triton():
        differences += parity.recorded_differences(device)
    return {
        "device": device,
        "name": _name(device),
        "kernel": _kernel(device),
        "cases": len(parity.CASES),
        "differences": differences,
        # A speed of wrong results means nothing.
        "steps": _measured(device) if speed and not differences else [],
    }


def _name(device: str) -> str:
    if device != "cpu":
        return str(getattr(torch, device.split(":")[0]).get_device_name(device))
    return f"{processor()}, {torch.get_num_threads()} threads"


def _kernel(device: str) -> str:
    if device != "cpu":
        return f"none, the reference runs: {missing_triton()}" if missing_triton() else "Triton"
    described = cpu_kernel.describe()
    if not described.available:
        return f"none, the reference runs: {described.reason}"
    return f"compiled, {described.instruction_set}, {described.threads} threads"


def _measured(device: str) -> list[dict[str, Any]]:
    """Milliseconds of a step of each sort, and the ratio to torch's fused AdamW on fp32 tensors of the same shapes."""
    parameters = sum(a * b for a, b in _SHAPES)
    calls = {"torch.optim.AdamW, fp32, fused": _step(device, None, {})}
    calls |= {name: _step(device, weight, options) for name, (weight, options) in _STEPS.items()}
    best = dict.fromkeys(calls, float("inf"))
    for repeat in range(_REPEATS + 1):  # they take turns; the first turn compiles and allocates
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            if repeat:
                best[name] = min(best[name], time.perf_counter() - start)
    baseline = next(iter(best.values()))
    return [
        {"step": name, "parameters": parameters, "milliseconds": 1e3 * seconds, "ratio": seconds / baseline}
        for name, seconds in best.items()
    ]


def _step(device: str, weight: str | None, options: dict[str, Any]) -> Callable[[], Any]:
    parameters = []
    for shape in _SHAPES:
        dense = torch.randn(shape, device=device) * 0.05
        p = Parameter(dense if weight is None else ml.QuantizedTensor.from_dense(dense, weight))
        p.grad = torch.randn(shape, device=device) * 1e-3
        parameters.append(p)
    if weight is None:
        return torch.optim.AdamW(parameters, fused=True).step
    return ml.AdamW(parameters, **options).step


def _wait(device: str) -> None:
    if device != "cpu":
        getattr(torch, device.split(":")[0]).synchronize(device)


def _text(found: dict[str, Any]) -> str:
    """The report as text that an issue shows as it is."""
    lines = [f"{name:<11}{value}" for name, value in found["versions"].items()]
    for device in found["devices"]:
        lines += ["", f"{device['device']:<11}{device['name']}", f"{'kernel':<11}{device['kernel']}"]
        equal = f"equals the reference to the bit in {device['cases']} cases"
        lines.append(f"{'parity':<11}{'; '.join(device['differences']) or equal}")
        for row in device["steps"]:
            what = f"{row['step']}, {row['parameters'] / 1e6:.1f}M parameters"
            lines.append(f"{'step':<11}{what:<56}{row['milliseconds']:8.2f} ms  {row['ratio']:5.2f}x")
    return "\n".join(lines)
