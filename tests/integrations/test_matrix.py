"""The matrix of docs/huggingface.md: every tool with everything that a fine-tuner switches on, cell by cell."""

import re
from pathlib import Path

import pytest
import torch
from tiny import differences, held_loss, same_state
from tools import COLUMNS, SETTINGS, TOOLS, resumed, whole

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


@pytest.fixture(autouse=True, scope="module")
def clean():
    yield
    for made in (whole, resumed):
        made.cache_clear()


def assert_resumes(tool, setting):
    a, b = whole(tool, setting), resumed(tool, setting)
    assert not differences(a.model, b.model) and same_state(a.optimizer, b.optimizer)
    assert b.losses == a.losses[-len(b.losses) :] and b.evaluated == a.evaluated


def train(tool):
    losses = whole(tool, "plain").losses
    half = len(losses) // 2
    assert sum(losses[half:]) < sum(losses[:half])


def setting_of(setting):
    def check(tool):
        plain, run = whole(tool, "plain"), whole(tool, setting)
        changed = differences(plain.model, run.model)
        if setting == "gradient checkpointing":
            assert not changed and run.losses == plain.losses, "it computes the same numbers, only later"
            assert any(getattr(module, "gradient_checkpointing", False) for module in run.model.modules())
        else:
            assert changed, "the setting had an effect"
        assert all(torch.isfinite(torch.tensor(run.losses)))
        assert_resumes(tool, setting)

    return check


def save(tool):
    run = whole(tool, "plain")
    assert not differences(run.read(), run.model)


def resume(tool):
    assert_resumes(tool, "plain")


def evaluate(tool):
    run = whole(tool, "plain")
    model = run.model.model if tool == "Lightning" else run.model
    assert run.evaluated == pytest.approx(held_loss(model), rel=1e-6)  # a mean over batches, in another order


CHECKS = {
    "train": train,
    **{setting: setting_of(setting) for setting in SETTINGS[1:]},
    "save": save,
    "resume to the bit": resume,
    "evaluate": evaluate,
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("tool", TOOLS)
def test_cell(tool, column):
    CHECKS[column](tool)


def test_the_table_in_the_documentation_has_these_cells():
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.read_text().splitlines() if "|" in line
    ]
    start = next(i for i, row in enumerate(rows) if tuple(row[1:]) == COLUMNS)
    table = {re.match(r"[\w.]+", row[0])[0]: row[1:] for row in rows[start + 2 : start + 2 + len(TOOLS)]}
    assert list(table) == list(TOOLS) and tuple(CHECKS) == COLUMNS
    assert all(cell.startswith("yes") for cells in table.values() for cell in cells)
