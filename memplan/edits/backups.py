"""Backups and the journal: what makes an apply something that can be taken back.

Beside a file stands `NAME.backup`, its first original, which is never overwritten; later originals are `NAME.backup.TIME`. The journal
lies in `.memplan/` beside the configuration: one JSON file for each apply, with the hash of every file before and after.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from memplan.description import Description
from memplan.edits.edit import KeyPath
from memplan.edits.files import Files, sha256
from memplan.edits.interrupted import JOURNAL_FOLDER, JOURNALS
from memplan.errors import ConfigError, reason_of

State = Literal["applying", "applied", "undoing", "undone"]


class JournalEdit(Description):
    """One value that was written."""

    key: KeyPath
    """The keys from the top of the file to it."""

    value: str
    """The value, as YAML and JSON both write it."""


class JournalFile(Description):
    """One file of an apply. On disk its paths are as seen from the configuration's folder, so that a copy of the folder undoes itself."""

    path: Path
    """The file itself."""

    backup: Path
    """Where its original is."""

    temporary: Path
    """Where its new content is prepared; a leftover of a killed process is removed by undo."""

    sha256_before: str
    """Hash of the original."""

    sha256_after: str
    """Hash of what memplan wrote."""

    in_place: bool = False
    """It is being written in place, so that a kill can leave it half written."""

    edits: tuple[JournalEdit, ...] = ()
    """What was written; the values that were right before are not among them."""


class Journal(Description):
    """One apply."""

    version: int = 1
    """Of this format."""

    created: datetime
    """When, in UTC."""

    state: State
    """How far it is."""

    files: tuple[JournalFile, ...]
    """What it writes."""

    def with_in_place(self, path: Path) -> "Journal":
        """Return the journal with the file at *path* marked as written in place."""
        marked = tuple(file.model_copy(update={"in_place": True}) if file.path == path else file for file in self.files)
        return self.model_copy(update={"files": marked})


def journal_path(root: Path, created: datetime) -> Path:
    """Return the journal's file for an apply of that moment; names sort by time."""
    return root / JOURNAL_FOLDER / f"apply-{created:%Y%m%dT%H%M%S.%fZ}.json"


def _with_paths(journal: Journal, change: Callable[[Path], Path]) -> Journal:
    paths = ("path", "backup", "temporary")
    files = tuple(file.model_copy(update={name: change(getattr(file, name)) for name in paths}) for file in journal.files)
    return journal.model_copy(update={"files": files})


def write_journal(files: Files, path: Path, journal: Journal) -> None:
    """Write *journal* to *path* in one instant."""
    root = path.parents[1].resolve()
    journal = _with_paths(journal, lambda file: file.relative_to(root) if file.is_relative_to(root) else file)
    temporary = path.with_suffix(".tmp")
    files.write_new(temporary, journal.model_dump_json(indent=2).encode() + b"\n")
    files.move(temporary, path)


def read_journals(root: Path) -> list[tuple[Path, Journal]]:
    """
    Return every journal of the configuration at *root*, the oldest first.

    Raises ConfigError for one that is damaged.
    """
    return [(path, read_journal(path)) for path in sorted((root / JOURNAL_FOLDER).glob(JOURNALS))]


def read_journal(path: Path) -> Journal:
    """Read one journal. Raises ConfigError where it is damaged."""
    root = path.parents[1].resolve()
    try:
        journal = Journal.model_validate(json.loads(path.read_text(encoding="utf-8")))
        return _with_paths(journal, lambda file: root / file)
    except (ValueError, ValidationError) as error:
        raise ConfigError(
            "is a damaged journal", file=path, hint="the backups beside the files (*.backup) are what it speaks of"
        ) from error


def make_journal_folder(files: Files, root: Path) -> None:
    """Make the folder for journals below *root* where there is none. Git passes over all in it but what is remembered of plans."""
    folder = root / JOURNAL_FOLDER
    files.make_folder(folder)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        files.write_new(ignore, b"*\n!/plan.yaml\n")


@contextmanager
def locked(files: Files, root: Path) -> Iterator[None]:
    """
    Keep other memplan processes from the configuration at *root* while the block runs.

    Raises ConfigError when one is at work there, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    folder = root / JOURNAL_FOLDER
    lock = FileLock(folder / "lock", timeout=0)
    try:
        make_journal_folder(files, root)
        lock.acquire()  # released below, and by the system where this process is killed
    except Timeout as error:
        raise ConfigError("another memplan is at work here", file=root, hint="wait for it to end") from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {reason_of(error)}", file=folder, hint="memplan keeps its journal there") from error
    try:
        yield
    finally:
        lock.release()


def back_up(files: Files, path: Path, data: bytes, *, moment: datetime) -> Path:
    """Keep *data*, the content of *path*, beside it and return where; what is there already with that content is enough."""
    temporary = path.with_name(f".{path.name}.memplan-backup")
    files.remove(temporary)  # of a killed process
    first = path.with_name(path.name + ".backup")
    for existing in (first, *sorted(path.parent.glob(f"{_escaped(path.name)}.backup.*"))):
        if existing.is_file() and sha256(existing.read_bytes()) == sha256(data):
            return existing
    files.write_new(temporary, data, like=path, keep_owner=False)
    later = path.with_name(f"{path.name}.backup.{moment:%Y%m%dT%H%M%S.%fZ}")
    kept = first if files.link_new(temporary, first) else later
    if kept == later:
        files.move(temporary, later)
    files.remove(temporary)
    return kept


def _escaped(name: str) -> str:
    """Return *name* so that glob takes it literally."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
