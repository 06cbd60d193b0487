"""The benchmark: its document, what it refuses, what it says of other libraries. No test here looks at a time."""

import gc
import importlib.util
import json
import mmap
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import masterless as ml
from masterless.backends.cpu import library as kernels
from masterless.lab.bench import (
    end_to_end,
    footprint,
    forward,
    growth,
    parity,
    processors,
    report,
    step_time,
    tensor_sizes,
)
from masterless.lab.bench.entries import ADAMW, BASELINES, OURS, Entry, Gradients, build
from masterless.lab.models.gpt import GPTConfig

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import bench_figures  # noqa: E402
import peer_libraries as peers  # noqa: E402

typer_testing = pytest.importorskip("typer.testing")
from masterless.lab.cli import app  # noqa: E402

needs_kernel = pytest.mark.skipif(not kernels.available(), reason="no compiled kernel")
SHAPES = tensor_sizes.SIZES["test"]


@pytest.fixture(autouse=True)
def _keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def invoke(*args):
    return typer_testing.CliRunner().invoke(app, ["bench", *args], env={**os.environ, "COLUMNS": "200"})


def entry(name="an entry", make=None, **options):
    return Entry(name, ADAMW, make or (lambda p: torch.optim.AdamW(p)), peer=True, **options)


# --- the command ------------------------------------------------------------------------------------------


