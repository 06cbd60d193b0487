"""Damages and forges every kind of file that is read, and looks at what happens: errors only.

    python benchmarks/fuzz_files.py --seconds 600 [--seed 0]

A case is a copy of a good file (a checkpoint, a run directory, safetensors, a configuration, text, token arrays, a
plan's input, results) with one file of it damaged or, with correct checksums, forged. Readers run in a process of their
own. A finding is anything but success or a one-line ValueError or OSError, which the command line prints with exit code
2: another exception, a signal, a case that takes longer than 20 s, memory beyond 64 MB and 32 times the files, and a
damaged checkpoint that loads as something else than what was saved. Ends with a table, and exit code 1 if there were
any. `fuzz_mutations` has the ways to damage and to forge.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_mutations import damage, forge_archive, forge_description, forge_header, forge_json

SECONDS, FREE, MULTIPLE = 20, 64 << 20, 32


# --- what is read ---------------------------------------------------------------------------------------------------


@dataclass
class Target:
    """A kind of input: a folder with good files, the files that are attacked, and the reader, which gets a copy."""

    name: str
    files: list[str]
    read: Callable[[Path], Any]
    forge: Callable[[bytes, random.Random], bytes] | None = None
    exact: bool = False  # whether damage must be noticed


def targets(folder: Path) -> list[Target]:
    """Makes the good files, and the readers of them."""
    import numpy as np
    import torch
    from torch import nn

    import masterless as ml
    from masterless.distributed import checkpoint
    from masterless.interop import load_safetensors, save_safetensors
    from masterless.lab.commands.compare import summarize
    from masterless.lab.plan import load_model, make_plan
    from masterless.lab.train import run as runs
    from masterless.lab.train.build import load_initial
    from masterless.lab.train.config import read_toml, resolve
    from masterless.lab.train.corpus import text_corpus
    from masterless.lab.train.display import Display
    from masterless.lab.train.experiment import load_results
    from masterless.lab.train.report import write_comparison_report, write_run_report

    torch.set_num_threads(1)

    def network() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
        ml.quantize_(model, "int4")
        return model

    def parts(value: Any) -> Iterator[bytes]:
        if isinstance(value, dict):
            for name in sorted(value, key=str):
                yield str(name).encode()
                yield from parts(value[name])
        elif hasattr(value, "stored"):
            yield from parts(value.detach().stored.tensors)
        elif torch.is_tensor(value):
            yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            yield repr(value).encode()

    def digest(*states: Any) -> str:
        return hashlib.sha256(b" ".join(piece for state in states for piece in parts(dict(state)))).hexdigest()

    def optimizer(model: nn.Module) -> Any:
        opt = ml.AdamW(model.named_parameters(), exp_avg="int4", exp_avg_sq="log2")
        model(torch.ones(2, 64)).sum().backward()
        opt.step()
        return opt

    def read_init(path: Path) -> str:
        model = network()
        load_initial(model, path / "init.pt")  # type: ignore[arg-type]
        return digest(model.state_dict())

    def read_safetensors(path: Path) -> str:
        model = network()
        load_safetensors(model, path / "model.safetensors")
        return digest(model.state_dict())

    def read_distributed(path: Path) -> str:
        model = network()
        opt = optimizer(model)
        extra = checkpoint.load(path, model, opt)
        return digest(model.state_dict(), *opt.state.values()) + json.dumps(extra)

    def read_run(path: Path) -> str:
        run = runs.resume(path)
        return digest(run.model.state_dict(), *run.optimizer.state.values()) + str(run.step)

    def read_report(path: Path) -> None:
        runs.resume(path)
        runs._earlier_summary(path)
        shutil.copy(folder / "run" / "summary.json", path / "summary.json")
        write_run_report(path)

    def read_results(path: Path) -> None:
        rows = load_results(path / "results.jsonl")
        if rows:
            write_comparison_report(path, rows, summarize(rows), {}, "text")

    for name in ("init", "safetensors", "distributed", "text", "jsonl", "tokens", "plan", "header", "index", "results"):
        (folder / name).mkdir()
    torch.save({"model": network().state_dict(), "step": 3}, folder / "init" / "init.pt")
    save_safetensors(network(), folder / "safetensors" / "model.safetensors")
    model = network()
    where = checkpoint.save(folder / "saved", 3, model, optimizer(model), extra={"step": 3})
    shutil.copytree(where, folder / "distributed", dirs_exist_ok=True)
    words = "seven wizards boil quartz while the quick brown fox looks on. " * 60
    (folder / "text" / "a.txt").write_text(words)
    (folder / "jsonl" / "a.jsonl").write_text("".join(json.dumps({"text": words[i:]}) + "\n" for i in range(20)))
    np.save(folder / "tokens" / "a.npy", np.arange(5000, dtype=np.int64) % 700)
    config = Path(__file__).parent.parent / "tests" / "data" / "configs" / "llama-3-8b.json"
    shutil.copy(config, folder / "plan" / "config.json")
    from safetensors.torch import save_file

    shapes = {"model.embed_tokens.weight": (64, 32), "model.layers.0.self_attn.q_proj.weight": (32, 32)}
    for name in ("header", "index"):
        save_file({n: torch.zeros(s) for n, s in shapes.items()}, folder / name / "model.safetensors")
    weight_map = dict.fromkeys(shapes, "model.safetensors")
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    flags = {"layers": 1, "width": 32, "heads": 2, "seq_len": 32, "eval_batches": 1, "steps": 2, "batch": 1}
    tiny = resolve({**flags, "data": [str(folder / "text" / "a.txt")], "threads": 1, "eval_every": 1})

    class Never:
        signal = None

    run = runs.start(tiny, folder / "run")
    runs.execute(run, Display(), Never())  # type: ignore[arg-type]
    del run
    memory = {"measured_per_parameter": 2.0, "predicted_per_parameter": 2.0, "inner_parameters": 10}
    row = {
        "id": "a",
        "label": "fp32",
        "loss": 2.0,
        "seconds": 1.0,
        "peak_bytes": 9,
        "seed": 0,
        "settings": {"steps": 4},
    }
    row |= {"memory": {**memory, "inner_bytes": {"weights": 20}}, "validation": [[4, 2.0]], "curve": []}
    row |= {"stalls": [{"step": 4, "stalls": {"exp_avg": {"stalled_codes": 0.1, "lost": 0.1}}}]}
    (folder / "results" / "results.jsonl").write_text("".join(json.dumps({**row, "seed": i}) + "\n" for i in range(7)))

    last = "checkpoints/step-00000002.pt"
    data = [p.name for p in (folder / "distributed").glob("*.distcp")]
    return [
        Target("init", ["init.pt"], read_init, forge_archive, exact=True),
        Target("run", [last, "checkpoints/manifest.json", "config.toml"], read_run, exact=False),
        Target("run checkpoint", [last], read_run, exact=True),
        Target("run manifest", ["checkpoints/manifest.json"], read_run, forge_json),
        Target("run report", ["metrics.jsonl", "summary.json"], read_report, forge_json),
        Target("safetensors", ["model.safetensors"], read_safetensors, forge_header, exact=True),
        Target("distributed", [*data, "metadata.json"], read_distributed, exact=True),
        Target("distributed description", ["metadata.json"], read_distributed, forge_description),
        Target("config", ["config.toml"], lambda path: resolve({}, read_toml(path / "config.toml")) and None),
        Target("text", ["a.txt"], lambda path: text_corpus(path / "a.txt", 16) and None),
        Target("jsonl", ["a.jsonl"], lambda path: text_corpus(path / "a.jsonl", 16) and None, forge_json),
        Target("tokens", ["a.npy"], lambda path: text_corpus(path / "a.npy", 16) and None),
        Target("plan", ["config.json"], lambda path: make_plan(load_model(path)) and None, forge_json),
        Target("header", ["model.safetensors"], lambda path: make_plan(load_model(path)) and None, forge_header),
        Target(
            "index", ["model.safetensors.index.json"], lambda path: make_plan(load_model(path)) and None, forge_json
        ),
        Target("results", ["results.jsonl"], read_results, forge_json),
    ]


FOLDERS = {"run checkpoint": "run", "run manifest": "run", "run report": "run", "config": "run"}
FOLDERS |= {"distributed description": "distributed"}


# --- one process that reads -----------------------------------------------------------------------------------------


def resident_peak() -> int:
    """The most memory since it was last asked, where Linux says it."""
    with open("/proc/self/status") as file:
        peak = next((int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM")), 0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak


def work(seed: int, first: int, until: float, cases: int) -> None:
    """Runs cases from number `first` on; says on stdout what it is about to do and how it ended."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = targets(folder)
        good = {t.name: t.read(_copy(folder, t)) for t in every if t.exact}
        case = first
        while time.time() < until and case < cases:
            target = every[case % len(every)]
            source = random.Random(f"{seed} {case}")
            copy = _copy(folder, target)
            file = copy / source.choice(target.files)
            forged = target.forge is not None and source.random() < 0.6
            raw = file.read_bytes()
            try:
                content = target.forge(raw, source) if forged and target.forge else damage(raw, source)
            except (ValueError, KeyError):
                content = damage(raw, source)
            file.write_bytes(content)
            print(
                json.dumps({"case": case, "target": target.name, "file": file.name, "bytes": len(content)}), flush=True
            )
            size = sum(p.stat().st_size for p in copy.rglob("*") if p.is_file())
            resident_peak()
            before, began, finding = resident_peak(), time.process_time(), ""
            try:
                value, ended = target.read(copy), "loaded"
                if target.exact and not forged and value != good[target.name]:
                    finding = "a damaged file was loaded as something else"
            except (ValueError, OSError) as error:
                ended = "refused"
                if "\n" in str(error) and target.name != "safetensors":
                    finding = f"more than one line: {error}"
            except BaseException as error:
                ended, finding = "failed", f"{type(error).__name__}: {error}"
            extra = max(0, resident_peak() - before)
            if extra > FREE + MULTIPLE * size:
                finding = finding or f"{extra:,} bytes of memory for files of {size:,}"
            took = time.process_time() - began  # of this process alone: others may keep the machine busy
            print(
                json.dumps({"end": ended, "seconds": took, "extra": extra, "size": size, "finding": finding[:300]}),
                flush=True,
            )
            case += 1


