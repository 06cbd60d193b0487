"""Big models in and out of files: dense shards into quantized models, whole training states, token files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from safetensors.torch import save_file
from test_backward import assert_same, everything

import masterless as ml
from masterless.interop.files import FileError
from masterless.interop.shards import INDEX, load_dense
from masterless.interop.training_state import load_training_state, save_training_state
from masterless.lab.models import Llama, LlamaConfig
from masterless.lab.plan import load_model
from masterless.lab.train.token_file import TokenFile

CONFIG = LlamaConfig(96, 64, 128, 2, 4, 2, 16)
CONFIGS = Path(__file__).parent / "data" / "configs"


def make(config=CONFIG, seed=0):
    return lambda: Llama(config, torch.Generator().manual_seed(seed))


def built(preset="1.3-byte", seed=0, **options):
    chosen = ml.PRESETS[preset]
    arguments = {"vocabulary": chosen.vocabulary, "dtype": torch.bfloat16, **options}
    model, _ = ml.build_quantized(make(seed=seed), chosen.weights, **arguments)
    return model


def batch(step):
    ids = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def run(model, optimizer, steps):
    with ml.step_in_backward(model, optimizer, clip_previous_norm=1.0):
        return [step_loss(model, step) for step in steps]


def step_loss(model, step):
    loss = model(*batch(step))
    loss.backward()
    return loss.item()


# --- the model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen3-8b", "llama-3-70b"])
def test_a_llama_has_the_names_and_shapes_of_published_checkpoints(name):
    source = json.loads((CONFIGS / f"{name}.json").read_text())
    with torch.device("meta"):
        model = Llama(LlamaConfig.from_json(source))
    planned = {p.name: p.shape for p in load_model(str(CONFIGS / f"{name}.json")).parameters}
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == planned


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "qwen2-7b"])
def test_other_architectures_are_refused(name):
    with pytest.raises(ValueError, match="give a config of llama, mistral or qwen3"):
        LlamaConfig.from_json(json.loads((CONFIGS / f"{name}.json").read_text()))


def test_checkpointing_changes_no_bit():
    results = []
    for checkpointing in (False, True):
        model = built()
        model.model.checkpointing = checkpointing
        optimizer = ml.prepare(model, "1.3-byte", 1e-3, whole_model=True)
        run(model, optimizer, range(2))
        results.append(everything(model, optimizer))
    assert_same(*results)


def test_it_learns_in_every_whole_model_preset():
    for preset in ("1-byte", "1-byte-int4", "2-byte"):
        model = built(preset)
        optimizer = ml.prepare(model, preset, 3e-3, whole_model=True)
        losses = [run(model, optimizer, [0])[0] for _ in range(8)]
        assert losses[-1] < losses[0] - 0.5, (preset, losses)
        formats = {n: str(p.format) for n, p in model.named_parameters() if p.dim() > 1}
        assert formats["lm_head.weight"] == formats["model.embed_tokens.weight"] == "int8:row"
        assert len(formats) == sum(p.dim() > 1 for p in model.parameters())
        states = optimizer.state[model.lm_head.weight]
        assert ("exp_avg_sq.top" in states) and not any(key.endswith("row") for key in states)


# --- dense checkpoints ----------------------------------------------------------------------------------------


def write(folder, tensors, shards):
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = sorted(tensors)
    places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == place}, folder / place)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder / INDEX


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
def test_loading_is_quantizing_the_loaded_model_to_the_bit(tmp_path, source, shards, as_folder):
    dense = make(seed=7)().to(source)
    path = write(tmp_path, {name: p.detach() for name, p in dense.named_parameters()}, shards)
    expected = dense.bfloat16()
    ml.quantize_(expected, ml.PRESETS["1.3-byte"].weights, vocabulary="int8")
    model = built(initialise=False)
    seen = []
    rounded = load_dense(model, tmp_path if as_folder else path, seen.append)
    one, other = model.state_dict(), expected.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert len(rounded) == sum(p.dim() > 1 for p in dense.parameters())
    assert len(seen) == len(list(dense.parameters())) and seen[-1].done == seen[-1].total > 0


def test_a_tied_head_may_be_missing_in_the_checkpoint(tmp_path):
    config = LlamaConfig(96, 64, 128, 1, 4, 2, 16, tie_word_embeddings=True)
    dense = make(config)()
    path = write(tmp_path, {name: p.detach() for name, p in dense.named_parameters()}, 1)
    model, _ = ml.build_quantized(make(config), "int8", vocabulary="int8", initialise=False)
    load_dense(model, path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ml.quantize_(dense, "int8", vocabulary="int8")
    assert torch.equal(model.lm_head.weight.codes, dense.lm_head.weight.codes)


def test_loading_holds_no_more_than_one_dense_tensor(tmp_path):
    config = LlamaConfig(96, 256, 1024, 6, 4, 2, 64)
    dense = make(config)()
    largest = max(p.numel() * 4 for p in dense.parameters())
    total = sum(p.numel() * 4 for p in dense.parameters())
    path = write(tmp_path, {name: p.detach() for name, p in dense.named_parameters()}, 2)
    model, _ = ml.build_quantized(make(config), "int8", vocabulary="int8", initialise=False)
    del dense
    with LiveBytes() as live:
        load_dense(model, path)
    assert live.peak <= largest + 8 * 4 * (1 << 17)  # a slab's intermediate results are a few slabs
    assert total > 2 * live.peak


@pytest.mark.parametrize(
    "damage, message",
    [
        ("missing", r"Not in the file: model.norm.weight"),
        ("foreign", r"Not in the model: stranger"),
        ("shape", r"'model.norm.weight' has shape \(3,\) in .* and \(64,\) in the model"),
        ("kind", r"dense checkpoints are bf16, fp16 or fp32"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path, damage, message):
    tensors = {name: p.detach() for name, p in make(seed=7)().named_parameters()}
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "foreign":
        tensors["stranger"] = torch.zeros(2)
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.zeros(3)
    else:
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.uint8)
    model = built()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_dense(model, write(tmp_path, tensors, 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_files_that_are_no_checkpoint_are_refused(tmp_path):
    model = built(initialise=False)
    with pytest.raises(FileError, match="holds 0 safetensors files"):
        load_dense(model, tmp_path)
    (tmp_path / "x.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(FileError, match="not beside it"):
        load_dense(model, tmp_path / "x.json")
    (tmp_path / "y.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(FileError, match="no safetensors file, or damaged"):
        load_dense(model, tmp_path / "y.safetensors")
    tensors = {name: p.detach().clone() for name, p in make()().named_parameters()}
    tensors["lm_head.weight"][3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"'lm_head.weight' of .* holds NaN or infinity"):
        load_dense(model, write(tmp_path, tensors, 2))


# --- training states ------------------------------------------------------------------------------------------


def prepared(preset="1.3-byte", seed=0, **options):
    model = built(preset, seed)
    return model, ml.prepare(model, preset, 3e-3, whole_model=True, **options)


@pytest.mark.parametrize("preset", ["1-byte", "1.3-byte", "2-byte-int4", "2-byte"])
def test_a_run_goes_on_to_the_bit(tmp_path, preset):
    model, optimizer = prepared(preset)
    run(model, optimizer, range(4))
    expected = everything(model, optimizer)
    model, optimizer = prepared(preset)
    run(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 1.25e-3
    save_training_state(tmp_path / "state", model, optimizer, {"step": 2, "at": [1, "x"]})
    other_model, other = prepared(preset, seed=1)
    assert load_training_state(tmp_path / "state", other_model, other) == {"step": 2, "at": [1, "x"]}
    assert (
        other.param_groups[0]["lr"] == 1.25e-3 and other.param_groups[0]["betas"] == ml.PRESETS[preset].options["betas"]
    )
    other.param_groups[0]["lr"] = 3e-3
    run(other_model, other, range(2, 4))
    assert_same(everything(other_model, other), expected)


def test_saving_and_loading_copy_nothing(tmp_path):
    model, optimizer = prepared()
    run(model, optimizer, [0])
    largest = max(t.nbytes for t in model.state_dict().values())
    with LiveBytes() as live:
        save_training_state(tmp_path / "state", model, optimizer)
    assert live.peak <= largest
    with LiveBytes() as live:
        load_training_state(tmp_path / "state", model, optimizer)
    assert live.peak <= 2 * largest  # one tensor of the file


def damaged(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda path: prepared("1-byte"), "another model or optimizer: it also holds optimizer"),
        (lambda path: prepared("1-byte-int4"), "as it was when it was saved"),
        (lambda path: prepared(exp_avg="int8"), r"formats they had when it was saved|other parameters or formats"),
        (lambda path: damaged(path) or prepared(), "its SHA-256 is not the one"),
    ],
    ids=["optimizer", "model", "state", "damage"],
)
def test_another_model_or_a_damaged_file_is_refused_and_changes_nothing(tmp_path, build, message):
    model, optimizer = prepared()
    run(model, optimizer, [0])
    save_training_state(tmp_path / "state", model, optimizer)
    other_model, other = build(tmp_path / "state")
    before = {name: tensor.clone() for name, tensor in other_model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_training_state(tmp_path / "state", other_model, other)
    assert not other.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in other_model.state_dict().items())


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    model, optimizer = prepared()
    run(model, optimizer, [0])
    save_training_state(tmp_path / "state", model, optimizer, {"step": 1})
    with pytest.raises(ValueError, match="what JSON cannot"):
        save_training_state(tmp_path / "state", model, optimizer, {"step": object()})
    assert load_training_state(tmp_path / "state", model, optimizer) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


# --- token files ----------------------------------------------------------------------------------------------


def test_batches_of_a_token_file_are_a_function_of_seed_and_step(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    file = TokenFile(tmp_path / "t.npy", 1000)
    ids, targets = file.batch(seed=1, step=5, batch_size=3, seq_len=20)
    assert ids.shape == (3, 20) and ids.dtype == torch.int64 and torch.equal(ids + 1, targets)
    assert torch.equal(file.batch(1, 5, 3, 20)[0], ids)
    assert not torch.equal(file.batch(1, 6, 3, 20)[0], ids) and not torch.equal(file.batch(2, 5, 3, 20)[0], ids)
    starts = {int(row[0]) for step in range(200) for row in file.batch(0, step, 8, 990)[0]}
    assert starts == set(range(10)), "every place, the last one included, is used"


def test_token_files_that_do_not_fit_are_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(50, dtype=np.uint8))
    with pytest.raises(FileError, match="too few for a sequence of 50"):
        TokenFile(tmp_path / "t.npy", 64).batch(0, 0, 1, 50)
    with pytest.raises(FileError, match=r"holds token .* vocabulary has 8"):
        TokenFile(tmp_path / "t.npy", 8).batch(0, 0, 1, 40)
    np.save(tmp_path / "f.npy", np.zeros(5))
    with pytest.raises(FileError, match="a vector of uint8, uint16 or uint32"):
        TokenFile(tmp_path / "f.npy", 8)
    (tmp_path / "x.npy").write_text("no")
    with pytest.raises(FileError, match=r"no \.npy file"):
        TokenFile(tmp_path / "x.npy", 8)
