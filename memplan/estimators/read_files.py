"""
What a program read when it was run, as it is now: where none of it has changed, a run would show the same again.

Small texts count by their content, everything else by size and time, folders by the names in them. Installed packages count by their
versions; the system's own files do not count.

Each run may read files that none before it did: with a larger batch, more samples. What is known of a run hangs on what had been read by
then, and not on what others read later. So the paths are kept in the order in which they came to be known, and after each run that added
some the state of all until then has a digest: a run's digest is that of its time, and holds for as long as it is among those of now.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from memplan.estimators.rehearsal_cache import write_whole

_TEXTS = (".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt", ".sh")
_MODULES = (".py", ".so")
_MOST_LOOKED_AT = 1000
"""Entries of a folder: the modules of a package are among its first."""
_MOST_TEXT_BYTES = 256 * 1024
_MOST_NAMES = 20_000
_OURS = "memplan-"
_PACKAGE = str(Path(__file__).parents[1])


class Ran(NamedTuple):
    """A run of the program."""

    requests: str
    """A digest of what it asked of the allocator."""
    files: str
    """That of the files that had been read by its end."""


class SizeLimit(NamedTuple):
    """The largest size of a program that makes a difference."""

    size: int
    reason: str
    """Why, as the end of a sentence."""


class ReadFiles:
    """The files and folders that one program is known to read, kept in *file*; None: nowhere."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._learned: list[list[str]] = []  # what each run added
        self._refused: dict[str, dict[str, list[str | None]]] = {}
        self._runs: dict[str, dict[str, Ran]] = {}
        self._limits: dict[str, tuple[int, str, str]] = {}
        self._took: dict[str, dict[str, str]] = {}
        if file is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):  # not there yet, or not what memplan wrote: as if nothing were known
                kept = json.loads(file.read_bytes())
                self._learned, self._refused, self._runs = list(kept["learned"]), dict(kept["refused"]), dict(kept["runs"])
                self._limits, self._took = dict(kept["limits"]), dict(kept["took"])
        self._paths = {path for added in self._learned for path in added}

    @property
    def are_known(self) -> bool:
        """Say whether the program has ever been seen."""
        return bool(self._paths)

    def learn(self, paths: Iterable[str], *, since_ns: int) -> None:
        """Take in what a run read; what was made for it, or *since_ns* as a temporary file, does not count."""
        found = {path for path in map(source_of, paths) if not _is_fleeting(path, since_ns) and not path.startswith(_PACKAGE)}
        added = found - self._paths
        if added:
            self._learned.append(sorted(added))
            self._paths |= added

    def changed_since(self, time_ns: int) -> bool:
        """Say whether any of them was changed after that time."""
        found = (state for state in map(_stat, self._paths) if state is not None and not stat.S_ISDIR(state.st_mode))
        return any(state.st_mtime_ns > time_ns for state in found)

    def digests(self, besides: Mapping[str, bytes]) -> list[str]:
        """
        Return, for each run that added files, what is equal where all are as they were that had been read by its end; in order.

        *besides*: contents that count in place of those of their files.
        """
        whole, found = hashlib.sha256(), []
        for path, content in sorted(besides.items()):
            whole.update(path.encode(errors="surrogateescape") + b"\0" + content + b"\0")
        # A program that lists a folder above its own is taken to look for modules there, or for the root of its project, and not for data.
        sources = {str(folder) for folder in Path.cwd().parents}
        for added in self._learned:
            modules = {os.path.dirname(path) for path in added if path.endswith(".py")}  # noqa: PTH120  (of thousands)
            packages = {path.removesuffix("/__init__.py") for path in added if path.endswith("/__init__.py")}
            sources |= modules | {os.path.dirname(path) for path in packages}  # noqa: PTH120
            for path in added:
                if path not in besides:
                    whole.update(f"{path}\0{_state(path, is_of_sources=path in sources)}\0".encode(errors="surrogateescape"))
            found.append(whole.hexdigest()[:24])
        return found

    def refusal(self, family: str, size: int, now: Collection[str]) -> tuple[str, str | None] | None:
        """Return why that size was refused, and what to do, where it was, and the files are as they were; *now*: the digests of now."""
        message, hint, of_time = self._refused.get(family, {}).get(str(size), (None, None, None))
        return (str(message), hint) if of_time in now else None

    def refuse(self, family: str, size: int, message: str, hint: str | None, *, now: str) -> None:
        """Take in that a size is refused, *now* being the last digest."""
        self._refused.setdefault(family, {})[str(size)] = [message, hint, now]

    def limit(self, family: str, now: Collection[str]) -> SizeLimit | None:
        """Return the largest size that makes a difference, where it is known, and the files are as they were; *now*: the digests of now."""
        size, reason, of_time = self._limits.get(family, (0, "", None))
        return SizeLimit(size, reason) if of_time in now else None

    def limit_to(self, family: str, limit: SizeLimit, *, now: str) -> None:
        """Take in that no larger size makes a difference, *now* being the last digest."""
        self._limits[family] = (*limit, now)

    def took(self, family: str, size: int, now: Collection[str]) -> bool:
        """Say whether the program was seen to take that size, or two others, each as it was given it; *now*: the digests of now."""
        known = {each for each, of_time in self._took.get(family, {}).items() if of_time in now}
        return str(size) in known or len(known) > 1  # one may be by chance

    def note_took(self, family: str, size: int, *, now: str) -> None:
        """Take in that it did, *now* being the last digest."""
        self._took.setdefault(family, {})[str(size)] = now

    def runs(self, family: str, now: Collection[str]) -> dict[int, Ran]:
        """Return what every run came to, by size, that would show the same again; *now*: the digests of now."""
        kept = {int(size): Ran(*ran) for size, ran in self._runs.get(family, {}).items()}
        return {size: ran for size, ran in kept.items() if ran.files in now}

    def saw(self, family: str, size: int, digest: str, *, now: str) -> None:
        """Take in what a run came to, *now* being the last digest."""
        self._runs.setdefault(family, {})[str(size)] = Ran(digest, now)

    def keep(self) -> None:
        """Write what is known, where that can be done."""
        if self._file is not None:
            with suppress(OSError):  # a full disk, a folder of somebody else: the next plan runs the program again
                self._file.parent.mkdir(parents=True, exist_ok=True)
                known = {
                    "learned": self._learned,
                    "refused": self._refused,
                    "runs": self._runs,
                    "limits": self._limits,
                    "took": self._took,
                }
                write_whole(self._file, json.dumps(known).encode())


