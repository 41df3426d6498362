"""
The documents say what is: their commands print what they show, their files are those of the repository, their links lead somewhere.

A console block runs where the comment above it says: `in an empty folder`, or in a copy of a folder of this repository; and on this
machine, or on a simulated one: `in an empty folder, on a machine with a t4 where 2 GiB are in use`. After a change to what a command
prints, to a file that is shown, or to a module's first sentence, `python -m tests.test_docs` writes the blocks anew.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplan.cli.app import cli, plan_command
from memplan.errors import MissingError
from memplan.hardware.torch_install import find_torch
from tests.hardware.nvml_driver import GIB, build_driver
from tests.standin.machine import machine

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "memplan"
README = REPOSITORY / "README.md"
MAP = REPOSITORY / "docs" / "map.md"
DOCUMENTS = [README, REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
CONSOLE = re.compile(r"<!-- in (?P<where>[^\n]+) -->\n```console\n(?P<body>.*?)```\n", re.DOTALL)
PYTHON = re.compile(r"<!-- python in (?P<where>[^\n]+) -->\n```python\n(?P<body>.*?)```\n", re.DOTALL)
FILE = re.compile(r"```yaml\n# (?P<path>tests/[^\n]+)\n(?P<body>.*?)```\n", re.DOTALL)
MACHINE = re.compile(r"(?P<folder>.*?)(?:, on a machine with a (?P<gpu>\S+)(?: where (?P<held>\d+) GiB are in use)?)?")
"""Where a block runs."""

OF_THE_MOMENT = re.compile(
    r"(?<=\()\d+\.\d s(?=\))|(?<=it took ).*(?= over)|^\d\d:\d\d:\d\d|\bCPU +\d+%|\bRAM \S+ \S+ of \S+ \S+|\b(?:python|pytest)\S* \(\d+\)",
    re.MULTILINE,
)
"""What is another in every run on a simulated machine: seconds, what a step that failed took, the time, the use of the host, processes."""

PROGRESS = re.compile(r"^memplan: rehearsal \d+ \(.*\n", re.MULTILINE)
"""What a slow machine is told while it waits."""

MODULES = "<!-- modules -->\n"


def run_block(where: str, commands: list[str]) -> str:
    """Run the memplan commands one after the other; return the block as it should stand in the document."""
    with tempfile.TemporaryDirectory() as folder:
        place = MACHINE.fullmatch(where)
        assert place is not None
        cwd = copied(place["folder"], Path(folder))
        here = machine_with(place["gpu"], int(place["held"] or 0), Path(folder)) if place["gpu"] else {}
        lines = []
        for command in commands:
            words = shlex.split(command)
            given = dict(word.split("=", 1) for word in words[: words.index("memplan")])
            result = subprocess.run(
                [sys.executable, "-m", "memplan", *words[words.index("memplan") + 1 :]],
                cwd=cwd,
                env=without_method() | {"PYTHONIOENCODING": "utf-8"} | here | given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            printed = PROGRESS.sub("", result.stdout.replace(f"{cwd}/", ""))
            lines += [f"$ {command}", printed.rstrip("\n"), ""]
        return "\n".join(lines).rstrip("\n") + "\n"


def copied(where: str, folder: Path) -> Path:
    """Return a copy of a folder of this repository, or an empty one."""
    cwd = folder / "project"
    if where == "an empty folder":
        cwd.mkdir()
        return cwd
    return Path(shutil.copytree(REPOSITORY / where, cwd))


def machine_with(gpu: str, held_gib: int, folder: Path) -> dict[str, str]:
    """Return the environment of a simulated machine with that GPU, of which this process holds so much."""
    (folder / "driver").mkdir()
    return machine(find_torch(), build_driver(folder / "driver"), gpu, busy={0: held_gib * GIB})


def without_method() -> dict[str, str]:
    """The environment of a user who has chosen no method."""
    return {name: value for name, value in os.environ.items() if name != "MEMPLAN_METHOD"}


def commands_of(body: str) -> list[str]:
    return [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]


def blocks(pattern: re.Pattern[str]) -> Iterator[tuple[Path, dict[str, str]]]:
    """Every block of that kind, with its document."""
    for path in DOCUMENTS:
        for match in pattern.finditer(path.read_text(encoding="utf-8")):
            yield path, match.groupdict()


def printed_with() -> str:
    """The PyTorch whose rehearsals the documents show: their reports say it."""
    match = re.search(r"^PyTorch +(\S+),", (REPOSITORY / "docs" / "rehearsing.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match[1]


def skip_without(torch_version: str) -> None:
    """A rehearsal's figures are those of one PyTorch."""
    try:
        found = find_torch().version
    except MissingError as error:
        pytest.skip(f"no rehearsals here: {error.message}")
    if found != torch_version:
        pytest.skip(f"the documents show rehearsals with PyTorch {torch_version}, this is {found}")


