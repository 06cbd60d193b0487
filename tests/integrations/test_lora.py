"""LoRA: adapters merged into a quantized base with the rounding stated, and extracted after full training."""

import copy

import peft
import pytest
import torch
from test_peft import adapters
from tiny import IDS, differences, examples, gpt2, llama
from tools import LORA, quantized, with_adapters

import masterless as ml
from masterless.integrations.lora import extract_lora, merge_lora_


def trained_adapters(format="int4+4", size=0.05, **options):
    model = with_adapters(format=format, **options)
    with torch.no_grad():
        for name, p in adapters(model).items():
            if "lora_B" in name:
                p.normal_(0.0, size, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("format", ["int8", "int4+4", "int4", "fp8", "int4+32", "int8:tensor"])
def test_merging_is_the_sum_rounded_once_and_says_what_it_lost(format):
    model = trained_adapters(format)
    before = copy.deepcopy(model)
    base = before.base_model.model
    merged, report = merge_lora_(model)
    assert type(merged) is type(llama()) and not adapters(merged) and len(report.merged) == 6
    for entry in report.merged:
        layer = base.get_submodule(entry.name.removesuffix(".weight"))
        old, delta = layer.base_layer.weight, layer.get_delta_weight("default")
        new = merged.get_parameter(entry.name)
        assert new.format == old.format and entry.format == str(old.format)
        true = old.detach().stored.decode() + delta
        quantum = (true.abs().amax() / (7 if "int4" in format else 127 if "int8" in format else 14)).item()
        held = new.detach().stored.decode()
        assert (held - true).abs().max() <= {"int4+4": 1 / 16, "int4+32": 0.0}.get(format, 0.55) * quantum * 1.07
        lost = (new.detach().dequantize() - old.detach().dequantize() - delta).norm() / delta.norm()
        assert entry.lost == pytest.approx(lost.item(), rel=1e-4) and f"{100 * entry.lost:.1f}%" in str(report)
    untouched = {name for name, p in merged.named_parameters()} - {entry.name for entry in report.merged}
    plain = {name: p for name, p in quantized(format=format).named_parameters()}
    for name in untouched:
        own = merged.get_parameter(name)
        assert torch.equal(own.detach() + 0.0, plain[name].detach() + 0.0)


def test_a_finer_format_loses_less_and_a_block_keeps_its_scale():
    lost = {}
    for format in (None, "int8", "int4+32"):
        model = trained_adapters("int4", size=0.002)
        expected = logits(model)
        merged, report = merge_lora_(model, format)
        lost[format] = sum(entry.lost for entry in report.merged) / len(report.merged)
        if format == "int8":
            assert (logits(merged) - expected).abs().max() < 0.1 * expected.abs().max()
    assert lost["int8"] < 0.5 * lost[None], lost
    zero = trained_adapters("int4", size=0.0)
    merged, report = merge_lora_(zero)
    assert not differences(merged, quantized(format="int4")) and all(entry.lost == 0.0 for entry in report.merged)


def test_what_cannot_be_merged_is_refused_before_anything_changes():
    dora = quantized(format="int8")
    dora = peft.get_peft_model(dora, peft.LoraConfig(**LORA, use_dora=True))
    before = copy.deepcopy(dora)
    with pytest.raises(ValueError, match=r"DoRA or a bias.*nothing was changed"):
        merge_lora_(dora)
    assert not differences(dora, before)
    with pytest.raises(ValueError, match="has no LoRA adapters"):
        merge_lora_(quantized(format="int8"))


def test_dense_layers_are_merged_as_peft_does():
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(**LORA))
    with torch.no_grad():
        for p in adapters(model).values():
            p.add_(0.01)
    theirs = copy.deepcopy(model).merge_and_unload()
    ours, report = merge_lora_(model)
    assert not differences(ours, theirs) and {entry.format for entry in report.merged} == {None}


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("format", ["int8", None])
def test_a_full_training_becomes_an_adapter(make, format, tmp_path):
    base = make()
    if format:
        ml.quantize_(base, format)
    trained = copy.deepcopy(base)
    linear = [
        (n, p) for n, p in trained.named_parameters() if n.endswith("proj.weight") or (".c_" in n and p.dim() > 1)
    ]
    optimizer = ml.AdamW(linear, lr=3e-3, exp_avg="int8", exp_avg_sq="log8")
    for example in examples(8):
        trained(**{name: value[None] for name, value in example.items()}).loss.backward()
        optimizer.step()
        trained.zero_grad()
    errors = []
    for rank in (2, 64):
        adapted, report = extract_lora(trained, copy.deepcopy(base), rank)
        assert len(report.extracted) == len(linear) and not report.left
        errors.append((logits(adapted) - logits(trained)).abs().max().item())
    distance = (logits(base) - logits(trained)).abs().max().item()
    assert errors[1] < 1e-3 * distance < errors[0] < distance, "rank 64 is all there is"
    assert all(entry.kept > 0.999 for entry in report.extracted) and "kept 100.0%" in str(report)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.equal(logits(again), logits(adapted))


def test_what_is_no_matrix_is_listed():
    base, trained = llama(), llama()
    with torch.no_grad():
        trained.model.norm.weight.add_(0.1)
    with pytest.raises(ValueError, match="nothing to extract"):
        extract_lora(trained, base, 4)
    with torch.no_grad():
        trained.model.layers[0].self_attn.q_proj.weight.add_(0.1)
    with pytest.warns(UserWarning, match=r"1 parameters differ .*model\.norm\.weight"):
        _, report = extract_lora(trained, base, 4)
    assert report.left == ["model.norm.weight"] and report.extracted[0].kept == pytest.approx(1.0)
    with pytest.raises(ValueError, match="rank=0"):
        extract_lora(trained, llama(), 0)
    with pytest.raises(ValueError, match="in one of the two models only"):
        extract_lora(trained, gpt2(), 4)


def test_a_merge_is_not_hidden_by_decoded_weights_that_are_kept():
    model, plain = trained_adapters(), trained_adapters()
    assert ml.cache_decoded_(model, "10MB").cached
    before = logits(model)
    merged = merge_lora_(model)[0]
    expected = logits(merge_lora_(plain)[0])
    assert torch.equal(logits(merged), expected) and not torch.equal(before, expected)
