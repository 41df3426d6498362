"""Disks that fail or stop at a chosen step, and what a folder looks like afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from memplan.edits.files import Files
from memplan.errors import ConfigError

Snapshot = dict[str, bytes]
Answer = TypeVar("Answer")


def answer_or_error(question: Callable[[], Answer]) -> Answer | ConfigError:
    """Return what *question* returns, or the error that a user would read; any other error is a bug."""
    try:
        return question()
    except ConfigError as error:
        return error


class Steps(Files):
    """A disk that tells every step to *before*, numbered from 0, before it is taken."""

    def __init__(self, before: Callable[[int, str, Path], None] = lambda _number, _what, _path: None) -> None:
        self.taken: list[tuple[str, str]] = []
        self._before = before

    def step(self, what: str, path: Path) -> None:
        self.taken.append((what, path.name))
        self._before(len(self.taken) - 1, what, path)


def fails(code: int, *, when: Callable[[int, str, Path], bool], names_file: bool = True) -> Steps:
    """Return a disk where the steps that *when* accepts raise OSError, as the system would: writes and fsyncs name no file."""

    def before(number: int, what: str, path: Path) -> None:
        if when(number, what, path):
            raise OSError(code, os.strerror(code), str(path)) if names_file else OSError(code, os.strerror(code))

    return Steps(before)


def at(number: int) -> Callable[[int, str, Path], bool]:
    """Accept one step."""
    return lambda step, _what, _path: step == number


def from_(number: int) -> Callable[[int, str, Path], bool]:
    """Accept one step and all after it: a disk that stays broken."""
    return lambda step, _what, _path: step >= number


def configs(folder: Path) -> Snapshot:
    """Return the bytes of every configuration file below *folder*, without backups and memplan's own files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".backup" not in path.name and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def backups(folder: Path) -> Snapshot:
    """Return the bytes of every backup below *folder*."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.backup*")) if not path.name.startswith(".")}


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files below *folder* that nobody will need again."""
    temporary = [*folder.rglob(".*.memplan-new"), *folder.rglob(".*.memplan-backup"), *folder.rglob("*.tmp")]
    return sorted(str(path.relative_to(folder)) for path in temporary)
