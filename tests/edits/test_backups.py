"""The first original is kept for good, later ones beside it, and a journal says what belongs together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memplan.edits.backups import Journal, JournalFile, State, back_up, journal_path, locked, read_journals, write_journal
from memplan.edits.files import Files, sha256
from memplan.errors import ConfigError
from tests.edits.conftest import moment
from tests.edits.faults import Steps, backups, leftovers
from tests.edits.test_files import LOCKER


def journal(state: State = "applied") -> Journal:
    """Return a journal of one file."""
    entry = JournalFile(
        path=Path("/conf/a.yaml"),
        backup=Path("/conf/a.yaml.backup"),
        temporary=Path("/conf/.a.yaml.memplan-new"),
        sha256_before=sha256(b"1"),
        sha256_after=sha256(b"2"),
    )
    return Journal(created=moment(), state=state, files=(entry,))


def kept(path: Path, data: bytes, minutes: int) -> str:
    """Write *data* to *path* and back it up; return the backup's name."""
    path.write_bytes(data)
    return back_up(Files(), path, data, moment=moment(minutes)).name


def test_the_first_backup_is_never_overwritten(tmp_path: Path):
    """Later originals carry their time."""
    path = tmp_path / "a.yaml"

    names = [kept(path, data, minutes) for minutes, data in enumerate([b"1", b"2", b"3"])]

    assert names == ["a.yaml.backup", "a.yaml.backup.20240506T070909.123456Z", "a.yaml.backup.20240506T071009.123456Z"]
    assert list(backups(tmp_path).values()) == [b"1", b"2", b"3"]
    assert leftovers(tmp_path) == []


def test_an_original_is_kept_once(tmp_path: Path):
    """What is backed up already, under whichever name, is not copied again."""
    path = tmp_path / "a.yaml"

    names = [kept(path, data, minutes) for minutes, data in enumerate([b"1", b"2", b"1", b"2"])]

    assert names[2:] == names[:2]
    assert list(backups(tmp_path).values()) == [b"1", b"2"]


def test_the_users_own_backup_is_left_alone(tmp_path: Path):
    """A `.backup` that memplan did not make is the first original all the same."""
    (tmp_path / "a.yaml.backup").write_bytes(b"theirs")

    name = kept(tmp_path / "a.yaml", b"1", 0)

    assert name == "a.yaml.backup.20240506T070809.123456Z"
    assert (tmp_path / "a.yaml.backup").read_bytes() == b"theirs"


def test_a_name_with_brackets_is_taken_literally(tmp_path: Path):
    """A pattern's signs in a file's name find that file's backups and no others."""
    kept(tmp_path / "a1.yaml", b"0", 0)
    kept(tmp_path / "a1.yaml", b"2", 0)
    path = tmp_path / "a[1]*?.yaml"

    names = [kept(path, data, minutes) for minutes, data in enumerate([b"1", b"2", b"2"])]

    assert names == ["a[1]*?.yaml.backup", "a[1]*?.yaml.backup.20240506T070909.123456Z", "a[1]*?.yaml.backup.20240506T070909.123456Z"]


def test_a_backup_has_the_permissions_of_its_file(tmp_path: Path):
    """A secret stays one."""
    path = tmp_path / "a.yaml"
    path.write_bytes(b"1")
    path.chmod(0o600)

    backup = back_up(Files(), path, b"1", moment=moment())

    assert backup.stat().st_mode & 0o7777 == 0o600
    assert backup.stat().st_nlink == 1


def test_a_backup_is_there_whole_or_not_at_all(tmp_path: Path):
    """Before every step, `.backup` is missing or complete."""
    path = tmp_path / "a.yaml"
    path.write_bytes(b"12345")
    seen: list[dict[str, bytes]] = []

    back_up(Steps(lambda _number, _what, _path: seen.append(backups(tmp_path))), path, b"12345", moment=moment())

    assert len(seen) >= 4
    assert all(found in ({}, {"a.yaml.backup": b"12345"}) for found in seen)


