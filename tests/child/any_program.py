"""Any function of any file as a program to rehearse: one process that has loaded none of them serves all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplan.child.server import load_build, value_from


def build(device: str, *, file: str, function: str, values: dict[str, Any], texts: dict[str, str]) -> Callable[[], object]:
    """Return the step of *function* of *file*, which is loaded in the fork that runs it; *texts* are values as somebody typed them."""
    program = load_build(file, function)
    return program(device, **values, **{name: value_from(program, name, text) for name, text in texts.items()})
