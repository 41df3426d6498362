"""
Which variables of the environment an installed package has set, and which the program itself.

Packages set some when they are imported (scikit-learn OpenMP's, polars its allocator's): so they do in a process that imports them ahead
(`warm.py`). What the program sets before its imports, as HF_HOME, has to be there when that process makes them.

This file is loaded before the program, as a file of no package (`hook/sitecustomize.py`), and is imported later: what was noted is kept
with `os.environ`.
"""

import os
import sys
from typing import Any

INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Folders that installed packages lie in."""

_OF_MAPPINGS = ("os.py", "os>", "_collections_abc.py", "_collections_abc>")
"""How the files end whose functions set a variable for someone else: `update`, `setdefault`; Python may have them frozen."""


def note_setters() -> None:
    """Note from here on who sets a variable."""
    kind: Any = type(os.environ)
    if hasattr(kind, "memplan_set_by_packages"):
        return
    kind.memplan_set_by_packages = set()
    set_item = kind.__setitem__

    def noting(environment: Any, name: str, value: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(_OF_MAPPINGS):
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        set_item(environment, name, value)
        (set_by_packages().add if any(folder in file for folder in INSTALLED) else set_by_packages().discard)(name)

    kind.__setitem__ = noting


def set_by_packages() -> set[str]:
    """Return the names of the variables that installed packages have set last, since it is noted."""
    found: set[str] = getattr(type(os.environ), "memplan_set_by_packages", set())
    return found
