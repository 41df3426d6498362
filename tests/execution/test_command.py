"""What a person types behind `--`: which program it is, and which Python runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from memplan.errors import UsageError
from memplan.execution.command import command_from


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def other_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another environment's Python, first on PATH."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "python"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("words", [["train.py", "--lr", "1"], ["-m", "trainer", "-x"], ["package"], ["train"]])
def test_a_script_a_module_and_a_folder_are_run_by_this_python(tmp_path: Path, words: list[str]) -> None:
    """Also a script without a suffix, where it is not a program."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    for name in ("train.py", "train"):
        (tmp_path / name).touch()

    command = command_from(words)

    assert command.words == (sys.executable, *words)
    assert command.is_of_this_python


def test_python_is_the_one_that_a_shell_would_start(other_python: Path) -> None:
    """That of the environment that is active."""
    command = command_from(["python", "train.py"])

    assert command.words == (str(other_python), "train.py")
    assert (command.python, command.is_of_this_python) == (str(other_python), False)


@pytest.mark.parametrize(
    "first",
    ["#!{python}\n", "#!/usr/bin/env python3\n", "#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n"],
    ids=["a path", "env", "a path that is too long for a kernel"],
)
def test_a_console_script_is_run_by_the_python_that_it_names(tmp_path: Path, other_python: Path, first: str) -> None:
    """As pip writes them: torchrun, accelerate, axolotl."""
    program(other_python.with_name("torchrun"), first.format(python=other_python) + "import sys\n")

    command = command_from(["torchrun", "--nproc-per-node", "1", "train.py"])

    assert command.words[0] == str(other_python.with_name("torchrun"))
    assert Path(command.python).parent == other_python.parent


def test_a_shell_script_is_taken_to_start_the_first_python(tmp_path: Path, other_python: Path) -> None:
    """What it really starts is seen when it does."""
    program(tmp_path / "run.sh", "#!/bin/bash\npython train.py\n")

    assert command_from(["./run.sh"]).python == str(other_python)
    assert command_from(["bash", "run.sh"]).python == str(other_python)
    assert command_from(["env", "A=1", "nice", "-n", "5", "python", "train.py"]).python == str(other_python)


def test_a_runner_of_environments_is_asked(tmp_path: Path, other_python: Path) -> None:
    """`uv run`, `poetry run`, `conda run`: with their options, and without the program."""
    said = tmp_path / "said"
    program(other_python.with_name("uv"), f'#!/bin/sh\necho "$@" >> {said}\nexec {sys.executable} -c "print(\'/its/python\')"\n')

    command = command_from(["uv", "run", "--project", "sub", "--no-sync", "train.py", "--lr", "1"])

    assert command.python == "/its/python"
    assert said.read_text().startswith("run --project sub --no-sync python -c ")


def test_variables_in_front_are_set(tmp_path: Path) -> None:
    """As a shell does."""
    (tmp_path / "train.py").touch()

    command = command_from(["OMP_NUM_THREADS=1", "NAME=a b", "train.py"])

    assert command.environment == {"OMP_NUM_THREADS": "1", "NAME": "a b"}
    assert command.words == (sys.executable, "train.py")


def test_a_variable_in_front_may_be_longer_than_a_name_of_a_file(tmp_path: Path) -> None:
    """As a token is."""
    (tmp_path / "train.py").touch()

    assert command_from([f"TOKEN={'x' * 300}", str(tmp_path / "train.py")]).environment == {"TOKEN": "x" * 300}


def test_a_program_beside_this_python_need_not_be_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment that was not activated has torchrun too."""
    monkeypatch.setenv("PATH", "/nowhere")

    assert command_from(["torchrun"]).words[0] == str(Path(sys.executable).with_name("torchrun"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere.py"], "nowhere.py does not exist"),
        (["nothing-of-that-name", "x"], "nothing-of-that-name does not exist"),
        (["-m"], "-m names no module"),
        (["A=1"], "no program is named"),
        (["run.sh"], "is a shell script that is not executable"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, words: list[str], problem: str) -> None:
    (tmp_path / "run.sh").touch()

    with pytest.raises(UsageError, match=problem):
        command_from(words)


def test_a_runner_that_fails_is_quoted(tmp_path: Path, other_python: Path) -> None:
    """With its own last word."""
    program(other_python.with_name("poetry"), "#!/bin/sh\necho no pyproject.toml here >&2\nexit 1\n")

    with pytest.raises(UsageError, match=r"does not start a Python: no pyproject\.toml here"):
        command_from(["poetry", "run", "python", "train.py"])
