"""Where the journal of an apply lies, as seen from a path that the user gives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from memplan.edits.interrupted import JOURNAL_FOLDER, JOURNALS
from memplan.errors import ConfigError
from memplan.layouts.registry import roots_of


def journal_root(path: Path, files: Sequence[Path] = ()) -> Path:
    """
    Return the folder whose journal *path* means, or one above the first of *files*.

    The folder that a layout finds at *path*; where the files are not readable any more, one that has a journal.
    """
    folder = path.parent if os.path.isfile(path) else path
    above = list(files[0].absolute().parents) if files else []
    return next((root for root in (*_roots(folder), *above) if any((root / JOURNAL_FOLDER).glob(JOURNALS))), folder)


def _roots(folder: Path) -> list[Path]:
    try:
        return [folder, *roots_of(folder)]
    except ConfigError:  # a layout that makes no sense: the command that needs it says so
        return [folder]
