"""``masterless train`` on a user's text of 20 MB: interrupted or killed, and resumed to the bit."""

import json
import random
import signal
import sysconfig
from pathlib import Path

import pytest
from train_runs import TINY, differences, interrupt, run

from masterless.lab.train.corpus import text_corpus

SIZE, STEPS = 20_000_000, 120


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Modules of the standard library, in any order and over again."""
    modules = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    source, content = random.Random(0), bytearray()
    while len(content) < SIZE:
        content += source.choice(modules)
    path = tmp_path_factory.mktemp("text") / "large.txt"
    path.write_bytes(content[:SIZE])
    return path


@pytest.fixture(scope="module")
def flags(text):
    return ["--data", text, "--preset", "2-byte-int4", "--steps", STEPS, "--eval-every", 20, "--save-every", 9, *TINY]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, flags):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run("train", *flags, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return out


def test_every_byte_of_it_is_used(text):
    corpus = text_corpus(text)
    assert len(corpus.train) + len(corpus.validation) == SIZE + 1  # and the end of the document
    assert len(corpus.validation) == pytest.approx(0.08 * SIZE, rel=1e-4)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_run_resumes_to_the_bit(number, code, whole, flags, tmp_path):
    out = tmp_path / "run"
    stopped, _, err = interrupt(number, "train", *flags, "--out", out, "--json")
    assert stopped == code, err
    saved = json.loads((out / "checkpoints" / "manifest.json").read_text())["checkpoints"][-1]["step"]
    assert 0 < saved < STEPS
    if number == signal.SIGKILL:  # Ctrl-C saves where it is, a killed process cannot
        assert saved % 9 == 0
    done = run("train", "--resume", out)
    assert done.returncode == 0 and f"resumed at step {saved}" in done.stdout, done.stderr
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert differences(out, whole, STEPS) == []
