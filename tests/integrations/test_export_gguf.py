"""GGUF files hold the trained codes: read by the `gguf` package and by transformers."""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from test_export import logits, quantized, refused  # noqa: F401 - a fixture
from tiny import differences
from transformers import AutoModelForCausalLM

from masterless.integrations.export import export

FORMATS = ["int4", "int4:32", "int4:row", "int4+4", "int2", "int3", "int6", "int8", "int8:32", "int8:tensor"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_llama_comes_back_with_the_same_logits(format, quantized, tmp_path):  # noqa: F811
    model = quantized(format=format, hidden_size=128, num_key_value_heads=1)
    report = export(model, tmp_path / "out", to="gguf")
    assert len(report.exported) == 14 and any("no vocabulary" in note for note in report.notes)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("kind", "format"), [("llama", "int4:32"), ("llama", "int8"), *(("moe", format) for format in FORMATS)]
)
def test_blocks_decode_to_the_trained_weights(kind, format, quantized, tmp_path):  # noqa: F811
    model = quantized(kind, format)
    export(model, tmp_path / "out", to="gguf")
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    tensors = {t.name: t for t in reader.tensors}
    four_bits = format.startswith(("int2", "int3", "int4"))
    wanted = gguf.GGMLQuantizationType.Q4_0 if four_bits else gguf.GGMLQuantizationType.Q8_0
    assert sum(t.tensor_type == wanted for t in tensors.values()) == 14, "experts count as a stack each"

    def read(name):
        t = tensors[name]
        return torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type)))

    layer = model.model.layers[0]
    assert torch.equal(read("blk.0.attn_output.weight"), layer.self_attn.o_proj.weight.dequantize())
    if kind == "llama":
        assert torch.equal(read("blk.0.ffn_down.weight"), layer.mlp.down_proj.weight.dequantize())
        q = layer.self_attn.q_proj.weight.dequantize()
        permuted = q.view(2, 2, 16, 64).swapaxes(1, 2).reshape(64, 64)  # llama.cpp's order of the rotated rows
        assert torch.equal(read("blk.0.attn_q.weight"), permuted)
    else:
        gate, up = layer.mlp.experts.gate_up_proj.dequantize().chunk(2, dim=1)
        assert torch.equal(read("blk.0.ffn_gate_exps.weight"), gate) and torch.equal(
            read("blk.0.ffn_up_exps.weight"), up
        )
        assert torch.equal(read("blk.0.ffn_down_exps.weight"), layer.mlp.experts.down_proj.dequantize())


def test_bf16_models_keep_their_bits(quantized, tmp_path):  # noqa: F811
    model = quantized(dtype=torch.bfloat16)
    export(model, tmp_path / "out", to="gguf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.bfloat16)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(again.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight.dequantize())
    assert not differences(again.model.norm, model.model.norm)


def test_what_does_not_fit_is_refused(quantized, tmp_path):  # noqa: F811
    refused(quantized("gpt2"), tmp_path, r"Conv1D.*scales run along the outputs", to="gguf")
    refused(quantized(format="fp8"), tmp_path, r"no block with the grid of 'fp8'", to="gguf")
    odd = quantized(format="int8", hidden_size=80, num_attention_heads=2)
    refused(odd, tmp_path, r"a row of 80 is not a whole number of blocks of 32", to="gguf")
    small = quantized(format="int8")
    with torch.no_grad():
        small.model.layers[0].mlp.up_proj.weight.scale[3] = 2.0**-40
    refused(small, tmp_path, r"up_proj.*not exact in fp16", to="gguf")
    report = export(quantized(format="fp8"), tmp_path / "out", to="gguf", requantize="int8:32")
    assert len(report.rounded) == 14


def test_a_vocabulary_goes_into_the_file(quantized, tmp_path):  # noqa: F811
    model = quantized()
    model.save_pretrained(tmp_path / "trained")
    vocab = {chr(33 + i): i for i in range(90)}
    about = {"model": {"type": "BPE", "vocab": vocab, "merges": [["!", '"']]}}
    about["added_tokens"] = [{"id": 90, "content": "<end>", "special": True}]
    (tmp_path / "trained" / "tokenizer.json").write_text(json.dumps(about))
    export(tmp_path / "trained", tmp_path / "out", to="gguf")
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 128 and tokens[0] == "!" and tokens[90] == "<end>" and re.match(r"\[PAD", tokens[127])
    assert fields["tokenizer.ggml.merges"].contents() == ['! "']
