"""The kernel under the address and undefined-behaviour sanitizers, on every instruction set, over random cases."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = """
import random, torch, kernel_cases as k
from masterless.backends.cpu.backend import CpuBackend
from masterless.formats import parse
from masterless.formats.storage import Storage
torch.set_num_threads(2)
rng = random.Random({seed})
for _ in range(3):
    k.check([k.random_case(rng) for _ in range(12)])
k.check([k.Case(weight="int8:row", first="int4:row", second="log4:row", shape=(2, 13000), steps=1)])
for name in ("int4", "int3", "fp8", "int4+6", "dynamic8", "bf16"):
    CpuBackend().decode(Storage.zeros(parse(name), (3, 5, 201)).encode_(torch.randn(3, 5, 201)), torch.bfloat16)
for name in ("int4", "int3", "fp8:row", "int4+6", "dynamic8", "int4:1024", "log2", "mxfp4"):
    for shape in ((3, 5, 201), (2, 13000), (40, 7)):
        CpuBackend().encode(Storage.zeros(parse(name), shape), torch.rand(shape, dtype=torch.bfloat16))
print("clean")
"""


def _tool(name: str) -> str | None:
    beside_python = Path(sys.executable).parent / name
    return str(beside_python) if beside_python.exists() else shutil.which(name)


@pytest.fixture(scope="module")
def sanitized_kernel(tmp_path_factory) -> Path:
    cmake, compiler = _tool("cmake"), shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the kernel with")
    if cmake is None:
        pytest.skip("no cmake to build the kernel with")
    build = tmp_path_factory.mktemp("sanitize")
    configure = [
        cmake,
        "-S",
        str(ROOT),
        "-B",
        str(build),
        "-DMASTERLESS_SANITIZE=ON",
        f"-DCMAKE_CXX_COMPILER={compiler}",
    ]
    subprocess.run(configure, check=True, capture_output=True, timeout=120)
    subprocess.run([cmake, "--build", str(build), "-j", "2"], check=True, capture_output=True, timeout=800)
    return build / "_masterless_cpu.so"


def _runtime_libraries() -> str:
    """The sanitizers' run-time libraries, which must come before everything else in an unsanitized Python."""
    found = [
        subprocess.run(["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip("the compiler has no sanitizer libraries")
    return " ".join(found)


@pytest.mark.timeout(1200)  # the first one builds: half a minute on an idle machine
@pytest.mark.parametrize(("isa", "seed"), [("portable", 1), ("avx2", 2), ("avx512", 3)])
def test_no_sanitizer_finding(sanitized_kernel, isa, seed):
    environment = {
        **os.environ,
        "LD_PRELOAD": _runtime_libraries(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself frees little at exit
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "MASTERLESS_KERNEL": str(sanitized_kernel),
        "MASTERLESS_ISA": isa,
        "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT / "tests"), *sys.path) if p),
    }
    code = CASES.format(seed=seed)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]
