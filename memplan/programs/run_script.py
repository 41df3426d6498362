"""Which script a command runs, `torchrun --nproc-per-node 4 train.py …` or `python -m trainer …`, and what that imports or starts."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memplan.edits.python_file import syntax_tree
from memplan.edits.shell_file import SHELL_SUFFIXES, ShellFile
from memplan.errors import ConfigError
from memplan.hardware.torchrun import NAMES

LAUNCHERS = NAMES | {"accelerate", "deepspeed"}


class RunScript(NamedTuple):
    """A script, and what the command gives it."""

    path: Path
    words: Sequence[str]
    """Those behind it."""


def run_script(words: Sequence[str]) -> RunScript | None:
    """Return the script of this machine's that the command *words* runs, by its path or as a module; None where it names none."""
    for number, word in enumerate(words):
        if word == "-m" and number + 1 < len(words):
            module = Path(*words[number + 1].split("."))
            for path in (module.with_suffix(".py"), module / "__main__.py"):
                if os.path.isfile(path):
                    return RunScript(path, words[number + 2 :])
        elif word.endswith(".py") and os.path.isfile(word):
            return RunScript(Path(word), words[number + 1 :])
    return None


def shell_script(words: Sequence[str]) -> Path | None:
    """Return the shell script that the command *words* runs; None where it runs none."""
    return next((Path(word) for word in words if word.endswith(SHELL_SUFFIXES) and os.path.isfile(word)), None)


def launcher_words(words: Sequence[str]) -> Sequence[str]:
    """
    Return the launcher that the shell script of the command *words* starts, and the options in that script; else *words* themselves.

    An option whose value the script does not write out, or sets twice, is left out.
    """
    script = shell_script(words)
    if script is None:
        return words
    try:
        file = ShellFile.load(script)
    except ConfigError:
        return words
    launcher = next((word for word in file.word_texts() if word.rpartition("/")[2] in LAUNCHERS), None)
    if launcher is None:
        return words
    options = []
    for option in sorted(file.keys()):
        with suppress(ConfigError):
            found = file.get((option,))
            options += [] if found is None else [f"--{option}={found.value}"]
    return [launcher, *options]


def declared_options(script: Path) -> list[tuple[str, ...]]:
    """
    Return the options that *script* itself declares to argparse or click, each by all its spellings, with their dashes.

    None of a file that is no Python.
    """
    with suppress(ConfigError, RecursionError):
        calls = (node for node in ast.walk(syntax_tree(script)) if isinstance(node, ast.Call) and _name_of(node.func) in _DECLARING)
        words = ([word.value for word in call.args if isinstance(word, ast.Constant)] for call in calls)
        return [tuple(word for word in each if isinstance(word, str) and word.startswith("-")) for each in words]
    return []


_DECLARING = ("add_argument", "option")


def _name_of(function: ast.expr) -> str:
    """Return the last part of what *function* is called by."""
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def imported_files(script: Path) -> list[Path]:
    """Return the files of the project that *script* itself imports: beside it, or below the working folder; in the order of the imports."""
    with suppress(ConfigError, RecursionError):
        paths = (folder / name for folder, name in _imported(syntax_tree(script), script.parent))
        files = (path for stem in paths if stem.name for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"))
        return list(dict.fromkeys(path for path in files if os.path.isfile(path)))
    return []


def _imported(tree: ast.Module, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the modules that *tree*, of a file in *folder*, imports: where they may be, and their paths without a suffix."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [Path(*alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = Path(*node.module.split(".")) if node.module else Path()
            names = [module / alias.name for alias in node.names if alias.name != "*"]  # from conf import base
            names += [module] if node.module else []
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        places = [folder.joinpath(*[".."] * (level - 1))] if level else [folder, Path()]
        yield from ((place, name) for name in names for place in places)
