"""Other libraries' optimizers, where they install and run: ``benchmarks/peers.txt`` has the versions.

A peer that is missing or fails is an `Unavailable` with the reason: it gets a row, never silence.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from torch.nn import Parameter

from masterless.lab.bench.entries import ADAMW, Entry
from masterless.lab.bench.step_time import StepTimes

PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "sdnq": "sdnq",
    "solo": "solow",
    "optimi": "torch-optimi",
}
_LR = 1e-4


class Unavailable(RuntimeError):
    """An entry that cannot be measured here, with the reason."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what libraries print, log and warn on import and in constructors out of our output."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            with contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
    finally:
        logging.disable(level)


def load(module: str) -> Any:
    """Imports a peer's module; `Unavailable` if that fails, for whatever reason."""
    package = PACKAGES[module.split(".")[0]]
    try:
        with quiet():
            return importlib.import_module(module)
    except Exception as error:  # a broken peer must not end the benchmark
        if not _version(package):
            raise Unavailable(f"{package} is not installed (make bench installs benchmarks/peers.txt)") from error
        raise Unavailable(f"{package} does not import: {describe_error(error)}") from error


def versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    found = {package: _version(package) for package in PACKAGES.values()}
    return {package: version for package, version in found.items() if version}


def measure(times: StepTimes, entries: Sequence[Entry], threads: int, tell: Callable[[str], None]) -> None:
    """Measures these entries as guests of ours; one that is missing or fails keeps its row, with the reason."""
    _compile_anew(threads)
    for entry in entries:
        tell(entry.name)
        try:
            with quiet():
                times.add_guest(entry)
        except Unavailable as error:
            times.add_failed(entry, str(error))
        except Exception as error:  # a peer that fails is a result too
            times.add_failed(entry, f"fails here: {describe_error(error)}")


def _compile_anew(threads: int) -> None:
    """Makes libraries that compile their step (torchao) compile it for this number of threads."""
    if "torch._inductor.config" in sys.modules or "torchao" in sys.modules:
        torch._dynamo.reset()
        importlib.import_module("torch._inductor.config").cpp.threads = threads


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def describe_error(error: BaseException) -> str:
    """An error's type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def _peer(module: str, create: Callable[[Any, list[Parameter]], torch.optim.Optimizer]) -> Any:
    def make(parameters: list[Parameter]) -> torch.optim.Optimizer:
        loaded = load(module)
        with quiet():
            return create(loaded, parameters)

    return make


def _solo(parameters: list[Parameter]) -> torch.optim.Optimizer:
    """SOLO's own step. Around it solow 0.2.0 expects names of an older torchao and a GPU to draw random numbers on."""
    states, utils = load("torchao.optim"), load("torchao.utils")
    for name in ("", ".quant_utils", ".subclass_4bit", ".subclass_8bit"):
        moved = states if not name else load(f"torchao.optim{name}")
        sys.modules.setdefault(f"torchao.prototype.low_bit_optim{name}", moved)
    for name in ("TORCH_VERSION_AT_LEAST_2_4", "TORCH_VERSION_AT_LEAST_2_5"):
        if not hasattr(utils, name):
            setattr(utils, name, True)
    solo, base, quantizer = load("solo"), load("solo.base"), load("solo.quantizer.utils")
    base.init_adaq_generator = lambda: None
    quantizer.adaq_generator = torch.Generator().manual_seed(0)
    with quiet():
        return solo.AdamWQ(parameters, _LR)


def _sdnq(dtype: str) -> Any:
    options = {"lr": _LR, "use_quantized_buffers": True, "quantized_buffers_dtype": dtype}
    return _peer("sdnq.optim", lambda sdnq, p: sdnq.AdamW(p, **options))


def _entry(name: str, make: Any, low_bit: bool = True) -> Entry:
    return Entry(name, ADAMW, make, low_bit=low_bit, peer=True)


ENTRIES = [
    _entry("optimi AdamW, fp32", _peer("optimi", lambda m, p: m.AdamW(p, _LR)), low_bit=False),
    _entry("bitsandbytes AdamW8bit", _peer("bitsandbytes.optim", lambda m, p: m.AdamW8bit(p, _LR))),
    _entry("torchao AdamWFp8", _peer("torchao.optim", lambda m, p: m.AdamWFp8(p, _LR))),
    _entry("torchao AdamW8bit", _peer("torchao.optim", lambda m, p: m.AdamW8bit(p, _LR))),
    _entry("torchao AdamW4bit", _peer("torchao.optim", lambda m, p: m.AdamW4bit(p, _LR))),
    _entry("SDNQ AdamW, uint8", _sdnq("uint8")),
    _entry("SDNQ AdamW, uint4", _sdnq("uint4")),
    _entry("SOLO AdamWQ, 4/2 bits", _solo),
]