def _copy(folder: Path, target: Target) -> Path:
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / FOLDERS.get(target.name, target.name), copy)
    return copy


# --- the process that watches ---------------------------------------------------------------------------------------


def watch(seed: int, seconds: float, cases: int) -> dict[str, Any]:
    """Runs so many cases, or for so long, starting a new process where one died; returns counts and findings."""
    result: dict[str, Any] = {
        "seed": seed,
        "cases": 0,
        "targets": {},
        "findings": [],
        "largest_extra": 0,
        "slowest": 0.0,
    }
    first, until = 0, time.time() + seconds
    while time.time() < until and first < cases:
        command = [sys.executable, __file__, "--work", str(first), "--seed", str(seed), "--until", str(until)]
        command += ["--cases", str(cases)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        about, pending, since = None, b"", time.time()
        while True:
            ended = process.poll() is not None
            pending += process.stdout.read() or b""
            *lines, pending = pending.split(b"\n")
            for line in lines:
                record = json.loads(line)
                since = time.time()
                if "case" in record:
                    about = record
                    continue
                assert about is not None
                counts = result["targets"].setdefault(about["target"], {})
                counts[record["end"]] = counts.get(record["end"], 0) + 1
                result["cases"] += 1
                result["largest_extra"] = max(result["largest_extra"], record["extra"])
                result["slowest"] = max(result["slowest"], round(record["seconds"], 3))
                if record["finding"]:
                    result["findings"].append({**about, "what": record["finding"]})
                first, about = about["case"] + 1, None
            if ended:
                break
            if about is not None and time.time() - since > SECONDS:
                process.kill()
                result["findings"].append({**about, "what": f"took longer than {SECONDS} s"})
                first, about = about["case"] + 1, None
                process.wait()
                break
            time.sleep(0.02)
        if about is not None:
            result["findings"].append({**about, "what": f"the process ended with {process.returncode}"})
            first = about["case"] + 1
        elif process.returncode not in (0, -9):
            raise SystemExit(f"the reading process ended with {process.returncode} before it began")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.seed, options.work, options.until, options.cases)
        return
    result = watch(options.seed, options.seconds, options.cases)
    if options.json:
        print(json.dumps(result))
    else:
        for name, counts in result["targets"].items():
            print(f"{name:24} " + ", ".join(f"{count} {end}" for end, count in sorted(counts.items())))
        extra = f"at most {result['largest_extra'] >> 20} MB more memory"
        found = f"{len(result['findings'])} findings"
        print(f"{result['cases']} cases, at most {result['slowest']} s of computing, {extra}, {found}")
        for finding in result["findings"]:
            print("FOUND", json.dumps(finding))
    sys.exit(1 if result["findings"] else 0)


if __name__ == "__main__":
    main()
