"""`from_pretrained` quantizes while it loads; what `save_pretrained` wrote comes back to the bit, or nothing does."""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import IDS, MODELS, differences, llama, moe
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import masterless as ml
from masterless.integrations.transformers import MasterlessConfig, MasterlessQuantizer
from masterless.tensor.mapped import _mapped_ranges


def reload(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "int4+4"])
@pytest.mark.parametrize("kind", MODELS)
def test_loading_quantizes_as_quantize_does_and_a_saved_folder_comes_back(kind, format, tmp_path):
    expected = MODELS[kind]()
    expected.save_pretrained(tmp_path / "dense")
    report = ml.quantize_(expected, format)
    model = reload(tmp_path / "dense", quantization_config=MasterlessConfig(format))
    assert not differences(model, expected) and len(report.quantized) >= 8
    assert all(p.requires_grad for p in model.parameters())
    for i, source in enumerate((model, expected)):  # loaded by the plug-in, and quantized afterwards
        source.save_pretrained(tmp_path / f"{i}")
        again = reload(tmp_path / f"{i}")
        assert not differences(again, source)
        assert torch.equal(again(IDS).logits, source(IDS).logits)
        assert isinstance(again.hf_quantizer, MasterlessQuantizer)
        again.save_pretrained(tmp_path / "second")
        assert not differences(reload(tmp_path / "second"), source)


def test_a_folder_is_made_of_plain_tensors_and_says_its_method(tmp_path):
    model = llama()
    ml.quantize_(model, "int4+4")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config == {
        **{"quant_method": "masterless", "format": "int4+4", "version": ml.__version__},
        **{"include": [], "exclude": [], "rules": {}},
    }
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert {key for key in tensors if key.startswith(name)} == {
        name,
        *(f"{name}.{p}" for p in ("codes", "hidden", "scale")),
    }
    assert json.loads(bytes(tensors[name].tolist()))["format"] == "int4+4"


def test_shards_and_rules_and_dtypes(tmp_path):
    llama().save_pretrained(tmp_path / "dense", max_shard_size="50KB")
    rules = {"*.layers.0.*": "fp8", "lm_head.weight": "int8", "*.down_proj.*": None}
    config = MasterlessConfig("int4+4", rules=rules, include=["*embed_tokens*"], exclude=["*.o_proj.*"])
    model = reload(tmp_path / "dense", quantization_config=config, dtype=torch.bfloat16)
    expected = llama().bfloat16()
    ml.quantize_(expected, "int4+4", rules=rules, include=["*embed_tokens*"], exclude=["*.o_proj.*"])
    assert not differences(model, expected) and model.lm_head.weight.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "small", max_shard_size="20KB")
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 2
    assert not differences(reload(tmp_path / "small"), model)
    as_float = reload(tmp_path / "small", dtype=torch.float32)  # another dtype to compute in: the codes are the same
    assert as_float.lm_head.weight.dtype == torch.float32
    assert torch.equal(as_float.lm_head.weight.codes, model.lm_head.weight.codes)


