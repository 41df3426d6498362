"""
The README's commands print what the README says.

A console block runs where the comment above it says: `in an empty folder`, or in a copy of a folder of this repository. After a change to
what a command prints, `python -m tests.test_docs` writes the blocks anew.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from memplan.errors import MissingError
from memplan.hardware.torch_install import find_torch

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
BLOCK = re.compile(r"<!-- in (?P<where>[^\n]+) -->\n```console\n(?P<body>.*?)```\n", re.DOTALL)


def run_block(where: str, commands: list[str]) -> str:
    """Run the memplan commands one after the other; return the block as it should stand in the README."""
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder) / "project"
        if where == "an empty folder":
            cwd.mkdir()
        else:
            shutil.copytree(REPOSITORY / where, cwd)
        lines = []
        for command in commands:
            program, *arguments = shlex.split(command)
            assert program == "memplan"
            result = subprocess.run(
                [sys.executable, "-m", "memplan", *arguments],
                cwd=cwd,
                env={name: value for name, value in os.environ.items() if name != "MEMPLAN_METHOD"} | {"PYTHONIOENCODING": "utf-8"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            lines += [f"$ {command}", result.stdout.replace(f"{cwd}/", "").rstrip("\n"), ""]
        return "\n".join(lines).rstrip("\n") + "\n"


def commands_of(body: str) -> list[str]:
    return [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]


BLOCKS = [(match["where"], match["body"]) for match in BLOCK.finditer(README.read_text(encoding="utf-8"))]


PRINTED_WITH = re.search(r"^PyTorch +(\S+),", README.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_readme_shows_the_step_that_it_rehearses() -> None:
    """The program in the text is the file that the commands below it run."""
    program = (REPOSITORY / "tests" / "trees" / "training" / "train_step.py").read_text(encoding="utf-8")

    assert f"```python\n{program}```\n" in README.read_text(encoding="utf-8")


def skip_without(torch_version: str) -> None:
    """A rehearsal's figures are those of one PyTorch; its report says which."""
    try:
        found = find_torch().version
    except MissingError as error:
        pytest.skip(f"no rehearsals here: {error.message}")
    if found != torch_version:
        pytest.skip(f"the README shows rehearsals with PyTorch {torch_version}, this is {found}")


def case_of(where: str, body: str) -> object:
    """A block as a case; one whose plan is rehearsed takes minutes where nothing is kept yet."""
    commands = commands_of(body)
    is_heavy = any(not command.startswith(("memplan rehearse", "memplan undo")) and "--method" not in command for command in commands)
    return pytest.param(where, body, id=commands[0], marks=[pytest.mark.heavy] if is_heavy else [])


@pytest.mark.parametrize(("where", "body"), [case_of(where, body) for where, body in BLOCKS])
def test_the_readme_shows_what_its_commands_print(where: str, body: str) -> None:
    """Word for word. When it was meant: `python -m tests.test_docs`."""
    if "rehearse" in body:
        assert PRINTED_WITH is not None
        skip_without(PRINTED_WITH[1])
    assert run_block(where, commands_of(body)) == body


def test_the_readme_shows_a_plan_and_an_apply() -> None:
    """The two things that memplan is for are on its first page."""
    commands = [command for _, body in BLOCKS for command in commands_of(body)]

    assert "memplan --gpu-memory 24" in commands
    assert any("--apply" in command for command in commands)


def test_every_file_of_the_map_is_there() -> None:
    """The README's map of the files names each module of the package, and no other."""
    text = README.read_text(encoding="utf-8")
    files = text[text.index("## Map of the files") :]
    named = set(re.findall(r"\b(\w+\.py)\b", files))
    modules = {path.name for path in (REPOSITORY / "memplan").rglob("*.py")} - {"__init__.py", "__main__.py"}

    assert modules - named == set()
    assert named - modules == set()


@pytest.mark.parametrize("path", [README, REPOSITORY / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of the documents is a file of the repository."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (REPOSITORY / target).exists(), target


@pytest.mark.parametrize("command", ["", "compare", "gpus", "rehearse", "replay", "undo"])
def test_every_help_has_examples(command: str) -> None:
    """--help of every command shows how it is used, and every example names options that exist."""
    result = subprocess.run([sys.executable, "-m", "memplan", *command.split(), "--help"], capture_output=True, text=True, check=True)
    examples = re.findall(r"^ +(memplan\b.*?)(?:  .*)?$", result.stdout[result.stdout.index("Examples:") :], re.MULTILINE)

    assert len(examples) >= 3
    for example in examples:
        own = re.split(r" -- | -m ", example)[0]  # what follows is another program's
        for option in re.findall(r"--[a-z-]+", own):
            assert option in result.stdout.split("Examples:")[0], example


def write_readme() -> None:
    """Write every block of the README with what its commands print now."""
    text = README.read_text(encoding="utf-8")
    new = BLOCK.sub(
        lambda match: f"<!-- in {match['where']} -->\n```console\n{run_block(match['where'], commands_of(match['body']))}```\n", text
    )
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    write_readme()
