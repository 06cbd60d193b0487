"""Lightning: a module that quantizes itself in `configure_model` trains, validates and resumes to the bit."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import differences, examples, llama, same_state
from torch.optim import swa_utils

import masterless as ml

SETTINGS = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.05},
    "accumulate": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "gradient checkpointing": {},
}


class Language(lightning.LightningModule):
    """A language model; `early`: quantized before Lightning restores a checkpoint, else in configure_optimizers."""

    def __init__(self, seed=0, early=True, checkpointing=False):
        super().__init__()
        self.model, self.early, self.losses = llama(seed), early, []
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()

    def configure_model(self):
        if self.early and not any(isinstance(p, ml.QuantizedTensor) for p in self.parameters()):
            ml.quantize_(self, "int4+4")

    def configure_optimizers(self):
        return ml.prepare(self, "1.8-byte-int4", lr=3e-3)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.model(**batch).loss, on_step=False, on_epoch=True)


def trainer_for(folder, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    save = ModelCheckpoint(dirpath=folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    return lightning.Trainer(max_epochs=2, callbacks=[save], num_sanity_val_steps=1, **quiet, **options)


def loader(count=8):
    return torch.utils.data.DataLoader(examples(count), batch_size=2)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_that_is_resumed_ends_where_the_whole_one_does(setting, tmp_path):
    checkpointing = setting == "gradient checkpointing"
    whole, trainer = Language(0, checkpointing=checkpointing), trainer_for(tmp_path / "a", **SETTINGS[setting])
    trainer.fit(whole, loader(), loader(4))
    again, second = Language(1, checkpointing=checkpointing), trainer_for(tmp_path / "b", **SETTINGS[setting])
    second.fit(again, loader(), loader(4), ckpt_path=str(tmp_path / "a" / "epoch=0.ckpt"))
    assert not differences(whole, again) and same_state(trainer.optimizers[0], second.optimizers[0])
    assert again.losses == whole.losses[4:] and sum(whole.losses[4:]) < sum(whole.losses[:4])
    assert trainer.validate(whole, loader(4), verbose=False) == second.validate(again, loader(4), verbose=False)


def test_a_module_that_is_quantized_too_late_is_refused_on_resume(tmp_path):
    """In `configure_optimizers` Lightning has already restored the weights: into a dense model, with rounding."""
    trainer_for(tmp_path).fit(Language(0, early=False), loader(), loader(4))
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.model\.layers\.0"):
        late = Language(1, early=False)
        trainer_for(tmp_path / "b").fit(late, loader(), loader(4), ckpt_path=str(tmp_path / "epoch=0.ckpt"))


def test_averaging_callbacks_of_torchs_kind_are_refused(tmp_path):
    callback = lightning.pytorch.callbacks.WeightAveraging(avg_fn=swa_utils.get_ema_avg_fn(0.9))
    trainer = trainer_for(tmp_path)
    trainer.callbacks.append(callback)
    with pytest.raises(RuntimeError, match=r"masterless.AveragedModel"):
        trainer.fit(Language(), loader())
