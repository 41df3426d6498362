"""
The files that a configuration builds on, as it names them itself.

mmengine's have a list `_base_`, or `with read_base(): from ..base.data import *`; detectron2's and other YAML files `_BASE_`. What a file
says overrides what is in those that it names.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from memplan.edits.config_file import ConfigFile, load_config_file, settings_of
from memplan.edits.python_file import syntax_tree
from memplan.errors import ConfigError

_KEYS = ("_base_", "_BASE_")
_MOST_FILES = 100


def with_bases(path: Path) -> list[tuple[Path, ConfigFile]]:
    """
    Return the files that *path* builds on and last itself, each before those that override it.

    Raises ConfigError where *path* itself cannot be read; a base that cannot be is left out.
    """
    found: dict[Path, tuple[Path, ConfigFile]] = {}
    _follow(path, load_config_file(path), found, [])
    return list(found.values())


def _follow(path: Path, file: ConfigFile, found: dict[Path, tuple[Path, ConfigFile]], above: list[Path]) -> None:
    for base in _named_by(path, file):
        real = base.resolve()
        if real not in found and real not in above and len(found) < _MOST_FILES:
            with suppress(ConfigError):
                _follow(base, load_config_file(base), found, [*above, path.resolve()])
    found[path.resolve()] = (path, file)


def _named_by(path: Path, file: ConfigFile) -> Iterator[Path]:
    """Yield the files that *file* names as what it builds on."""
    content = settings_of(file)
    for key in _KEYS:
        named = content.get(key, ()) if isinstance(content, dict) else ()
        for name in [named] if isinstance(named, str) else named if isinstance(named, list) else ():
            if isinstance(name, str) and os.path.isfile(path.parent / name):
                yield path.parent / name
    if path.suffix == ".py":
        yield from _imported_by_read_base(path)


def _imported_by_read_base(path: Path) -> Iterator[Path]:
    """Yield the files that `with read_base():` imports: relative ones, as mmengine wants them."""
    for block in (node for node in syntax_tree(path).body if isinstance(node, ast.With)):
        if any(ast.unparse(item.context_expr) == "read_base()" for item in block.items):
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.level:
                    folder = path.parent.joinpath(*[".."] * (node.level - 1))
                    names = [node.module] if node.module else [alias.name for alias in node.names]
                    bases = (folder.joinpath(*name.split(".")).with_suffix(".py") for name in names if name != "*")
                    yield from (base for base in bases if os.path.isfile(base))
