"""Apply and undo: a set of edits over several files is one transaction.

    check all      every edit is made in memory and verified; anything doubtful stops here, with nothing written
    back up all    each original is beside its file before the first file changes
    journal        hashes before and after: from here on an interrupted apply can be recognised
    write all      a temporary file beside the target, fsync, rename; in place where a name cannot be moved over
    verify         every file is read again; on any failure all are put back

Killed at any moment, each file is old or new, and `undo` puts every one back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from memplan.edits.backups import Journal, JournalFile, back_up, journal_path, locked, read_journals, write_journal
from memplan.edits.edit import Edit
from memplan.edits.files import Files, is_shared, sha256, try_lock
from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError, EditRefusedError, UsageError


@dataclass(frozen=True)
class FileChange:
    """One file, as it is and as it would be."""

    path: Path
    """As the user knows it."""
    target: Path
    """The file itself, links followed."""
    before: bytes
    after: bytes
    edits: tuple[Edit, ...]
    """Those that change something."""


def prepare(edits: Sequence[Edit]) -> list[FileChange]:
    """
    Return what *edits* would make of their files; nothing is written. Values that are right already make no change.

    Raises EditRefusedError for the first edit that cannot be made without guessing.
    """
    by_target: dict[Path, list[Edit]] = {}
    for edit in edits:
        by_target.setdefault(edit.file.resolve(), []).append(edit)
    changes = [_prepare_file(target, group) for target, group in by_target.items()]
    return [change for change in changes if change.after != change.before]


def _prepare_file(target: Path, edits: Sequence[Edit]) -> FileChange:
    path = edits[0].file
    original = current = YamlFile.load(path)
    made = []
    for edit in edits:
        found = current.get(edit.key)
        if found is not None and str(found.value) == str(edit.value):
            continue
        current = YamlFile.parse(path, current.replace(edit.key, edit.value))
        made.append(edit)
    return FileChange(path, target, original.data, current.data, tuple(made))


def apply(changes: Sequence[FileChange], *, root: Path, now: datetime, files: Files | None = None) -> Journal | None:
    """
    Write *changes*, all of them or none, and return the journal; None where there is nothing to write.

    *root* is the configuration's folder, where the journal lies; *now* is in UTC. Raises ConfigError when a file cannot be written or
    has changed since it was read, or an earlier apply was interrupted.
    """
    if not changes:
        return None
    files = files or Files()
    for change in changes:
        _check_writable(change)
    with locked(files, root):
        interrupted = [journal for _, journal in read_journals(root) if journal.state in ("applying", "undoing")]
        if interrupted:
            raise ConfigError("an earlier apply was interrupted here", file=root, hint="run `memplan undo` first: it puts every file back")
        for change in changes:
            _check_unchanged(change)
        return _transaction(files, changes, journal_path(root, now), now)


def _check_writable(change: FileChange) -> None:
    for path in (change.target, change.target.parent):
        if not os.access(path, os.W_OK):
            raise ConfigError(
                "cannot be written: permission denied", file=path, hint="nothing was changed; ask its owner for write permission"
            )
    _check_unlocked(change)


def _check_unlocked(change: FileChange) -> None:
    """Raise ConfigError when another program holds a lock on the file."""
    with change.target.open("rb") as file:
        try:
            try_lock(file, exclusive=False)
        except BlockingIOError as error:
            raise ConfigError(
                "is locked by another program", file=change.path, hint="nothing was changed; try again when it is done"
            ) from error


def _check_unchanged(change: FileChange) -> None:
    try:
        current = change.target.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read any more: {error.strerror}", file=change.path, hint="nothing was changed") from error
    if current != change.before:
        raise ConfigError(
            "has changed since memplan read it: another program is writing it",
            file=change.path,
            hint="nothing was changed; run the plan again",
        )


def _transaction(files: Files, changes: Sequence[FileChange], path: Path, now: datetime) -> Journal:
    try:
        entries = tuple(_entry(change, back_up(files, change.target, change.before, moment=now)) for change in changes)
        journal = Journal(created=now, state="applying", files=entries)
        write_journal(files, path, journal)
    except OSError as error:
        raise _write_error(error) from error
    written: list[FileChange] = []
    try:
        for change, entry in zip(changes, entries, strict=True):
            _check_unchanged(change)
            written.append(change)
            journal = _write_file(files, entry, change.after, journal, path)
        for change in changes:
            if change.target.read_bytes() != change.after:
                raise ConfigError("does not hold what was written", file=change.path)
    except (OSError, ConfigError) as error:
        _put_all_back(files, written, journal, path)
        raise _write_error(error) if isinstance(error, OSError) else error from error
    journal = journal.model_copy(update={"state": "applied"})
    write_journal(files, path, journal)
    return journal


def _put_all_back(files: Files, written: Sequence[FileChange], journal: Journal, path: Path) -> None:
    try:
        for change in written:
            _put_back(files, change, journal, path)
        write_journal(files, path, journal.model_copy(update={"state": "undone"}))
    except OSError as error:
        raise ConfigError(
            f"cannot be put back: {error.strerror}", file=Path(str(error.filename)), hint="run `memplan undo` when it can be written again"
        ) from error


def _put_back(files: Files, change: FileChange, journal: Journal, path: Path) -> None:
    """Restore a file after a failure, unless somebody else has written it meanwhile."""
    entry = next(entry for entry in journal.files if entry.path == change.target)
    current = change.target.read_bytes()
    if current == change.after or entry.in_place:
        _write_file(files, entry, change.before, journal, path)
    files.remove(entry.temporary)


def _write_error(error: OSError) -> ConfigError:
    file = Path(error.filename) if isinstance(error.filename, str) else None
    return ConfigError(f"cannot be written: {error.strerror}", file=file, hint="every file is as it was before")


def _entry(change: FileChange, backup: Path) -> JournalFile:
    return JournalFile(
        path=change.target,
        backup=backup,
        temporary=change.target.with_name(f".{change.target.name}.memplan-new"),
        sha256_before=sha256(change.before),
        sha256_after=sha256(change.after),
    )


def _write_file(files: Files, entry: JournalFile, data: bytes, journal: Journal, journal_file: Path) -> Journal:
    """
    Give the file of *entry* the content *data*; return the journal, which says so when that had to be done in place.

    In place are written: a name that cannot be moved over (a file mounted into a container), a file with further hard links, and one
    whose owner a new file could not have.
    """
    if not is_shared(entry.path):
        try:
            files.write_new(entry.temporary, data, like=entry.path)
            files.move(entry.temporary, entry.path)
            return journal
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EPERM, errno.EXDEV):
                raise
            files.remove(entry.temporary)
    journal = journal.with_in_place(entry.path)
    write_journal(files, journal_file, journal)
    files.write_in_place(entry.path, data)
    return journal


@dataclass(frozen=True)
class Undone:
    """What an undo did."""

    journal: Journal
    restored: tuple[Path, ...]
    """Files that were put back; the others had their original content."""
    was_interrupted: bool


def undo(root: Path, *, files: Files | None = None) -> Undone:
    """
    Put every file of the last apply in *root* back, also of one that was interrupted.

    Raises UsageError when there is nothing to undo, EditRefusedError when a file or a backup has changed since; then nothing is written.
    """
    files = files or Files()
    path, journal, to_restore = plan_undo(root)
    with locked(files, root):
        current = journal.model_copy(update={"state": "undoing"})
        write_journal(files, path, current)
        try:
            for entry in to_restore:
                current = _write_file(files, entry, entry.backup.read_bytes(), current, path)
            for entry in journal.files:
                files.remove(entry.temporary)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", file=root, hint="run `memplan undo` again to go on") from error
        write_journal(files, path, current.model_copy(update={"state": "undone"}))
    return Undone(journal, tuple(entry.path for entry in to_restore), journal.state in ("applying", "undoing"))


def plan_undo(root: Path) -> tuple[Path, Journal, list[JournalFile]]:
    """
    Return the journal to undo, where it lies, and the files that would be put back; nothing is written.

    Raises UsageError when there is nothing to undo, EditRefusedError when a file or a backup has changed since.
    """
    open_journals = [(path, journal) for path, journal in read_journals(root) if journal.state != "undone"]
    if not open_journals:
        raise UsageError(
            f"{root}: nothing to undo", hint="`memplan --apply` writes a journal there; name another place with `--config-path`"
        )
    path, journal = open_journals[-1]
    return path, journal, [entry for entry in journal.files if _needs_restoring(entry, journal)]


def _needs_restoring(entry: JournalFile, journal: Journal) -> bool:
    try:
        current = sha256(entry.path.read_bytes())
        backup = sha256(entry.backup.read_bytes())
    except OSError as error:
        raise EditRefusedError(f"cannot be read: {error.strerror}", file=Path(str(error.filename)), hint="nothing was changed") from error
    if current == entry.sha256_before:
        return False
    if backup != entry.sha256_before:
        raise EditRefusedError(
            "is not the backup that was made", file=entry.backup, hint="nothing was changed; another backup may be beside it"
        )
    half_written = entry.in_place and journal.state in ("applying", "undoing")
    if current != entry.sha256_after and not half_written:
        raise EditRefusedError(
            "has changed since memplan wrote it", file=entry.path, hint=f"nothing was changed; the original is {entry.backup}"
        )
    return True
