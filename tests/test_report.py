"""The HTML report: one file that fetches nothing and shows the figures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from masterless.lab.train.config import resolve, to_toml
from masterless.lab.train.report import write_comparison_report, write_run_report
from masterless.lab.train.svg import Series, histogram, line_chart, scatter, ticks

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Finds unbalanced elements and everything that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.tags, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "poster")]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check(path):
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and checker.fetched == []
    assert "http://" not in page and "https://" not in page and "@import" not in page
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#plot"}
    assert not {"script", "link", "iframe", "object", "img"} & set(checker.tags)
    assert "nan" not in re.findall(r'd="([^"]*)"', page)
    assert "prefers-color-scheme:dark" in page and 'name="viewport"' in page
    return checker, page


@pytest.fixture
def run_folder(tmp_path):
    config = resolve({"steps": 40, "data": ["<b>&.txt"]})
    (tmp_path / "config.toml").write_text(to_toml(config))
    rows = [{"step": i + 1, "loss": 5.0 - i / 20, "lr": 1e-3} for i in range(40)]
    for i in (9, 19, 29, 39):
        rows[i]["validation_loss"] = rows[i]["loss"] + 0.1
        rows[i]["stalls"] = {"weight": {"lost": 0.2}, "exp_avg_sq": {"stalled_codes": 0.9, "predicted": 0.8}}
    rows[3]["loss"] = None  # what a run writes for a loss that is not finite
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 41, "lo')
    roles = {"weights": 1_100_000, "first moment": 500_000, "second moment": 300_000, "gradients": 4_000_000}
    summary = {
        "validation_loss": 3.15,
        "bytes_per_parameter": 1.8123,
        "peak_bytes": 300 * 2**20,
        "step": 40,
        "steps": 40,
        "tokens_per_second": 12345.6,
        "stalled": 0.9,
        "memory": {"parameters": 1_000_000, "bytes": roles},
        "histograms": {"exp_avg": {"format": "int4", "counts": list(range(15))}},
        "text": "a text <i>",
        "sample": "<script>alert(1)</script>",
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_report_of_a_run(run_folder):
    checker, page = check(write_run_report(run_folder))
    shown = " ".join(checker.text)
    for figure in ("3.1500", "1.81", "300 MiB", "12,346", "90%", "40 of 40", "<b>&.txt", "a text <i>"):
        assert figure in shown
    for heading in ("Loss", "Stalled averages", "Memory", "Codes: first moment", "Configuration", "A sample"):
        assert heading in checker.text
    assert "second moment, predicted" in shown and "AdamW, all fp32" in shown
    assert page.count("<rect") == 15 + 1  # a bar a code, and the clipping area
    assert len(page) < 60_000


def test_report_of_a_run_that_measured_nothing(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    missing = {"validation_loss": None, "stalled": None, "tokens_per_second": None, "histograms": None, "sample": ""}
    (run_folder / "summary.json").write_text(json.dumps({**summary, **missing}))
    (run_folder / "metrics.jsonl").write_text("")
    checker, _ = check(write_run_report(run_folder))
    assert "Stalled averages" not in checker.text and "Codes: first moment" not in checker.text


def test_report_of_a_comparison(tmp_path):
    table, rows = [], []
    for i, label in enumerate(("fp32", "1.8-byte", "naive-int4")):
        diverged = label == "naive-int4"
        table.append(
            {
                "label": label,
                "loss": None if diverged else 2.0 + i / 10,
                "loss_spread": 0.01,
                "gap": None if diverged else i / 20,
                "bytes_measured": 12.0 / (i + 1),
                "bytes_predicted": 12.0 / (i + 1),
                "peak_bytes": 2**28,
                "seconds_per_step": None if diverged else 0.025,
                "roles": {"weights": 4.0, "second moment": 2.0},
            }
        )
        stalls = [{"step": s, "stalls": {"weight": {"lost": 0.3 * i}}} for s in (5, 10)]
        rows.append({"label": label, "seed": 0, "validation": [[5, 3.0], [10, 2.5]], "stalls": stalls})
    checker, page = check(write_comparison_report(tmp_path, rows, table, {"steps": 10}, "a text"))
    shown = " ".join(checker.text)
    for figure in ("2.1000 ±0.0100", "+5.00%", "diverged", "12.000", "25.0 ms", "256 MiB", "Lost updates"):
        assert figure in shown
    assert page.count("<svg viewBox") == 4


def test_ticks():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.93, 2.41) == pytest.approx([2.0, 2.1, 2.2, 2.3, 2.4])
    assert len(ticks(3.0, 3.0)) >= 1
    for low, high in ((1e-4, 2e-4), (-1, 1), (0, 1e6), (2.000, 2.001)):
        found = ticks(low, high)
        assert 3 <= len(found) <= 8 and low <= found[0] + 1e-12 and found[-1] <= high + 1e-9


def test_charts_at_the_edges():
    assert line_chart([Series("empty", [])], "x", "y") == "" and scatter([], "x", "y") == ""
    one = line_chart([Series("one", [(1.0, 2.0)])], "x", "y")
    assert "<circle" in one and "nan" not in one and "inf" not in one
    assert "nan" not in histogram([0, 0], "nothing") and histogram([1], "one").count("<rect") == 1
    same = scatter([("a", 2.0, 1.0, 0), ("b", 2.0, 1.0, 1)], "bytes", "loss")
    places = re.findall(r'class="mark" text-anchor="(\w+)" x="([\d.]+)" y="([\d.]+)"', same)
    assert len(set(places)) == 2  # labels of equal points do not cover each other
