"""Where memplan keeps what it may need again: the folder for caches of this user, or one that goes with this process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path


def default_cache() -> Path:
    """
    Return memplan's cache folder: `~/.cache/memplan` on Linux, `~/Library/Caches/memplan` on macOS, XDG_CACHE_HOME on both.

    A user without a home gets one that this process removes when it ends.
    """
    from platformdirs import user_cache_path

    try:
        return user_cache_path("memplan", appauthor=False)
    except RuntimeError:  # no HOME, and a user number without a name, as containers have
        return private_cache()


@lru_cache(maxsize=1)
def private_cache() -> Path:
    """Return a cache of this process alone."""
    return temporary_folder("memplan-cache-")


def temporary_folder(prefix: str, parent: str | None = None) -> Path:
    """Make a folder that goes when this process ends. Raises OSError where it cannot be made."""
    folder, process = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # a fork of this process ends before it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
