"""A process that is measured holds its memory at its end, until whoever asked has seen what the driver says of it."""

from __future__ import annotations

import time
from pathlib import Path

_MOST_SECONDS = 10.0


def wait_for(path: str) -> None:
    """Wait until there is a file at *path*, where one is named; not for ever."""
    begin = time.monotonic()
    while path and not Path(path).exists() and time.monotonic() - begin < _MOST_SECONDS:
        time.sleep(0.002)
