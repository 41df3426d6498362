"""
Rehearsals that are kept on disk: a plan that is asked for again is answered at once.

What a rehearsal depends on is in its key: the step and the GPU, PyTorch and the other packages that build it, this memplan's own code, and
the variables of the environment that PyTorch and CUDA read. So nothing has to be thrown away when one of them changes; the oldest files go
when there are too many.

    <cache>/rehearsals/<family>/<size>/rehearsal.json  the rehearsal without its trace
    <cache>/rehearsals/<family>/<size>/trace           its trace, which only what is worked out from it needs
    <cache>/rehearsals/<family>/<size>/answers.json    what was worked out, by question

A family is what the sizes of one variable have in common. Several processes may write and clean up at once: a rehearsal is a folder, which
is put in its place and taken out by being renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from memplan.execution.rehearsal import Rehearsal
from memplan.traces.trace import MemoryTrace

FORMAT = 1

MOST_BYTES = 2**30
"""Of all files together; the rehearsals that were written longest ago go when there are more."""

_REHEARSAL, _TRACE, _ANSWERS = "rehearsal.json", "trace", "answers.json"
_TRIES = 10
"""Of putting a rehearsal in its place; what other processes put there meanwhile is the same."""

_MOST_SECONDS_IN_USE = 3600.0
"""A rehearsal is written and removed in less than a second."""

READ_BY_PYTORCH = ("TORCH", "PYTORCH", "CUDA", "CUBLAS", "CUDNN", "NVIDIA", "NCCL", "TRITON", "MEMPLAN_ASK_CUDNN")
"""How the variables of the environment begin that PyTorch and CUDA read, and the simulated GPU in their place."""

_PACKAGE = Path(__file__).parents[1]


class RehearsalCache:
    """The rehearsals of one cache folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The user's cache."""
        self._folder = folder / "rehearsals"
        self._is_writable = True

    def get(self, family: str, size: int) -> Rehearsal | None:
        """Return the rehearsal without its trace; None where it is not there, or not readable."""
        try:
            return Rehearsal.model_validate_json((self._place(family, size) / _REHEARSAL).read_bytes())
        except (OSError, ValueError):
            return None

    def get_trace(self, family: str, size: int) -> MemoryTrace | None:
        """Return its trace; None where it is not there, or not readable."""
        try:
            return MemoryTrace.from_bytes((self._place(family, size) / _TRACE).read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, family: str, size: int, rehearsal: Rehearsal) -> bool:
        """Keep *rehearsal* and its trace; say whether that could be done."""
        assert rehearsal.trace is not None
        if not self._is_writable:
            return False
        content = {_REHEARSAL: rehearsal.model_dump_json(round_trip=True).encode(), _TRACE: rehearsal.trace.to_bytes()}
        try:
            _put_folder(self._place(family, size), content)
        except FileNotFoundError:  # somebody removes the cache at this moment: the next finds it empty
            return False
        except OSError:
            self._is_writable = False  # a full disk, a folder of somebody else: everything works without, only slower
            return False
        with suppress(OSError):  # what cannot be looked at or removed is another's
            self._make_room()
        return True

    def get_answers(self, family: str, size: int) -> dict[str, dict[str, object]]:
        """Return what was worked out of that rehearsal, by question."""
        try:
            answers = json.loads((self._place(family, size) / _ANSWERS).read_bytes())
        except (OSError, ValueError):
            return {}
        return answers if isinstance(answers, dict) else {}

    def put_answers(self, family: str, size: int, answers: Mapping[str, Mapping[str, object]]) -> None:
        """Keep what was worked out, where the rehearsal is kept."""
        if self._is_writable:
            try:
                write_whole(self._place(family, size) / _ANSWERS, json.dumps(answers).encode())
            except FileNotFoundError:  # the rehearsal is not there any more
                pass
            except OSError:
                self._is_writable = False

    def _place(self, family: str, size: int) -> Path:
        return self._folder / family / str(size)

    def _make_room(self) -> None:
        """Remove the rehearsals that were written longest ago while there are too many bytes."""
        found = sorted((*_age_and_size(path), path) for path in self._folder.glob("*/*") if not _is_in_use(path))
        too_many = sum(size for _, size, _ in found) - MOST_BYTES
        for _, size, path in found:
            if too_many <= 0:
                break
            too_many -= size * _remove(path)


def _put_folder(place: Path, content: Mapping[str, bytes]) -> None:
    """Make the folder *place* with the files *content*, instead of what may be there. Raises OSError where that is not possible."""
    import tempfile  # noqa: PLC0415  (a plan that is kept writes nothing)

    place.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=place.parent, prefix=".new-"))
    try:
        for name, data in content.items():
            (new / name).write_bytes(data)
        for _ in range(_TRIES):
            try:
                new.rename(place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                _remove(place)  # broken, or put there meanwhile by another process
            else:
                return
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _remove(path: Path) -> bool:
    """Take *path* out of its place at once, and then remove it, so that nobody sees half of it; say whether it was there to be taken."""
    gone = path.with_name(f".gone-{os.getpid()}-{time.monotonic_ns()}")
    try:
        path.rename(gone)
    except OSError:  # another process was faster, or it is another's
        return False
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        gone.unlink()  # a file of an earlier memplan
    return True


def _is_in_use(path: Path) -> bool:
    """Say whether another process is putting *path* in its place or removing it; what one left behind that was killed is old."""
    return path.name.startswith(".") and time.time() - _age_and_size(path)[0] < _MOST_SECONDS_IN_USE


def _age_and_size(path: Path) -> tuple[float, int]:
    """Return when *path*, or something in it, was written last, and its bytes; zeros where another process has removed it meanwhile."""
    try:
        files = [each.stat() for each in (path.iterdir() if path.is_dir() else (path,))]
        return max(path.stat().st_mtime, *(file.st_mtime for file in files), 0.0), sum(file.st_size for file in files)
    except OSError:
        return 0.0, 0


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all. Raises OSError where it cannot be written, and leaves nothing then."""
    import tempfile  # noqa: PLC0415  (a plan that is kept writes nothing)

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def family_of(depends_on: Mapping[str, object]) -> str:
    """Return the name of what *depends_on*, this memplan and this environment have in common."""
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(READ_BY_PYTORCH)}
    whole = {
        "format": FORMAT,
        "memplan": own_code(),
        "python": sys.version_info[:3],
        "environment": environment,
        **depends_on,
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


@lru_cache
def own_code(*others: str) -> str:
    """Return a digest of what decides a rehearsal here: the programs, the device, and what is made of what they see; and *others*."""
    digest = hashlib.sha256()
    for package in ("child", "execution", "standin", "allocator", "estimators", "traces", "memory", "workload", *others):
        for path in sorted((_PACKAGE / package).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
