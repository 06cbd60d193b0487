"""One short training in each tool: what is trained, where it is saved, how it is read back and evaluated.

Every run goes over the same four steps (Lightning: two epochs of two), saves after the second and at its end, and can
start from the middle's checkpoint with other initial weights.
"""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import lightning
import peft
import torch
import trl
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_model
from tiny import examples, llama, tokenizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import masterless as ml

FORMAT = "int4+4"
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.0}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "exp_avg": "int8", "exp_avg_sq": "log8"}
SETTINGS = ("plain", "clip", "accumulate", "bf16", "gradient checkpointing")
COLUMNS = ("train", *SETTINGS[1:], "save", "resume to the bit", "evaluate")


@dataclass
class Run:
    """What a training came to."""

    model: torch.nn.Module
    optimizer: Any
    losses: list[float]
    evaluated: float
    folder: Path
    read: Callable[[], torch.nn.Module] = field(repr=False)  # a fresh model from the last checkpoint


def quantized(seed=0, format=FORMAT):
    model = llama(seed)
    ml.quantize_(model, format)
    return model


def held_out():
    return examples(4, seed=1)


# --- transformers, and what is built on its Trainer -----------------------------------------------------------------

TRAINER = {
    "plain": {},
    "clip": {"max_grad_norm": 0.05},
    "accumulate": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "bf16": {"bf16": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


def arguments(folder, kind=TrainingArguments, **options):
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2}
    run = {"max_steps": 4, "per_device_train_batch_size": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    return kind(output_dir=str(folder), **{**fixed, **run, **options})


def logged_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _run_trainer(trainer, folder, middle, read):
    trainer.train(resume_from_checkpoint=middle and str(middle / "checkpoint-2"))
    evaluated = trainer.evaluate()["eval_loss"]
    return Run(trainer.model, trainer.optimizer, logged_losses(trainer), evaluated, folder, read)


def run_trainer(setting, folder, seed=0, middle=None):
    model = quantized(seed)
    data = {"train_dataset": examples(), "eval_dataset": held_out()}
    options = arguments(folder, **TRAINER[setting])
    trainer = Trainer(model, options, **data, optimizer_cls_and_kwargs=(ml.AdamW, ADAMW))
    return _run_trainer(trainer, folder, middle, lambda: type(model).from_pretrained(folder / "checkpoint-4"))


def with_adapters(seed=0, format="int4"):
    model = llama(0)
    ml.quantize_(model, format)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def run_peft(setting, folder, seed=0, middle=None):
    """Adapters on a frozen base; another seed is another start of the adapters."""
    model = with_adapters(seed)
    if setting == "gradient checkpointing":
        model.enable_input_require_grads()
    data = {"train_dataset": examples(), "eval_dataset": held_out()}
    options = arguments(folder, label_names=["labels"], **TRAINER[setting])
    trainer = Trainer(model, options, **data, optimizer_cls_and_kwargs=(ml.AdamW, ADAMW))

    def read():
        base = llama(0)
        ml.quantize_(base, "int4")
        return peft.PeftModel.from_pretrained(base, folder / "checkpoint-4", is_trainable=True)

    return _run_trainer(trainer, folder, middle, read)


def run_sft(setting, folder, seed=0, middle=None):
    model = quantized(seed)
    rows = [{"input_ids": example["input_ids"].tolist()} for example in examples()]
    held = [{"input_ids": example["input_ids"].tolist()} for example in held_out()]
    data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(held)}
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": 32, "packing": False}
    quiet = {"bf16": False, "gradient_checkpointing": False}  # SFTConfig has them on
    options = arguments(folder, trl.SFTConfig, **prepared, **{**quiet, **TRAINER[setting]})
    choice = {"processing_class": tokenizer(), "optimizer_cls_and_kwargs": (ml.AdamW, ADAMW)}
    trainer = trl.SFTTrainer(model, options, **data, **choice)
    return _run_trainer(trainer, folder, middle, lambda: type(model).from_pretrained(folder / "checkpoint-4"))


# --- accelerate -----------------------------------------------------------------------------------------------------


def run_accelerate(setting, folder, seed=0, middle=None):
    accelerate.state.AcceleratorState._reset_state(True)
    chosen = {"accumulate": {"gradient_accumulation_steps": 2}, "bf16": {"mixed_precision": "bf16"}}
    accelerator = accelerate.Accelerator(cpu=True, **chosen.get(setting, {}))
    model = quantized(seed)
    if setting == "gradient checkpointing":
        model.gradient_checkpointing_enable()
        model.train()
    model, optimizer = accelerator.prepare(model, ml.AdamW(model.named_parameters(), lr=1e-2))
    if middle is not None:
        accelerator.load_state(str(middle / "middle"))
    losses = []
    for step, example in enumerate(examples(2) * 4):
        if step < 4 and middle is not None:
            continue
        if step == 4 and middle is None:
            accelerator.save_state(str(folder / "middle"))
        with accelerator.accumulate(model):
            loss = model(**{name: value[None] for name, value in example.items()}).loss
            accelerator.backward(loss)
            if setting == "clip" and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(str(folder / "end"))
    plain = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        rows = torch.stack([example["input_ids"] for example in held_out()])
        evaluated = model(input_ids=rows, labels=rows).loss.item()

    def read():
        other = quantized(7)
        load_model(other, folder / "end" / "model.safetensors")
        return other

    return Run(plain, optimizer.optimizer, losses, evaluated, folder, read)


# --- Lightning ------------------------------------------------------------------------------------------------------


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
            ml.quantize_(self, FORMAT)

    def configure_optimizers(self):
        return ml.prepare(self, "2-byte-int4", lr=3e-3)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.model(**batch).loss, on_step=False, on_epoch=True)


def lightning_trainer(folder, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    save = ModelCheckpoint(dirpath=folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    return lightning.Trainer(max_epochs=2, callbacks=[save], num_sanity_val_steps=1, **quiet, **options)


def loader(rows):
    return DataLoader(rows, batch_size=2)


def run_lightning(setting, folder, seed=0, middle=None):
    chosen = {"clip": {"gradient_clip_val": 0.05}, "accumulate": {"accumulate_grad_batches": 2}}
    chosen["bf16"] = {"precision": "bf16-mixed"}
    module = Language(seed, checkpointing=setting == "gradient checkpointing")
    trainer = lightning_trainer(folder, **chosen.get(setting, {}))
    trainer.fit(module, loader(examples(8)), loader(held_out()), ckpt_path=middle and str(middle / "epoch=0.ckpt"))
    (evaluated,) = trainer.validate(module, loader(held_out()), verbose=False)

    def read():
        other = Language(7)
        other.configure_model()
        other.load_state_dict(torch.load(folder / "epoch=1.ckpt", weights_only=False)["state_dict"])
        return other

    return Run(module, trainer.optimizers[0], module.losses, evaluated["val"], folder, read)


TOOLS = {
    "Trainer": run_trainer,
    "accelerate": run_accelerate,
    "Lightning": run_lightning,
    "peft": run_peft,
    "trl": run_sft,
}


@functools.cache
def whole(tool, setting):
    """A training from its beginning to its end; made once."""
    return TOOLS[tool](setting, Path(tempfile.mkdtemp(prefix=f"{tool}-")))


@functools.cache
def resumed(tool, setting):
    """The second half of the same training, in a model that started from other weights."""
    return TOOLS[tool](setting, Path(tempfile.mkdtemp(prefix=f"{tool}-")), 1, whole(tool, setting).folder)
