"""Each primitive is whole or not there, and keeps what belongs to the file."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.edits.files import Files, is_locked, is_shared, sha256
from tests.edits.faults import Steps, at, fails

LOCKER = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, getattr(fcntl, sys.argv[2])); print(flush=True); sys.stdin.read()"


def test_a_new_file_holds_what_was_written(tmp_path: Path):
    """Also where a leftover of a killed process stands in its place."""
    path = tmp_path / "new"
    path.write_bytes(b"leftover, and a long one")

    Files().write_new(path, b"\r\n\xff12345")

    assert path.read_bytes() == b"\r\n\xff12345"


def test_a_leftover_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path):
    """Nobody can lead a write elsewhere by a link in the temporary's place."""
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "new").symlink_to("precious")

    Files().write_new(tmp_path / "new", b"12345")

    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert not (tmp_path / "new").is_symlink()


def test_a_new_file_is_like_another(tmp_path: Path):
    """Permissions and extended attributes come along; the time does not, since the content is new."""
    original, path = tmp_path / "original", tmp_path / "new"
    original.write_bytes(b"1")
    original.chmod(0o640)
    os.utime(original, (1_000_000_000, 1_000_000_000))
    attributes = supports_attributes(original)

    Files().write_new(path, b"2", like=original)

    assert path.stat().st_mode & 0o7777 == 0o640
    assert path.stat().st_mtime > 1_500_000_000
    if attributes:
        assert os.getxattr(path, "user.memplan") == b"kept"


def supports_attributes(path: Path) -> bool:
    """Give *path* an extended attribute; say whether the file system has them."""
    try:
        os.setxattr(path, "user.memplan", b"kept")
    except OSError:
        return False
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_new_file_belongs_to_the_owner_of_the_other(tmp_path: Path):
    """An apply under sudo takes nobody's file away."""
    original, path = tmp_path / "original", tmp_path / "new"
    original.write_bytes(b"1")
    os.chown(original, 65534, 12345)

    Files().write_new(path, b"2", like=original)

    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 12345)


def test_a_private_file_is_private_before_it_is_whole(tmp_path: Path):
    """At no moment can others read a copy of what they cannot read."""
    original, path = tmp_path / "original", tmp_path / "new"
    original.write_bytes(b"1")
    original.chmod(0o600)
    modes: list[int] = []

    Steps(lambda number, _what, path: modes.append(path.stat().st_mode & 0o777) if number == 1 else None).write_new(
        path, b"secret", like=original
    )

    assert modes == [0o600]


@pytest.mark.parametrize("step", [0, 1])
def test_an_error_in_a_write_leaves_the_original(tmp_path: Path, step: int):
    """A full disk before the file, and in the middle of it."""
    original = tmp_path / "original"
    original.write_bytes(b"1")

    with pytest.raises(OSError, match="No space left"):
        fails(errno.ENOSPC, when=at(step)).write_new(tmp_path / "new", b"12345", like=original)

    assert original.read_bytes() == b"1"


def test_a_move_replaces_its_target(tmp_path: Path):
    """The source is gone, the target is new."""
    (tmp_path / "new").write_bytes(b"2")
    (tmp_path / "old").write_bytes(b"1")

    Files().move(tmp_path / "new", tmp_path / "old")

    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old", b"2")]


def test_a_link_never_replaces(tmp_path: Path):
    """The first time it gives a second name, the second time it says that there is one."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"1")

    assert Files().link_new(source, target)
    source.unlink()
    source.write_bytes(b"2")
    assert not Files().link_new(source, target)
    assert target.read_bytes() == b"1"


def no_links(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make links fail as on a file system that has none, which needs a disk of its own to have really."""

    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(source), None, str(target))

    monkeypatch.setattr(os, "link", link)


def test_where_links_are_unknown_a_file_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """FAT and some network disks have no links; what is there is not replaced there either."""
    no_links(errno.EPERM, monkeypatch)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"1")

    assert Files().link_new(source, target)
    source.write_bytes(b"2")
    assert not Files().link_new(source, target)
    assert target.read_bytes() == b"1"


def test_another_error_of_a_link_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk is not a disk without links."""
    no_links(errno.ENOSPC, monkeypatch)
    (tmp_path / "source").write_bytes(b"1")

    with pytest.raises(OSError, match="No space left"):
        Files().link_new(tmp_path / "source", tmp_path / "target")


@pytest.mark.parametrize("data", [b"", b"1", b"shorter", b"much longer than it was"])
def test_in_place_a_file_stays_the_same_file(tmp_path: Path, data: bytes):
    """Other names, permissions and owner are those of the file, whatever its new length."""
    path, other = tmp_path / "file", tmp_path / "other-name"
    path.write_bytes(b"as it was before")
    other.hardlink_to(path)
    inode = path.stat().st_ino

    Files().write_in_place(path, data)

    assert other.read_bytes() == data
    assert path.stat().st_ino == inode


def test_what_is_not_there_is_removed_already(tmp_path: Path):
    """Clearing up twice is no error."""
    (tmp_path / "file").touch()

    Files().remove(tmp_path / "file")
    Files().remove(tmp_path / "file")

    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_once(tmp_path: Path):
    """One that is there is good."""
    Files().make_folder(tmp_path / "folder")
    Files().make_folder(tmp_path / "folder")

    assert (tmp_path / "folder").is_dir()


def test_every_primitive_takes_its_steps(tmp_path: Path):
    """Each can be stopped before it acts, and a write in its middle."""
    files, file, other = Steps(), tmp_path / "file", tmp_path / "other"

    files.make_folder(tmp_path / "folder")
    files.write_new(file, b"12")
    files.link_new(file, other)
    files.write_in_place(file, b"34")
    files.move(file, other)
    files.remove(other)

    assert [what for what, _ in files.taken] == [
        "make folder",
        "create",
        "write the rest of",
        "link",
        "write in place",
        "write the rest of",
        "move",
        "remove",
    ]


def test_a_file_with_two_names_is_shared(tmp_path: Path):
    """A folder has several links and is no file."""
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "file").touch()
    alone = is_shared(tmp_path / "file")
    (tmp_path / "second-name").hardlink_to(tmp_path / "file")

    assert not alone
    assert is_shared(tmp_path / "file")
    assert not is_shared(tmp_path / "folder")


@pytest.mark.parametrize(("theirs", "expected"), [("LOCK_EX", True), ("LOCK_SH", False)])
def test_a_lock_of_another_process_is_seen(tmp_path: Path, theirs: str, expected: bool):
    """A writer bears nobody; a program that only reads is in nobody's way."""
    path = tmp_path / "file"
    path.touch()
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", LOCKER, str(path), theirs], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        other.stdout.readline()
        found = is_locked(path)
        other.communicate()

    assert found == expected
    assert not is_locked(path)


def no_locks(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make locks fail as a file system that has none does, which needs a disk of its own to have really."""

    def flock(file: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_where_locks_are_unknown_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    """Some network disks have none."""
    (tmp_path / "file").touch()
    no_locks(code, monkeypatch)

    assert not is_locked(tmp_path / "file")


def test_another_error_of_a_lock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that fails is not a disk without locks."""
    (tmp_path / "file").touch()
    no_locks(errno.EIO, monkeypatch)

    with pytest.raises(OSError, match="Input/output error"):
        is_locked(tmp_path / "file")


def test_a_hash_is_that_of_sha256sum():
    """The journal can be checked by hand. Source: `printf abc | sha256sum`, also in FIPS 180-2, appendix B.1."""
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
