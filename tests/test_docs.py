"""The documentation's tables are what the committed results say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_tables_in_the_documentation_equal_the_result_files():
    command = [sys.executable, str(ROOT / "benchmarks" / "update_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; run benchmarks/update_docs.py"


def test_pages_that_are_linked_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in page.read_text().split("](")[1:]:
            link = target.split(")")[0].split("#")[0]
            if link and "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="pip install 'masterless[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page), "pages must open offline"


def test_code_on_the_first_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["loss"] < 0.9 and (tmp_path / "checkpoint.pt").exists()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_tour_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "tour.py"), "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumed to the bit: True" in done.stdout
