"""Compiles the GPU kernels without a GPU, for four targets, and writes down what came out.

    python -m benchmarks.gpu_compile            # benchmarks/results/gpu_compile.json: about five core-minutes
    python benchmarks/update_docs.py            # the table in docs/gpu.md

Instructions per element are static: all machine instructions of a kernel times its threads, over the elements of a
program. Slow paths that are hardly ever taken (divisions of denormal numbers, the count of bad elements) are in them.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from masterless.backends.triton import launch
from masterless.backends.triton.backend import surveyed, without_first
from masterless.backends.triton.spec import Codec, Step, at, codec_of, step_of
from masterless.formats import as_first_moment, as_second_moment, parse
from masterless.formats.rounding import PURPOSES
from masterless.formats.storage import Storage
from masterless.step.rules import RULES
from masterless.step.scalars import Scalars
from masterless.step.task import Task

RESULTS = Path(__file__).parent / "results" / "gpu_compile.json"
TARGETS: dict[str, tuple[str, Any, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of the table: a name, the function and its compile-time constants."""

    name: str
    function: str  # module.name
    constants: tuple[tuple[str, Any], ...]

    @property
    def step(self) -> Step:
        """The kind of step; of a kernel without one, a step of nothing."""
        return dict(self.constants).get("STEP") or surveyed(kind("int4", "int4", "log2"))


def kind(
    weight: str,
    first: str,
    second: str,
    rule: str = "adam_weight_units",
    inject: bool = True,
    cols: int = 1024,
    **more: Any,
) -> Step:
    """The kind of step of a matrix with bf16 gradients."""
    shape, chosen = (64, cols), RULES[rule]
    task = Task(
        name="",
        rule=chosen,
        scalars=Scalars(),
        group={},
        grad=torch.zeros(0, dtype=torch.bfloat16),
        weight=Storage.zeros(parse(weight), shape),
        first=Storage.zeros(as_first_moment(first), shape) if chosen.first else None,
        second=Storage.zeros(as_second_moment(second), shape) if chosen.second else None,
        rounding=dict.fromkeys(PURPOSES, "stochastic"),
        keys=dict.fromkeys(PURPOSES, 0),
        inject=inject,
    )
    return replace(at(step_of(task), "held", l2=False, eps=True), aligned=cols % 128 == 0, **more)


def _step(name: str, step: Step | None) -> Kernel:
    assert step is not None
    return Kernel(name, "entry.step_kernel", (("STEP", step),))


def _decode(name: str, step: Step) -> Kernel:
    chosen = launch.whole(replace(surveyed(step), weight=step.weight), 1024)
    constants = (("STEP", chosen), ("VISIBLE", True), ("BF16", True))
    return Kernel(f"decode {name} to bf16", "entry.decode_kernel", constants)


@cache
def kernels() -> tuple[Kernel, ...]:
    """The kernels of the table: what presets use first, then one of every sort."""
    int4, fine = kind("int4", "int4", "log2"), kind("int4+4", "int2", "factored", inject=False)
    adafactor = kind("int8:tensor", "int4", "factored", "adafactor_weight_units")
    long = kind("int4:row", "int8:row", "log4:row", cols=20_000)
    tables = ("dynamic8", "dynamic8", "udynamic8")

    def statistic(name: str, step: Step, *more: tuple[str, Any]) -> Kernel:
        return Kernel(name, f"statistics.{name}_kernel", (("STEP", step), *more))

    whole = launch.whole(surveyed(adafactor), 1024)
    return (
        _step("int4, int4/log2, injected", launch.tiles(int4, 1024)),
        _step("int4+4, int2/factored", launch.tiles(fine, 1024)),
        _step("int8, int4/log4, injected", launch.tiles(kind("int8", "int4", "log4"), 1024)),
        _step("fp8:row, int4/log2, injected", launch.tiles(kind("fp8:row", "int4", "log2"), 1024)),
        _step("bf16, bf16/bf16", launch.tiles(kind("bf16", "bf16", "bf16", "adam", False), 1024)),
        _step("int3, int3:64/log3:256, injected", launch.tiles(kind("int3", "int3:64", "log3:256"), 1024)),
        _step("dynamic8, dynamic8/udynamic8: by tables", launch.tiles(kind(*tables, "adam", False), 1024)),
        _step("nvfp4, mxfp4/log4, injected", launch.tiles(kind("nvfp4", "mxfp4", "log4"), 1024)),
        _step("int4, int4/log2, injected: tails", launch.tails(kind("int4", "int4", "log2", cols=1000), 1000)),
        _step("int4:row, int8:row/log4:row: long rows", launch.tiles(long, 20_000)),
        _decode("int4", int4),
        _decode("fp8:row", kind("fp8:row", "int4", "log2")),
        statistic("survey", whole),
        statistic("factored_sums", launch.columns(replace(surveyed(fine), weight=Codec()), 1024)),
        statistic("factored_finish", whole),
        statistic("adafactor", launch.whole(without_first(adafactor), 1024), ("SECOND_PASS", False)),
        statistic("adafactor_finish", whole),
        statistic("target_peak", launch.whole(adafactor, 1024)),
        statistic("store_scale", replace(whole, weight=codec_of(parse("int8:tensor")))),
        Kernel("course", "course.course_kernel", ()),
        Kernel("count", "course.count_kernel", ()),
    )


