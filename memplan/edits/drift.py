"""Drift: values that an applied plan wrote, and that somebody has changed since."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from memplan.description import Description
from memplan.edits.backups import Journal, read_journals
from memplan.edits.config_file import load_config_file
from memplan.edits.edit import KeyPath, as_text
from memplan.errors import ConfigError, UsageError


class Drift(Description):
    """A value that an applied plan wrote, and that has been changed since."""

    file: Path
    """The file."""

    line: int | None
    """The line of the value; None where it is not there any more."""

    key: str
    """The key, dotted."""

    planned: str
    """What was written."""

    present: str | None
    """What stands there now; None where nothing does."""


class Drifted(NamedTuple):
    """What has become of the values that were written."""

    num_values: int
    drifts: tuple[Drift, ...]


def is_applied(root: Path) -> bool:
    """Say whether the journals in *root* have values that a plan has written and nobody has put back."""
    return bool(_written(journal for _, journal in read_journals(root) if journal.state == "applied"))


def drift_in(root: Path) -> Drifted:
    """
    Return which values that plans have written, as the journals in *root* say, are not so any more.

    A later apply counts for the keys that it wrote, an undone one for nothing. Raises UsageError where nothing has been applied.
    """
    written = _written(journal for _, journal in read_journals(root) if journal.state == "applied")
    if not written:
        raise UsageError(
            f"{root}: no plan has been applied here, or its journal is elsewhere",
            hint="`plan.apply()` writes the journal; git does not keep it",
        )
    found = (_drift(file, key, planned) for (file, key), planned in written.items())
    return Drifted(len(written), tuple(drift for drift in found if drift is not None))


def _written(journals: Iterable[Journal]) -> dict[tuple[Path, KeyPath], str]:
    """Return what stands where by *journals*, the oldest first."""
    return {(file.path, edit.key): edit.value for journal in journals for file in journal.files for edit in file.edits}


def _drift(file: Path, key: KeyPath, planned: str) -> Drift | None:
    try:
        found = load_config_file(file).get(key)
    except ConfigError:  # the file is gone, or the value is none any more
        found = None
    present = None if found is None else as_text(found.value)
    if present == planned:
        return None
    return Drift(file=file, line=found.line if found else None, key=".".join(key), planned=planned, present=present)
