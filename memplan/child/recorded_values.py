"""
What a values pass found, for the memory pass behind it: the bytes of each read, by the line that made it and its turn.

A file of two parts: a line of JSON with the places, and the bytes that they point into.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from pathlib import Path

MOST_BYTES = 2**30
"""Of contents in one file; what comes behind them is not known."""


class ValueWriter:
    """Collects what is read."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, list[tuple[int, int, str | None] | None]] = defaultdict(list)
        self._contents: dict[bytes, int] = {}
        self._bytes = 0

    def add(self, place: str, size: int, content: bytes | None, assumption: str | None) -> None:
        """Note the next read of *size* bytes at *place*; *content* is None where it is not known."""
        if content is not None and content not in self._contents and self._bytes + size <= MOST_BYTES:
            self._contents[content] = self._bytes
            self._bytes += size
        at = None if content is None else self._contents.get(content)
        self._turns[f"{place} {size}"].append(None if at is None else (at, size, assumption))

    @property
    def has_assumptions(self) -> bool:
        """Say whether anything that was read stands on an assumption."""
        return any(turn is not None and turn[2] is not None for turns in self._turns.values() for turn in turns)

    def write(self, path: Path) -> None:
        """Write all of it to the file at *path*."""
        with path.open("wb") as file:
            file.write(json.dumps(self._turns).encode() + b"\n")
            file.writelines(self._contents)  # in the order in which they were given their places


class RecordedValues:
    """Gives what was collected, in the same order."""

    def __init__(self, path: Path) -> None:
        header, _, self._contents = path.read_bytes().partition(b"\n")
        self._turns = {key: deque(turns) for key, turns in json.loads(header).items()}

    def next(self, place: str, size: int) -> tuple[bytes, str | None] | None:
        """Return the bytes of the next read of *size* bytes at *place*, and the assumption that they stand on; None: not known."""
        turns = self._turns.get(f"{place} {size}")
        if not turns:
            return None
        turn = turns.popleft()
        return None if turn is None else (self._contents[turn[0] : turn[0] + turn[1]], turn[2])
