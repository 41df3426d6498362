"""
Shares of the heavy suite: `pytest -m heavy --share 2/4` runs the second quarter of it.

The whole takes more than an hour on two processors. Continuous integration runs one share after the other; a test is in the same one on
every machine. Parameters of a test are spread over all of them, so that each share has something of every sweep.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple


class Share(NamedTuple):
    """One of several parts, counted from 1."""

    number: int
    count: int

    def has(self, test: str) -> bool:
        """Say whether the test of that node id is in it."""
        return zlib.crc32(test.encode()) % self.count == self.number - 1


def share_from(text: str) -> Share:
    """Return the share that *text* says, as "2/4". Raises ValueError for another text."""
    said = re.fullmatch(r"(\d+)/(\d+)", text)
    if said is None or not 1 <= int(said[1]) <= int(said[2]):
        raise ValueError(f"{text!r} is no share: give one as 2/4")
    return Share(int(said[1]), int(said[2]))
