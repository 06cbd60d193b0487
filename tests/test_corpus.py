"""The corpora: what is read, how it is split, and that a batch is a pure function of seed and step."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from masterless.lab.train import CorpusError, batch, stdlib_corpus, text_corpus, validation_batches


@pytest.fixture(scope="module")
def stdlib():
    return stdlib_corpus()


def write_documents(folder, n=60, length=200):
    for i in range(n):
        (folder / f"{i:03}.txt").write_text(f"document {i} " + "x" * length)


def documents_of(tokens):
    return bytes(tokens.tolist()).split(b"\0")[:-1]


def test_stdlib_corpus(stdlib):
    assert stdlib.train.dtype == stdlib.validation.dtype == torch.uint8
    assert stdlib.vocab_size == 256 and stdlib.is_bytes
    total = len(stdlib.train) + len(stdlib.validation)
    assert 5e6 < total < 30e6  # 12 MB on Python 3.11; other versions and distributions differ somewhat
    assert 0.03 < len(stdlib.validation) / total < 0.15
    assert f"{total:,} bytes in {sum(stdlib.documents):,} documents" in stdlib.description
    assert "by document" in stdlib.description


def test_stdlib_split_is_deterministic_and_disjoint(stdlib):
    again = stdlib_corpus()
    assert torch.equal(stdlib.train, again.train) and torch.equal(stdlib.validation, again.validation)
    train, validation = documents_of(stdlib.train), documents_of(stdlib.validation)
    assert (len(train), len(validation)) == stdlib.documents
    # By content, and not only by name: what little the two sides share are copies that Python itself ships.
    shared = set(train) & set(validation)
    assert sum(map(len, shared)) < 0.01 * len(stdlib.validation)
    assert any(b"import" in document for document in validation)


def test_split_by_document_does_not_depend_on_the_neighbours(tmp_path):
    write_documents(tmp_path)
    before = text_corpus(tmp_path)
    held_out = set(documents_of(before.validation))
    assert "by document" in before.description and sum(before.documents) == 60
    assert not held_out & set(documents_of(before.train))
    for i in range(100, 160):
        (tmp_path / f"{i}.md").write_text(f"another {i} " + "y" * 200)
    after = text_corpus(tmp_path)
    assert held_out <= set(documents_of(after.validation))
    assert not held_out & set(documents_of(after.train))


def test_split_of_a_moved_folder_is_the_same(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write_documents(tmp_path / name)
    one, other = text_corpus(tmp_path / "here"), text_corpus(str(tmp_path / "there"))
    assert torch.equal(one.train, other.train) and torch.equal(one.validation, other.validation)


def test_single_file_is_split_by_its_tail(tmp_path):
    path = tmp_path / "book.text"  # named directly, any suffix will do
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    corpus = text_corpus([path])
    assert corpus.documents == (1, 1) and "from the end of each document" in corpus.description
    assert len(corpus.validation) / path.stat().st_size == pytest.approx(0.08, abs=0.001)
    assert corpus.decode(torch.cat((corpus.train, corpus.validation))) == path.read_text() + "\n"


def test_folder_is_searched_and_nothing_is_read_twice(tmp_path):
    text = "abc " * 1000
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "sub" / "a.md").write_text(text)
    (tmp_path / "sub" / "__init__.py").write_text("")
    (tmp_path / "sub" / "blank.txt").write_text(" \n")
    (tmp_path / "sub" / "image.png").write_bytes(b"\0\1")
    (tmp_path / ".hidden" / "b.txt").write_text(text)
    corpus = text_corpus([tmp_path, tmp_path / "sub" / "a.md"])
    assert len(corpus.train) + len(corpus.validation) == len(text) + 1


def test_jsonl(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": f"dokument {i} ü " * 10, "id": i}) for i in range(100)]
    path.write_text("\n".join([*lines, "", json.dumps({"text": ""})]) + "\n")
    corpus = text_corpus(path)
    assert sum(corpus.documents) == 100 and corpus.documents.validation > 0
    assert corpus.decode(corpus.train).startswith("dokument ")


def test_token_arrays(tmp_path):
    ids = np.arange(5000, dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    corpus = text_corpus(tmp_path / "ids.npy")
    assert corpus.vocab_size == 5000 and not corpus.is_bytes and corpus.train.dtype == torch.int32
    assert torch.cat((corpus.train, corpus.validation)).tolist() == ids.tolist()
    assert corpus.decode([3, 4000]) == "3 4000"
    with pytest.raises(CorpusError, match="tokenizer"):
        corpus.encode("text")
    np.save(tmp_path / "bytes.npy", np.frombuffer(b"hello " * 500, dtype=np.uint8))
    as_bytes = text_corpus(tmp_path / "bytes.npy")
    assert as_bytes.vocab_size == 256 and as_bytes.decode(as_bytes.train[:5]) == "hello"
    np.save(tmp_path / "small.npy", ids % 50)
    assert text_corpus(tmp_path / "small.npy").train.dtype == torch.uint8


def test_encode_and_decode(stdlib):
    text = "def grüße():\n    pass\n"
    assert stdlib.decode(stdlib.encode(text)) == text
    assert stdlib.decode([104, 105, 0, 0xC3]) == "hi\n\ufffd"


def test_errors_name_value_reason_and_remedy(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    (tmp_path / "void").mkdir()
    np.save(tmp_path / "floats.npy", np.zeros(500))
    np.save(tmp_path / "negative.npy", np.full(500, -1))
    np.save(tmp_path / "ids.npy", np.arange(500))
    cases = [
        (tmp_path / "missing.txt", "missing.txt: no such file"),
        (write("empty.txt", b""), "empty.txt: empty text"),
        (write("blank.txt", b" \n\n"), "blank.txt: empty text"),
        (write("binary.txt", b"ab\0cd" * 100), "binary.txt: binary.*NUL.*UTF-8"),
        (write("short.txt", b"too short"), r"short.txt: 10 tokens.*sequence of 128.*lower seq_len"),
        (write("broken.jsonl", b'{"text": "fine"}\n{oops\n'), "broken.jsonl, line 2: not valid JSON"),
        (write("other.jsonl", b'{"body": "x"}\n'), 'other.jsonl, line 1: no "text" field'),
        (write("fake.npy", b"not an array"), "fake.npy: not a readable .npy"),
        (tmp_path / "floats.npy", "floats.npy: array of shape.*float64.*1-D array of integers"),
        (tmp_path / "negative.npy", "negative.npy: token ids from -1 to -1"),
        (tmp_path / "void", "void: no text found"),
        ([], "0 paths: no text found"),
        ([tmp_path / "ids.npy", write("long.txt", b"text " * 500)], "mixes text with arrays of token ids"),
    ]
    for paths, message in cases:
        with pytest.raises(CorpusError, match=message) as caught:
            text_corpus(paths)
        assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)
        assert "; " in str(caught.value)  # the remedy


def test_seq_len_decides_what_is_too_short(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 999)
    assert len(text_corpus(path, seq_len=79).validation) == 80
    with pytest.raises(CorpusError, match="a part of 80"):
        text_corpus(path, seq_len=80)


def test_batch_is_pure_and_shifted():
    tokens = torch.arange(200, dtype=torch.uint8)
    state = torch.random.get_rng_state()
    inputs, targets = batch(tokens, seed=3, step=17, batch_size=5, seq_len=8)
    torch.manual_seed(99)
    batch(tokens, seed=3, step=2, batch_size=5, seq_len=8)
    again = batch(tokens, seed=3, step=17, batch_size=5, seq_len=8)
    torch.random.set_rng_state(state)
    batch(tokens, seed=3, step=17, batch_size=5, seq_len=8)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator did not move
    assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
    assert inputs.shape == (5, 8) and inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_batches_differ_and_do_not_repeat_along_diagonals():
    tokens = torch.arange(1_000_000)
    starts = {
        (seed, step): tuple(batch(tokens, seed, step, 4, 8)[0][:, 0].tolist()) for seed in range(4) for step in range(4)
    }
    assert len(set(starts.values())) == 16


def test_batch_is_the_same_on_every_machine():
    # Frozen numbers: a change here silently changes every published run.
    inputs, _ = batch(torch.arange(10_000), seed=0, step=0, batch_size=4, seq_len=4)
    assert inputs[:, 0].tolist() == [7973, 7385, 9359, 5949]


def test_batch_reaches_both_ends():
    tokens = torch.arange(10)
    seen = {int(start) for step in range(50) for start in batch(tokens, 0, step, 4, 7)[0][:, 0]}
    assert seen == {0, 1, 2}
    assert batch(tokens, 0, 0, 2, 9)[0].tolist() == [list(range(9))] * 2  # exactly one window
    with pytest.raises(CorpusError, match=r"10 tokens: shorter than a sequence of 10 \+ 1"):
        batch(tokens, 0, 0, 2, 10)


def test_validation_batches_are_evenly_spaced():
    tokens = torch.arange(1000)
    batches = validation_batches(tokens, n=5, batch_size=4, seq_len=30)
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert len(batches) == 5 and batches[0][0].shape == (4, 30)
    assert starts[0] == 0 and starts[-1] == 969  # the last target is the last token
    gaps = starts.diff()
    assert gaps.max() - gaps.min() <= 1
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches)
    assert validation_batches(tokens, 1, 1, 30)[0][0][0, 0] == 0
    with pytest.raises(CorpusError):
        validation_batches(tokens, 1, 1, 1000)
