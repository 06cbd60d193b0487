"""Checkpoints: copies, torch.save and state dicts of quantized models, and safetensors files."""

import copy
import json
import os
import pickle
import sys
import warnings
import zipfile
from random import Random as random_source

import pytest
import safetensors.torch
import torch
from torch import nn
from weight_cases import FORMATS, mlp, quantized, random, same_storage, visible

import masterless as ml
from masterless.interop import FileError, load_safetensors, read_torch, save_safetensors
from masterless.lab.models import GPT, GPTConfig
from masterless.tensor.quantize import quantize_
from masterless.tensor.quantized import QuantizedTensor

# --- torch's own ways ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_copies_and_files_hold_the_very_same_codes(format, tmp_path):
    q = quantized(6, 160, format=format)
    q.grad = random(6, 160)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.clone(), q.detach().clone()):
        assert isinstance(other, QuantizedTensor) and other.format == q.format
        assert same_storage(q, other)
    duplicate = copy.deepcopy(q)
    assert isinstance(duplicate, nn.Parameter) and torch.equal(duplicate.grad, q.grad)
    with torch.no_grad():
        duplicate.zero_()
    assert visible(duplicate).abs().sum() == 0 and visible(q).abs().sum() > 0, "a deep copy shares nothing"
    torch.save({"w": q, "plain": q.detach()}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert same_storage(loaded["w"], q) and isinstance(loaded["w"], nn.Parameter) and loaded["w"].requires_grad
    assert not isinstance(loaded["plain"], nn.Parameter)


@pytest.mark.parametrize("view", [lambda q: q[2:5], lambda q: q.view(-1), lambda q: q.t()], ids=["rows", "flat", "t"])
def test_copies_of_views_hold_their_values(view):
    v = view(quantized(6, 160).detach())
    for other in (copy.deepcopy(v), pickle.loads(pickle.dumps(v))):
        assert torch.equal(other + 0.0, v + 0.0)


def test_state_dict_round_trips(tmp_path):
    model, other = mlp(seed=0), mlp(seed=1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    identity = other[0].weight
    other.load_state_dict(state)
    assert other[0].weight is identity and same_storage(other[0].weight, model[0].weight)
    assert other[0].weight.requires_grad
    other = mlp(seed=1)
    other.load_state_dict(state, assign=True)
    assert same_storage(other[0].weight, model[0].weight) and isinstance(other[0].weight, nn.Parameter)


def test_a_size_mismatch_is_torchs_to_say():
    with pytest.raises(RuntimeError, match="size mismatch"):
        mlp().load_state_dict({k: v[:10] for k, v in mlp().state_dict(keep_vars=True).items()})
    with pytest.raises(ValueError, match=r"\(96, 64\).*NaN or infinity"):
        mlp()[0].weight.encode_(torch.full((96, 64), float("nan")))


# --- safetensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_comes_back_bit_for_bit(format, tmp_path):
    model, other = mlp(format, seed=0), mlp(format, seed=1)
    path = tmp_path / "model.safetensors"
    save_safetensors(model, path)
    assert load_safetensors(other, path) == []
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if isinstance(a, QuantizedTensor):
            assert same_storage(a, b) and b.requires_grad, name
        else:
            assert torch.equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"], "no temporary file stays"


def test_a_file_holds_plain_tensors_and_says_what_they_are(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(64, 96), "norm": nn.BatchNorm1d(96)}).bfloat16()
    quantize_(model, "int4+4")
    path = str(tmp_path / "model.safetensors")
    save_safetensors(model, path)
    tensors = safetensors.torch.load_file(path)
    buffers = {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert set(tensors) == {"a.weight.codes", "a.weight.hidden", "a.weight.scale", "a.bias", *buffers}
    for part, tensor in model["a"].weight.stored.tensors.items():
        assert torch.equal(tensors[f"a.weight.{part}"], tensor) and tensors[f"a.weight.{part}"].dtype == tensor.dtype
    with safetensors.safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["masterless"])
    assert about["quantized"] == {"a.weight": {"format": "int4+4", "shape": [96, 64], "dtype": "bfloat16"}}
    assert about["version"] == ml.__version__ and about["tied"] == {} and about["layout"] == 1


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    config = GPTConfig(vocab_size=64, n_layer=1, n_head=2, d_model=64, seq_len=16, tie_embeddings=True)
    path = tmp_path / "model.safetensors"
    for include in ([], ["embed.weight"]):
        model, other = (GPT(config, torch.Generator().manual_seed(i)) for i in range(2))
        quantize_(model, "int4", include=include)
        quantize_(other, "int4", include=include)
        save_safetensors(model, path)
        with safetensors.safe_open(str(path), framework="pt") as file:
            assert not [key for key in file.keys() if key.startswith("head.")]
            assert json.loads(file.metadata()["masterless"])["tied"] == {"head.weight": "embed.weight"}
        load_safetensors(other, path)
        assert other.head.weight is other.embed.weight
        ids = torch.arange(16).view(2, 8)
        assert torch.equal(other(ids)[0], model(ids)[0])
    untied = GPT(GPTConfig(**{**config.__dict__, "tie_embeddings": False}))
    quantize_(untied, "int4", include=["embed.weight", "head.weight"])
    load_safetensors(untied, path)  # one tensor of the file, two of the model
    assert untied.head.weight is not untied.embed.weight and torch.equal(untied(ids)[0], model(ids)[0])
    save_safetensors(untied, path)
    load_safetensors(model, path)  # stored twice, with equal values
    with torch.no_grad():
        untied.head.weight.zero_()
    save_safetensors(untied, path)
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' are one parameter.*differ.*untie"):
        load_safetensors(model, path)


def test_dense_files_are_rounded_into_quantized_models(tmp_path):
    dense, path = mlp(None), tmp_path / "dense.safetensors"
    safetensors.torch.save_file(dense.state_dict(), path)  # a foreign file, without our metadata
    model = mlp("int4", seed=1)
    assert load_safetensors(model, path) == ["0.weight", "2.weight"]
    assert same_storage(model[0].weight, QuantizedTensor.from_dense(dense[0].weight.detach(), "int4"))
    assert torch.equal(model[0].bias, dense[0].bias)
    with torch.no_grad():
        dense[2].weight[0, 0] = float("inf")
    safetensors.torch.save_file(dense.state_dict(), path)
    other = mlp("int4", seed=2)
    before = visible(other[0].weight)
    with pytest.raises(ValueError, match=r"'2.weight' holds NaN or infinity"):
        load_safetensors(other, path)
    assert torch.equal(visible(other[0].weight), before), "nothing is loaded if anything is wrong"


def refuse(model, path, pattern):
    before = {k: v.detach().clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=pattern):
        load_safetensors(model, path)
    for key, value in model.state_dict().items():
        assert torch.equal(value + 0.0, before[key] + 0.0), "a refused file must not change the model"


def test_what_does_not_fit_is_refused_with_a_remedy(tmp_path):
    path = tmp_path / "model.safetensors"
    save_safetensors(mlp("int4"), path)
    refuse(mlp("int8", seed=1), path, r"'0.weight' is stored as 'int4'.*'int8:row'.*quantize the model with 'int4'")
    refuse(mlp("int4:row", seed=1), path, r"stored as 'int4'.*'int4:row'")
    refuse(mlp(None, seed=1), path, r"'0.weight' is stored as 'int4'.*dense in the model.*quantize_\(")
    taller = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    quantize_(taller, "int4")
    refuse(taller, path, r"'0.(weight|bias)' has shape .* and \(128(, 64)?,?\) in the model")
    deeper = nn.Sequential(*mlp("int4"), nn.Linear(64, 64))
    refuse(deeper, path, r"Not in the file: 3.bias, 3.weight\. Build the model")
    refuse(mlp("int4")[:1], path, r"Not in the model: 2.bias, 2.weight\.")
    with torch.device("meta"):
        empty = mlp(None)
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        load_safetensors(empty, path)


def test_damaged_and_newer_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_safetensors(mlp("int4"), path)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(str(path), framework="pt") as file:
        metadata = {"masterless": file.metadata()["masterless"]}  # without the checksum, which would refuse them all
    without = {k: v for k, v in tensors.items() if k != "0.weight.scale"}
    safetensors.torch.save_file(without, path, metadata=metadata)
    refuse(mlp("int4", seed=1), path, r"damaged: '0.weight'.*'0.weight.scale'.*found none; save it again")
    wrong = {**tensors, "0.weight.scale": tensors["0.weight.scale"].float()}
    safetensors.torch.save_file(wrong, path, metadata=metadata)
    refuse(mlp("int4", seed=1), path, r"damaged.*'BF16'.*'F32'")
    newer = {"masterless": json.dumps({**json.loads(metadata["masterless"]), "layout": 2, "version": "9.0"})}
    safetensors.torch.save_file(tensors, path, metadata=newer)
    refuse(mlp("int4", seed=1), path, r"layout 2.*masterless 9\.0.*upgrade")


def copies(path, count):
    """Copies of a file with one bit flipped each, at seeded places all over it."""
    source, raw = random_source(count), path.read_bytes()
    target = path.with_name(f"flipped{path.suffix}")
    for _ in range(count):
        place = source.randrange(8 * len(raw))
        content = bytearray(raw)
        content[place // 8] ^= 1 << place % 8
        target.write_bytes(content)
        yield place, target


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """Of safetensors and of what torch.save wrote: no damaged file loads as something else."""
    model, plain = mlp("int4"), tmp_path / "model.safetensors"
    save_safetensors(model, plain)
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def same(state):
        return list(state) == list(expected) and all(torch.equal(v + 0.0, expected[k] + 0.0) for k, v in state.items())

    refused = 0
    for place, path in copies(plain, 150):
        other = mlp("int4", seed=1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the flipped bit may be in the name of the digest
                load_safetensors(other, path)
            assert same(other.state_dict()), f"bit {place} was flipped and nobody noticed"
        except ValueError:
            refused += 1
    assert refused > 140
    saved, refused = tmp_path / "model.pt", 0
    torch.save({"model": model.state_dict(), "step": 3}, saved)
    assert same(read_torch(saved)["model"])
    for place, path in copies(saved, 150):
        try:
            found = read_torch(path)
            assert same(found["model"]) and found["step"] == 3, f"bit {place} was flipped and nobody noticed"
        except FileError as error:
            assert str(error).count("\n") == 0
            refused += 1
    assert refused > 110  # the rest is padding, which nobody reads


def test_a_file_of_ours_without_a_checksum_loads_with_a_warning(tmp_path):
    path, model = tmp_path / "model.safetensors", mlp("int4")
    save_safetensors(model, path)
    with safetensors.safe_open(str(path), framework="pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "masterless.sha256"}
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata=metadata)  # as it was before 0.2
    other = mlp("int4", seed=1)
    with pytest.warns(UserWarning, match="saved without a checksum"):
        load_safetensors(other, path)
    assert same_storage(other[0].weight, model[0].weight)


LIES = {
    "expanded": lambda: torch.zeros(1).expand(20_000, 20_000),
    "meta": lambda: torch.empty(20_000, 20_000, device="meta"),
    "sparse": lambda: torch.zeros(8, 8).to_sparse(),
}


@pytest.mark.parametrize("name", LIES)
def test_tensors_without_their_elements_are_refused(name, tmp_path):
    torch.save({"deep": [{"w": LIES[name]()}]}, tmp_path / "lie.pt")
    with pytest.raises(FileError, match=r"lie\.pt: (holds a tensor|corrupt)"):
        read_torch(tmp_path / "lie.pt")


def test_a_quantized_tensor_that_lies_about_its_size_is_refused(tmp_path):
    """528 bytes that call themselves 20000 x 20000: decoding them would read foreign memory."""
    q = quantized(8, 64).detach()
    torch.save({"w": q}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    main = next(name for name in records if name.endswith("data.pkl"))
    lie = records[main].replace(b"K\x08K@", b"M NM N")  # two BININT1 8, 64 -> two BININT2 20000 (0x4e20)
    assert lie != records[main]
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        for record, content in records.items():
            archive.writestr(record, lie if record == main else content)
    with pytest.raises(FileError, match=r"w\.pt: "):
        read_torch(tmp_path / "w.pt")


def test_code_in_a_file_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(FileError, match=r"evil\.pt: corrupt, or not a checkpoint"):
        read_torch(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_a_file_is_replaced_in_one_move_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_safetensors(mlp("int8"), path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        save_safetensors(mlp("int4"), path)
        assert reader.read() == before, "who has the old file open goes on reading it"
    before = path.read_bytes()

    def fails(tensors, file, metadata):
        with open(file, "wb") as f:
            f.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(OSError, match="no space left"):
        save_safetensors(mlp("int8"), path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_what_a_file_cannot_hold_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"anything": 1}

    with pytest.raises(ValueError, match=r"'_extra_state'.*dict.*only tensors"):
        save_safetensors(Extra(64, 64), tmp_path / "x")
    outer = nn.ModuleDict({"linear": nn.Linear(64, 64, bias=False)})
    quantize_(outer, "int4")
    outer["linear"]._modules["weight"] = nn.Module()  # a module of the parameter's name, with a parameter "codes"
    outer["linear"]._modules["weight"].register_parameter("codes", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"would be stored as 'linear\.weight\.codes'"):
        save_safetensors(outer, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_shared_and_strided_dense_tensors(tmp_path):
    model, other = nn.Module(), nn.Module()
    for module, base in ((model, random(8, 64)), (other, torch.zeros(8, 64))):
        module.register_buffer("whole", base)
        module.register_buffer("front", base[:4])
        module.register_parameter("turned", nn.Parameter(base.clone().t()))
    save_safetensors(model, tmp_path / "x")
    load_safetensors(other, tmp_path / "x")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_missing_library_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        save_safetensors(mlp(), tmp_path / "x")
    with pytest.raises(ImportError, match="pip install safetensors"):
        load_safetensors(mlp(), tmp_path / "x")
