"""Standard input that a program reads in each of its runs, though it comes once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memplan.execution.standard_input import StandardInput


def content_of(descriptor: int) -> bytes:
    """Return what is read from *descriptor*, to its end."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def test_what_lies_in_a_pipe_is_there_again_and_still_there() -> None:
    """As often as it is asked for; the pipe itself is as it was."""
    read, write = os.pipe()
    os.write(write, b"1\nyes\n")
    os.close(write)
    found = StandardInput(read)

    for _ in range(2):
        with found.again() as again:
            assert content_of(again) == b"1\nyes\n"
    assert os.read(read, 100) == b"1\nyes\n"
    os.close(read)


def test_the_rest_of_a_file_is_there_again_wherever_the_first_run_has_read_to(tmp_path: Path) -> None:
    """From where it was when the program began."""
    path = tmp_path / "answers.txt"
    path.write_bytes(b"read before\n1\n2\n")
    file = os.open(path, os.O_RDONLY)
    os.read(file, len(b"read before\n"))
    found = StandardInput(file)
    os.read(file, 100)

    with found.again() as again:
        assert content_of(again) == b"1\n2\n"
    os.close(file)


@pytest.mark.parametrize("kind", ["an open pipe", "nothing", "closed"])
def test_where_nothing_is_there_nothing_is_read(kind: str) -> None:
    """And nobody waits for more than a moment."""
    read, write = os.pipe()
    if kind == "nothing":
        os.dup2(os.open(os.devnull, os.O_RDONLY), read)
    found = StandardInput(10_000 if kind == "closed" else read)

    with found.again() as again:
        assert content_of(again) == b""
    os.close(read)
    os.close(write)
