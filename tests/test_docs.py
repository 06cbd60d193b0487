"""The documentation's tables are what the committed results say."""

import subprocess
import sys
from pathlib import Path

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
