"""`prepare`: a preset on a model, or a refusal that leaves the model as it was."""

import pytest
import torch
from torch import nn
from weight_cases import mlp, random, same_storage

import masterless as ml
from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor


def formats(model):
    return {name: str(p.format) for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def test_the_report_is_kept_and_vectors_do_not_decay():
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
    optimizer = ml.prepare(model, "1-byte", lr=1e-2, weight_decay=0.1)
    assert [d.name for d in optimizer.quantization_report.quantized] == ["0.weight", "2.weight"]
    assert "2 of 6 parameters quantized" in str(optimizer.quantization_report)
    decay = {name: group["weight_decay"] for group, _, name in optimizer.parameters()}
    assert decay == {name: 0.1 if p.dim() > 1 else 0.0 for name, p in model.named_parameters()}
    only = nn.Sequential(nn.Linear(64, 64, bias=False))
    assert len(ml.prepare(only, "1-byte").param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused_before_anything_changes(dtype):
    model = mlp(None).to(dtype)
    with pytest.raises(ValueError, match=rf"'0.weight' is {dtype}.*\.bfloat16\(\) \(nothing was changed\)"):
        ml.prepare(model, "1.8-byte")
    assert not formats(model) and {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"exp_avg": "log2"}, {"nonsense": 1}, {"preset": "0-byte"}])
def test_wrong_options_are_refused_before_anything_changes(options):
    model = mlp(None)
    with pytest.raises((ValueError, TypeError)):
        ml.prepare(model, **options)
    assert not formats(model)


def test_a_quantized_model_keeps_its_codes_or_the_preset_is_refused():
    model, expected = mlp("int8"), mlp("int8")
    ml.prepare(model, "1.8-byte")
    assert same_storage(model[0].weight, expected[0].weight)
    for preset, wanted in (("1.3-byte", "int6"), ("1-byte-int4", "int4"), ("fp32", "dense weights")):
        with pytest.raises(
            ValueError, match=rf"already stored as 'int8:row' and preset '{preset}' is for '{wanted}'.*"
        ):
            ml.prepare(model, preset)
        assert same_storage(model[0].weight, expected[0].weight)
    partly = mlp(None)
    quantize_(partly, "int8", exclude=["2.*"])
    ml.prepare(partly, "1.8-byte")
    assert formats(partly) == {"0.weight": "int8:row"}, "what the user has left alone stays so"


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared_expert_gate = nn.Linear(64, 1, bias=False)
        self.qa_outputs = nn.Linear(64, 2)
        self.body = nn.Linear(64, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 64, bias=False)})


def test_gates_heads_and_adapters_are_left_by_default():
    report = quantize_(Gates(), "int4")
    assert [d.name for d in report.quantized] == ["body.weight"]
    why = {d.name: d.reason for d in report.left}
    assert why["shared_expert_gate.weight"].startswith("too small: a side of 1, below 32; name it in include=")
    assert why["qa_outputs.weight"].startswith("too small: a side of 2")
    assert why["lora_A.default.weight"].startswith("adapter")
    asked = quantize_(Gates(), "int4", include=["shared_expert_gate.*", "lora_A.*"])
    assert len(asked.quantized) == 3


def test_a_model_keeps_nothing_of_a_mapped_file(tmp_path):
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512))
    torch.save(model.state_dict(), tmp_path / "x.pt")
    model.load_state_dict(torch.load(tmp_path / "x.pt", mmap=True, weights_only=True), assign=True)
    expected = [p.detach().clone() for p in model.parameters()]
    quantize_(model, "int8")
    from masterless.tensor.mapped import _mapped_ranges

    ranges = _mapped_ranges()
    for p, value in zip(model.parameters(), expected, strict=True):
        for tensor in p.stored.tensors.values() if isinstance(p, QuantizedTensor) else [p]:
            assert not any(start <= tensor.data_ptr() < stop for start, stop in ranges)
        assert isinstance(p, QuantizedTensor) or torch.equal(p, value)
    assert torch.isfinite(model(random(2, 512))).all()


def test_a_preset_that_is_traded_knows_what_it_becomes():
    preset = ml.PRESETS["1-byte-int8"]
    late = preset.traded
    assert (preset.weights, preset.trade_last) == ("int4", 0.15)
    assert (late.weights, late.trade_last, late.options["exp_avg"]) == ("int8", 0.0, "none")
    assert late.bytes_per_parameter <= preset.bytes_per_parameter and late.traded is late
    assert ml.PRESETS["2-byte"].traded is ml.PRESETS["2-byte"]


def test_trained_weights_start_traded_and_a_stored_model_says_where_it_is():
    def formats(model):
        return {str(p.format) for p in model.parameters() if isinstance(p, ml.QuantizedTensor)}

    trained = nn.Linear(64, 64)
    optimizer = ml.prepare(trained, "1-byte-int8", pretrained=True)
    assert formats(trained) == {"int8:row"} and optimizer.param_groups[0]["exp_avg"] == "none"
    again = ml.prepare(trained, "1-byte-int8")  # quantized already, after the trade
    assert again.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"] == (0.0, 0.95)
    early = nn.Linear(64, 64)
    assert ml.prepare(early, "1-byte-int8").param_groups[0]["exp_avg"] == "int4" and formats(early) == {"int4"}
    assert ml.prepare(early, "1-byte-int8", pretrained=True).param_groups[0]["exp_avg"] == "int4"
