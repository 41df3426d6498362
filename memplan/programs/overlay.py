"""
Files that a rehearsed program writes: they go to a scratch folder, where it finds them again, and which ends with the rehearsal.

A library in C (`csrc/overlay.h` says how it works) stands first in LD_PRELOAD, in front of the functions of the C library that take a path.
Every process that the program starts inherits it; one that does without the C library is refused by the kernel what would change a file
of the user's. Held are all folders, except

- what the kernel makes: /dev, /proc, /sys, and /run (but removable disks, in /run/media, are the user's);
- the rehearsal's own folder;
- what is new in a folder for temporary files (/tmp, /var/tmp, TMPDIR). What was there before the program began is held: an earlier run's
  output, or the program's own working folder. Where that folder, or the script's, is the temporary folder itself, all of it is held.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from memplan.hardware.cache_dir import default_cache
from memplan.standin.compiled_libraries import compile_library, find_compiler, made_once, path_for_preload

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = "liboverlay.so"
_OPTIONS = ("-O2", "-std=gnu11", "-U_FORTIFY_SOURCE", "-fno-delete-null-pointer-checks", "-fvisibility=hidden")
_PASSED = ("/run",)
_HELD = ("/run/media",)
TEMPORARY = ("/tmp", "/var/tmp")


class FileWritten(NamedTuple):
    """A file that the program wrote, or changed."""

    path: Path
    size_bytes: int


class Overlay:
    """
    The scratch folder of one rehearsal, in *folder*, which is the rehearsal's own.

    *script*: the file that is run, where it is known. *passed*: folders in which what is written is written. *shown*: other contents of
    files, by path, which the program finds wherever it opens them, by any path; the files themselves stay as they are.
    """

    def __init__(
        self,
        folder: Path,
        *,
        script: Path | None = None,
        passed: Sequence[Path] = (),
        shown: Mapping[Path, bytes] = MappingProxyType({}),
    ) -> None:
        self.folder = folder = folder.resolve()
        self._scratch = folder / "overlay"
        self._copies = self._scratch / "files"
        for path in (self._scratch, self._copies, self._scratch / "work"):
            path.mkdir()
        self._library = path_for_preload(build_overlay()) / LIBRARY
        self._shown = {path.resolve(): content for path, content in shown.items()}
        for path, content in self._shown.items():
            self._put(path, content)
        rules = [*self._rules([folder, *passed], script), *(("c", str(path)) for path in self._shown), ("r", "")]
        text = "".join(f"{kind} {_one_line(path)}\n" for kind, path in rules)
        (self._scratch / "rules").write_bytes(os.fsencode(text))

    def _put(self, path: Path, content: bytes) -> None:
        """Make a copy of the file at *path* with that content. Its folders only carry it: of themselves the originals still tell."""
        copy = self._copy_of(path)
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy.write_bytes(content)
        original = path.stat()
        copy.chmod(original.st_mode & 0o7777)
        if int(copy.stat().st_mtime) == int(original.st_mtime):  # Python would take what it compiled of the original in this second
            os.utime(copy, ns=(original.st_atime_ns, original.st_mtime_ns + 10**9))

    def _copy_of(self, path: Path) -> Path:
        return Path(f"{self._copies}{path}")

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that hold what a program writes, for one whose environment is *inherited*."""
        preload = filter(None, [str(self._library), *inherited.get("LD_PRELOAD", "").split(":")])
        return {"MEMPLAN_OVERLAY": str(self._scratch), "LD_PRELOAD": ":".join(preload)}

    def _rules(self, folders: Sequence[Path], script: Path | None) -> Iterator[tuple[str, str]]:
        """Yield what the library is to know, each with a letter: see `Rule` in csrc/index.c."""
        yield "l", str(self._library)
        yield from (("p", path) for path in (*_PASSED, *(str(folder.resolve()) for folder in folders)))
        yield from (("h", path) for path in _HELD)
        own = {Path.cwd().resolve(), *([script.resolve().parent] if script else [])}
        temporary = {Path(path).resolve() for path in (tempfile.gettempdir(), *TEMPORARY)}
        yield from (("t", str(path)) for path in sorted(temporary - own) if path.is_dir())

    def written(self) -> list[FileWritten]:
        """Return the files that the program has written and not removed, the largest first; what Python compiles for itself is not told."""
        files = [file for file in self._files() if "__pycache__" not in file.path.parts and not self._is_as_it_was(file)]
        return sorted(files, key=lambda file: (-file.size_bytes, file.path))

    def read(self) -> list[Path]:
        """Return the files and folders that the program opened for reading, but for those of the system and of installed packages."""
        log = self._scratch / "reads"
        names = log.read_bytes().split(b"\0")[:-1] if log.exists() else []
        return sorted({Path(os.path.normpath(os.fsdecode(name))) for name in names})

    def _files(self) -> Iterator[FileWritten]:
        for folder, _, names in os.walk(self._copies):
            for name in names:
                copy = Path(folder, name)
                yield FileWritten(Path("/") / copy.relative_to(self._copies), copy.lstat().st_size)

    def _is_as_it_was(self, file: FileWritten) -> bool:
        """
        Say whether the program never wrote into *file*: what it was shown, or what it opened for writing.

        A copy keeps the time of what it is a copy of.
        """
        if file.path in self._shown:
            return self._copy_of(file.path).read_bytes() == self._shown[file.path]
        try:
            before, now = file.path.lstat(), self._copy_of(file.path).lstat()
        except OSError:
            return False
        return (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)

    def removed(self) -> list[Path]:
        """Return the user's files and folders that the program has removed, or given another name; of a folder, not what is in it."""
        log = self._scratch / "removed"
        names = log.read_bytes().split(b"\0")[:-1] if log.exists() else []
        paths = (Path(os.fsdecode(name)) for name in names)
        gone = {path for path in paths if not os.path.lexists(self._copy_of(path))}
        return sorted(path for path in gone if gone.isdisjoint(path.parents))


NOT_TOLD = ("/proc/", "/dev/", "/sys/", "/run/", "/usr/", "/lib/", "/lib64/", "/bin/", "/etc/")
NOT_TOLD_BELOW = ("/site-packages/", "/dist-packages/", "/lib/python3")
"""Of the kernel, the system and installed packages: how such files' names begin, and what is in them."""


def tells_reads_of(path: Path) -> bool:
    """Say whether `Overlay.read` tells of a file at *path*, by that name and by its own: csrc/reads.c has the same list of the others."""
    names = (os.path.abspath(path), os.path.realpath(path))  # noqa: PTH100  (links are not followed)
    return not any(name.startswith(NOT_TOLD) or any(part in name for part in NOT_TOLD_BELOW) for name in names)


def build_overlay(cache: Path | None = None) -> Path:
    """Return the folder with the library, compiled where it is not there yet. Raises MissingError when there is no C compiler."""
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(repr((_OPTIONS, platform.machine())).encode())
    for path in sources:
        digest.update(path.read_bytes())

    def compile_it(folder: Path) -> None:
        compile_library(find_compiler(), folder / LIBRARY, [path for path in sources if path.suffix == ".c"], *_OPTIONS)

    return made_once(f"overlay-{digest.hexdigest()[:16]}", cache or default_cache(), compile_it)


def _one_line(path: str) -> str:
    return path.replace("\n", "\1")
