"""The examples run, on tiny models."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tiny import llama, tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lora(tmp_path, capsys):
    last = load("lora").main(["--steps", "12", "--out", str(tmp_path / "merged")])
    printed = capsys.readouterr().out
    first = float(printed.splitlines()[0].rpartition(" ")[2])
    assert last < first and "14 adapters merged" in printed and (tmp_path / "merged" / "config.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--preset", "fp32"],
        ["--preset", "2-byte", "--step-in-backward", "--gradient-checkpointing"],
        ["--preset", "2-byte-int4", "--weights", "int4+4:32", "--calibrate"],
    ],
    ids=lambda options: options[1],
)
def test_finetune_smollm2(options, tmp_path, monkeypatch, capsys):
    """With a tiny model in the place where the example keeps the real one."""
    llama(max_position_embeddings=256).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    example = load("finetune_smollm2")
    monkeypatch.setattr(example.pydoc_data.topics, "topics", {"a": " ".join(str(i % 100) for i in range(20000))})
    monkeypatch.setattr(sys, "argv", ["x", "--root", str(tmp_path), "--steps", "8", "--lr", "3e-3", *options])
    example.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["loss"] < result["start"] and result["peak"] > result["stored"] > 0
