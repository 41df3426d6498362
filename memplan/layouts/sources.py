"""Where the values of a configuration are read: its files, each parsed once, and the line of every value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memplan.edits.config_file import ConfigFile, load_config_file
from memplan.edits.yaml_file import YamlFile


def file_of(main: Path, file: str | None) -> Path:
    """Return the path of a *file* that a layout names: beside the *main* one, or that itself where it names none."""
    return main if file is None else main.parent / file


def is_number(file: ConfigFile, key: str, *, least: int | None = None) -> bool:
    """Say whether a number stands at *key*, from *least* on: "auto" and an empty value are filled in by somebody else."""
    path = tuple(key.split("."))
    found = file.get(path) if file.kind_of(path) == "scalar" else None
    value = None if found is None else found.value
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


@dataclass(frozen=True)
class Source:
    """Where a field's value was read."""

    file: Path
    line: int
    key: str
    value: Any
    """As the file spells it, or the framework's default."""
    why: Literal["written", "default", "rule"] = "written"
    """It stands there; it is the framework's default, where nothing does; or the layout's rules make it out of several keys."""


@dataclass(frozen=True)
class ParsedFiles:
    """The files of one configuration."""

    all: dict[Path, ConfigFile] = field(default_factory=dict)

    def of(self, path: Path) -> ConfigFile:
        """Return the file at *path*. Raises ConfigError where it cannot be parsed, or holds several documents."""
        if path not in self.all:
            file = load_config_file(path)
            if isinstance(file, YamlFile):
                file.check_single()
            self.all[path] = file
        return self.all[path]