_POINTERS = {
    "records": "*i64",
    "record": "*i64",
    "table": "*fp32",
    "adafactor": "*fp64",
    "courses": "*fp64",
    "rates": "*fp64",
    "owners": "*i32",
    "which": "*i32",
    **dict.fromkeys(("counts", "stop", "counters", "streams", "grads", "odd_steps", "bad", "stopped"), "*i64"),
    "out": "*u16",
}


def compiled(kernel: Kernel, target: str) -> Any:
    """A kernel as Triton compiles it for a target, as every launch does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from masterless.backends.triton import course, entry, statistics

    module, name = kernel.function.split(".")
    function = getattr({"entry": entry, "statistics": statistics, "course": course}[module], name)
    constants = dict(kernel.constants)
    signature = {n: "constexpr" if n in constants else _POINTERS[n] for n in function.arg_names}
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if n not in constants},
    )
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=launch.options(kernel.step))


def measured(kernel: Kernel, target: str, made: Any) -> dict[str, Any]:
    """Registers, spilled bytes and instructions per element of a compiled kernel."""
    if target.startswith("gfx"):
        text = made.asm["amdgcn"]
        count = len(re.findall(r"^\t[sv]_|^\t(?:ds|global|flat|buffer|scratch)_", text, re.M))
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        spilled = int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
    else:
        count, registers, spilled = _of_cubin(made.asm["cubin"])
    threads = kernel.step.warps * TARGETS[target][2]
    per_element = count * threads / (kernel.step.chunks * 128)
    return {"registers": registers, "spilled": spilled, "instructions": count, "per_element": round(per_element, 1)}


def _of_cubin(cubin: bytes) -> tuple[int, int, int]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = _output(tools / "nvdisasm", "-c", file.name)
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
    lines = [line for line in code.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/\s+\S", line) and "NOP" not in line]
    found = {name: int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK", "LOCAL")}
    return len(lines), found["REG"], found["STACK"] + found["LOCAL"]


def _output(*command: Any) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def rows() -> Iterator[dict[str, Any]]:
    """A row for every kernel, with what every target makes of it."""
    for kernel in kernels():
        yield {"kernel": kernel.name, **{t: measured(kernel, t, compiled(kernel, t)) for t in TARGETS}}


def committed() -> list[dict[str, Any]]:
    """The rows of the last run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


# A program of these is not for elements: it is for a matrix or for a parameter.
_SINGLE = ("factored_finish", "adafactor_finish", "store_scale", "course", "count")


def _cell(measured: dict[str, Any], single: bool) -> str:
    spilled = f", **{measured['spilled']} bytes spilled**" if measured["spilled"] else ""
    count = f"{measured['instructions']} in all" if single else f"{measured['per_element']:g}"
    return f"{measured['registers']}, {count}{spilled}"


def table(found: list[dict[str, Any]]) -> str:
    """The rows as the table of the documentation."""
    lines = [f"| kernel | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
    for row in found:
        single = row["kernel"] in _SINGLE
        cells = [_cell(row[t], single) for t in TARGETS]
        lines.append(f"| {row['kernel']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Writes the results."""
    found = []
    for row in rows():
        print(json.dumps(row), flush=True)
        found.append(row)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")


if __name__ == "__main__":
    main()
