"""Lightning: what would be inexact is refused (training and resuming are in test_matrix)."""

import lightning
import pytest
from tiny import examples
from tools import Language, held_out, lightning_trainer, loader
from torch.optim import swa_utils


def test_a_module_that_is_quantized_too_late_is_refused_on_resume(tmp_path):
    """In `configure_optimizers` Lightning has already restored the weights: into a dense model, with rounding."""
    lightning_trainer(tmp_path).fit(Language(0, early=False), loader(examples(8)), loader(held_out()))
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.model\.layers\.0"):
        late = Language(1, early=False)
        lightning_trainer(tmp_path / "b").fit(
            late, loader(examples(8)), loader(held_out()), ckpt_path=str(tmp_path / "epoch=0.ckpt")
        )


def test_averaging_callbacks_of_torchs_kind_are_refused(tmp_path):
    callback = lightning.pytorch.callbacks.WeightAveraging(avg_fn=swa_utils.get_ema_avg_fn(0.9))
    trainer = lightning_trainer(tmp_path)
    trainer.callbacks.append(callback)
    with pytest.raises(RuntimeError, match=r"masterless.AveragedModel"):
        trainer.fit(Language(), loader(examples(8)))
