"""Apply and undo: a set of edits over several files is one transaction.

    check all      every edit is made in memory and verified; anything doubtful stops here, with nothing written
    back up all    each original is beside its file before the first file changes
    journal        hashes before and after: from here on an interrupted apply can be recognised
    write all      a temporary file beside the target, fsync, rename; in place where a name cannot be moved over
    verify         every file is read again; on any failure all are put back

Killed at any moment, each file is old or new, and `undo` puts every one back.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from memplan.edits.backups import (
    Journal,
    JournalEdit,
    JournalFile,
    back_up,
    journal_path,
    locked,
    read_journal,
    read_journals,
    write_journal,
)
from memplan.edits.config_file import load_config_file, parse_config_file
from memplan.edits.edit import Edit, as_text
from memplan.edits.files import Files, is_locked, is_shared, sha256
from memplan.errors import ConfigError, EditRefusedError, UsageError, reason_of


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
        try:
            by_target.setdefault(edit.file.resolve(), []).append(edit)
        except (OSError, RuntimeError) as error:  # a circle of links
            raise ConfigError("cannot be read: it leads in a circle of links", file=edit.file) from error
    changes = [_prepare_file(target, group) for target, group in by_target.items()]
    return [change for change in changes if change.after != change.before]


def _prepare_file(target: Path, edits: Sequence[Edit]) -> FileChange:
    path = edits[0].file
    original = current = load_config_file(path)
    made = []
    for edit in edits:
        try:
            found = current.get(edit.key)
        except ConfigError:
            found = None  # no value that could be right already: `replace` says why it refuses
        if found is not None and as_text(found.value) == as_text(edit.value):
            continue
        current = parse_config_file(path, current.replace(edit.key, edit.value))
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
        with _told(change.path, hint="nothing was changed"):
            _check_writable(change)
    with _told(root, hint="`memplan undo` puts back what was written"), locked(files, root):
        interrupted = [journal for _, journal in read_journals(root) if journal.state in ("applying", "undoing")]
        if interrupted:
            raise ConfigError("an earlier apply was interrupted here", file=root, hint="run `memplan undo` first: it puts every file back")
        for change in changes:
            _check_unchanged(change)
        return _transaction(files, changes, journal_path(root, now), now)


@contextlib.contextmanager
def _told(file: Path, *, hint: str) -> Iterator[None]:
    """Tell what the system refuses here as an error of *file*, where the error names no other."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot be read or written: {reason_of(error)}", file=_file_of(error) or file, hint=hint) from error


def _file_of(error: OSError) -> Path | None:
    """Return the file that *error* names: one in the middle of a read or write names none."""
    return None if error.filename is None else Path(os.fsdecode(error.filename))


def _check_writable(change: FileChange) -> None:
    if not change.target.exists():
        raise ConfigError("no longer exists", file=change.path, hint="nothing was changed; run the plan again")
    for path in (change.target, change.target.parent):
        if not os.access(path, os.W_OK):
            raise ConfigError(
                "cannot be written: permission denied", file=path, hint="nothing was changed; ask its owner for write permission"
            )
    _check_unlocked(change)


def _check_unlocked(change: FileChange) -> None:
    """Raise ConfigError when another program holds a lock on the file."""
    if is_locked(change.target):
        raise ConfigError("is locked by another program", file=change.path, hint="nothing was changed; try again when it is done")


def _check_unchanged(change: FileChange) -> None:
    try:
        current = change.target.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read any more: {reason_of(error)}", file=change.path, hint="nothing was changed") from error
    if current != change.before:
        raise ConfigError(
            "has changed since memplan read it: another program is writing it",
            file=change.path,
            hint="nothing was changed; run the plan again",
        )


def _transaction(files: Files, changes: Sequence[FileChange], path: Path, now: datetime) -> Journal:
    file = path
    try:
        entries = []
        for change in changes:
            file = change.path
            entries.append(_entry(change, back_up(files, change.target, change.before, moment=now)))
        file = path
        journal = Journal(created=now, state="applying", files=tuple(entries))
        write_journal(files, path, journal)
    except OSError as error:
        raise _write_error(error, file) from error
    written: list[FileChange] = []
    torn: FileChange | None = None
    try:
        for change, entry in zip(changes, entries, strict=True):
            _check_unchanged(change)
            written.append(change)
            file, torn = change.path, change
            journal = _write_file(files, entry, change.after, journal, path)
            torn = None
        for change in changes:
            if change.target.read_bytes() != change.after:
                raise ConfigError("does not hold what was written", file=change.path)
        file = path
        journal = journal.model_copy(update={"state": "applied"})
        write_journal(files, path, journal)
    except (OSError, ConfigError) as error:
        _put_all_back(files, written, path, torn=torn)
        raise _write_error(error, file) if isinstance(error, OSError) else error from error
    return journal


