"""How findings of several modules name places and lists of names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SHOWN = 3
"""Names and places that a sentence holds."""


def shown_place(place: str) -> str:
    """Return *place* as a person would name it: from its package, or from here."""
    inside = place.rsplit("/site-packages/", 1)
    return inside[-1] if len(inside) > 1 else place.removeprefix(f"{Path.cwd()}/")


def listed(names: Sequence[str]) -> str:
    """Return the first of *names*, and how many more there are."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
