"""A folder with three configuration files and what is to change in them, and children that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from memplan.edits.edit import Edit
from tests.edits.faults import Snapshot

OLD: Snapshot = {
    "a.yaml": b"# one\r\nbatch: 4\t# fits\r\nlr: 2e-4\r\n".replace(b"\t", b"  "),
    "sub/b.yaml": b"training: {batch: '4',\n  steps: [1, 2]}",
    "sub/c.json": b'\xef\xbb\xbf{\n  "batch": 4\n}\n',
}
NEW: Snapshot = {
    "a.yaml": b"# one\r\nbatch: 16  # fits\r\nlr: 2e-4\r\n",
    "sub/b.yaml": b"training: {batch: '16',\n  steps: [1, 32]}",
    "sub/c.json": b'\xef\xbb\xbf{\n  "batch": 16\n}\n',
}
CHANGES = [
    ("a.yaml", ("batch",), 16),
    ("sub/b.yaml", ("training", "batch"), 16),
    ("sub/c.json", ("batch",), 16),
    ("sub/b.yaml", ("training", "steps", "1"), 32),
]


def moment(minutes: int = 0) -> datetime:
    """Return a moment; a later one for each minute."""
    return datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc) + timedelta(minutes=minutes)


def write_old(folder: Path) -> Path:
    """Write the three files as they were before."""
    for name, data in OLD.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def edits_in(folder: Path) -> list[Edit]:
    """Return the edits that make the new files of the old ones."""
    return [Edit(folder / name, key, value) for name, key, value in CHANGES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the three files."""
    return write_old(tmp_path / "conf")


@pytest.fixture
def fast_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: for tests that write hundreds of files, each durably, and pull no plug."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="memplan-test-", dir=memory) as folder:
        yield Path(folder)


class Victims:
    """A process that forks a child for every request; see killed.py."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("killed.py")
        self._process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, action: str, root: Path, *, kill_at: int) -> bool:
        """Run *action* in a child that kills itself before its step number *kill_at*; say whether it came to that."""
        assert self._process.stdin
        assert self._process.stdout
        request = {
            "action": action,
            "root": str(root),
            "kill_at": kill_at,
            "edits": [[str(root / name), key, to] for name, key, to in CHANGES],
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer in ("killed", "done"), answer or "the process that forks children has died"
        return answer == "killed"

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def victims() -> Iterator[Victims]:
    """Children that apply or undo and are killed at a chosen step."""
    victims = Victims()
    yield victims
    victims.close()
