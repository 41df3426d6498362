"""
What a values pass found, for the memory pass behind it: the bytes of each read, by the line that made it and its turn.

A file of two parts: a line of JSON with the places, and the bytes that they point into. Where several processes of a program use the GPU,
a launcher and what it starts, each puts its own beside what is there, and every one of them reads the whole file.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from pathlib import Path

MOST_BYTES = 2**30
"""Of contents in one file; what comes behind them is not known."""

_Turn = tuple[int, int, str | None] | str | None
"""Where the bytes of a read begin, how many they are, and the assumption that they stand on; the type where they are not known."""


class ValueWriter:
    """Collects what is read."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, list[_Turn]] = defaultdict(list)
        self._contents: dict[bytes, int] = {}
        self._bytes = 0

    def add(self, place: str, size: int, content: bytes | None, assumption: str | None, dtype: str | None) -> None:
        """Note the next read of *size* bytes at *place*; *content* is None where only the type is known, *dtype* where not even that is."""
        if content is not None and content not in self._contents and self._bytes + size <= MOST_BYTES:
            self._contents[content] = self._bytes
            self._bytes += size
        at = None if content is None else self._contents.get(content)
        self._turns[f"{place} {size}"].append(dtype if at is None else (at, size, assumption))

    def write(self, path: Path) -> None:
        """Write all of it to the file at *path*, beside what is there; a place of both is of the process that read it more often."""
        earlier, contents = _read(path) if path.exists() else ({}, b"")
        kept = {
            key: [_moved(turn, self._bytes) for turn in turns]
            for key, turns in earlier.items()
            if len(turns) > len(self._turns.get(key, ()))
        }
        with path.open("wb") as file:
            file.write(json.dumps({**self._turns, **kept}).encode() + b"\n")
            file.writelines(self._contents)  # in the order in which they were given their places
            file.write(contents)


class RecordedValues:
    """Gives what was collected, in the same order."""

    def __init__(self, path: Path) -> None:
        turns_of, self._contents = _read(path)
        self._turns = {key: deque(turns) for key, turns in turns_of.items()}

    def next(self, place: str, size: int) -> tuple[bytes, str | None] | str | None:
        """Return the bytes of the next read of *size* bytes at *place*, and the assumption that they stand on; else the type, if known."""
        turns = self._turns.get(f"{place} {size}")
        turn = turns.popleft() if turns else None
        return turn if turn is None or isinstance(turn, str) else (self._contents[turn[0] : turn[0] + turn[1]], turn[2])


def _read(path: Path) -> tuple[dict[str, list[_Turn]], bytes]:
    """Return the turns of each place in the file at *path*, and the bytes that they point into."""
    header, _, contents = path.read_bytes().partition(b"\n")
    return json.loads(header), contents


def _moved(turn: _Turn, num_bytes: int) -> _Turn:
    """Return *turn* where its bytes begin *num_bytes* later."""
    return turn if turn is None or isinstance(turn, str) else (turn[0] + num_bytes, turn[1], turn[2])
