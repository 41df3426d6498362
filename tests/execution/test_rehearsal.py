"""How a rehearsal tells of a program that failed."""

from __future__ import annotations

import pytest
from torch._utils import ExceptionWrapper

from memplan.execution.rehearsal import ProgramFailure


def told(message: str) -> str:
    return ProgramFailure(message=message, place=None, phase="build").first_line


def of_a_worker(error: Exception, cause: Exception | None = None) -> str:
    """Return the message that a DataLoader raises for what a worker raised, as PyTorch makes it."""
    try:
        raise error from cause
    except type(error):
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(type(error)) as raised:
        wrapped.reraise()
    return f"{type(error).__name__}: {raised.value}"


def test_an_error_of_many_lines_is_told_by_its_first() -> None:
    """With dots where there is more, or where it is too long."""
    assert told("ValueError: no\n") == "ValueError: no"
    assert told("RuntimeError: it failed:\nbecause") == "RuntimeError: it failed: …"
    assert told("ValueError: " + "x" * 1000) == "ValueError: " + "x" * 288 + " …"
    assert told("") == ""


def test_an_error_of_a_dataloader_s_worker_is_the_worker_s() -> None:
    """What it quotes the stack of; an error that another one led to is the last."""
    where = "in DataLoader worker process 0"

    assert told(of_a_worker(ValueError("no such file: a.wav"))) == f"ValueError: no such file: a.wav, {where}"
    assert told(of_a_worker(ValueError("not read"), OSError("gone"))) == f"ValueError: not read, {where}"
    assert told(of_a_worker(RuntimeError("one\ntwo"))) == f"RuntimeError: one …, {where}"
