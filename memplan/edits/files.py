"""The few things that edits do to a disk, each durable before it returns.

They are methods of one small class so that a test can stop the process, or make a call fail, before any one of them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None


class Files:
    """Writes that are whole or not there. A subclass may override `step`, which every primitive calls before it acts."""

    def step(self, what: str, path: Path) -> None:
        """Do nothing: the place for a test's fault."""

    def make_folder(self, path: Path) -> None:
        """Make a folder where there is none."""
        self.step("make folder", path)
        path.mkdir(exist_ok=True)

    def write_new(self, path: Path, data: bytes, *, like: Path | None = None, keep_owner: bool = True) -> None:
        """
        Write *data* to *path*, replacing a leftover, with the permissions, owner and attributes of *like*.

        Raises PermissionError where the owner cannot be kept.
        """
        self.step("create", path)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600 if like else 0o644, exist_ok=False)
        with path.open("wb") as file:
            half = len(data) // 2
            file.write(data[:half])
            file.flush()
            self.step("write the rest of", path)
            file.write(data[half:])
            file.flush()
            if like is not None:
                self._imitate(path, like, keep_owner=keep_owner)
            os.fsync(file.fileno())

    def _imitate(self, path: Path, like: Path, *, keep_owner: bool) -> None:
        original = like.stat()
        own = path.stat()
        if (own.st_uid, own.st_gid) != (original.st_uid, original.st_gid):
            try:
                os.chown(path, original.st_uid, original.st_gid)
            except PermissionError:
                if keep_owner:
                    raise
        shutil.copystat(like, path)
        os.utime(path)  # the content is new, and tools look at the time to know

    def move(self, source: Path, target: Path) -> None:
        """Put *source* in the place of *target*, in one instant."""
        self.step("move", target)
        source.replace(target)
        self._settle(target.parent)

    def link_new(self, source: Path, target: Path) -> bool:
        """Give *source* the second name *target* unless that exists, in one instant; say whether it was done."""
        self.step("link", target)
        try:
            os.link(source, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if target.exists():  # a file system without links: nothing better than to look first
                return False
            source.replace(target)
        self._settle(target.parent)
        return True

    def write_in_place(self, path: Path, data: bytes) -> None:
        """Write *data* over the content of *path*: not in one instant, for files whose name cannot be moved over."""
        self.step("write in place", path)
        with path.open("r+b") as file:
            half = len(data) // 2
            file.write(data[:half])
            file.flush()
            self.step("write the rest of", path)
            file.write(data[half:])
            file.truncate()
            file.flush()
            os.fsync(file.fileno())

    def remove(self, path: Path) -> None:
        """Remove *path* if it is there."""
        self.step("remove", path)
        path.unlink(missing_ok=True)

    def _settle(self, folder: Path) -> None:
        """Make a change of names in *folder* durable."""
        if os.name != "posix":
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sha256(data: bytes) -> str:
    """Return the hash that the journal keeps."""
    return hashlib.sha256(data).hexdigest()


def is_locked(path: Path) -> bool:
    """
    Say whether another program keeps readers from the file at *path* by a lock.

    It asks for a shared lock and gives it back at once. filelock, which guards the journal, has exclusive locks only: it would take a
    program that reads under a shared lock for one that writes. Windows has no such locks, nor have some network disks: the content is
    checked before each write all the same.
    """
    if fcntl is None:
        return False
    with path.open("rb") as file:  # closing it ends the lock
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
    return False


def is_shared(path: Path) -> bool:
    """Say whether the file has further hard links, which moving a new file over it would cut."""
    return stat.S_ISREG(path.stat().st_mode) and path.stat().st_nlink > 1
