"""An edit: one value at one place of one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KeyPath = tuple[str, ...]
"""The keys from the top of a file to a value; an element of a sequence is named by its number."""

EditValue = int | str | bool

Scalar = int | float | bool | str | None
"""A single value of a file."""


class Found(NamedTuple):
    """A scalar and its line."""

    value: Scalar
    line: int


class Location(NamedTuple):
    """Where something is written."""

    file: Path
    line: int | None = None


class DuplicateKey(NamedTuple):
    """A key that stands twice in one mapping."""

    key: str
    first_line: int
    line: int


@dataclass(frozen=True)
class Edit:
    """Set the value at *key* of *file* to *value*."""

    file: Path
    key: KeyPath
    value: EditValue

    @property
    def dotted(self) -> str:
        """Return the key as people write it."""
        return ".".join(self.key)


def as_text(value: EditValue | float | None) -> str:
    """Return *value* as YAML and JSON both write it."""
    return ("true" if value else "false") if isinstance(value, bool) else "null" if value is None else str(value)
