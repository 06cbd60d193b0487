"""`masterless plan`: what it reads and refuses, what it prints and advises."""

from __future__ import annotations

import json

import pytest
import torch
from plan_models import CONFIGS, PUBLISHED, SMALL, config_of, expand, small
from safetensors.torch import save_file
from typer.testing import CliRunner

from masterless.lab.cli import app
from masterless.lab.commands.plan import parse_bytes, parse_count
from masterless.lab.plan import PlanError, Settings, advise, load_model, make_plan, model_of_size
from masterless.optim.presets import PRESETS

# --- safetensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-moe-16b", "gemma-3-1b", "gpt2"])
def test_headers_give_the_plan_of_the_config(tmp_path, name):
    model = small(name)
    tensors = {n: torch.zeros(p.shape) for p in model.parameters for n in expand(p)}
    names = sorted(tensors)
    index = {}
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, tmp_path / f"model-{i}.safetensors")
        index |= dict.fromkeys(part, f"model-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "other.safetensors").write_bytes(b"not named by the index")
    read = load_model(tmp_path)
    assert read.geometry is None and "config.json" in read.notes[-1]
    expected, found = make_plan(model), make_plan(read)
    assert found.left == expected.left
    for a, b in zip(expected.rows, found.rows, strict=True):
        assert b.total == a.total - a.activations
        assert b.total_in_backward == a.total_in_backward - a.activations


def test_one_file_with_its_config_and_things_that_are_no_parameters(tmp_path):
    tensors = {n: torch.zeros(p.shape) for p in small("llama-3-8b").parameters for n in expand(p)}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "position_ids": torch.zeros(4).long()}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    config = config_of("llama-3-8b")
    (tmp_path / "config.json").write_text(json.dumps(config | {k: v for k, v in SMALL.items() if k in config}))
    model = load_model(tmp_path / "model.safetensors")
    assert model.numel == small("llama-3-8b").numel
    assert model.geometry is not None
    assert "2 tensors" in model.notes[1]


