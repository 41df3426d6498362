"""Any function of any file as a program to rehearse: one process that has loaded none of them serves all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplan.child.server import load_build


def build(device: str, *, file: str, function: str, values: dict[str, Any]) -> Callable[[], object]:
    """Return the step of *function* of *file*, which is loaded in the fork that runs it."""
    return load_build(file, function)(device, **values)
