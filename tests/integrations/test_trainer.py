"""Stock Trainer: presets, the best model, from_pretrained, and checkpoints of another kind (see test_matrix, too)."""

import pytest
from tiny import differences, examples, gpt2, llama, moe, same_state
from tools import ADAMW, arguments, logged_losses, quantized
from transformers import Trainer, TrainerCallback

import masterless as ml
from masterless.integrations.trainer import MasterlessCallback
from masterless.integrations.transformers import MasterlessConfig, PresetOptimizer


def trainer_for(model, folder, optimizer=("AdamW", {}), callbacks=(), **options):
    if optimizer[0] == "AdamW":
        choice = (ml.AdamW, ADAMW)
    else:
        choice = (PresetOptimizer, {"preset": optimizer[0], "lr": 1e-2, **optimizer[1]})
    data = {"train_dataset": examples(), "eval_dataset": examples(4, seed=1)}
    data["callbacks"] = list(callbacks)
    return Trainer(model, arguments(folder, **options), **data, optimizer_cls_and_kwargs=choice)


@pytest.mark.parametrize("preset", ["1-byte", "2-byte-int4", "1.8-byte", "states-8bit"])
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


def test_momentum_is_traded_for_bits_at_the_end_and_resumed_on_both_sides_of_it(tmp_path):
    """Steps 1 to 4, saved after 2 and 4: INT4 weights until 2 are done, INT8 for the rest."""
    choice = ("1-byte-int8", {"pretrained": False})
    whole = trainer_for(gpt2(), tmp_path / "whole", choice, [MasterlessCallback(trade_last=0.5)])
    whole.train()
    formats = {str(p.format) for p in whole.model.parameters() if hasattr(p, "stored")}
    assert formats == {"int8:row"} and whole.optimizer.optimizer.param_groups[0]["betas"][0] == 0.0
    whole.save_model(tmp_path / "final")
    assert not differences(type(whole.model).from_pretrained(tmp_path / "final"), whole.model)
    for step in (2, whole.state.max_steps):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        model = type(whole.model).from_pretrained(checkpoint)
        resumed = trainer_for(model, tmp_path / f"from {step}", choice, [MasterlessCallback(trade_last=0.5)])
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert not differences(whole.model, resumed.model) and same_state(whole.optimizer, resumed.optimizer)
    with pytest.raises(ValueError, match=r"trade_last=1.*below 1"):
        MasterlessCallback(trade_last=1)
    with pytest.raises(ValueError, match=r"trade_for='int8'.*trade_last=0.15"):
        MasterlessCallback(trade_for="int8")
    data = {"train_dataset": examples(), "eval_dataset": examples(4, seed=1)}
    stock = Trainer(gpt2(), arguments(tmp_path / "stock"), **data, callbacks=[MasterlessCallback(trade_last=0.5)])
    with pytest.raises(ValueError, match=r"is not masterless' AdamW"):
        stock.train()


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
    trainer = trainer_for(model, tmp_path / "run", ("2-byte", {"weight_decay": 0.1}))
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


def test_steps_in_the_backward_pass_are_ordinary_steps(tmp_path):
    plain = trainer_for(quantized(), tmp_path / "plain", max_grad_norm=0.0)
    plain.train()
    callback = MasterlessCallback(step_in_backward=True)
    freed = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            freed.append(all(p.grad is None for p in model.parameters()))

    lean = trainer_for(quantized(), tmp_path / "lean", max_grad_norm=0.0, callbacks=[callback, Looks()])
    lean.train()
    assert freed == [True] * 4 and callback._stepper is None
    assert not differences(plain.model, lean.model) and same_state(plain.optimizer, lean.optimizer)
    middle = str(tmp_path / "lean" / "checkpoint-2")
    again = trainer_for(quantized(seed=1), tmp_path / "again", max_grad_norm=0.0, callbacks=[callback])
    again.train(resume_from_checkpoint=middle)
    assert not differences(plain.model, again.model) and same_state(plain.optimizer, again.optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"max_grad_norm=1\.0 clips by the norm of all gradients"),
        ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: .* each backward"),
    ],
)
def test_what_would_silently_not_happen_is_refused(options, message, tmp_path):
    trainer = trainer_for(quantized(), tmp_path, **options, callbacks=[MasterlessCallback(step_in_backward=True)])
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_the_callback_refuses_what_contradicts_itself():
    with pytest.raises(ValueError, match=r"belong to step_in_backward=True"):
        MasterlessCallback(clip_norm=1.0)
    with pytest.raises(ValueError, match=r"the steps happen elsewhere"):
        MasterlessCallback(step_in_backward=True, monitor={})


def test_a_monitor_logs_into_the_history(tmp_path):
    callback = MasterlessCallback(monitor={"every": 2})
    trainer = trainer_for(quantized(), tmp_path, callbacks=[callback])
    trainer.train()
    entries = [e for e in trainer.state.log_history if any(key.startswith("masterless/") for key in e)]
    assert [e["step"] for e in entries] == [2, 4] and len(callback.watching.samples) == 2
    assert 0.0 <= entries[0]["masterless/weight/lost"] <= 1.0 and "masterless/exp_avg_sq/stalled_codes" in entries[0]
