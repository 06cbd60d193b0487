"""Exports are what the trained model computed, to the bit, read by the servers' own packages."""

import copy
import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file
from tiny import IDS, MODELS, differences
from transformers import AutoModelForCausalLM

import masterless as ml
from masterless.integrations.export import export
from masterless.integrations.export.compressed import packed
from masterless.integrations.transformers import MasterlessConfig

INTEGERS = ["int4", "int4:32", "int4+4:32", "int4+32:64", "int2:64", "int3:64", "int6:64", "int8", "int8:64"]
HARDWARE = ["mxfp8", "mxfp4", "nvfp4"]
COMPRESSED = [*INTEGERS, "int8:tensor", "fp8", "fp8:tensor", "fp8+32"]


@pytest.fixture
def quantized(tmp_path):
    """A model as a user would have it: loaded by transformers, quantized on the way, and trained for a step."""

    def make(kind="llama", format="int4:32", dtype=torch.float32, include=(), exclude=(), **options):
        folder = tmp_path / "dense"
        MODELS[kind](**options).save_pretrained(folder)
        config = MasterlessConfig(format, include=include, exclude=exclude)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
        optimizer = ml.SGD(model.named_parameters(), lr=0.1, error_compensation=False)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        return model.eval()

    return make


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def reload(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


# --- compressed-tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", COMPRESSED)
def test_compressed_tensors_gives_the_same_logits(format, dtype, quantized, tmp_path):
    model = quantized(format=format, dtype=dtype, hidden_size=128)
    before = copy.deepcopy(model)
    report = export(model, tmp_path / "out")
    assert len(report.exported) == 14 and not report.rounded and str(report).startswith(str(tmp_path / "out"))
    assert torch.equal(logits(reload(tmp_path / "out", dtype)), logits(model))
    assert not differences(model, before), "exporting changes nothing"


@pytest.mark.parametrize("format", HARDWARE)
def test_formats_of_hardware_give_the_same_logits(format, quantized, tmp_path):
    model = quantized(format=format, dtype=torch.bfloat16, hidden_size=128)
    report = export(model, tmp_path / "out")
    assert len(report.exported) == 14 and not report.rounded
    assert torch.equal(logits(reload(tmp_path / "out", torch.bfloat16)), logits(model))
    with pytest.raises(ValueError, match=r"decode 'mxfp4' to bfloat16 and the model is torch.float32"):
        export(quantized(format="mxfp4", hidden_size=128), tmp_path / "fp32")


@pytest.mark.parametrize(
    ("format", "dtype"),
    [*((format, torch.float32) for format in COMPRESSED), *((f, torch.bfloat16) for f in ("int4+4:64", "int8", "fp8"))],
    ids=str,
)
def test_experts_are_split_and_come_back(format, dtype, quantized, tmp_path):
    model = quantized("moe", format, dtype)
    export(model, tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    part = "weight" if "fp8" in format else "weight_packed"
    for i in range(4):
        assert {f"model.layers.0.mlp.experts.{i}.{p}_proj.{part}" for p in ("gate", "up", "down")} <= names
    assert "model.layers.0.mlp.gate.weight" in names, "the router is dense"
    assert torch.equal(logits(reload(tmp_path / "out", dtype)), logits(model))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_bits_are_packed_as_the_package_packs_them(bits):
    codes = torch.randint(0, 2**bits, (5, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    theirs = pack_to_int32((codes.int() - 2 ** (bits - 1)).to(torch.int8), bits)
    assert torch.equal(packed(codes, bits), theirs)


def test_the_config_says_what_vllm_reads(quantized, tmp_path):
    model = quantized(format="int4:64", exclude=["*.down_proj.*"])
    report = export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    method = config["quantization_config"]
    assert method["quant_method"] == "compressed-tensors" and method["format"] == "pack-quantized"
    (group,) = method["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["weights"] == {
        **{"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False},
        **{"strategy": "channel"},  # rows of 64 are one group of 64
    }
    assert {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"} <= set(method["ignore"])
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert any("multiples of 128" in note for note in report.notes)
    assert torch.equal(logits(reload(tmp_path / "out")), logits(model))


def test_several_formats_in_one_model(quantized, tmp_path):
    model = quantized(format="int8", hidden_size=128, exclude=["*mlp*"])
    ml.quantize_(model, "int4:32", exclude=["*.1.mlp*"])
    ml.quantize_(model, "fp8")
    export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 3 and config["format"] == "mixed-precision"
    assert torch.equal(logits(reload(tmp_path / "out")), logits(model))


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(model, folder, pattern, **options):
    with pytest.raises(ValueError, match=pattern):
        export(model, folder / "out", **options)
    assert not (folder / "out").exists() and not list(folder.glob(".out*")), "nothing half-written stays"


def test_what_does_not_fit_is_refused_and_can_be_requantized(quantized, tmp_path):
    refused(quantized("gpt2"), tmp_path, r"c_attn.*\(and 7 more\).*\[in, out\] \(Conv1D\).*requantize=")
    refused(quantized(format="fp4"), tmp_path, r"no grid like 'fp4'")
    refused(quantized(format="fp8:32"), tmp_path, r"one scale a row there")
    odd = quantized(format="int4:64", hidden_size=96, num_attention_heads=2)
    refused(odd, tmp_path, r"a row of 96 is not a whole number of groups of 64")
    refused(quantized(format="int4:32:fp32", dtype=torch.bfloat16), tmp_path, r"scales do not fit the model's torch.bf")
    refused(odd, tmp_path, r"in format 'int4:64' either: a row of 96", requantize="int4:64")
    refused(odd, tmp_path, r"to='vllm': choose one of", to="vllm")
    report = export(odd, tmp_path / "out", requantize="int4:32")
    assert len(report.rounded) == 12, "rows of 128 did fit"
    expected = copy.deepcopy(odd)
    for name in report.rounded:
        owner, _, key = name.rpartition(".")
        p = expected.get_parameter(name)
        setattr(
            expected.get_submodule(owner),
            key,
            torch.nn.Parameter(ml.QuantizedTensor.from_dense(p.detach().dequantize(), "int4:32")),
        )
    assert torch.equal(logits(reload(tmp_path / "out")), logits(expected))
    with pytest.raises(ValueError, match="exists already"):
        export(odd, tmp_path / "out", requantize="int4:32")


# --- dense, and folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "dtype"),
    [*((format, torch.float32) for format in (*COMPRESSED, "fp4", "fp8:32")), ("int4+4", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_dense_export_is_an_ordinary_checkpoint(kind, format, dtype, quantized, tmp_path):
    model = quantized(kind, format, dtype)
    export(model, tmp_path / "out", to="dense")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = reload(tmp_path / "out", dtype)
    assert not any(isinstance(p, ml.QuantizedTensor) for p in again.parameters())
    assert torch.equal(logits(again), logits(model))
    if kind == "moe":
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_folder_is_exported_with_its_tokenizer(quantized, tmp_path):
    model = quantized()
    model.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "tokenizer.json").write_text("{}")
    export(tmp_path / "trained", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert torch.equal(logits(reload(tmp_path / "out")), logits(model))
    with pytest.raises(ValueError, match=r"no config\.json"):
        export(tmp_path, tmp_path / "other")


def test_the_command(quantized, tmp_path, capsys):
    from masterless.lab.cli import app

    quantized("moe", "int8").save_pretrained(tmp_path / "trained")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            app([str(a) for a in ("export", tmp_path / "trained", *arguments)])
        return ended.value.code, capsys.readouterr()

    code, printed = run("--out", tmp_path / "a")
    assert code == 0 and "12 matrices as compressed-tensors (int8:row)" in printed.out
    code, printed = run("--out", tmp_path / "b", "--to", "gguf", "--json")
    assert (
        code == 0
        and json.loads(printed.out.splitlines()[-1])["to"] == "gguf"
        and (tmp_path / "b" / "model.gguf").is_file()
    )
    code, printed = run("--out", tmp_path / "a")
    assert code == 2 and "exists already" in printed.err
    code, printed = run("--out", tmp_path / "c", "--to", "onnx")
    assert code == 2 and "to='onnx': choose one of compressed-tensors, gguf, dense" in printed.err