def source_of(path: str) -> str:
    """Return the source of a compiled Python file, whose time decides; *path* for any other."""
    file = Path(path)
    is_compiled = file.suffix == ".pyc" and file.parent.name == "__pycache__"
    return str(file.parent.parent / f"{file.name.partition('.')[0]}.py") if is_compiled else path


_OF_THE_KERNEL = ("/proc/", "/sys/", "/dev/")
"""What stands there is of no file, and the processes that /proc lists are others each time."""


def _is_fleeting(path: str, since_ns: int) -> bool:
    """Say whether *path* is the kernel's, memplan's own for the time of a run, or a temporary file that is gone or was made since then."""
    if f"{path}/".startswith(_OF_THE_KERNEL):
        return True
    parts, folder = Path(path).parts, Path(tempfile.gettempdir()).parts
    if parts[: len(folder)] != folder or len(parts) == len(folder):
        return False
    state = _stat(path)
    if parts[len(folder)].startswith(_OURS) or state is None:
        return True
    # A package that writes Python and imports it takes another name each time. Only of files beside no others of a project is that sure.
    is_alone = len(parts) == len(folder) + 1 and stat.S_ISREG(state.st_mode)
    return is_alone and state.st_mtime_ns > since_ns


def _stat(path: str) -> os.stat_result | None:
    try:
        return Path(path).stat()
    except OSError:
        return None


def _state(path: str, *, is_of_sources: bool) -> str:
    found = _stat(path)
    if found is None:
        return "missing"
    with suppress(OSError):  # it went meanwhile, or is not for us to read: its time counts
        if stat.S_ISDIR(found.st_mode):
            names = sorted(entry.name for entry in Path(path).iterdir() if _counts(entry, is_of_sources=is_of_sources))
            return hashlib.sha256("\0".join(names[:_MOST_NAMES]).encode(errors="surrogateescape")).hexdigest() + str(len(names))
        if path.endswith(_TEXTS) and found.st_size <= _MOST_TEXT_BYTES:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return f"{found.st_size} {found.st_mtime_ns}"


def _counts(entry: Path, *, is_of_sources: bool) -> bool:
    """Say whether *entry* of a folder may mean something to the program; where sources are, Python looks through it for modules alone."""
    if entry.name.startswith(".") or entry.name == "__pycache__" or ".backup" in entry.name:
        return False
    return not is_of_sources or entry.suffix in _MODULES or (entry.is_dir() and _has_modules(entry))


def _has_modules(folder: Path) -> bool:
    """Say whether *folder* may be a package: one that a training writes into has none."""
    with suppress(OSError):
        return any(entry.suffix in _MODULES for entry in islice(folder.iterdir(), _MOST_LOOKED_AT))
    return False
