"""A file that a program is configured by, whatever its format: YAML and JSON, TOML, Python, or a shell script that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from memplan.edits.edit import DuplicateKey, EditValue, Found, KeyPath
from memplan.edits.flat_file import FlatFile
from memplan.edits.python_file import PythonFile
from memplan.edits.shell_file import SHELL_SUFFIXES, ShellFile
from memplan.edits.toml_file import TomlFile
from memplan.edits.yaml_file import YamlFile

_FORMATS: dict[str, type[FlatFile]] = {".toml": TomlFile, ".py": PythonFile, **dict.fromkeys(SHELL_SUFFIXES, ShellFile)}
SUFFIXES = (".yaml", ".yml", ".json", *_FORMATS)
"""Of the files whose values are read and written."""


class ConfigFile(Protocol):
    """A parsed file and its text, unchanged. `YamlFile` and `FlatFile` say what each method raises."""

    @property
    def path(self) -> Path:
        """Return where it was read."""

    @property
    def data(self) -> bytes:
        """Return its bytes."""

    def get(self, key: KeyPath) -> Found | None:
        """Return the value at *key*, or None where nothing stands there."""

    def replace(self, key: KeyPath, value: EditValue) -> bytes:
        """Return the file's bytes with the value at *key* set to *value*, every other byte as it was."""

    def keys(self) -> set[str]:
        """Return every path of the file, dotted."""

    def kind_of(self, key: KeyPath) -> str | None:
        """Return what stands at *key*: scalar, mapping or sequence; None where nothing stands there, or one that is empty."""

    def length_of(self, key: KeyPath) -> int | None:
        """Return how many elements the sequence at *key* has; None where no sequence stands there."""

    def duplicate_keys(self) -> list[DuplicateKey]:
        """Return every key that is set twice."""

    def line_of(self, key: KeyPath) -> int | None:
        """Return the line of what stands at *key*, or of the nearest thing above it."""

    def to_python(self) -> Any:
        """Return what it holds as dicts, lists and single values."""


def load_config_file(path: Path) -> ConfigFile:
    """Read and parse *path* as what its name says it is. Raises ConfigError when it cannot be read, or is not of its format."""
    return _format_of(path).load(path)


def parse_config_file(path: Path, data: bytes) -> ConfigFile:
    """Parse *data* as the content of *path*. Raises ConfigError when it is not of its format."""
    return _format_of(path).parse(path, data)


def settings_of(file: ConfigFile) -> Any:
    """Return what *file* holds as a program takes it: of source code no arguments of functions, of a repeated key the last."""
    if isinstance(file, FlatFile):
        return file.to_python(with_arguments=False)
    return file.to_python(may_repeat_keys=True) if isinstance(file, YamlFile) else file.to_python()


def _format_of(path: Path) -> type[YamlFile | FlatFile]:
    return _FORMATS.get(path.suffix, YamlFile)
