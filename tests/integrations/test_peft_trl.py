"""peft on a quantized frozen base, and trl's SFTTrainer."""

import copy

import peft
import pytest
import torch
import trl
from datasets import Dataset
from test_trainer import SETTINGS, arguments, losses
from tiny import IDS, differences, examples, llama, same_state
from transformers import Trainer

import masterless as ml

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.0}


def with_adapters(seed=0, format="int4"):
    model = llama(seed)
    ml.quantize_(model, format)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def adapters(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def peft_trainer(model, folder, **options):
    optimizer = (ml.AdamW, {"lr": 1e-2, "exp_avg": "int8", "exp_avg_sq": "log8"})
    data = {"train_dataset": examples(), "eval_dataset": examples(4, seed=1)}
    return Trainer(
        model, arguments(folder, label_names=["labels"], **options), **data, optimizer_cls_and_kwargs=optimizer
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_adapters_on_a_quantized_base_train_and_resume_to_the_bit(setting, tmp_path):
    model = with_adapters()
    if setting == "gradient checkpointing":
        model.enable_input_require_grads()
    base = copy.deepcopy(model)
    whole = peft_trainer(model, tmp_path / "whole", **SETTINGS[setting])
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0]
    assert set(differences(model, base)) == set(adapters(model)), "the base has not moved, all adapters have"
    other = with_adapters()
    if setting == "gradient checkpointing":
        other.enable_input_require_grads()
    resumed = peft_trainer(other, tmp_path / "resumed", **SETTINGS[setting])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert not differences(model, other) and same_state(whole.optimizer, resumed.optimizer)
    assert resumed.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]


def test_the_adapters_of_a_peft_model_are_left_alone():
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(**{**LORA, "r": 64}))
    optimizer = ml.prepare(model, "1-byte-int4", lr=1e-2)
    report = optimizer.quantization_report
    assert len(report.quantized) == 14 and not any("lora_" in d.name for d in report.quantized)
    left = {d.name: d.reason for d in report.left}
    assert all(left[name].startswith("adapter") for name in adapters(model))
    included = peft.get_peft_model(llama(), peft.LoraConfig(**{**LORA, "r": 64}))
    assert len(ml.quantize_(included, "int4", include=["*lora_*"]).quantized) > 14


def test_adapters_are_saved_alone_and_come_back(tmp_path):
    model = with_adapters()
    with torch.no_grad():
        for p in adapters(model).values():
            p.add_(0.01)
    model.save_pretrained(tmp_path)
    base = llama()
    ml.quantize_(base, "int4")
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


# --- trl --------------------------------------------------------------------------------------------------------


def sft(model, folder, **options):
    rows = [{"input_ids": example["input_ids"].tolist()} for example in examples()]
    data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:4])}
    common = arguments(folder, **options).to_dict()
    keep = {k: v for k, v in common.items() if k in SFT_OPTIONS}
    config = trl.SFTConfig(**keep, dataset_kwargs={"skip_prepare_dataset": True}, max_length=32, packing=False)
    optimizer = (ml.AdamW, {"lr": 1e-2, "exp_avg": "int8", "exp_avg_sq": "log8"})
    return trl.SFTTrainer(model, config, **data, processing_class=tokenizer(), optimizer_cls_and_kwargs=optimizer)


SFT_OPTIONS = (
    *("output_dir", "use_cpu", "report_to", "disable_tqdm", "logging_steps", "learning_rate", "max_steps"),
    *("per_device_train_batch_size", "save_steps", "eval_strategy", "eval_steps", "max_grad_norm"),
    *("gradient_accumulation_steps", "bf16", "gradient_checkpointing"),
)


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(128)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1", pad_token="0", unk_token="0")


@pytest.mark.parametrize("setting", SETTINGS)
def test_sft_trainer_trains_and_resumes_to_the_bit(setting, tmp_path):
    def quantized(seed):
        model = llama(seed)
        ml.quantize_(model, "int4+4")
        return model

    whole = sft(quantized(0), tmp_path / "whole", **SETTINGS[setting])
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0]
    resumed = sft(quantized(1), tmp_path / "resumed", **SETTINGS[setting])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert not differences(whole.model, resumed.model) and same_state(whole.optimizer, resumed.optimizer)
    assert resumed.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
