"""What errors say."""

from __future__ import annotations

import ctypes
import errno
import gzip
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import memplan
from memplan.errors import reason_of


def _raised_by(call: Callable[[], object]) -> OSError:
    with pytest.raises(OSError) as caught:  # noqa: PT011  (any of them: the words are what the test looks at)
        call()
    return caught.value


def _reads_own_memory() -> None:
    with Path("/proc/self/mem").open("rb") as file:  # nothing lies at address 0
        file.read(1)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: Path("/nowhere/at all").read_bytes(), "No such file or directory"),
        (_reads_own_memory, "Input/output error"),
        (lambda: ctypes.CDLL("libnowhere.so"), "libnowhere.so: cannot open shared object file: No such file or directory"),
        (lambda: gzip.GzipFile(fileobj=io.BytesIO(b"plain text")).read(), "Not a gzipped file (b'pl')"),
    ],
)
def test_a_reason_is_the_systems_or_the_librarys(call: Callable[[], object], reason: str) -> None:
    """An error of the system has its words; one that a library made has a text and no number."""
    assert reason_of(_raised_by(call)) == reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.EIO, None), "Input/output error"), (OSError(), "OSError"), (TimeoutError(), "TimeoutError")],
)
def test_a_reason_is_never_none(error: OSError, reason: str) -> None:
    """A number without words, and nothing at all."""
    assert reason_of(error) == reason


def test_only_the_helper_asks_for_strerror() -> None:
    """It is None for some errors, so nothing else in the package reads it."""
    package = Path(memplan.__file__).parent

    asking = [path.name for path in package.rglob("*.py") if ".strerror" in path.read_text(encoding="utf-8")]

    assert asking == ["errors.py"]


def test_a_command_tells_the_error_of_a_library() -> None:
    """A command that cannot load a library: its words, not "None", and nothing about output."""
    command = (
        "import ctypes, click; from memplan.cli.app import cli, main; "
        "cli.add_command(click.Command('load', callback=lambda: ctypes.CDLL('libnowhere.so'))); main(['load'])"
    )

    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr == "Error: libnowhere.so: cannot open shared object file: No such file or directory\n"
