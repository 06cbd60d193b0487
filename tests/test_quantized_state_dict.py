"""State dicts of quantized models: plain tensors that anything can save, loaded to the bit or refused."""

import copy
import io
import json
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn
from weight_cases import FORMATS, mlp, parts, quantized, random, same_storage

import masterless as ml
from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.state import join, joined, load_rounded_


def same(a, b):
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(same_storage(p, q) if isinstance(p, QuantizedTensor) else torch.equal(p, q) for (_, p), (_, q) in pairs)


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_holds_plain_tensors_and_the_format(format):
    model = mlp(format)
    state = model.state_dict()
    assert all(type(t) is torch.Tensor for t in state.values())
    stored = model[0].weight.stored
    assert {k for k in state if k.startswith("0.weight.")} == {f"0.weight.{part}" for part in stored.tensors}
    for part, tensor in stored.tensors.items():
        assert state[f"0.weight.{part}"].data_ptr() == tensor.data_ptr(), "as in torch, it shares the memory"
    about = json.loads(bytes(state["0.weight"].tolist()))
    assert about == {"format": str(stored.format), "shape": [96, 64], "dtype": "float32"}


def by_torch(state, folder):
    torch.save(state, folder / "x.pt")
    return torch.load(folder / "x.pt", weights_only=True)


def by_safetensors(state, folder):
    safetensors.torch.save_file(state, folder / "x.safetensors")
    return safetensors.torch.load_file(folder / "x.safetensors")


WAYS = {
    "directly": lambda state, folder: state,
    "torch.save": by_torch,
    "safetensors": by_safetensors,
    "pickle": lambda state, folder: pickle.loads(pickle.dumps(state)),
    "deepcopy": lambda state, folder: copy.deepcopy(state),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", ["int4", "int4+4", "fp8", "int3:row", "int8+32", "int4:tensor"])
def test_what_was_saved_comes_back_to_the_bit(format, way, assign, tmp_path):
    model, other = mlp(format), mlp(format, seed=1)
    result = other.load_state_dict(WAYS[way](model.state_dict(), tmp_path), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys and same(model, other)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in other.parameters())


def test_safetensors_own_functions_for_models(tmp_path):
    """`save_model` and `load_model` drop one of two names of a tied parameter; it stays tied."""

    def tied(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(50, 64), "inner": nn.Linear(64, 64), "out": nn.Linear(64, 50)})
        model["out"].weight = model["embed"].weight
        quantize_(model, "int4+4", include=["embed.weight"])
        return model

    model, other = tied(0), tied(1)
    safetensors.torch.save_model(model, str(tmp_path / "x.safetensors"))
    safetensors.torch.load_model(other, str(tmp_path / "x.safetensors"))
    assert same(model, other) and other["out"].weight is other["embed"].weight


def test_copies_pickles_and_conversions_of_a_model_still_save_and_load(tmp_path):
    model = mlp("int4+4")
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert clone.state_dict().keys() == model.state_dict().keys()
        other = mlp("int4+4", seed=1)
        other.load_state_dict(clone.state_dict())
        assert same(model, other)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    assert same(model, torch.load(stream, weights_only=False))
    half = copy.deepcopy(model).bfloat16()
    assert json.loads(bytes(half.state_dict()["0.weight"].tolist()))["dtype"] == "bfloat16"


def test_variables_and_files_of_old_hold_whole_parameters(tmp_path):
    model, other = mlp("int4+4"), mlp("int4+4", seed=1)
    whole = model.state_dict(keep_vars=True)
    assert whole["0.weight"] is model[0].weight
    torch.save({k: v.detach() for k, v in whole.items()}, tmp_path / "old.pt")
    other.load_state_dict(torch.load(tmp_path / "old.pt", weights_only=True))
    assert same(model, other)
    assert joined(model.state_dict()).keys() == whole.keys() == dict(model.named_parameters()).keys()


# --- exact or loud ------------------------------------------------------------------------------------------


def refused(model, state, pattern, **options):
    before = copy.deepcopy(model[0].weight)
    with pytest.raises(RuntimeError, match=pattern):
        model.load_state_dict(state, **options)
    now = model[0].weight  # other layers have been loaded, as torch does it
    assert same_storage(before, now) if isinstance(now, QuantizedTensor) else torch.equal(before, now)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_mismatch_of_formats_is_refused(strict, assign):
    options = {"strict": strict, "assign": assign}
    dense, whole = mlp(None), mlp("int4").state_dict(keep_vars=True)
    refused(mlp("int4"), dense.state_dict(), r"(?s)'0.weight' is dense.*stored as 'int4'.*encode_", **options)
    refused(mlp("int8"), mlp("int4").state_dict(), r"(?s)'int4'.*'int8:row'.*quantize_\(model, like=", **options)
    refused(mlp("int8"), whole, r"(?s)'int4'.*'int8:row'.*quantize_\(model, like=", **options)
    refused(ml.dequantize_(mlp("int4")), mlp("int4").state_dict(), r"(?s)dense in the model.*like=state", **options)