def test_a_journal_is_read_as_it_was_written(tmp_path: Path):
    """Paths, hashes, time and state."""
    (tmp_path / ".memplan").mkdir()
    path = journal_path(tmp_path, moment())

    write_journal(Files(), path, journal("applying"))

    assert path == tmp_path / ".memplan" / "apply-20240506T070809.123456Z.json"
    assert read_journals(tmp_path) == [(path, journal("applying"))]


def test_journals_are_read_in_the_order_of_time(tmp_path: Path):
    """The last is the one that an undo takes."""
    (tmp_path / ".memplan").mkdir()
    for minutes in (60 * 24 * 300, 0, 61):
        write_journal(Files(), journal_path(tmp_path, moment(minutes)), journal())

    assert [path for path, _ in read_journals(tmp_path)] == [journal_path(tmp_path, moment(minutes)) for minutes in (0, 61, 60 * 24 * 300)]


def test_where_there_is_no_journal_nothing_is_made(tmp_path: Path):
    """Reading leaves no trace."""
    assert read_journals(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_written_in_place_is_marked():
    """The others are not."""
    marked = journal().with_in_place(Path("/conf/a.yaml"))

    assert [file.in_place for file in marked.files] == [True]
    assert journal().with_in_place(Path("/conf/b.yaml")) == journal()


UNKNOWN_STATE = b'{"version": 1, "created": "2024-05-06T07:08:09Z", "state": "gone", "files": []}'


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", UNKNOWN_STATE])
def test_a_damaged_journal_is_named(tmp_path: Path, content: bytes):
    """The user learns where the originals are."""
    (tmp_path / ".memplan").mkdir()
    path = journal_path(tmp_path, moment())
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"apply-20240506T070809\.123456Z\.json: is a damaged journal") as caught:
        read_journals(tmp_path)

    assert "*.backup" in (caught.value.hint or "")


def test_a_journal_with_unknown_words_is_damaged(tmp_path: Path):
    """A later memplan's journal is not half understood."""
    (tmp_path / ".memplan").mkdir()
    path = journal_path(tmp_path, moment())
    path.write_text(journal().model_dump_json().replace('"version"', '"later": 1, "version"'))

    with pytest.raises(ConfigError, match="damaged"):
        read_journals(tmp_path)


def test_memplans_folder_is_ignored_by_git(tmp_path: Path):
    """Nobody commits a journal by accident, and what is remembered of a plan can be; the user's own word on that stays."""
    with locked(Files(), tmp_path):
        pass
    made = (tmp_path / ".memplan" / ".gitignore").read_text()
    (tmp_path / ".memplan" / ".gitignore").write_text("mine\n")
    with locked(Files(), tmp_path):
        pass

    assert made == "*\n!/plan.yaml\n"
    assert (tmp_path / ".memplan" / ".gitignore").read_text() == "mine\n"


@pytest.mark.parametrize("theirs", ["LOCK_EX", "LOCK_SH"])
def test_two_memplans_do_not_work_in_one_folder(tmp_path: Path, theirs: str):
    """The second is refused while the first is at work, and not after."""
    (tmp_path / ".memplan").mkdir()
    lock = tmp_path / ".memplan" / "lock"
    lock.touch()
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", LOCKER, str(lock), theirs], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another memplan is at work here"), locked(Files(), tmp_path):
            pass
        other.communicate()

    with locked(Files(), tmp_path):
        pass


def test_two_memplans_of_one_process_do_not_either(tmp_path: Path):
    """As threads of a notebook might."""
    with locked(Files(), tmp_path):
        with pytest.raises(ConfigError, match="another memplan is at work here"), locked(Files(), tmp_path):
            pass
        with pytest.raises(ConfigError, match="another memplan is at work here"), locked(Files(), tmp_path):
            pass


def test_a_lock_ends_with_its_block(tmp_path: Path):
    """Also where the block ends with an error."""
    with pytest.raises(KeyError), locked(Files(), tmp_path):
        raise KeyError

    with locked(Files(), tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    """Here a file stands in its place."""
    (tmp_path / ".memplan").touch()

    with pytest.raises(ConfigError, match=r"\.memplan: cannot be written"), locked(Files(), tmp_path):
        pass
