"""Stock Trainer: presets, the best model, from_pretrained, and checkpoints of another kind (see test_matrix, too)."""

import pytest
from tiny import differences, examples, gpt2, llama, moe, same_state
from tools import ADAMW, arguments, logged_losses, quantized
from transformers import Trainer

import masterless as ml
from masterless.integrations.transformers import MasterlessConfig, PresetOptimizer


def trainer_for(model, folder, optimizer=("AdamW", {}), **options):
    if optimizer[0] == "AdamW":
        choice = (ml.AdamW, ADAMW)
    else:
        choice = (PresetOptimizer, {"preset": optimizer[0], "lr": 1e-2, **optimizer[1]})
    data = {"train_dataset": examples(), "eval_dataset": examples(4, seed=1)}
    return Trainer(model, arguments(folder, **options), **data, optimizer_cls_and_kwargs=choice)


@pytest.mark.parametrize("preset", ["1-byte", "1.3-byte-int4", "1.8-byte", "states-8bit"])
@pytest.mark.parametrize("make", [gpt2, moe], ids=["gpt2", "moe"])
def test_presets_train_and_resume(make, preset, tmp_path):
    """The factory gets a dense model in both runs: what is resumed is quantized as it was."""
    whole = trainer_for(make(), tmp_path / "whole", (preset, {}))
    whole.train()
    assert logged_losses(whole)[-1] < logged_losses(whole)[0]
    resumed_model = type(whole.model).from_pretrained(tmp_path / "whole" / "checkpoint-2")
    resumed = trainer_for(resumed_model, tmp_path / "resumed", (preset, {}))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert not differences(whole.model, resumed.model) and same_state(whole.optimizer, resumed.optimizer)


def test_the_best_model_is_loaded_at_the_end_and_the_folder_is_complete(tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5}
    trainer = trainer_for(quantized(), tmp_path, **options)  # a learning rate that ruins the model: the best is early
    trainer.train()
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    assert not differences(trainer.model, best)
    trainer.save_model(tmp_path / "final")
    assert not differences(type(trainer.model).from_pretrained(tmp_path / "final"), best)


def test_from_pretrained_to_trainer_without_a_line_between(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    model = type(llama()).from_pretrained(tmp_path / "dense", quantization_config=MasterlessConfig("int8"))
    trainer = trainer_for(model, tmp_path / "run", ("1-byte", {"weight_decay": 0.1}))
    trainer.train()
    assert logged_losses(trainer)[-1] < logged_losses(trainer)[0]
    decays = {
        p.dim() > 1: group["weight_decay"]
        for group in trainer.optimizer.optimizer.param_groups
        for p in group["params"]
    }
    assert decays == {True: 0.1, False: 0.0}


def test_a_checkpoint_of_another_kind_of_model_is_refused(tmp_path):
    dense = Trainer(llama(), arguments(tmp_path / "dense"), train_dataset=examples(), eval_dataset=examples(4))
    dense.train()
    with pytest.raises(RuntimeError, match=r"(?s)is dense in the state dict and stored as 'int4\+4'"):
        trainer_for(quantized(), tmp_path / "a").train(resume_from_checkpoint=str(tmp_path / "dense" / "checkpoint-2"))
    trainer_for(quantized(), tmp_path / "quantized").train()
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0"):
        again = Trainer(llama(), arguments(tmp_path / "b"), train_dataset=examples(), eval_dataset=examples(4))
        again.train(resume_from_checkpoint=str(tmp_path / "quantized" / "checkpoint-2"))
    with pytest.raises(RuntimeError, match=r"(?s)'int4\+4' in the state dict and as 'int8:row'"):
        other = trainer_for(quantized(format="int8"), tmp_path / "c")
        other.train(resume_from_checkpoint=str(tmp_path / "quantized" / "checkpoint-2"))
