"""What the answer to a read of a value from the device stands on, where nothing is computed."""

from __future__ import annotations

from typing import Literal

Basis = Literal["data", "copied", "answer", "assumed", "drawn", "rule", "padding", "rounded", "compared", "ordinary", "zero"]
"""
The program's own data, computed on the host; the same, as the host copied them to the device; the user; an assumption about what a model
computes; what is drawn at random on the device; what holds in an ordinary training; the worse of two cases (a mask has padding); all of
what a float may be a share of; one of two numbers, with which the program may branch otherwise; a number that a program only looks at; or
nothing.
"""

DRAWN = "drawn at random on the GPU"
"""What the reason begins with of what was drawn there: an end of its range, or one draw."""

ONE_DRAW = f"{DRAWN}: one draw, and others differ"

USERS = "your answer for "
"""What the reason of a user's answer begins with; the place follows, as it was given."""

ALL_BUT_ONE = "all but one of each row pass"
"""The reason of what a model decides, where a program fails with everything passing: a ball around a point has the point in it."""
