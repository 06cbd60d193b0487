"""The kernel built for Arm, NEON and portable, run by an emulator: every byte as the reference has it.

Needs a cross compiler and an emulator, which the tests' machine may lack: `make neon-check` says how to get them. The
tasks of a step go to a small driver (`neon_driver.cpp`) as a file, and what it stored comes back as one.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_cases as k
import numpy as np
import pytest
import torch

from masterless.backends.cpu import backend, library
from masterless.backends.cpu.interface import interface
from masterless.step.task import Task

ROOT = Path(__file__).parent.parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
ROUNDS = int(os.environ.get("MASTERLESS_NEON_ROUNDS", "2"))  # of 12 random cases


def _cmake() -> str | None:
    beside_python = Path(sys.executable).parent / "cmake"
    return str(beside_python) if beside_python.exists() else shutil.which("cmake")


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    cmake = _cmake()
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}: apt-get install g++-aarch64-linux-gnu qemu-user")
    if cmake is None or not library.available():
        pytest.skip("no cmake, or no compiled kernel here to describe tasks with")
    build = tmp_path_factory.mktemp("neon")
    system = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": COMPILER}
    options = [f"-DCMAKE_{name}={value}" for name, value in system.items()]
    kernel, program = build / "_masterless_cpu.so", build / "neon_driver"
    for command in (
        [cmake, "-S", ROOT, "-B", build, *options],
        [cmake, "--build", build, "-j", "2"],
        [COMPILER, "-O1", "-std=c++17", ROOT / "tests/neon_driver.cpp", kernel, f"-Wl,-rpath,{build}", "-o", program],
    ):
        subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=900)
    return program


class Arm:
    """Steps records on the emulated kernel, in place of `ml_step`."""

    def __init__(self, driver: Path, isa: str, folder: Path):
        self.driver, self.isa, self.files = driver, isa, (folder / "in", folder / "out")

    def run(self, *options: str) -> bytes:
        """What the driver writes."""
        command = [EMULATOR, "-L", LIBRARIES, self.driver, *self.files, *options]
        environment = {**os.environ, "MASTERLESS_ISA": self.isa}
        done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return self.files[1].read_bytes()

    def step(self, records: Any, tasks: Sequence[Task]) -> None:
        """Moves everything that the records point at to the driver, and back."""
        pointers, copies = _pointers(records.dtype), records.copy()
        as_bytes = copies.view(np.uint8).reshape(len(records), -1)
        sizes = _sizes(tasks)
        places: dict[int, int] = {}
        memory = bytearray()
        for row in as_bytes:
            for offset in pointers:
                word = row[offset : offset + 8].view(np.uint64)
                address = int(word[0])
                if address and address not in places:
                    places[address] = len(memory)
                    memory += ctypes.string_at(address, sizes[address]) + bytes(-sizes[address] % 64)
                word[0] = places[address] + 1 if address else 0
        header = [len(records), records.dtype.itemsize, len(pointers), len(memory), 2]
        numbers = np.array([*header, *pointers], dtype=np.int64)
        self.files[0].write_bytes(numbers.tobytes() + as_bytes.tobytes() + memory)
        written = self.run()
        after = np.frombuffer(written[: as_bytes.size], dtype=np.uint8).view(records.dtype)
        records["bad"] = after["bad"]
        for address, place in places.items():
            ctypes.memmove(address, written[as_bytes.size + place :][: sizes[address]], sizes[address])


def _pointers(dtype: np.dtype[Any]) -> list[int]:
    """Where the pointers of a task stand: the fields that the interface calls so, of its storages too."""
    described = json.loads(interface().library.ml_interface())
    found = []
    for name, (kind, offset, _) in described["MlTask"]["fields"].items():
        if kind == "p":
            found.append(offset)
        elif kind == "MlStorage":
            inner = described["MlStorage"]["fields"].values()
            found += [offset + o for k, o, _ in inner if k == "p"]
        assert dtype.fields is not None and dtype.fields[name][1] == offset
    return found


def _sizes(tasks: Sequence[Task]) -> dict[int, int]:
    """The bytes behind every address that a record may hold."""
    tensors = [t for task in tasks for s in task.storages for t in s.tensors.values()]
    sizes = {t.data_ptr(): t.numel() * t.element_size() for t in [*tensors, *(task.grad for task in tasks)]}
    for task in tasks:
        for storage in task.storages:
            if storage.format.kind == "codebook":
                tables = vars(backend._tables(storage.format)).values()
                sizes |= {array.ctypes.data: array.nbytes for array in tables}
    return sizes


@pytest.fixture(params=["neon", "portable"])
def arm(request, driver, tmp_path) -> Arm:
    return Arm(driver, request.param, tmp_path)


@pytest.mark.timeout(1800)  # the first one builds: a minute on an idle machine
def test_the_interface_is_the_same(arm):
    """Structs of the same layout, and the build that was asked for."""
    name, described = arm.run("--interface").decode().split("\n", 1)
    assert name == arm.isa
    assert described == interface().library.ml_interface().decode()


@pytest.mark.timeout(1800)
def test_every_byte_is_the_references(arm, monkeypatch):
    """Random cases, one of every format, and a row longer than the buffers."""

    def perform(tasks: Sequence[Task]) -> list[int]:
        def run(records: Any, only_survey: bool) -> bool:
            assert not only_survey
            arm.step(records, tasks)
            return True

        monkeypatch.setattr(backend, "_run", run)
        return k.step_on_the_kernel(tasks)

    rng = random.Random(4)
    for _ in range(ROUNDS):
        k.check([k.random_case(rng) for _ in range(12)], perform)
    k.check([k.hostile_case(rng) for _ in range(12)], perform)
    k.check(k.covering(40), perform)
    k.check([k.Case(weight="int8:row", first="int4:row", second="log4:row", shape=(2, 13000), steps=1)], perform)
    bf16 = {"shape": (64, 1024), "grad": torch.bfloat16, "steps": 2}
    k.check([k.Case(weight=w, first="int4", second=v, **bf16) for w, v in (("int4", "log2"), ("fp8", "log4"))], perform)
