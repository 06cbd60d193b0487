"""peft: adapters stay as they are, a frozen base stays where it is (training is in test_matrix)."""

import copy

import peft
import torch
from tiny import IDS, differences, examples, llama
from tools import LORA, with_adapters

import masterless as ml


def adapters(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


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


def test_the_base_stays_and_all_adapters_move():
    model = with_adapters()
    before = copy.deepcopy(model)
    optimizer = ml.AdamW(model.named_parameters(), lr=1e-2, exp_avg="int8", exp_avg_sq="log8")
    for example in examples(2):
        model(**{name: value[None] for name, value in example.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(differences(model, before)) == set(adapters(model))