def test_a_dense_model_refuses_a_quantized_state_dict():
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
            mlp(None).load_state_dict(mlp("int4").state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=r"like=state_dict"):  # an old file, with whole parameters
        mlp(None).load_state_dict({k: v.detach() for k, v in mlp("int4").state_dict(keep_vars=True).items()})


def test_a_model_can_be_quantized_as_a_state_dict_is():
    rules = {"0.weight": "int4+4", "2.weight": "fp8"}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 64))
    quantize_(model, rules=rules, exclude=["3.*"])
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 64))
    report = quantize_(other, like=model.state_dict())
    assert {d.name: d.format for d in report.quantized} == {"0.weight": "int4+4", "2.weight": "fp8:row"}
    other.load_state_dict(model.state_dict())
    assert same(model, other)
    assert not quantize_(other, like=model.state_dict()).quantized, "a second time there is nothing to do"
    with pytest.raises(ValueError, match=r"already says what is quantized"):
        quantize_(mlp(None), like=model.state_dict(), exclude=["0.*"])
    with pytest.raises(ValueError, match=r"'0.weight' quantized, which is no parameter"):
        quantize_(nn.Linear(64, 64), like=model.state_dict())
    with pytest.raises(ValueError, match=r"'0.weight' is \(96, 64\) stored as 'int4\+4'.*'int8:row'"):
        quantize_(mlp("int8"), like=model.state_dict())


def test_damaged_and_converted_parts_are_refused():
    state = mlp("int4+4").state_dict()
    without = {k: v for k, v in state.items() if k != "0.weight.hidden"}
    refused(mlp("int4+4", seed=1), without, r"0.weight.hidden.*has none", strict=False)
    cast = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    refused(mlp("int4+4", seed=1), cast, r"0.weight.scale.*torch.float32.*without casting", strict=False)
    averaged = {k: (v + v) / 2 for k, v in state.items()}
    refused(mlp("int4+4", seed=1), averaged, r"does not say in which format", strict=False)
    garbled = {**state, "0.weight": torch.zeros(9, dtype=torch.uint8)}
    refused(mlp("int4+4", seed=1), garbled, r"'0.weight' in parts and does not say in which format", strict=False)
    lie = torch.frombuffer(
        bytearray(b'{"format": "int4", "shape": [20000, 20000], "dtype": "float32"}'), dtype=torch.uint8
    )
    refused(mlp("int4", seed=1), {**mlp("int4").state_dict(), "0.weight": lie}, r"takes a tensor 0.weight.codes")


def test_what_is_missing_is_named_as_the_file_would_have_it():
    model = mlp("int4+4")
    result = model.load_state_dict({}, strict=False)
    stored = {f"{i}.weight{part}" for i in (0, 2) for part in ("", ".codes", ".hidden", ".scale")}
    assert set(result.missing_keys) == stored | {"0.bias", "2.bias"}


def test_copies_round_only_by_name():
    q, dense = quantized(40, 64), random(40, 64, seed=1)
    before = parts(q)
    for source in (dense, quantized(40, 64, format="int8"), quantized(64, 40).detach().T):
        with pytest.raises(RuntimeError, match=r"would round it.*AveragedModel.*encode_"), torch.no_grad():
            q.copy_(source)
        assert all(torch.equal(before[k], v) for k, v in parts(q).items())
    with pytest.raises(RuntimeError, match=r"stored as 'int4' to a dense parameter.*dequantize\(\)"), torch.no_grad():
        nn.Parameter(dense).copy_(q)
    assert torch.equal(torch.zeros(40, 64).copy_(q.detach()), q.detach().dequantize()), "a buffer of yours may"
    version = q.changes
    assert q.encode_(dense) is q and q.changes != version
    assert same_storage(q, QuantizedTensor.from_dense(dense, "int4"))
    finer = quantized(40, 64, format="int4+4", seed=2)
    q.encode_(finer)
    assert same_storage(q, QuantizedTensor.from_dense(finer.detach().stored.decode(), "int4")), "hidden bits are used"
    with pytest.raises(ValueError, match=r"shape \(64,\) to one of shape \(40, 64\)"):
        q.encode_(torch.zeros(64))


def test_an_explicit_conversion_says_what_it_rounded():
    model, finer, dense = mlp("int4+4"), mlp("int8", seed=1), mlp(None, seed=2)
    assert load_rounded_(finer, model.state_dict()) == ["0.weight", "2.weight"]
    assert same_storage(finer[0].weight, QuantizedTensor.from_dense(model[0].weight.detach().stored.decode(), "int8"))
    assert load_rounded_(finer, dense.state_dict()) == ["0.weight", "2.weight"]
    assert same_storage(finer[0].weight, QuantizedTensor.from_dense(dense[0].weight.detach(), "int8"))
    assert load_rounded_(dense, model.state_dict()) == ["0.weight", "2.weight"]
    assert torch.equal(dense[0].weight, model[0].weight.detach().dequantize())
    assert load_rounded_(mlp("int4+4", seed=3), model.state_dict()) == []
    assert torch.equal(join(model.state_dict(), "0.weight").dequantize(), dense[0].weight)