def test_tied_embeddings_are_saved_once_and_stay_tied(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    config = MasterlessConfig("int8", include=["*embed_tokens*"])
    model = reload(tmp_path / "dense", quantization_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, ml.QuantizedTensor)
    model.save_pretrained(tmp_path / "saved")
    assert not [key for key in load_file(tmp_path / "saved" / "model.safetensors") if key.startswith("lm_head")]
    again = reload(tmp_path / "saved")
    assert again.lm_head.weight is again.model.embed_tokens.weight and not differences(again, model)


def test_the_footprint_is_the_stored_one(tmp_path):
    model = llama()
    dense = model.get_memory_footprint()
    report = ml.quantize_(model, "int4")
    assert model.get_memory_footprint() == dense - report.dense_bytes + report.stored_bytes
    assert copy.deepcopy(model).get_memory_footprint() == model.get_memory_footprint()
    assert ml.dequantize_(model).get_memory_footprint() == dense


def test_the_checkpoint_file_is_not_held_in_memory(tmp_path):
    """Dense tensors that are left would keep the whole mapped file resident."""
    moe().save_pretrained(tmp_path / "dense")
    quantized = reload(tmp_path / "dense", quantization_config=MasterlessConfig("int4"))
    afterwards = reload(tmp_path / "dense")
    ml.quantize_(afterwards, "int4")
    quantized.save_pretrained(tmp_path / "saved")
    for model in (quantized, afterwards, reload(tmp_path / "saved")):
        inside = _mapped_ranges()
        for name, p in model.named_parameters():
            for tensor in p.stored.tensors.values() if isinstance(p, ml.QuantizedTensor) else [p]:
                assert not any(start <= tensor.data_ptr() < stop for start, stop in inside), name


def test_rounding_trained_weights_to_four_bits_warns(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.warns(ml.LossyUpdateWarning, match=r"to 4 bits, to nearest.*calibrate_\(model, batches, 'int4\+4'\)"):
        ml.prepare(reload(tmp_path), "2-byte-int4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ml.prepare(reload(tmp_path), "2-byte")
        ml.prepare(llama(), "2-byte-int4")
        calibrated = reload(tmp_path)
        ml.calibrate_(calibrated, [{"input_ids": IDS}], "int4+4")
        ml.prepare(calibrated, "2-byte-int4")


def test_trained_weights_are_rounded_as_suits_them(tmp_path):
    llama().save_pretrained(tmp_path)

    def rounding(model, **options):
        return {group["weight_rounding"] for group in ml.prepare(model, "1.3-byte", **options).param_groups}

    with pytest.warns(UserWarning, match=r"with weight_rounding='stochastic', as suits.*; pass pretrained=True"):
        assert rounding(reload(tmp_path)) == {"stochastic"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rounding(reload(tmp_path), pretrained=True) == {"stochastic"}
        assert rounding(reload(tmp_path), pretrained=False) == {"nearest"}
        assert rounding(reload(tmp_path), weight_rounding="nearest") == {"nearest"}
        assert rounding(reload(tmp_path), weight_rounding="stochastic") == {"stochastic"}
        assert rounding(llama()) == {"nearest"}
        assert rounding(llama(), pretrained=True) == {"stochastic"}
    with pytest.warns(ml.LossyUpdateWarning, match="the trained weights of 'a pretrained model' to 4 bits"):
        ml.prepare(llama(), "1-byte-int4", pretrained=True)


def test_a_dequantized_model_is_an_ordinary_one(tmp_path):
    model = llama()
    ml.quantize_(model, "int8")
    logits = model(IDS).logits
    ml.dequantize_(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = reload(tmp_path)
    assert type(again.lm_head.weight) is torch.nn.Parameter and torch.equal(again(IDS).logits, logits)


# --- exact or loud ----------------------------------------------------------------------------------------------


def test_a_quantized_folder_without_its_method_is_an_error(tmp_path):
    """Without our plug-in, or with the config's entry removed: never randomly initialised matrices."""
    model = llama()
    ml.quantize_(model, "int8")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"(?s)mismatch"):
        reload(tmp_path)


def test_what_cannot_be_is_refused(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"float16.*dtype=torch.bfloat16"):
        reload(tmp_path / "dense", quantization_config=MasterlessConfig("int8"), dtype=torch.float16)
    with pytest.raises(ValueError, match="matches no parameter"):
        reload(tmp_path / "dense", quantization_config=MasterlessConfig("int8", include=["*.wieght"]))
    with pytest.raises(ValueError, match="no option 'bits'"):
        MasterlessConfig("int8", bits=4)
    with pytest.raises(TypeError, match="list of name patterns"):
        MasterlessConfig("int8", include=[torch.nn.Linear])
    reload(tmp_path / "dense", quantization_config=MasterlessConfig("int8")).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="MasterlessConfig"):
        reload(tmp_path / "saved", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    damaged = load_file(tmp_path / "saved" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    partial = {k: v for k, v in damaged.items() if k != f"{name}.scale"}
    save_file(partial, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):  # its report names the tensor
        reload(tmp_path / "saved")
