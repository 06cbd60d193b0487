"""``masterless train --decode-cache``: the same run to the bit, interrupted and resumed; what cannot be is refused."""

import signal
import warnings

import pytest
from train_runs import TINY, differences, interrupt, run, write_text

from masterless.lab.cli import app
from masterless.lab.train.config import read_toml


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.mark.parametrize(
    "formats",
    [["--preset", "1-byte-int8", "--trade-last", "0.3"], ["--preset", "2-byte-int4", "--show-hidden", "0.5"]],
    ids=["traded", "hidden bits shown"],
)
def test_a_run_that_keeps_decoded_weights_is_the_same_to_the_bit_also_resumed(formats, text, tmp_path):
    flags = ["--data", text, "--steps", 40, "--eval-every", 8, "--accumulate", 2, "--json", *formats, *TINY]
    plain, out = tmp_path / "plain", tmp_path / "kept"
    done = run("train", "--out", plain, *flags)
    assert done.returncode == 0, done.stderr
    code, _, err = interrupt(signal.SIGINT, "train", "--out", out, *flags, "--decode-cache", "40KB")
    assert code == 130, err
    last = run("train", "--resume", out, "--json")
    assert last.returncode == 0, last.stderr
    assert (out / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
    assert differences(out, plain, 40) == []
    assert read_toml(out / "config.toml")["decode_cache"] == "40KB"
    assert "decode_cache" not in read_toml(plain / "config.toml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode-cache", "much"], "decode-cache=much: is no number of bytes; write e.g. 64MB or 64MiB, or leave"),
        (["--decode-cache", "-5MB"], "decode-cache=-5MB: is no number of bytes"),
        (["--decode-cache", "1KB"], "budget='1KB': the smallest weight takes 4,096 bytes decoded; raise it"),
        (["--decode-cache", "1MB", "--preset", "fp32"], "decode-cache=1MB: weights 'fp32' are not decoded; leave it"),
        (["--decode-cache", "1MB", "--parallel", "fsdp"], "decode-cache=1MB: FSDP2 gathers weights anew in every"),
    ],
)
def test_what_cannot_be_kept_is_one_line_and_leaves_no_trace(arguments, message, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("RANK", "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as end:
            app(["train", "--data", str(text), "--out", str(tmp_path / "run"), *TINY, *arguments])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
