"""
What packages ask of the GPU while they are imported, in a process that other programs are forked from.

bitsandbytes picks the library that it loads by the GPU's compute capability. PyTorch begins CUDA to answer that, and then no fork of the
process could use CUDA. So a fork is asked instead, which ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from memplan.child.server import fork

_MEMORY = {"total_memory"}
"""The properties that are not those of a kind of GPU."""


class Properties(SimpleNamespace):
    """The properties of a GPU, which remember whether its memory was asked for."""

    def __getattribute__(self, name: str) -> Any:
        if name in _MEMORY:
            self.__dict__["is_memory_known"] = True
        return super().__getattribute__(name)


class GpuAtImport:
    """Answers for the GPU that *environment* describes, and knows whether it was asked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._described = environment.get("MEMPLAN_CARD", "")
        self._properties: Properties | None = None

    def is_that_of(self, environment: Mapping[str, str]) -> bool:
        """Say whether packages would have learned the same of the GPU that *environment* describes."""
        other = environment.get("MEMPLAN_CARD", "")
        if self._properties is None or other == self._described:
            return True
        return not self._properties.is_memory_known and _kinds(other) == _kinds(self._described)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Answer what is asked of the current GPU, without that CUDA begins."""
        asked = torch.cuda.get_device_properties, torch.cuda.current_device
        of_device, current = asked
        is_over = False

        def get_device_properties(device: Any = None) -> Any:
            if is_over or torch.cuda.is_initialized():  # a package has kept this function
                return of_device(device)
            if self._properties is None:
                self._properties = _asked_of_a_fork(of_device)
            return self._properties or of_device(device)

        def current_device() -> int:
            return current() if is_over or torch.cuda.is_initialized() else 0

        torch.cuda.get_device_properties, torch.cuda.current_device = get_device_properties, current_device
        try:
            yield
        finally:
            is_over = True
            torch.cuda.get_device_properties, torch.cuda.current_device = asked


def _asked_of_a_fork(of_device: Any) -> Properties | None:
    """Return the properties of the first GPU, as a fork of this process finds them; None where it fails."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            found = of_device(0)
            values = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
            os.write(writing, json.dumps(values, default=str).encode())
        finally:
            os._exit(0)  # whatever happened: what follows is the parent's
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return Properties(**json.loads(text), is_memory_known=False) if text else None


def _kinds(described: str) -> list[list[str]]:
    """Return what *described* says of each GPU, but for memory: MEMPLAN_CARD, as csrc/card.c has it."""
    fields = [line.split(" ", 6) for line in described.splitlines()]
    return [[*line[:4], *line[6:]] for line in fields]
