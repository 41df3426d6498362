"""
Rehearsals that are kept on disk: a plan that is asked for again is answered at once.

What a rehearsal depends on is in its key: the step and the card, PyTorch and the other packages that build it, this memplan's own code, and
the variables of the environment that PyTorch and CUDA read. So nothing has to be thrown away when one of them changes; the oldest files go
when there are too many.

    <cache>/rehearsals/<family>/<size>.json     the rehearsal without its trace
    <cache>/rehearsals/<family>/<size>.trace    its trace, which only what is worked out from it needs
    <cache>/rehearsals/<family>/<size>.answers  what was worked out, by question

A family is what the sizes of one variable have in common.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from memplan.memory.rehearsal import Rehearsal
from memplan.memory.trace import MemoryTrace

FORMAT = 1

MOST_BYTES = 2**30
"""Of all files together; the oldest families go when there are more."""

_READ_BY_PYTORCH = ("TORCH", "PYTORCH", "CUDA", "CUBLAS", "CUDNN", "NVIDIA", "TRITON")
_PACKAGE = Path(__file__).parents[1]


class KeptRehearsals:
    """The rehearsals of one cache folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "rehearsals"
        self._is_writable = True

    def get(self, family: str, size: int) -> Rehearsal | None:
        """Return the rehearsal without its trace; None where it is not there, or not readable."""
        try:
            return Rehearsal.model_validate_json(self._path(family, size, "json").read_bytes())
        except (OSError, ValueError):
            return None

    def get_trace(self, family: str, size: int) -> MemoryTrace | None:
        """Return its trace; None where it is not there, or not readable."""
        try:
            return MemoryTrace.from_bytes(self._path(family, size, "trace").read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, family: str, size: int, rehearsal: Rehearsal) -> bool:
        """Keep *rehearsal* and its trace; say whether the folder could be written."""
        assert rehearsal.trace is not None
        if self._is_writable:
            try:
                (self._folder / family).mkdir(parents=True, exist_ok=True)
                write_whole(self._path(family, size, "trace"), rehearsal.trace.to_bytes())
                write_whole(self._path(family, size, "json"), rehearsal.model_dump_json(round_trip=True).encode())
                self._make_room()
            except OSError:
                self._is_writable = False  # a full disk, a folder of somebody else: everything works without, only slower
        return self._is_writable

    def get_answers(self, family: str, size: int) -> dict[str, dict[str, object]]:
        """Return what was worked out of that rehearsal, by question."""
        try:
            answers = json.loads(self._path(family, size, "answers").read_bytes())
        except (OSError, ValueError):
            return {}
        return answers if isinstance(answers, dict) else {}

    def put_answers(self, family: str, size: int, answers: Mapping[str, Mapping[str, object]]) -> None:
        """Keep what was worked out."""
        if self._is_writable and (self._folder / family).is_dir():
            try:
                write_whole(self._path(family, size, "answers"), json.dumps(answers).encode())
            except OSError:
                self._is_writable = False

    def _path(self, family: str, size: int, kind: str) -> Path:
        return self._folder / family / f"{size}.{kind}"

    def _make_room(self) -> None:
        """Remove the files that were written longest ago while there are too many bytes."""
        found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.glob("*/*"))
        too_many = sum(size for _, size, _ in found) - MOST_BYTES
        for _, size, path in found:
            if too_many <= 0:
                break
            path.unlink(missing_ok=True)
            too_many -= size


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all. Raises OSError where it cannot be written."""
    import tempfile  # noqa: PLC0415  (a plan that is kept writes nothing)

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(name).replace(path)


def family_of(depends_on: Mapping[str, object]) -> str:
    """Return the name of what *depends_on*, this memplan and this environment have in common."""
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_READ_BY_PYTORCH)}
    whole = {
        "format": FORMAT,
        "memplan": _own_code(),
        "python": sys.version_info[:3],
        "environment": environment,
        **depends_on,
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


@lru_cache(maxsize=1)
def _own_code() -> str:
    """Return a digest of what decides a rehearsal here: the programs, the device, and what is made of what they see."""
    digest = hashlib.sha256()
    for room in ("programs", "standin", "allocator", "estimators", "memory", "workload"):
        for path in sorted((_PACKAGE / room).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