def case_of(path: Path, where: str, body: str) -> object:
    """A block as a case; one whose plan is rehearsed takes minutes where nothing is cached yet, a script some seconds."""
    commands = commands_of(body)
    quick = ("memplan rehearse", "memplan undo", "memplan dataset", "memplan monitor", "--method")
    is_heavy = (
        any(not any(word in command for word in quick) for command in commands)
        or any(" -- " in command for command in commands)
        or where == "tests/trees/symptoms"  # a dozen steps, or two rehearsals
        or path.name in ("frameworks.md", "troubleshooting.md")  # ten seconds each
    )
    return pytest.param(where, body, id=f"{path.name}: {commands[0]}", marks=[pytest.mark.heavy] if is_heavy else [])


@pytest.mark.parametrize(("where", "body"), [case_of(path, block["where"], block["body"]) for path, block in blocks(CONSOLE)])
def test_the_documents_show_what_their_commands_print(where: str, body: str) -> None:
    """Word for word. When it was meant: `python -m tests.test_docs`."""
    if "rehearse" in body or "on a machine" in where:
        skip_without(printed_with())
    printed = run_block(where, commands_of(body))
    if "on a machine" in where:
        printed, body = (OF_THE_MOMENT.sub("…", text) for text in (printed, body))
    assert printed == body


@pytest.mark.parametrize(("where", "body"), [pytest.param(b["where"], b["body"], id=path.name) for path, b in blocks(PYTHON)])
def test_the_python_of_the_documents_runs(where: str, body: str, tmp_path: Path) -> None:
    """As it stands there."""
    done = subprocess.run([sys.executable, "-c", body], cwd=copied(where, tmp_path), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_the_readme_shows_a_plan_and_is_short() -> None:
    """What memplan is for is on its first page, which is one."""
    commands = [command for path, block in blocks(CONSOLE) for command in commands_of(block["body"])]

    assert "memplan --gpu-memory 24" in commands
    assert any("--apply" in command for command in commands)
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_documents_show_the_step_that_they_rehearse() -> None:
    """The program in the text is the file that the commands below it run."""
    program = (REPOSITORY / "tests" / "trees" / "training" / "train_step.py").read_text(encoding="utf-8")

    assert f"```python\n{program}```\n" in (REPOSITORY / "docs" / "rehearsing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "body"), [pytest.param(b["path"], b["body"], id=b["path"]) for _, b in blocks(FILE)])
def test_the_files_that_are_shown_are_those_of_the_repository(path: str, body: str) -> None:
    """The tutorial's listings."""
    assert (REPOSITORY / path).read_text(encoding="utf-8") == body


def module_map() -> str:
    """Every module with the first sentence of its docstring, by package."""
    lines = []
    for folder in [
        PACKAGE,
        *sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE),
        PACKAGE / "child" / "hook",
    ]:
        modules = [path for path in sorted(folder.glob("*.py")) if path.name not in ("__init__.py", "__main__.py")]
        lines += [f"\n## {folder.relative_to(REPOSITORY).as_posix()}/\n", *(f"- `{path.name}`: {first_sentence(path)}" for path in modules)]
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    """Return how a module's docstring begins."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)])\.(?: |$)", paragraph)[0].rstrip(".:")


def test_the_map_names_every_module() -> None:
    """With its first sentence. After a change: `python -m tests.test_docs`."""
    assert MAP.read_text(encoding="utf-8").partition(MODULES)[2] == module_map()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of the documents is a file of the repository, and its heading is there."""
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", path.read_text(encoding="utf-8")):
        file = path.parent / target if target else path
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings], heading


@pytest.mark.parametrize(
    "command", ["", "check", "compare", "dataset", "doctor", "explain-config", "gpus", "init", "loader", "rehearse", "replay", "undo"]
)
def test_every_help_has_examples(command: str) -> None:
    """--help of every command shows how it is used, and every example names options that exist."""
    result = subprocess.run([sys.executable, "-m", "memplan", *command.split(), "--help"], capture_output=True, text=True, check=True)
    examples = re.findall(r"^ +(memplan\b.*?)(?:  .*)?$", result.stdout[result.stdout.index("Examples:") :], re.MULTILINE)

    assert len(examples) >= 3
    for example in examples:
        own = re.split(r" -- | -m ", example)[0]  # what follows is another program's
        for option in re.findall(r"--[a-z-]+", own):
            assert option in result.stdout.split("Examples:")[0], example


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_text_can_be_typed(path: Path) -> None:
    """What stands between backticks and begins with memplan names options that its command has."""
    for line in re.findall(r"`(?:\w+=\S+ )?memplan (-[^`]*|[a-z-]+ -[^`]*)`", path.read_text(encoding="utf-8")):
        words = line.split(" -- ")[0].split()  # what follows is another program's
        command = cli.commands.get(words[0], plan_command)
        known = {option for parameter in command.params for option in parameter.opts} | {"--version", "--help"}
        given = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert given <= known, line


def write_documents() -> None:
    """Write every block of the documents with what its commands print now, the files that are shown, and the map."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        text = FILE.sub(lambda match: f"```yaml\n# {match['path']}\n{(REPOSITORY / match['path']).read_text(encoding='utf-8')}```\n", text)
        text = CONSOLE.sub(
            lambda match: f"<!-- in {match['where']} -->\n```console\n{run_block(match['where'], commands_of(match['body']))}```\n", text
        )
        if path == MAP:
            text = text.partition(MODULES)[0] + MODULES + module_map()
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_documents()
