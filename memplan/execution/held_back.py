"""What a rehearsed program writes, and uploads: held back unless the user allows it, and told in the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from memplan.execution.rehearsal import HeldBackFile, Rehearsal
from memplan.programs.offline import offline_variables
from memplan.programs.overlay import Overlay
from memplan.programs.prepared_data import PreparedData

MOST_TOLD = 1000
"""Files of which the report has the names."""


class Writes:
    """
    What one rehearsal does with the files that its program writes.

    *folder* is the rehearsal's own, *script* what it runs; what is written in the folders *passed* is memplan's. *shown*: other contents of
    files, which the program finds in their place. *prepared*: what it prepares is kept there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        script: Path | None,
        are_allowed: bool,
        passed: Sequence[Path] = (),
        shown: Mapping[Path, bytes] = MappingProxyType({}),
        prepared: PreparedData | None = None,
    ) -> None:
        assert not (are_allowed and shown)  # the user's own files would have to change
        self._folder = folder
        self._script = script
        self._passed = [*passed, *([prepared.folder] if prepared else [])]
        self._shown, self._prepared = shown, prepared
        self._are_allowed = are_allowed
        self._overlay: Overlay | None = None

    def held_in(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return *environment* for a process whose writes are held back; unchanged where they are allowed."""
        if self._are_allowed:
            return dict(environment)
        if self._overlay is None:
            self._overlay = Overlay(self._folder, script=self._script, passed=self._passed, shown=self._shown)
        return {**environment, **offline_variables(self._folder, environment), **self._overlay.environment(environment)}

    def told_in(self, rehearsal: Rehearsal) -> Rehearsal:
        """Return *rehearsal* with what was held back."""
        if self._overlay is None:
            return rehearsal
        files, removed = self._overlay.written(), self._overlay.removed()
        return rehearsal.model_copy(
            update={
                "held_back_files": tuple(HeldBackFile(path=str(file.path), size_bytes=file.size_bytes) for file in files[:MOST_TOLD]),
                "num_held_back_files": len(files),
                "held_back_bytes": sum(file.size_bytes for file in files),
                "read_files": tuple(self._read(map(str, self._overlay.read()))),
                "held_back_removals": tuple(map(str, removed[:MOST_TOLD])),
            }
        )

    def _read(self, files: Iterable[str]) -> Iterator[str]:
        """Yield *files* by the names that they have for the user."""
        for file in files:
            name = file if self._prepared is None else self._prepared.users_file(file)
            if name is not None:
                yield name
