"""What import-linter cannot see: what a start loads, names, the words of the core, and that every package has its tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import pytest

from memplan.cli.app import cli

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
    """Neither torch nor transformers nor numpy: a plan starts in a third of a second. `memplan.data` is for who imports it."""
    assert not loaded_by(arguments, tmp_path) & {"torch", "transformers", "numpy"}


def test_a_plan_without_files_loads_no_yaml_no_locks_and_no_nvml(tmp_path: Path) -> None:
    """What is not needed is not paid for."""
    assert not loaded_by(["--gpu-memory", "24"], tmp_path) & {"ruamel", "filelock", "platformdirs", "pynvml"}


def test_a_program_that_wants_json_loads_no_rich(tmp_path: Path) -> None:
    """rich is for people."""
    assert "rich" not in loaded_by(["--gpu", "t4", "--pin", "n_negatives=2", "--format", "json"], tmp_path)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_file_opens_with_what_it_is_for(path: Path) -> None:
    """The `__init__.py` of sub-packages are empty but that of `memplan.data`, which users import; every other file has a docstring."""
    if path.name == "__init__.py" and path.parent not in (PACKAGE, PACKAGE / "data"):
        assert path.read_text() == ""
    else:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_nothing_inside_imports_from_memplan_itself() -> None:
    """Import from the module that defines the thing; only the version comes from the package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "memplan":
                assert [alias.name for alias in node.names] == ["__version__"], path


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_every_package_has_its_tests(package: str) -> None:
    """The same folders."""
    assert list((REPOSITORY / "tests" / package).rglob("test_*.py"))


# One thing seen from two layers: a command and what it shows, a model as it is described and as it is built, an estimate as a value and
# as the formulas make it, and the registries, each of what its package offers.
SHARED_NAMES = {
    "contrastive", "estimate", "find_batch", "gpus", "held_back", "huggingface", "monitor", "plan", "registry", "rehearse", "replay", "warm"
}  # fmt: skip


def test_no_two_modules_share_a_name_unless_they_are_one_thing_seen_from_two_layers() -> None:
    """A traceback or a search for a name leads to one file."""
    names = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")

    assert {name for name, count in names.items() if count > 1} == SHARED_NAMES


def options_of(command: click.Command) -> set[str]:
    """The long options of *command* and of its subcommands."""
    own = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    return own.union(*(options_of(each) for each in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize(
    "path", [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE / "cli"], ids=lambda path: path.name
)
def test_the_core_does_not_speak_the_command_line(path: Path) -> None:
    """Below cli/ a message names the value, in Python's words; `cli/typed_options.py` makes the option of it."""
    options = options_of(cli) - {"--help"}
    texts = [node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)]
    named = {option for text in texts if isinstance(text, str) for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}

    assert not named & options


def test_no_named_tuple_is_generic() -> None:
    """Python 3.10 refuses that when the class is defined, and later ones do not."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            assert not ("NamedTuple" in bases and any(base.startswith("Generic[") for base in bases)), path