def safetensors_bytes(header: object, data: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


GOOD = {"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
CORRUPT = {
    "empty": b"",
    "cut in the length": b"\x01\x02",
    "cut in the header": safetensors_bytes(GOOD)[:30],
    "cut in the data": safetensors_bytes(GOOD, 60),
    "absurd length": b"\xff" * 8 + b"{}",
    "not JSON": safetensors_bytes(b"hello"),
    "not UTF-8": safetensors_bytes(b"\xff\xfe\x00"),
    "a list": safetensors_bytes([1]),
    "no shape": safetensors_bytes({"w": {"dtype": "F32", "data_offsets": [0, 64]}}, 64),
    "no object": safetensors_bytes({"w": 3}),
    "negative": safetensors_bytes({"w": {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}}, 64),
    "wrong size": safetensors_bytes({"w": {"dtype": "F32", "shape": [5, 4], "data_offsets": [0, 64]}}, 64),
    "no tensors": safetensors_bytes({}),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_files_are_refused(tmp_path, case):
    path = tmp_path / "model.safetensors"
    path.write_bytes(CORRUPT[case])
    with pytest.raises(PlanError, match=r"model\.safetensors: "):
        load_model(path)


def test_a_truncated_copy_is_refused_and_the_whole_one_is_not(tmp_path):
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    save_file({"a.weight": torch.zeros(64, 64)}, whole)
    cut.write_bytes(whole.read_bytes()[:-1])
    assert load_model(whole).numel == 4096
    with pytest.raises(PlanError, match="corrupt safetensors file"):
        load_model(cut)


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10**7, 10**8, 10**9, 7 * 10**9, 70 * 10**9, 10**12])
def test_a_number_of_parameters_is_met(count):
    assert model_of_size(count).numel == pytest.approx(count, rel=0.06 if count < 10**8 else 0.01)


def test_sizes():
    assert [parse_count(t) for t in ("7B", "1.5T", "350m", "1_000")] == [7 * 10**9, 15 * 10**11, 35 * 10**7, 1000]
    assert [parse_bytes(t) for t in ("24GB", "24 GiB", "512mb")] == [24 * 10**9, 24 * 2**30, 512 * 10**6]
    for text in ("", "seven", "-7B", "7X", "1e9", "nanB", "9" * 30 + "B"):
        with pytest.raises(ValueError, match="--params"):
            parse_count(text)
    for text in ("", "24", "lots", "-1GB", "0GB", "IB", "24IB"):
        with pytest.raises(ValueError, match="--memory"):
            parse_bytes(text)


# --- the command ------------------------------------------------------------------------------------------


def run(*args: object):
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def test_the_table_and_the_advice():
    result = run(CONFIGS / "llama-3-8b.json", "--memory", "24GB", "--checkpointing", "full")
    assert result.exit_code == 0, result.output
    assert "8,030,261,248 parameters" in result.output
    assert all(name in result.output for name in (*PRESETS, "torch AdamW", "bitsandbytes 8-bit", "torchao 4-bit"))
    assert "-> take preset 2-byte and step_in_backward" in result.output and "leaves" not in result.output
    tight = run(CONFIGS / "llama-3-8b.json", "--memory", "22GB", "--checkpointing", "full")
    assert "leaves only 0.14 GB" in tight.output and "(preset 1.8-byte leaves 5% and more)" in tight.output


def test_json_is_the_plan():
    result = run(CONFIGS / "gemma-3-1b.json", "--json", "--memory", "24GB", "--preset", "1-byte", "--shards", 3)
    data = json.loads(result.output)
    assert data["parameters"] == PUBLISHED["gemma-3-1b"]
    assert [s["name"] for s in data["systems"] if s["preset"]] == ["1-byte"]
    for s in data["systems"]:
        kept = s["weights"] + s["master"] + s["states"] + s["activations"] + s["workspace"]
        assert s["total"] == kept + s["gradients"]
        assert s["total_in_backward"] == kept + s["gradients_in_backward"]
    assert data["advice"]["preset"] == "1-byte"


def test_advice_is_the_most_bytes_that_fit_and_not_int4_if_anything_else_does():
    plan = make_plan(load_model(CONFIGS / "llama-3-8b.json"), Settings(checkpointing="full"))
    for memory in range(10 * 10**9, 200 * 10**9, 7 * 10**9):
        advice = advise(plan, memory)
        fitting = [r for r in plan.rows if r.system.ours and min(r.total, r.total_in_backward) <= memory]
        if fitting:
            finer = [r for r in fitting if "int4" not in r.system.name] or fitting
            assert advice.preset == max(finer, key=lambda r: r.bytes_per_parameter).system.name
            assert advice.settings == plan.settings
        else:
            assert "--shards" in advice.text and advice.settings.shards > 1
    assert advise(plan, 10**6).preset is None


def test_advice_tries_checkpointing_first():
    plan = make_plan(load_model(CONFIGS / "llama-3-8b.json"), Settings(seq_len=4096))
    advice = advise(plan, 24 * 10**9)
    assert advice.settings.checkpointing == "full" and advice.settings.shards == 1
    assert "--checkpointing full" in advice.text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "either a model"),
        (("nowhere.json",), "no such file"),
        (("{dir}",), "neither config.json nor"),
        (("{dir}/text.json",), "is not JSON"),
        (("{dir}/list.json",), "not an object"),
        (("{dir}/mamba.json",), "known: llama, mistral"),
        (("{dir}/short.json",), "lacks 'hidden_size'"),
        (("{dir}/odd.json",), "is no size"),
        (("--params", "many"), "--params 'many'"),
        (("--params", "1K"), "config.json for so small a model"),
        (("--params", "7B", "--memory", "big"), "--memory 'big'"),
        (("--params", "7B", "--shards", "0"), "shards=0"),
        (("--params", "7B", "--checkpointing", "some"), "checkpointing='some'"),
        (("--params", "7B", "--dtype", "int4"), "dtype='int4'"),
        (("--params", "7B", "--preset", "9-byte"), "unknown preset"),
        (("--params", "7B", "--batch", "x"), "--batch"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, args, message):
    (tmp_path / "text.json").write_text("once upon a time")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "mamba.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "short.json").write_text('{"model_type": "llama"}')
    (tmp_path / "odd.json").write_text(json.dumps(config_of("llama-3-8b") | {"hidden_size": "4096"}))
    (tmp_path / "sub").mkdir()
    where = tmp_path / "sub" if args == ("{dir}",) else tmp_path
    result = run(*(a.replace("{dir}", str(where)) for a in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_the_documentation_shows_what_the_command_prints():
    page = (CONFIGS.parents[2] / "docs" / "memory.md").read_text()
    result = run(CONFIGS / "llama-3-8b.json", "--checkpointing", "full", "--memory", "24GB")
    for line in filter(str.strip, result.output.splitlines()):
        assert f"    {line.rstrip()}\n" in page
