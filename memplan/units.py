"""Bytes as people write and read them.

Inside memplan a size is an `int` of bytes and its name ends in `_bytes`. GiB (2**30) appears only here,
on the way in and on the way out.
"""

import re
from decimal import Decimal
from typing import NamedTuple

from memplan.errors import UsageError

KIB = 2**10
MIB = 2**20
GIB = 2**30
LARGEST_BYTES = 2**80

_UNIT_BYTES = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2**40,
    "g": 10**9,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z]*)\s*")


_UNITS_ON_BOXES = ("", "g", "gb")


class Size(NamedTuple):
    """A size that somebody typed."""

    size_bytes: int
    marketing_gb: int | None = None
    """The same as the number on a GPU's box, which is no exact size: 24 for "24", "24GB" and "24G"; None for any other text."""


def parse_size(text: str) -> Size:
    """
    Return the size that *text* says: "24GiB", "15835660288B", "24 GB" (10**9 each), or a plain number of GiB.

    Raises UsageError when it says no size, or one below one byte.
    """
    match = _SIZE.fullmatch(text)
    unit = match["unit"].lower() if match else ""
    if match is None or (unit and unit not in _UNIT_BYTES):
        raise UsageError(f"{text!r} is not a size", hint="write it with a unit, as 24GiB or 15835660288B, or as a plain number of GiB")
    size_bytes = int(Decimal(match["number"]) * (_UNIT_BYTES[unit] if unit else GIB))
    if size_bytes > LARGEST_BYTES:
        raise UsageError(f"a size of {text.strip()[:20]} is more than any machine has", hint="write what the GPU has, as 24 or 24GiB")
    if size_bytes < 1:
        raise UsageError(f"a size of {text!r} is less than one byte", hint="write what the GPU has, as 24 or 24GiB")
    number = Decimal(match["number"])
    return Size(size_bytes, int(number) if unit in _UNITS_ON_BOXES and number == int(number) else None)


def format_bytes(size_bytes: int) -> str:
    """Return *size_bytes* for a person: "19.82 GiB", "512.0 MiB", "0 B"."""
    magnitude = abs(size_bytes)
    if magnitude >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    if magnitude >= MIB:
        return f"{size_bytes / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{size_bytes / KIB:.1f} KiB"
    return f"{size_bytes} B"
