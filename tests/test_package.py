"""What the package says of itself, and what is in it when it is built and installed."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import memplan

REPOSITORY = Path(__file__).parents[1]

DISTRIBUTIONS = {
    "elftools": "pyelftools",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "pytorch_lightning": "lightning",
    "ruamel": "ruamel.yaml",
    "typing_extensions": "typing-extensions",
}
"""By the name that is imported, where the package has another."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml, and that of hatch."""
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML from 3.11 on")
    content: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return content["project"] | {"hatch": content["tool"]["hatch"]}


def names_of(requirements: list[str]) -> set[str]:
    """The packages that *requirements* name."""
    return {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]


def imported() -> set[str]:
    """Every package besides Python's own that a module of memplan imports."""
    found = set()
    for path in (REPOSITORY / "memplan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return {DISTRIBUTIONS.get(name, name) for name in found - sys.stdlib_module_names - {"memplan"}}


def test_the_version_is_that_of_the_module(project: dict[str, Any]) -> None:
    """It is written once; hatchling reads it there."""
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert Path(memplan.__file__) == REPOSITORY / project["hatch"]["version"]["path"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", memplan.__version__)


def test_the_license_is_there_in_full(project: dict[str, Any]) -> None:
    """As an SPDX expression, and as its text."""
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_what_is_imported_is_required_and_nothing_else(project: dict[str, Any]) -> None:
    """By the package itself or by one of its extras. accelerate is what transformers' Trainer imports."""
    extras = {name: names_of(packages) for name, packages in project["optional-dependencies"].items()}

    assert set(extras) == {"lightning", "transformers", "notebook", "plots", "dev"}
    for_users = set().union(*(packages for name, packages in extras.items() if name != "dev"))
    assert names_of(project["dependencies"]) | for_users - {"accelerate"} == imported()
    assert not names_of(project["dependencies"]) & for_users


def test_whoever_works_on_memplan_has_every_extra(project: dict[str, Any]) -> None:
    """The tests use all of them."""
    extras = project["optional-dependencies"]

    assert f"memplan[{','.join(name for name in extras if name != 'dev')}]" in extras["dev"]


def test_every_pinned_package_is_asked_for(project: dict[str, Any]) -> None:
    """constraints.txt names what pyproject.toml does; coverage comes with pytest-cov."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = names_of([line for line in lines if line and not line.startswith("#")])
    asked_for = names_of([*project["dependencies"], *(each for packages in project["optional-dependencies"].values() for each in packages)])

    assert pinned - {"coverage"} == asked_for - {"memplan", "typing-extensions"}