def _put_all_back(files: Files, written: Sequence[FileChange], path: Path, *, torn: FileChange | None) -> None:
    file = path
    try:
        journal = read_journal(path)  # the one on the disk knows what may be half written in place
        for change in written:
            file = change.path
            _put_back(files, change, journal, path, is_torn=change is torn)
        write_journal(files, path, journal.model_copy(update={"state": "undone"}))
    except OSError as error:
        raise ConfigError(
            f"cannot be put back: {reason_of(error)}", file=file, hint="run `memplan undo` when it can be written again"
        ) from error


def _put_back(files: Files, change: FileChange, journal: Journal, path: Path, *, is_torn: bool) -> None:
    """Restore a file after a failure, unless somebody else has written it meanwhile."""
    entry = next(entry for entry in journal.files if entry.path == change.target)
    current = change.target.read_bytes()
    if current == change.after or (is_torn and entry.in_place):
        _write_file(files, entry, change.before, journal, path)
    files.remove(entry.temporary)


def _write_error(error: OSError, file: Path) -> ConfigError:
    return ConfigError(f"cannot be written: {reason_of(error)}", file=file, hint="every file is as it was before")


def _entry(change: FileChange, backup: Path) -> JournalFile:
    return JournalFile(
        path=change.target,
        backup=backup,
        temporary=change.target.with_name(f".{change.target.name}.memplan-new"),
        sha256_before=sha256(change.before),
        sha256_after=sha256(change.after),
        edits=tuple(JournalEdit(key=edit.key, value=as_text(edit.value)) for edit in change.edits),
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


def undo(root: Path, *, only: Sequence[Path] = (), files: Files | None = None) -> Undone:
    """
    Put every file of the last apply in *root* back, also of one that was interrupted; with *only*, those files of it.

    Raises UsageError when there is nothing to undo, or one of *only* is not of that apply, EditRefusedError when a file or a backup has
    changed since; then nothing is written.
    """
    files = files or Files()
    plan_undo(root, only=only)  # refuses before anything is written, the lock included
    with _told(root, hint="run `memplan undo` again to go on"), locked(files, root):
        path, journal, to_restore = plan_undo(root, only=only)
        current = journal.model_copy(update={"state": "undoing"})
        try:
            write_journal(files, path, current)
            for entry in to_restore:
                current = _write_file(files, entry, entry.backup.read_bytes(), current, path)
            for entry in journal.files:
                files.remove(entry.temporary)
            is_whole = all(_is_original(entry) for entry in journal.files)
            write_journal(files, path, current.model_copy(update={"state": "undone" if is_whole else "applied"}))
        except OSError as error:
            raise ConfigError(f"cannot be written: {reason_of(error)}", file=root, hint="run `memplan undo` again to go on") from error
    return Undone(journal, tuple(entry.path for entry in to_restore), journal.state in ("applying", "undoing"))


def plan_undo(root: Path, *, only: Sequence[Path] = ()) -> tuple[Path, Journal, list[JournalFile]]:
    """
    Return the journal to undo, where it lies, and the files that would be put back; nothing is written.

    Raises UsageError when there is nothing to undo, or one of *only* is not of the last apply; EditRefusedError when a file or a backup has
    changed since.
    """
    with _told(root, hint="nothing was changed"):
        open_journals = [(path, journal) for path, journal in read_journals(root) if journal.state != "undone"]
    if not open_journals:
        where = "this folder" if root == Path() else root
        raise UsageError(f"{where}: nothing to undo", hint="nothing has been applied there; name a file that was written, or its folder")
    path, journal = open_journals[-1]
    wanted = {file.resolve() for file in only}
    chosen = [entry for entry in journal.files if not only or entry.path.resolve() in wanted]
    strangers = sorted(wanted - {entry.path.resolve() for entry in journal.files})
    if strangers:
        raise UsageError(
            f"{strangers[0]} is not a file of the last apply", hint=f"its files are {', '.join(str(entry.path) for entry in journal.files)}"
        )
    return path, journal, [entry for entry in chosen if _needs_restoring(entry, journal)]


def _is_original(entry: JournalFile) -> bool:
    """Say whether a file has the content that it had before the apply."""
    return entry.path.exists() and sha256(entry.path.read_bytes()) == entry.sha256_before


def _needs_restoring(entry: JournalFile, journal: Journal) -> bool:
    try:
        current = sha256(entry.path.read_bytes())
        backup = sha256(entry.backup.read_bytes())
    except OSError as error:
        raise EditRefusedError(
            f"cannot be read: {reason_of(error)}", file=_file_of(error) or entry.path, hint="nothing was changed"
        ) from error
    if current == entry.sha256_before:
        return False
    if backup != entry.sha256_before:
        raise EditRefusedError(
            "is not the backup that was made", file=entry.backup, hint="nothing was changed; another backup may be beside it"
        )
    half_written = entry.in_place and journal.state in ("applying", "undoing")
    if current != entry.sha256_after and not half_written:
        raise EditRefusedError(
            "has changed since memplan wrote it",
            file=entry.path,
            hint=f"nothing was changed; the original is {entry.backup}. `memplan undo FILE …` puts back only the files that are named",
        )
    return True