@needs_kernel
def test_the_document_has_ratios_bytes_machine_and_versions(tmp_path):
    done = invoke("step", "--sizes", "test", "--threads", "1,2", "--repeats", "1", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["machine"]["torch"] == torch.__version__ and document["parity"] == len(parity.CASES)
    assert [row["name"] for row in document["step"]] == [e.name for e in [*BASELINES, *OURS]] * 2
    by_name = {row["name"]: row for row in document["step"]}
    assert by_name[ADAMW]["ratio"] == 1.0 and by_name[ADAMW]["bytes_per_parameter"] == 12.0
    assert by_name[ADAMW]["bytes_moved_per_parameter"] == 28.0
    assert all(row["ratio"] > 0 and row["limit"] > 0 for row in document["step"])


@needs_kernel
def test_files_and_tables(tmp_path):
    options = ["--sizes", "test", "--threads", "1", "--repeats", "1", "--only", "fp32 weights"]
    done = invoke("step", "growth", "--largest", "20000", *options, "--out", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    written = {path.suffix: path for path in tmp_path.iterdir()}
    assert written.keys() == {".md", ".json"}
    text = written[".md"].read_text()
    assert "fp32 weights, int8/log8" in done.stdout and "INT4" not in text.split("##")[1]
    document = json.loads(written[".json"].read_text())
    assert {path.stem for path in written.values()} == {report.file_stem(document)}
    assert report.markdown(report.step_table(document, "test")) in text
    processor = f"{processors.processor()} ({document['machine']['instruction_set']})"
    assert all(title.endswith(f", on {processor}") for title in report.tables(document))
    bench_figures.draw_step(document, tmp_path / "bench.png")
    bench_figures.draw_growth(document, tmp_path / "growth.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("bench.png", "growth.png"))


def test_a_second_machine_adds_its_results(tmp_path):
    machine = {**report.machine({}), "processor": "Some CPU (R) 9", "instruction_set": "avx2"}
    written = [
        report.write({"machine": {**machine, **other}}, tmp_path)
        for other in ({}, {"instruction_set": "avx512"}, {"processor": "Other CPU"}, {})
    ]
    assert written[0] == written[3] == [tmp_path / "some-cpu-r-9-avx2.md", tmp_path / "some-cpu-r-9-avx2.json"]
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize(
    ("vendor", "family", "model", "name", "said"),
    [
        ("AuthenticAMD", 26, 2, "AMD EPYC", "AMD EPYC, Zen 5"),
        ("AuthenticAMD", 25, 17, "AMD EPYC", "AMD EPYC, Zen 4"),
        ("AuthenticAMD", 25, 1, "AMD EPYC", "AMD EPYC, Zen 3"),
        ("GenuineIntel", 6, 143, "Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Processor, Sapphire Rapids"),
        ("GenuineIntel", 6, 144, "Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Processor, family 6, model 144"),
        ("Other", 7, 3, "Some CPU", "Some CPU, family 7, model 3"),
    ],
)
def test_processors_of_one_name_are_told_apart(vendor, family, model, name, said, tmp_path):
    fields = {
        "processor": 0,
        "vendor_id": vendor,
        "cpu family": family,
        "model": model,
        "model name": name,
        "flags": "x: y",
    }
    first = "".join(f"{field}\t: {value}\n" for field, value in fields.items())
    (tmp_path / "cpuinfo").write_text(f"{first}\n{first.replace(name, 'another')}")
    assert processors.processor(tmp_path / "cpuinfo") == said
    assert processors.processor(tmp_path / "none")  # a system without the file has a name for it, too


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["sideways"], "no such section"),
        (["--sizes", "huge"], "no such size"),
        (["--threads", "0"], "no number of threads"),
        (["end-to-end", "--decode-cache", "much"], "--decode-cache 'much': is no number of bytes; write e.g. 64MB"),
        (["step", "--only", "no such entry", "--sizes", "test"], "no entry has that in its name"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(args, reason):
    done = invoke(*args)
    assert done.exit_code == 2 and reason in done.stderr and done.stderr.count("\n") == 1


# --- parity -----------------------------------------------------------------------------------------------


@needs_kernel
def test_no_speed_is_printed_if_the_kernel_differs_from_the_reference(monkeypatch):
    from masterless.backends.cpu import backend

    run = backend._run

    def forgetful(records, only_survey):
        records["step_size"] *= 1.001  # a slightly wrong step size
        return run(records, only_survey)

    monkeypatch.setattr(backend, "_run", forgetful)
    done = invoke("step", "--sizes", "test", "--repeats", "1")
    assert done.exit_code == 1 and done.stdout == ""
    assert "differs from the reference" in done.stderr and "AdamW, INT4, int4/log2" in done.stderr


def test_without_a_kernel_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: False)
    with pytest.raises(parity.ParityError, match="no compiled kernel"):
        parity.check()


# --- other libraries --------------------------------------------------------------------------------------


def rows_with(*entries):
    times = step_time.StepTimes("test", SHAPES, [BASELINES[0]], 1, 1)
    peers.measure(times, entries, 1, lambda what: None)
    return {row.name: row for row in times.rows()}


def test_a_peer_that_is_not_installed_keeps_its_row(monkeypatch):
    monkeypatch.setitem(peers.PACKAGES, "no_such_library", "no-such-library")
    missing = entry("missing", peers._peer("no_such_library", lambda module, p: module.AdamW(p)))
    row = rows_with(missing)["missing"]
    assert row.milliseconds is None and row.ratio is None and "no-such-library is not installed" in row.note
    cells = report.step_table({"step": [vars(row)]}, "test")[1][0]
    assert cells[0] == "missing" and cells[1:4] == ["-", "-", "-"] and "not installed" in cells[-1]


def test_a_peer_that_fails_keeps_its_row():
    def broken(parameters):
        raise RuntimeError("needs a GPU\nand more lines")

    assert rows_with(entry("broken", broken))["broken"].note == "fails here: RuntimeError: needs a GPU"


def test_a_peer_is_repeated_at_least_twice_and_not_much_longer_than_its_budget(monkeypatch):
    monkeypatch.setattr(step_time, "GUEST_SECONDS", 0.0)
    times = step_time.StepTimes("test", SHAPES, [BASELINES[0]], 1, 9)
    times.add_guest(entry())
    assert times.rows()[-1].repeats == 2


@needs_kernel
def test_the_script_adds_other_libraries_to_ours():
    script = [sys.executable, str(BENCHMARKS / "bench.py"), "step", "--sizes", "test", "--threads", "1"]
    done = subprocess.run([*script, "--repeats", "1", "--only", "AdamW8bit", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(done.stdout)["step"]]
    assert names == [ADAMW, "bitsandbytes AdamW8bit", "torchao AdamW8bit"]


def test_silent_full_precision_is_seen_in_the_state():
    row = rows_with(entry("fp32 in disguise"))["fp32 in disguise"]
    assert row.note == "fp32 states in 2 of 2 tensors, 100% of parameters"
    assert row.bytes_per_parameter == 12.0
    assert rows_with(entry("honest fp32", low_bit=False))["honest fp32"].note == ""


@needs_kernel
def test_our_own_vectors_in_full_precision_are_noted_too():
    one = build(OURS[0], Gradients(SHAPES))
    one.step()
    assert footprint.fallback_note(one).startswith("fp32 states in 1 of 2 tensors")
    weights = sum(p.nbytes for group in one.param_groups for p in group["params"])
    assert footprint.resident_bytes(one) == weights + one.state_bytes()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_falls_back_where_a_size_is_no_multiple_of_its_block():
    torchao = peers.load("torchao.optim.subclass_8bit")
    p = torch.nn.Parameter(torch.zeros(64, 64))
    quantized = torchao.OptimState8bit.zeros(p.shape)
    held = [(t.dtype, t.numel()) for t in footprint.stored_tensors(quantized)]
    assert (torch.uint8, p.numel()) in held
    assert not footprint._full_precision({"exp_avg": quantized}, p)
    assert footprint._full_precision({"exp_avg": torch.zeros(64, 64)}, p)


def test_a_library_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setitem(peers.PACKAGES, "json", "pytest")  # installed, and has no such module
    with pytest.raises(peers.Unavailable, match="pytest does not import: ModuleNotFoundError"):
        peers.load("json.no_such_module")


# --- growth and the forward pass --------------------------------------------------------------------------


@needs_kernel
def test_a_step_takes_no_more_extra_memory_than_a_mebibyte_a_thread():
    points = growth.grow([5_000, 300_000], threads=2, repeats=1)
    assert [p.parameters for p in points] == [4096, 299_008] * 2
    for point in points:
        assert point.kernel_bytes_per_thread <= 2**20
        assert point.extra_bytes is None or point.extra_bytes <= 2 * 2**20


needs_peaks = pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
MUCH = 1 << 26
SEEN = 0.9 * MUCH  # Linux counts resident pages in batches per processor; what hides a call hides all of it


@needs_peaks
def test_extra_memory_sees_what_a_call_takes_and_gives_back():
    assert growth.extra_memory(lambda: torch.ones(MUCH // 4).sum()) >= SEEN


@needs_peaks
def test_garbage_of_others_does_not_hide_what_a_call_takes():
    class Node:
        def __init__(self):
            self.me, self.tensor = self, torch.ones(MUCH // 4)

    def call():
        gc.collect()  # as Python may do at any time
        total = torch.ones(MUCH // 4).sum()
        Node()
        return total

    gc.disable()
    try:
        Node()
        assert growth.extra_memory(call) >= SEEN
    finally:
        gc.enable()


@needs_peaks
def test_memory_that_the_c_library_keeps_does_not_hide_what_a_call_takes():
    torch.ones((31 << 20) // 4)  # freed, it makes the C library take blocks of up to this size from its heap
    blocks = [torch.ones((20 << 20) // 4) for _ in range(6)]
    above = [torch.ones(1 << 18) for _ in range(8)]  # what is free below them stays in the process
    del blocks
    assert growth.extra_memory(lambda: torch.ones(MUCH // 4).sum()) >= SEEN
    assert len(above) == 8


@needs_peaks
def test_pages_that_the_system_drops_do_not_hide_what_a_call_takes(tmp_path):
    (tmp_path / "mapped").write_bytes(b"1" * MUCH)
    with open(tmp_path / "mapped", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0  # now it is resident

        def call():
            mapped.madvise(mmap.MADV_DONTNEED)  # as a system short of memory does
            return torch.ones(MUCH // 4).sum()

        assert growth.extra_memory(call) >= SEEN


@needs_kernel
def test_forward_compares_decoding_and_products():
    rows = forward.forward(1, 1, shape=(48, 64), tokens=(8,))
    assert {row.what for row in rows} == {"decode", "forward", "forward+backward"}
    assert [row.ratio for row in rows if row.name == row.baseline] == [1.0] * 4
    assert {row.name for row in rows if row.what == "decode"} > set(forward.FORMATS)


@needs_kernel
@pytest.mark.parametrize("processor_time", [False, True])
def test_end_to_end_measures_every_preset(processor_time):
    config = GPTConfig(vocab_size=64, n_layer=1, n_head=2, d_model=64, seq_len=16)
    rows = end_to_end.end_to_end(1, 1, config, (8, 48), processor_time)
    assert [row.name for row in rows] == [ADAMW, *(name for name in ml.PRESETS if name != "fp32")] * 2
    assert [row.ratio for row in rows if row.name == ADAMW] == [1.0] * 2
    assert all(0 < row.step_milliseconds < row.milliseconds for row in rows)
    header, body = report.end_to_end_table({"end_to_end": [asdict(row) for row in rows]})
    assert len(body) == len(rows) / 2 and {len(line) for line in body} == {len(header)} == {7}
    assert ("processor" in header[1]) == processor_time
    assert not any(row.decode_cache for row in rows)


@needs_kernel
def test_end_to_end_keeps_decoded_weights_on_request():
    config = GPTConfig(vocab_size=64, n_layer=1, n_head=2, d_model=64, seq_len=16)
    rows = end_to_end.end_to_end(1, 1, config, (8,), decode_cache=100_000)
    kept = {row.name: row.decode_cache for row in rows}
    assert kept[ADAMW] == kept["states-8bit"] == 0, "dense weights are not decoded"
    assert kept["2-byte"] == kept["1-byte-int4"] == (3 + 1) * 64 * 64 * 4  # up and down, 65,536 bytes each, do not fit
    document = {"machine": report.machine({}), "end_to_end": [asdict(row) for row in rows]}
    assert "0.0655 MB of decoded weights kept" in next(iter(report.tables(document)))
