"""What import-linter cannot see: what a start loads, and that every room has its tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "memplan"
LOADED = """
import sys
from memplan.cli.app import run
code = run({arguments!r})
print("loaded:", *sorted({{name.split(".")[0] for name in sys.modules}}), file=sys.stderr)
sys.exit(code)
"""


def loaded_by(arguments: list[str], cwd: Path) -> set[str]:
    """The top-level packages that a command leaves in sys.modules."""
    result = subprocess.run([sys.executable, "-c", LOADED.format(arguments=arguments)], cwd=cwd, capture_output=True, text=True, check=True)
    return set(result.stderr.rpartition("loaded:")[2].split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--gpu-memory", "24", "--method", "analytic"], ["--gpu", "t4", "--pin", "n_negatives=2", "--format", "json"]]
)
def test_help_and_an_analytic_plan_load_no_torch(arguments: list[str], tmp_path: Path) -> None:
    """Neither torch nor transformers nor numpy: a plan starts in a third of a second."""
    assert not loaded_by(arguments, tmp_path) & {"torch", "transformers", "numpy"}


def test_a_plan_without_files_loads_no_yaml_no_locks_and_no_nvml(tmp_path: Path) -> None:
    """What is not needed is not paid for."""
    assert not loaded_by(["--gpu-memory", "24"], tmp_path) & {"ruamel", "filelock", "platformdirs", "pynvml"}


def test_a_program_that_wants_json_loads_no_rich(tmp_path: Path) -> None:
    """rich is for people."""
    assert "rich" not in loaded_by(["--gpu", "t4", "--pin", "n_negatives=2", "--format", "json"], tmp_path)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_file_opens_with_what_it_is_for(path: Path) -> None:
    """The `__init__.py` of sub-packages are empty, every other file has a docstring."""
    if path.name == "__init__.py" and path.parent != PACKAGE:
        assert path.read_text() == ""
    else:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_nothing_inside_imports_from_memplan_itself() -> None:
    """Import from the module that defines the thing; only the version comes from the package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "memplan":
                assert [alias.name for alias in node.names] == ["__version__"], path


@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_every_room_has_its_tests(room: str) -> None:
    """The same folders."""
    assert list((REPOSITORY / "tests" / room).rglob("test_*.py"))
