"""
The command after `--`: what is started, and which Python will run it.

A rehearsal is built for the PyTorch of the Python that trains. Where the command is a script of ours to start, that is this Python; where
it is a launcher (`torchrun`, `accelerate`, `axolotl`, `python`, `uv run`, `bash run.sh`), it is the one that the launcher will start.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.errors import UsageError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_PROBE_SECONDS = 60.0

_RUNNERS: Mapping[str, tuple[str, ...]] = {
    "uv": ("run",), "poetry": ("run",), "pdm": ("run",), "pixi": ("run",), "hatch": ("run",), "rye": ("run",), "pipenv": ("run",),
    "conda": ("run",), "mamba": ("run",), "micromamba": ("run",),
}  # fmt: skip
"""Programs that run another command in a virtual environment of their choice, by the word after which it stands."""

_VALUED = {
    "-n", "--name", "-p", "--prefix", "--python", "--project", "--directory", "--with", "--extra", "--group", "--env-file", "-e",
    "--environment", "--manifest-path", "--index", "--index-url", "--cwd",
}  # fmt: skip
"""Options of these programs that are followed by a value."""

_WRAPPERS = {"env", "nice", "nohup", "time", "stdbuf", "timeout", "numactl", "taskset", "exec"}
"""Programs that run another command as it is; which Python that is, PATH says."""


_WHAT = "give a script and its arguments, `-m` and a module, or a program: `torchrun train.py`"


class Command(NamedTuple):
    """A program to start."""

    words: tuple[str, ...]
    """The program and its arguments."""

    python: str
    """The Python that runs it, or that it is taken to start."""

    environment: Mapping[str, str] = {}
    """Variables that were written in front of it."""

    is_guess: bool = False
    """The Python is the one that a shell would start, which the program may choose otherwise."""

    @property
    def is_of_this_python(self) -> bool:
        """Say whether it runs with this interpreter, and with its packages."""
        return os.path.abspath(self.python) == os.path.abspath(sys.executable)  # noqa: PTH100  (virtual environments are links: not resolved)

    @property
    def script(self) -> Path | None:
        """Return the file that is run, where one is named."""
        return next((Path(word) for word in self.words[1:] if word.endswith(".py")), None)


class PythonProgram(NamedTuple):
    """A script or a module, and the Python that runs it."""

    python: str
    options: tuple[str, ...]
    """Python's own, in front of the program."""
    script: str
    """Its file; empty: a module is run."""
    module: str
    arguments: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Return what stands behind the Python on the command line."""
        return [*self.beginning, *self.arguments]

    @property
    def beginning(self) -> list[str]:
        """Return the words in front of its arguments."""
        return [*self.options, *([self.script] if self.script else ["-m", self.module])]


def program_of(command: Command) -> PythonProgram | None:
    """Return what the first process of *command* runs in Python; None where that is another program, or begins in a way of its own."""
    if command.is_guess:
        return None
    is_python = _PYTHON.fullmatch(Path(command.words[0]).name) or os.path.abspath(command.words[0]) == os.path.abspath(command.python)  # noqa: PTH100
    return python_program(command.python, command.words[1:] if is_python else command.words)


_WITH_VALUE = ("-W", "-X")
_PLAIN_OPTIONS = re.compile(r"-[bBdOqRuv]+|-W.+|-X.+")


def python_program(python: str, words: Sequence[str]) -> PythonProgram | None:
    """
    Return what *python* runs with *words* on its command line; None where that is no script or module, or where an option makes it begin
    in another way (`-c`, `-i`, `-I`, a folder with a ``__main__.py``).
    """
    rest = list(words)
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        word = rest.pop(0)
        if word in _WITH_VALUE and rest:
            options += [word, rest.pop(0)]
        elif _PLAIN_OPTIONS.fullmatch(word) and word not in _WITH_VALUE:
            options.append(word)
        else:
            return None
    if rest[:1] == ["-m"]:
        return PythonProgram(python, tuple(options), "", rest[1], tuple(rest[2:])) if len(rest) > 1 else None
    if not rest or not os.path.isfile(rest[0]) or _is_archive(Path(rest[0])):
        return None
    return PythonProgram(python, tuple(options), rest[0], "", tuple(rest[1:]))


def _is_archive(file: Path) -> bool:
    with file.open("rb") as start:
        head = start.read(1024)
    return b"\0" in head or zipfile.is_zipfile(file)


def command_from(words: Sequence[str]) -> Command:
    """
    Return the command that *words* say: a script and its arguments, ``-m`` and a module, or a program as a shell would start it.

    Raises UsageError for one that is not there.
    """
    environment: dict[str, str] = {}
    rest = list(words)
    while rest and _ASSIGNMENT.fullmatch(rest[0]) and not os.path.exists(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        environment[name] = value
    if not rest:
        raise UsageError("no program is named", hint=_WHAT)
    first = Path(rest[0])
    if rest[0] == "-m":
        if len(rest) == 1:
            raise UsageError("-m names no module", hint="name it: `-m my.training`")
        return Command((sys.executable, *rest), sys.executable, environment)
    if os.path.isfile(first / "__main__.py") or (
        os.path.isfile(first) and (first.suffix in (".py", ".pyz") or not os.access(first, os.X_OK))
    ):
        if first.suffix == ".sh":
            raise UsageError(f"{first} is a shell script that is not executable", hint=f"start it as `bash {' '.join(rest)}`")
        return Command((sys.executable, *rest), sys.executable, environment)
    path = environment.get("PATH", os.environ.get("PATH", os.defpath))
    program = shutil.which(rest[0], path=path) or _beside_python(rest[0])
    if program is None:
        hint = "install it, or activate the environment that has it; a script is given by its path, and a module by `-m`"
        raise UsageError(f"{rest[0]} does not exist", hint=hint)
    python = _python_of(program, rest[1:], path)
    return Command((program, *rest[1:]), python or _first_on(path), environment, is_guess=python is None)


def _beside_python(name: str) -> str | None:
    """Return the program of that name in the folder of this Python: a virtual environment need not be activated."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) if os.sep not in name else None


