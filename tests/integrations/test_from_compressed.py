"""Checkpoints that compressed-tensors itself wrote become a start: the same codes, the same logits, trainable."""

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from tiny import IDS, differences, examples, llama, moe
from transformers import AutoModelForCausalLM

import masterless as ml
from masterless.integrations.from_compressed import _imported, from_compressed

KINDS = {
    "int4 groups (GPTQ)": ({"num_bits": 4, "strategy": "group", "group_size": 32}, "int4:32"),
    "int4 zero points (AWQ)": ({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, "int8:64"),
    "int3 rows": ({"num_bits": 3, "strategy": "channel"}, "int3:row"),
    "int8 rows": ({"num_bits": 8, "strategy": "channel"}, "int8"),
    "int4 zero points, rows": ({"num_bits": 4, "strategy": "channel", "symmetric": False}, "int8"),
    "fp8 rows": ({"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8"),
    "fp8 tensor": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8:tensor"),
}


def write(folder, options, make=llama, scale_dtype=torch.bfloat16):
    """Quantizes a model with the package's own arithmetic and saves it with its own compressor."""
    model, arguments = make(hidden_size=128), QuantizationArgs(**{"symmetric": True, **options})
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows = module.weight.detach() if arguments.strategy != "tensor" else module.weight.detach().view(1, -1)
            groups = rows.reshape(len(rows), -1, arguments.group_size or rows.shape[1])
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
            module.weight_scale.data.copy_(scale.view_as(module.weight_scale).to(scale_dtype))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_is_the_checkpoint_to_the_bit_and_trains(kind, tmp_path):
    options, format = KINDS[kind]
    write(tmp_path / "theirs", options)
    model, report = from_compressed(tmp_path / "theirs")
    assert set(report.imported.values()) == {str(ml.tensor.quantized.as_weight(format))}
    assert len(report.imported) == 14 and not report.left and "14 matrices" in str(report)
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32))
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "ours")
    assert not differences(model, AutoModelForCausalLM.from_pretrained(tmp_path / "ours"))
    optimizer = ml.AdamW(model.named_parameters(), lr=1e-3, exp_avg="int8", exp_avg_sq="log8")
    losses = []
    for example in examples(8) * 2:
        loss = model(**{name: value[None] for name, value in example.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[8:]) < sum(losses[:8])


def test_hidden_bits_are_added_and_scales_of_fp32_kept(tmp_path):
    write(tmp_path, KINDS["int4 groups (GPTQ)"][0], scale_dtype=torch.float32)
    plain, _ = from_compressed(tmp_path)
    hidden, report = from_compressed(tmp_path, hidden=4)
    assert set(report.imported.values()) == {"int4+4:32:fp32"}
    assert torch.equal(logits(plain), logits(hidden)), "nothing is hidden at the start"
    weight = hidden.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(weight.detach().stored.decode(), weight.detach().dequantize())


def test_what_has_no_place_is_left_dense_and_said(tmp_path):
    write(tmp_path, KINDS["int4 groups (GPTQ)"][0])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    tensors[f"{name}.weight_g_idx"] = (torch.arange(128) // 32).flip(0).int()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, report = from_compressed(tmp_path)
    assert len(report.imported) == 13 and "activation order" in report.left[f"{name}.weight"]
    assert f"{name}.weight: left dense" in str(report)
    llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="holds no matrices in the formats of compressed-tensors"):
        from_compressed(tmp_path / "dense")


def test_experts_are_left_dense(tmp_path):
    model = moe(hidden_size=128)
    ml.quantize_(model, "int4:32")
    ml.export(model, tmp_path / "out")
    again, report = from_compressed(tmp_path / "out")
    assert any("experts" in name for name in report.left) and len(report.imported) == 8
    assert torch.equal(logits(again), logits(model))


def test_codes_of_another_kind_are_left_dense():
    parts = {"weight_packed": torch.zeros(4, 16, dtype=torch.uint8), "weight_scale": torch.ones(4, 1)}
    assert "its codes are torch.uint8" in _imported(parts, (4, 32), 0)
