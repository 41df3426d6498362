"""Libraries of our own: compiled once, whoever needs them at the same time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memplan.errors import MissingError
from memplan.standin import compiled_libraries
from memplan.standin.compiled_libraries import compile_library, find_compiler, made_once

MAKES_IT = """
import sys, time
from pathlib import Path
from memplan.standin.compiled_libraries import made_once

def fill(folder):
    with open(sys.argv[2], "a") as log:
        log.write("filled\\n")
    time.sleep(0.5)
    (folder / "made").touch()

print(made_once("name", Path(sys.argv[1]), fill))
"""


def test_of_several_processes_one_makes_it(tmp_path: Path) -> None:
    """The others wait for it, and find it."""
    arguments = [sys.executable, "-c", MAKES_IT, str(tmp_path / "cache"), str(tmp_path / "log")]
    running = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]

    assert {process.communicate(timeout=60)[0].strip() for process in running} == {str(tmp_path / "cache" / "name")}
    assert (tmp_path / "log").read_text() == "filled\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["name"]


def test_a_process_that_was_stopped_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the cache, as one that was stopped with Ctrl-Z while it compiled."""
    monkeypatch.setattr(compiled_libraries, "LONGEST_WAIT_SECONDS", 0.2)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    began = time.monotonic()

    made = made_once("name", tmp_path, lambda folder: (folder / "made").touch())

    os.close(descriptor)
    assert (made / "made").exists()
    assert time.monotonic() - began >= 0.2


def test_what_could_not_be_made_is_not_there(tmp_path: Path) -> None:
    """The next tries again."""

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise MissingError("no compiler", hint="install one")

    with pytest.raises(MissingError, match="no compiler"):
        made_once("name", tmp_path, fail)

    assert list(tmp_path.iterdir()) == []
    assert made_once("name", tmp_path, lambda _: None).is_dir()


def test_a_library_of_several_files_is_whole(tmp_path: Path) -> None:
    """Two of them may have the same name, and nothing but the library is left."""
    sources = [tmp_path / "one" / "part.c", tmp_path / "two" / "part.c"]
    for number, source in enumerate(sources):
        source.parent.mkdir()
        source.write_text(f"int part_{number}(void) {{ return VALUE + {number}; }}\n")
    output = tmp_path / "out" / "both.so"
    output.parent.mkdir()

    compile_library(find_compiler(), output, sources, "-DVALUE=40")

    called = subprocess.run(
        [sys.executable, "-c", f"import ctypes; both = ctypes.CDLL({str(output)!r}); print(both.part_0(), both.part_1())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert called.stdout.split() == ["40", "41"]
    assert list(output.parent.iterdir()) == [output]
