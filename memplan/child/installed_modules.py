"""Which modules of installed packages a process has imported: what a warm one (`warm.py`) imports ahead."""

from __future__ import annotations

import sys
from typing import Any

from memplan.child.set_variables import INSTALLED

_OWN = ("memplan", "__main__", "sitecustomize")


def installed_modules() -> dict[str, str]:
    """Return the modules of installed packages that this process has imported, in the order in which it began to, each with its file."""
    found = ((name, _file_of(name, module)) for name, module in list(sys.modules.items()))
    return {name: file for name, file in found if file is not None}


def _file_of(name: str, module: Any) -> str | None:
    """Return the file of a module that an installed package has under that name; None of one that cannot be imported by it."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None)
    if not isinstance(file, str) or getattr(spec, "name", None) != name or name.partition(".")[0] in _OWN:
        return None
    return file if any(folder in file for folder in INSTALLED) else None
