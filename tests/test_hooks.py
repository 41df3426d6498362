"""Before a commit the same is checked as by `make test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

REPOSITORY = Path(__file__).parents[1]
CHECKS = ("lint", "types", "architecture")
"""Targets of the Makefile that take seconds."""


def hooks() -> list[dict[str, Any]]:
    """Those of .pre-commit-config.yaml, which are all our own."""
    (repository,) = YAML(typ="safe").load(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    return list(repository["hooks"])


def recipe(target: str) -> list[str]:
    """The commands of *target* in the Makefile, without what is tried first and may fail."""
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8").replace("$(BIN)", ".venv/bin")
    lines = text[text.index(f"\n{target}:") + 1 :].splitlines()[1:]
    commands = lines[: next(number for number, line in enumerate(lines) if not line.startswith("\t"))]
    return [command.rpartition("||")[2].strip() for command in commands]


def test_the_hooks_are_the_checks_of_the_makefile() -> None:
    """Each command, in the same order, and none besides."""
    assert [hook["entry"] for hook in hooks()] == [command for target in CHECKS for command in recipe(target)]


def test_the_hooks_run_in_the_environment_that_make_sets_up() -> None:
    """On all files, as `make test` does, with nothing downloaded."""
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks()} == {("system", False)}
