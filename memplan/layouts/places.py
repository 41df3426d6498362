"""Where the keys of a configuration are: in its main file, in a file that this names, or in the launcher's own."""

from __future__ import annotations

import os
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from memplan.edits.config_file import ConfigFile
from memplan.edits.edit import KeyPath
from memplan.errors import ConfigError
from memplan.layouts.schema import ANYTHING, Conditions, LayoutPart, readings_of, spelled
from memplan.layouts.sources import ParsedFiles

LAUNCH = "launch."
"""What the keys of the launcher's own file begin with, in a layout."""


class Place(NamedTuple):
    """Where a key is."""

    file: Path
    parsed: ConfigFile
    key: KeyPath

    @property
    def is_empty(self) -> bool:
        """Say whether nothing stands there."""
        return self.parsed.kind_of(self.key) is None


class Places:
    """Finds the keys that a layout names."""

    def __init__(self, main: Path, launch: Path | None, layout: LayoutPart, files: ParsedFiles) -> None:
        self._main, self._launch = main, launch
        self._layout = layout
        self._files = files

    def holds(self, conditions: Conditions) -> bool:
        """Say whether the main file has one of the spellings at each key."""
        return all(is_one_of(self.spelling(self._main, key), spellings) for key, spellings in conditions.items())

    def of(self, path: Path, key: str) -> Place:
        """Return where *key* of the file at *path* is, by that of its spellings that stands there."""
        place = self._where(path, key)
        above, _, name = key.rpartition(".")
        for optional in self._layout.optional_prefixes if path == self._main else ():
            prefixed = self._where(path, f"{above}.{optional.prefix}{name}")
            if above == optional.below and place.is_empty and not prefixed.is_empty:
                return prefixed
        return place

    def _where(self, path: Path, key: str) -> Place:
        """Return where *key* of the file at *path* is: of the main file, one below a key that names a file is in that file."""
        for named in self._layout.named_files if path == self._main else ():
            if key != named.name and not key.startswith(f"{named.name}."):
                continue
            at = self._literally(named.key)
            inner = self._named_file(at)
            if inner is not None and key == named.name:
                return at
            if inner is not None:
                return Place(inner, self._files.of(inner), tuple(key.removeprefix(f"{named.name}.").split(".")))
        return self._literally(key) if path == self._main else Place(path, self._files.of(path), tuple(key.split(".")))

    def _literally(self, key: str) -> Place:
        """Return where *key* is written: in the main file, or below `launch` in the launcher's."""
        if self._launch is not None and key.startswith(LAUNCH):
            return Place(self._launch, self._files.of(self._launch), tuple(key.removeprefix(LAUNCH).split(".")))
        return Place(self._main, self._files.of(self._main), tuple(key.split(".")))

    def _named_file(self, at: Place) -> Path | None:
        """Return the file that is named *at* a key, None where none is. Raises ConfigError for one that is not there."""
        found = at.parsed.get(at.key) if at.parsed.kind_of(at.key) == "scalar" else None
        if found is None or not isinstance(found.value, str) or not found.value:
            return None
        places = [parent / found.value for parent in at.file.resolve().parents] + [Path(found.value)]
        inner = next((place for place in places if os.path.isfile(place)), None)
        if inner is None:
            problem = f"`{'.'.join(at.key)}` names {found.value}, which is neither beside it nor below a folder that it is in"
            raise ConfigError(problem, file=at.file, line=found.line, hint="put the file there: it says how the model is shared")
        return Path(os.path.relpath(inner))

    def spelling(self, path: Path, key: str) -> str:
        """Return how the file spells the value at *key*; of a list or mapping what it is, of nothing an empty text."""
        _, file, where = self.of(path, key)
        kind = file.kind_of(where)
        if kind is None:
            return ""
        found = file.get(where) if kind == "scalar" else None
        return spelled(found.value) if found is not None else f"a {kind}"


def is_one_of(spelling: str, spellings: Collection[str]) -> bool:
    """Say whether a value that is spelled so is one of *spellings*."""
    patterns = [each for each in spellings if ANYTHING in each]
    return any(
        each in spellings or (bool(each) and any(fnmatchcase(each, pattern) for pattern in patterns)) for each in readings_of(spelling)
    )
