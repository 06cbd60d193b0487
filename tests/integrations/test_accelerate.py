"""accelerate: its loop, its files, to the bit."""

import copy

import accelerate
import pytest
import torch
from tiny import IDS, differences, examples, llama, same_state

import masterless as ml

SETTINGS = {
    "plain": {},
    "clip": {"clip": 0.05},
    "accumulate": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "gradient checkpointing": {"checkpointing": True},
}


def quantized(seed=0, format="int4+4"):
    model = llama(seed)
    ml.quantize_(model, format)
    return model


def run(folder, steps, start=0, seed=0, clip=None, checkpointing=False, **options):
    """Trains; saves everything before step 4, or starts from what is saved. Returns model, optimizer and losses."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = quantized(seed)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    model, optimizer = accelerator.prepare(model, ml.AdamW(model.named_parameters(), lr=1e-2))
    if start:
        accelerator.load_state(folder)
    losses = []
    for step, example in enumerate(examples(2) * (steps // 2)):
        if step < start:
            continue
        if step == 4 and not start:
            accelerator.save_state(folder)
        with accelerator.accumulate(model):
            loss = model(**{name: value[None] for name, value in example.items()}).loss
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = accelerator.unwrap_model(model).eval()(IDS).logits
    return accelerator.unwrap_model(model), optimizer.optimizer, losses, evaluated


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_that_is_resumed_ends_where_the_whole_one_does(setting, tmp_path):
    model, optimizer, losses, logits = run(str(tmp_path), 8, **SETTINGS[setting])
    again, other, later, same = run(str(tmp_path), 8, start=4, seed=1, **SETTINGS[setting])
    assert later == losses[4:] and not differences(model, again) and same_state(optimizer, other)
    assert torch.equal(logits, same) and sum(losses[4:]) < sum(losses[:4])


def test_save_model_and_its_readers(tmp_path):
    accelerate.state.AcceleratorState._reset_state(True)
    model, accelerator = quantized(), accelerate.Accelerator(cpu=True)
    accelerator.save_model(model, str(tmp_path))
    other = quantized(1)
    accelerate.load_checkpoint_in_model(other, str(tmp_path))
    assert not differences(model, other)
    for wrong, message in ((quantized(1, "int8"), "'int8:row'"), (llama(1), "size mismatch|shape")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            accelerate.load_checkpoint_in_model(wrong, str(tmp_path))


def test_offloading_is_refused_with_the_reason(tmp_path):
    for offload in (accelerate.cpu_offload, lambda model: accelerate.disk_offload(model, str(tmp_path))):
        with pytest.raises(TypeError, match=r"accelerate's cpu_offload and disk_offload.*leave the model"):
            offload(copy.deepcopy(quantized()))
