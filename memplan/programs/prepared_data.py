"""
Data that a program prepares, kept from one rehearsal of a plan to the next: tokenizing a dataset anew for every size would take most of it.

Hugging Face's datasets keeps what `map` and `filter` make in a cache, under names that follow from the data and the functions. A plan has a
cache of its own: in it lies, as links, what is in the user's, and what its rehearsals add; the user's stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "HF_DATASETS_CACHE"


def users_cache(environment: Mapping[str, str]) -> Path:
    """Return where datasets keeps what it makes, as its `config.py` finds it."""
    if environment.get(_VARIABLE):
        return Path(environment[_VARIABLE]).expanduser()
    caches = Path(environment.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environment.get("HF_HOME") or caches / "huggingface").expanduser() / "datasets"


class PreparedData:
    """A cache for the rehearsals of one plan, in *folder*, which is the plan's own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder.resolve()
        self._users = users_cache(environment).absolute()
        _link_files(self._users, self.folder)

    def variables(self) -> dict[str, str]:
        """Return what makes a program use it."""
        return {_VARIABLE: str(self.folder)}

    def users_file(self, path: str) -> str | None:
        """Return the file of the user's that the program found at *path*; None for one that a rehearsal has made."""
        if not Path(path).is_relative_to(self.folder):
            return path
        there = self._users / Path(path).relative_to(self.folder)
        return str(there) if there.exists() else None


def _link_files(users: Path, own: Path) -> None:
    """Make in *own* the folders that are in *users*, with links to their files: what is renamed or removed there is a link."""
    for folder, _, names in os.walk(users):
        there = own / Path(folder).relative_to(users)
        there.mkdir(parents=True, exist_ok=True)
        for name in names:
            (there / name).symlink_to(Path(folder, name))
    own.mkdir(parents=True, exist_ok=True)
