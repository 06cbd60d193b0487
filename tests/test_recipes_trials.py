"""Trials of the study of recipes: each changes what it says and nothing else."""

import pytest
import torch
from benchmarks.recipes import groups, trainer, trials
from benchmarks.recipes.recipe import Job, Setting, recipe
from benchmarks.recipes.trials import LINEAR, NF4, RATIOS, TRIALS

TINY = Setting("tiny", 2)


@pytest.fixture
def weights():
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


def test_a_rotation_is_its_own_inverse_and_keeps_lengths(weights):
    turned = trials.rotated(weights)
    assert (turned - weights).abs().max() > 0.5
    torch.testing.assert_close(trials.rotated(turned), weights)
    torch.testing.assert_close(turned.norm(dim=1), weights.norm(dim=1))


def test_the_gradient_of_rotated_weights_is_that_of_what_is_shown(weights):
    stored = weights.clone().requires_grad_()
    shown = trials.rotated(stored)
    (shown.square().sum() / 2).backward()
    torch.testing.assert_close(TRIALS["rotated"].gradient(shown.detach()), stored.grad)


@pytest.mark.parametrize(("levels", "ratios"), [(LINEAR, (1.0,)), (NF4, (1.0,)), (LINEAR, RATIOS)])
def test_what_is_shown_has_few_levels_in_every_group(weights, levels, ratios):
    shown = trials.coarse(weights, levels, ratios=ratios).reshape(-1, 128)
    assert all(len(group.unique()) <= len(levels) for group in shown)


def test_least_squares_never_errs_more_than_the_peak(weights):
    def errors(ratios):
        return (trials.coarse(weights, ratios=ratios) - weights).reshape(-1, 128).square().sum(1)

    assert (errors(RATIOS) <= errors((1.0,))).all()
    assert errors(RATIOS).sum() < 0.9 * errors((1.0,)).sum()


def test_tiles_keep_their_means_and_products_of_rows_and_columns(weights):
    v = weights.square()
    tiled = trials.in_tiles(v, 16)
    for dim in (1, 3):
        own, means = (x.view(4, 16, 16, 16).mean(dim) for x in (v, tiled))
        torch.testing.assert_close(means, own)
    product = torch.rand(64, 1) @ torch.rand(1, 256)
    torch.testing.assert_close(trials.in_tiles(product, 1 << 20), product)


@pytest.mark.parametrize("levels", [LINEAR, NF4])
def test_a_dithered_momentum_is_right_on_average(levels):
    u = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    draws = torch.stack([trials.dithered(u, levels, step) for step in range(400)])
    # The largest gap of the levels is 0.3 of a peak of about 3: a deviation of 0.45 / sqrt(400) = 0.023 at most.
    assert (draws.mean(0) - u).abs().max() < 6 * 0.023
    assert (trials.dithered(u, levels, 0) != u).any()


def test_what_rounding_takes_from_the_momentum_goes_to_the_weight():
    w, u = torch.randn(8, 128), torch.randn(8, 128) * 0.01
    theta = w - 9 * u
    state = {"exp_avg": u.clone()}
    TRIALS["4-bit m, its error to the weight"].after(w, state, 0.9, 1)
    assert not torch.equal(state["exp_avg"], u)
    torch.testing.assert_close(w - 9 * state["exp_avg"], theta)


def test_a_second_moment_remembers_every_fourth_step_after_a_sixth_of_the_run():
    stores = TRIALS["v stored every fourth step"].stores_second
    assert [step for step in range(30) if stores(step, 30)] == [0, 1, 2, 3, 4, 8, 12, 16, 20, 24, 28]


@pytest.mark.parametrize("chosen", groups.ideas(), ids=lambda r: r.label)
def test_every_trial_runs_and_changes_the_run(chosen):
    plain = recipe("", beta1=chosen.beta1, **{k: v for k, v in chosen.options.items() if k == "moment_units"})

    def loss(r):
        job = Job(r, TINY, 1e-2)
        return trainer.train(job, compiled=False, windows=8, checkpoints=None)["loss"]

    found = loss(chosen)
    assert found == loss(chosen)
    assert found != loss(plain)
