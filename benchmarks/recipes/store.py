"""Rows on disk, and who is working on what.

Contract:
    * A row is one line of JSON, written by one `write` under a lock and flushed to the disk. A line that a crash cut
      short is skipped when reading, and closed before the next row is written.
    * A claim is a locked file: the system lets go of it when its holder dies, however it dies.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results" / "recipes"


class Store:
    """The rows of a folder; one file a group, a key at most once."""

    def __init__(self, folder: Path = RESULTS, claims: Path | None = None) -> None:
        self.folder = folder
        self.claims = claims or folder / "claims"

    def rows(self) -> dict[str, Row]:
        """All rows by key."""
        return {row["key"]: row for path in sorted(self.folder.glob("*.jsonl")) for row in _read(path)}

    def add(self, group: str, row: Mapping[str, Any]) -> bool:
        """Appends a row unless its key is there already; says whether it did."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{group}.jsonl").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if any(known["key"] == row["key"] for known in _read(Path(file.name))):
                return False
            file.seek(0, os.SEEK_END)
            line = json.dumps(row, default=list).encode() + b"\n"
            os.write(file.fileno(), line if _ends_a_line(file) else b"\n" + line)
            os.fsync(file.fileno())
        return True

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Holds the right to run a key while the block lasts; False if another process has it."""
        self.claims.mkdir(parents=True, exist_ok=True)
        path = self.claims / key
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)


def _ends_a_line(file: IO[bytes]) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _read(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the end of a write that a crash cut short: that run is repeated
    return rows
