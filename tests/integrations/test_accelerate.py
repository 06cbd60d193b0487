"""accelerate: save_model and its readers, and what is refused (its loop is in test_matrix)."""

import copy

import accelerate
import pytest
from tiny import differences, llama
from tools import quantized


def test_save_model_and_its_readers(tmp_path):
    accelerate.state.AcceleratorState._reset_state(True)
    model, accelerator = quantized(), accelerate.Accelerator(cpu=True)
    accelerator.save_model(model, str(tmp_path))
    other = quantized(1)
    accelerate.load_checkpoint_in_model(other, str(tmp_path))
    assert not differences(model, other)
    for wrong, message in ((quantized(1, format="int8"), "'int8:row'"), (llama(1), "size mismatch|shape")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            accelerate.load_checkpoint_in_model(wrong, str(tmp_path))


def test_offloading_is_refused_with_the_reason(tmp_path):
    for offload in (accelerate.cpu_offload, lambda model: accelerate.disk_offload(model, str(tmp_path))):
        with pytest.raises(TypeError, match=r"accelerate's cpu_offload and disk_offload.*leave the model"):
            offload(copy.deepcopy(quantized()))