def _python_of(program: str, arguments: Sequence[str], path: str) -> str | None:
    """Return the Python that *program* is, is written for, or is told to start; None where nothing says which."""
    name = Path(program).name
    if _PYTHON.fullmatch(name):
        return program
    if name in _RUNNERS and any(word in arguments for word in _RUNNERS[name]):
        return _asked([program, *_up_to_command(arguments, _RUNNERS[name]), "python"], path)
    if name in _WRAPPERS:
        inner = next((word for word in arguments if _PYTHON.fullmatch(Path(word).name) or shutil.which(word, path=path)), None)
        found = inner and shutil.which(inner, path=path)
        if found and inner is not None:
            return _python_of(found, list(arguments)[list(arguments).index(inner) + 1 :], path)
    return _of_first_line(Path(program), path)


def _up_to_command(arguments: Sequence[str], verbs: Sequence[str]) -> list[str]:
    """Return the words of a runner in front of the command that it runs."""
    kept: list[str] = []
    words = iter(arguments)
    has_verb = False
    for word in words:
        if has_verb and not word.startswith("-"):
            break
        kept.append(word)
        has_verb = has_verb or word in verbs
        if word == "--":
            break
        if word in _VALUED:
            kept.append(next(words, ""))
    return kept


def _of_first_line(program: Path, path: str) -> str | None:
    """Return the Python that a script's first lines name: `#!/…/python`, `#!/usr/bin/env python3`, or pip's form for long paths."""
    with program.open("rb") as file:
        lines = file.read(4096).split(b"\n", 2)
    if not lines[0].startswith(b"#!"):
        return None
    words = lines[0][2:].decode(errors="replace").split()
    if len(lines) > 1 and lines[1].startswith(b"'''exec'"):
        words = [lines[1].decode(errors="replace").removeprefix("'''exec' ").split('"$0"')[0].strip().strip('"')]
    if words and Path(words[0]).name == "env":
        words = [found for word in words[1:] if (found := shutil.which(word, path=path))]
    return words[0] if words and _PYTHON.fullmatch(Path(words[0]).name) and os.path.exists(words[0]) else None


def _first_on(path: str) -> str:
    """Return the Python that a shell would start; this one where there is none, or where it is only another name for it."""
    found = next(filter(None, (shutil.which(name, path=path) for name in ("python", "python3"))), None)
    return found or sys.executable


def _asked(command: list[str], path: str) -> str:
    """Return the Python that *command*, which ends with `python`, starts."""
    try:
        answer = subprocess.run(
            [*command, "-c", "import sys; print(sys.executable)"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_SECONDS,
            env=os.environ | {"PATH": path},
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise UsageError(f"`{' '.join(command)}` does not start a Python: {said[-1] if said else error}") from error
    return answer.stdout.strip().splitlines()[-1]
