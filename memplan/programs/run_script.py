"""Which script a command runs, `torchrun --nproc-per-node 4 train.py …` or `python -m trainer …`, and what that imports of its project."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


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


def imported_files(script: Path) -> list[Path]:
    """Return the files of the project that *script* itself imports: beside it, or below the working folder; in the order of the imports."""
    with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(script.read_bytes())
        paths = (folder / name for name in _imported(tree) for folder in (script.parent, Path()))
        files = (path for stem in paths for path in (stem.with_suffix(".py"), stem / "__init__.py"))
        return list(dict.fromkeys(path for path in files if path.is_file()))
    return []


def _imported(tree: ast.Module) -> Iterator[Path]:
    """Yield the modules that *tree* imports, as paths without a suffix."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Path(*alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = Path(*(node.module or "").split("."))
            yield from (module / alias.name for alias in node.names if alias.name != "*")  # from conf import base
            yield module
