"""Whether an apply or an undo was interrupted somewhere: asked at the start of every command, and so with as few imports as can be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

JOURNAL_FOLDER = ".memplan"
JOURNALS = "apply-*.json"
UNFINISHED = ("applying", "undoing")


def interrupted_in(path: Path) -> Path | None:
    """Return the folder at *path*, or one in it, whose last apply was interrupted; None where there is none."""
    return next((folder for folder in _folders(path) if _is_interrupted(folder / JOURNAL_FOLDER)), None)


def _folders(path: Path) -> Iterator[Path]:
    folder = path if os.path.isdir(path) else path.parent
    yield folder
    try:
        yield from sorted(journal.parent for journal in folder.glob(f"*/{JOURNAL_FOLDER}"))
    except OSError:  # a folder that may not be listed
        return


def _is_interrupted(journals: Path) -> bool:
    if not os.path.isdir(journals):
        return False
    for path in journals.glob(JOURNALS):
        try:
            if json.loads(path.read_bytes()).get("state") in UNFINISHED:
                return True
        except (OSError, ValueError, AttributeError):  # a damaged journal: the command that needs it says so
            continue
    return False
