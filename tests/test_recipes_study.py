"""The study of recipes: keys, rows that survive a kill, the plan of a sweep, paired gaps, and runs that resume."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.recipes import analysis, figure, groups, recipe, texts, trainer  # noqa: E402
from benchmarks.recipes.plan import Cell, belongs, missing  # noqa: E402
from benchmarks.recipes.recipe import Job, Setting  # noqa: E402
from benchmarks.recipes.store import Store  # noqa: E402
from benchmarks.recipes.workers import work  # noqa: E402

import masterless as ml  # noqa: E402

TINY = Setting("tiny", 1, batch_tokens=384)  # 24 steps
TWO_BYTES = recipe.recipe("two bytes", "int8", "int4", "log4")
FP32 = recipe.recipe("fp32")


def row(job, loss):
    return {"key": job.key, "loss": loss, "bytes_per_parameter": 1.0, "text": "t", **job.described()}


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_covers_what_changes_the_result_and_no_label():
    job = Job(TWO_BYTES, TINY, 1e-2)
    changes = [{"lr": 2e-2}, {"seed": 1}, {"order": 1}, {"dither": 1}, {"setting": replace(TINY, batch_tokens=4096)}]
    changes += [{"recipe": recipe.recipe("two bytes", "int8", "int4", "log2")}]
    assert len({job.key, *(job.at(**change).key for change in changes)}) == 1 + len(changes)
    assert job.at(recipe=replace(TWO_BYTES, label="another name")).key == job.key


def test_only_runs_that_inject_or_use_log_codes_depend_on_the_meaning_of_the_library(monkeypatch):
    dependent = [TWO_BYTES, recipe.recipe("", "int8"), recipe.recipe("", v="log2"), recipe.recipe("", "int4+4")]
    independent = [
        FP32,
        recipe.recipe("", "int4+32"),
        recipe.recipe("", "int4+32:64"),
        recipe.recipe("", "int8", error_compensation=False),
        recipe.recipe("", "int8", "none", "factored", 0.0),
        recipe.recipe("", m="int2", beta1=0.53),
    ]
    before = [Job(r, TINY, 1e-2).key for r in (*dependent, *independent)]
    monkeypatch.setattr(recipe, "SPEC", "another")
    monkeypatch.setattr(recipe, "CARRIED", "still another")
    after = [Job(r, TINY, 1e-2).key for r in (*dependent, *independent)]
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [False] * len(dependent) + [True] * len(independent)


def test_only_a_momentum_that_is_carried_over_has_the_newest_meaning():
    assert TWO_BYTES.spec == recipe.CARRIED
    assert recipe.recipe("", "int4", "int4", "log2", weight_rounding="nearest").spec == recipe.PAID_BACK
    assert recipe.recipe("", "int8", "int4", "factored").spec == recipe.recipe("", v="log2").spec == recipe.SPEC


def test_a_row_read_back_belongs_to_its_cell():
    cell = Cell("g", TWO_BYTES, TINY)
    stored = json.loads(json.dumps(row(cell.job(1e-2, 1).at(dither=7), 2.0), default=list))
    assert belongs(cell, stored)
    assert not belongs(replace(cell, setting=replace(TINY, corpus="prose")), stored)


@pytest.mark.filterwarnings("ignore::masterless.LossyUpdateWarning")  # naive baselines are meant
def test_the_library_accepts_every_recipe_of_the_study():
    for chosen in {str(c.recipe): c.recipe for c in groups.cells()}.values():
        model = torch.nn.Sequential(torch.nn.Embedding(9, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 9))
        if chosen.weights:
            ml.quantize_(model, chosen.weights)
        found = trainer.optimizers(Job(chosen, TINY, 1e-2), model)
        assert [type(o) for o in found] == {"muon": [ml.Muon, ml.AdamW], "lion": [ml.Lion]}.get(
            chosen.optimizer, [ml.AdamW]
        )
        assert 0.9 < chosen.bytes_per_parameter <= 13.1, chosen.label


def test_labels_name_one_recipe_each():
    found = {}
    for cell in groups.cells():
        key = Job(cell.recipe, TINY, 1e-2).key
        assert found.setdefault((cell.group, cell.recipe.label), key) == key, cell.recipe.label


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_kept_once_and_a_torn_line_is_harmless(tmp_path):
    store = Store(tmp_path)
    first, second = (row(Job(FP32, TINY, 1e-2, seed), 2.0) for seed in (0, 1))
    assert store.add("g", first) and not store.add("g", first)
    with (tmp_path / "g.jsonl").open("a") as file:
        file.write('{"key": "cut sho')
    assert set(store.rows()) == {first["key"]}
    assert store.add("g", second)
    assert set(store.rows()) == {first["key"], second["key"]}


def test_processes_that_write_at_once_lose_no_row(tmp_path):
    script = (
        "import sys; from pathlib import Path; from benchmarks.recipes.store import Store\n"
        "for i in range(40): Store(Path(sys.argv[1])).add('g', {'key': f'{sys.argv[2]}-{i}', 'curve': [0.5] * 500})"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, tmp_path, name], cwd=ROOT) for name in "ab"]
    assert [process.wait() for process in started] == [0, 0]
    assert len(Store(tmp_path).rows()) == 80
    assert all(json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines())


def test_a_killed_process_lets_go_of_its_claim(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from benchmarks.recipes.store import Store\n"
        "with Store(Path(sys.argv[1])).claim('k') as mine: print(mine, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"True\n"
        with Store(tmp_path).claim("k") as mine:
            assert not mine
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with Store(tmp_path).claim("k") as mine:
        assert mine


# --- the plan ---------------------------------------------------------------------------------------------------------


def finished(cells, loss):
    """Rows of all that a plan asks for until it asks for nothing."""
    rows = {}
    while jobs := [job for _, job in missing(cells, rows)]:
        rows |= {job.key: row(job, loss(job)) for job in jobs}
    return rows


def test_a_sweep_grows_until_its_best_has_neighbours_then_the_other_seeds_follow():
    cell = Cell("g", FP32, TINY, sweep=(0,), lrs=(1e-3, 2e-3, 4e-3))
    rows = finished([cell], lambda job: 2 + abs(math.log2(job.lr / 8e-3)))
    assert sorted({r["lr"] for r in rows.values()}) == [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    assert sorted(r["lr"] for r in rows.values() if r["seed"] > 0) == [8e-3, 8e-3]
    assert cell.swept(rows)[2] == 8e-3


def test_a_sweep_ends_even_where_more_is_always_better():
    rows = finished([Cell("g", FP32, TINY, lrs=(1e-3, 2e-3))], lambda job: -job.lr)
    assert max(r["lr"] for r in rows.values()) == 8e-3


def test_a_costly_sweep_stays_where_it_was_told_to_and_counts_as_unfinished():
    cell = Cell("g", FP32, TINY, sweep=(0,), seeds=(0, 1), lrs=(1e-2, 2e-2), growth=0)
    rows = {job.key: row(job, job.lr) for job in (cell.job(lr) for lr in (1e-2, 2e-2))}
    assert cell.swept(rows) == ([1e-2, 2e-2], [], 1e-2), "the best is at an end, and no other rate is asked for"
    assert [(job.lr, job.seed) for job in cell.missing(rows)] == [(1e-2, 1)]
    rows |= {job.key: row(job, 1.0) for job in cell.missing(rows)}
    assert not analysis.describe(cell, rows).complete


def test_a_diverged_learning_rate_is_never_the_best():
    cell = Cell("g", FP32, TINY, lrs=(1e-3, 2e-3, 4e-3))
    rows = finished([cell], lambda job: None if job.lr > 3e-3 else 2 - job.lr)
    assert cell.swept(rows)[2] == 2e-3


# --- gaps -------------------------------------------------------------------------------------------------------------


def test_gaps_are_paired_by_seed_and_their_errors_are_those_of_the_mean():
    # seeds differ by far more than the recipes: only pairing can see 1%
    seed_effect = {0: 1.0, 1: 2.0, 2: 4.0}
    percent = {0: 0.5, 1: 1.0, 2: 1.5}

    def loss(job):
        best = 1 + abs(math.log2(job.lr / 2e-3))
        worse = 1 + percent[job.seed] / 100 if job.recipe is TWO_BYTES else 1.3 if job.recipe.beta1 == 0.8 else 1
        return seed_effect[job.seed] * best * worse

    chosen = [FP32, recipe.recipe("fp32, b1 .8", beta1=0.8), TWO_BYTES]
    cells = [Cell("g", r, TINY, lrs=(1e-3, 2e-3, 4e-3)) for r in chosen]
    reference, short, two = analysis.summarise(cells, finished(cells, loss))
    assert reference.gap == 0.0 and reference.error is None
    assert short.gap == pytest.approx(30.0)
    assert two.gap == pytest.approx(1.0) and two.seeds == 3 and two.complete
    assert two.own_error == pytest.approx(0.5 / math.sqrt(3))  # standard deviation of .5, 1, 1.5 is .5
    assert two.error == pytest.approx(two.own_error)  # b1 .8 is too far off to be pooled
    assert "+1.00% ± 0.29" in analysis.markdown([two])


def test_the_pooled_deviation_weighs_samples_by_their_degrees_of_freedom():
    # variances 1 (2 degrees) and 8 (1 degree): (2 + 8) / 3
    assert analysis.pooled_deviation([[1.0, 2.0, 3.0], [0.0, 4.0], [9.0]]) == pytest.approx(math.sqrt(10 / 3))
    assert analysis.pooled_deviation([[1.0]]) is None


def test_parts_add_up_to_the_whole_or_the_table_says_by_how_much_not():
    whole = recipe.recipe("whole", "int8", "int4", "log4")
    losses = [1.0, 1.01, 1.02, 1.03, 1.07]  # of fp32, its three parts, and all of them together
    recipes = [FP32, *groups.parts(whole), whole]
    cells = [Cell("g", r, TINY, sweep=(0,), seeds=(0, 1), lrs=(1e-2,), growth=0) for r in recipes]
    jobs = [(cell.job(1e-2, seed), loss) for cell, loss in zip(cells, losses, strict=True) for seed in (0, 1)]
    table = analysis.additivity(cells, {job.key: row(job, loss) for job, loss in jobs}, groups.parts)
    assert table.splitlines()[2:] == ["| whole | +1.00% | +2.00% | +3.00% | +6.00% | +7.00% | +1.00 ± 0.00 |"]
    without = {job.key: row(job, loss) for job, loss in jobs[:-2]}
    assert len(analysis.additivity(cells, without, groups.parts).splitlines()) == 2


def test_rows_of_another_text_are_left_out():
    cell = Cell("g", FP32, TINY, lrs=(1e-3, 2e-3, 4e-3))
    rows = finished([cell], lambda job: 2 + abs(job.lr - 2e-3))
    foreign = {"x": {**next(iter(rows.values())), "key": "x", "text": "another"}}
    assert analysis.of_one_text({**rows, **foreign}) == rows


def test_a_figure_shows_presets_by_name(tmp_path):
    presets = groups.presets()
    cells = [Cell("g", r, groups.SMALL, lrs=(1e-3, 2e-3, 4e-3)) for r in (FP32, *presets)]
    rows = finished(cells, lambda job: 2 + abs(job.lr - 2e-3) + 0.01 * job.seed * (job.recipe in presets))
    drawn = figure.draw(cells, rows, tmp_path / "gap.svg").read_text()
    assert [name for name in ("2-byte", "1-byte-int8", "1-byte-int4") if f"<!-- {name} -->" not in drawn] == []
    assert figure.draw(cells[:1], rows, tmp_path / "none.svg").stat().st_size > 1000


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_text(monkeypatch):
    torch.set_num_threads(1)  # as a worker does; spinning threads would only wait for each other
    generator = torch.Generator().manual_seed(0)
    made = texts.Text(*(torch.randint(97, 105, (n,), generator=generator, dtype=torch.uint8) for n in (20_000, 4_000)))
    monkeypatch.setattr(trainer, "load", lambda corpus: made)
    return made


def test_an_epoch_sees_every_window_once(small_text):
    batch = small_text.order(3, 5)
    windows = (len(small_text.train) - 1) // recipe.SEQ_LEN - 1
    seen = torch.cat([batch(step)[0] for step in range(windows // 5)])
    assert len(torch.unique(seen, dim=0)) == len(seen)
    x, y = batch(0)
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(x, small_text.order(3, 5)(0)[0])
    assert not torch.equal(x, small_text.order(4, 5)(0)[0])


@pytest.mark.parametrize("chosen", [FP32, TWO_BYTES, recipe.recipe("", "int4+32"), recipe.recipe("", "int4+4")])
def test_the_dense_twin_computes_what_the_stored_model_computes(chosen, small_text):
    run = trainer._Run(Job(chosen, TINY, 1e-2), compiled=False, checkpoints=None)
    run.twin.take(run.model)
    batch = small_text.order(0, 4)(0)
    loss = run.twin.loss(*batch)
    loss.backward()
    own = run.model(*batch)[1]
    own.backward()
    torch.testing.assert_close(loss, own, rtol=1e-5, atol=1e-6)  # two orders of the same fp32 sums
    for dense, stored in zip(run.twin.model.parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(dense.grad, stored.grad, rtol=1e-3, atol=1e-5)
        dense.grad = None


def test_a_run_that_was_stopped_goes_on_to_the_same_bit(small_text, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    job = Job(TWO_BYTES, TINY, 1e-2)
    whole = trainer.train(job, compiled=False, checkpoints=None, windows=16)

    def stop(step, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.train(job, compiled=False, checkpoints=tmp_path, progress=stop, windows=16)
    assert list(tmp_path.glob("*.pt"))
    rest = trainer.train(job, compiled=False, checkpoints=tmp_path, windows=16)
    assert rest["loss"] == whole["loss"] and rest["curve"] == whole["curve"]
    assert not list(tmp_path.glob("*.pt"))


def test_chance_is_what_a_job_says_it_is(small_text):
    def loss(chosen, **changes):
        return trainer.train(Job(chosen, TINY, 1e-2).at(**changes), compiled=False, checkpoints=None, windows=16)[
            "loss"
        ]

    assert loss(TWO_BYTES) == loss(TWO_BYTES, order=0, dither=0)
    assert loss(TWO_BYTES) != loss(TWO_BYTES, dither=1)
    assert loss(FP32) == loss(FP32, dither=1)
    assert loss(FP32) != loss(FP32, order=1)


def test_work_stops_and_goes_on_where_it_was(small_text, tmp_path):
    cells = [Cell("g", FP32, TINY, sweep=(0,), seeds=(0, 1), lrs=(1e-2, 2e-2))]
    store, events = Store(tmp_path), []

    def report(event):
        events.append(event["kind"])
        if events.count("row") == 1 and event["kind"] == "start":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(cells, store, report, compiled=False, checkpoints=None, windows=16)
    assert len(store.rows()) == 1
    done = dict(store.rows())
    work(cells, store, lambda event: None, compiled=False, checkpoints=None, windows=16)
    assert done.items() <= store.rows().items() and not list(missing(cells, store.rows()))


def test_a_run_that_diverges_is_a_row_without_a_loss(small_text):
    wild = trainer.train(Job(FP32, TINY, 1e30), compiled=False, checkpoints=None, windows=16)
    assert wild["loss"] is None and json.loads(json.dumps(wild, default=list))["loss"] is None
