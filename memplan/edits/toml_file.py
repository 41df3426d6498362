"""A TOML file that belongs to someone else: read a value, or change one and leave every other byte alone."""

from __future__ import annotations

import math
import re
import sys
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from memplan.edits.edit import EditValue, KeyPath, Scalar, as_text
from memplan.edits.flat_file import Container, Content, FlatFile, PlacedValue
from memplan.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"[ \t]*")
_BETWEEN = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
"""Blanks, ends of lines and comments."""
_WORD = re.compile(r"[^,\]}#\r\n]+")
"""A number, a truth value or a date, with blanks behind it."""
_TEXTS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)
_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_LARGEST = 2**64
_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


class TomlFile(FlatFile):
    """A parsed TOML file and its text, unchanged."""

    @classmethod
    def read(cls, path: Path, text: str) -> Content:
        """Return the values of *text*. Raises ConfigError where it is not TOML."""
        try:
            _parse(text)
        except ValueError as error:  # tomllib's own, or a number of thousands of digits
            place = _LINE.search(str(error))
            problem = f"is not valid TOML: {_LINE.sub('', str(error)).strip()}"
            raise ConfigError(problem, file=path, line=int(place[1]) if place else None, hint="repair the file first") from error
        except RecursionError as error:
            raise ConfigError("is nested too deeply to be a configuration", file=path, hint="is it the right file?") from error
        return _Scanner(text).content()

    def written(self, value: EditValue, present: PlacedValue) -> str:
        """Return *value* as TOML writes it; text with the quotes that stand there. Raises EditRefusedError where that is not sure."""
        text, is_text = as_text(value), isinstance(present.value, str)
        if not is_text and (not isinstance(value, str) or text in ("true", "false") or _NUMBER.fullmatch(text)):
            return text
        return self.quoted(text, present)

    def is_as_before(self, edited: FlatFile, changed: PlacedValue, literal: str) -> bool:
        """Say whether an independent parser finds in *edited* what it finds here, but for *literal* at *changed*."""
        before, after = _parse(self.text), _parse(edited.text)
        mapping = before
        for name in changed.key[:-1]:
            mapping = mapping[int(name) if isinstance(mapping, list) else name]
        name = changed.key[-1]
        mapping[int(name) if isinstance(mapping, list) else name] = _parse(f"value = {literal}")["value"]
        return _are_same(before, after)


def _parse(text: str) -> Any:
    return tomllib.loads(text.replace("\r\n", "\n"))


def _are_same(one: Any, other: Any) -> bool:
    """Say whether two parsed files are the same, "not a number" being itself."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    is_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return type(one) is type(other) and (is_nan or bool(one == other))


class _Scanner:
    """From a text that is TOML to values that know their place."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._values: list[PlacedValue] = []
        self._containers: dict[KeyPath, Container] = {}
        self._tables: dict[KeyPath, int] = {}
        """How many tables each array of tables has so far."""

    def content(self) -> Content:
        """Return what the text holds."""
        table: KeyPath = ()
        while self._skip(_BETWEEN) and self._place < len(self._text):
            if self._text.startswith("[[", self._place):
                table = self._table(is_of_array=True)
            elif self._text.startswith("[", self._place):
                table = self._table(is_of_array=False)
            else:
                self._assignment(table)
        return Content(tuple(self._values), self._containers)

    def _table(self, *, is_of_array: bool) -> KeyPath:
        brackets = 1 + is_of_array
        line = self._line()
        self._place += brackets
        name = self._key()
        self._place += brackets
        *above, last = name
        key: KeyPath = ()
        for part in above:
            key = self._entered((*key, part))
        key = (*key, last)
        if is_of_array:
            self._contain(key, "sequence", line)
            self._tables[key] = self._tables.get(key, -1) + 1
            key = (*key, str(self._tables[key]))
        self._contain(key, "mapping", line)
        return key

    def _entered(self, key: KeyPath) -> KeyPath:
        """Return the last table of the array *key*, or *key* where it is a table."""
        return (*key, str(self._tables[key])) if key in self._tables else key

    def _assignment(self, table: KeyPath) -> None:
        line, key = self._line(), (*table, *self._key())
        for length in range(len(table) + 1, len(key)):
            self._contain(key[:length], "mapping", line)
        self._place += 1  # the sign of equality
        self._skip(_BLANK)
        self._value(key)

    def _key(self) -> KeyPath:
        """Read a key, dotted or not, with the blanks around it."""
        parts: list[str] = []
        while True:
            self._skip(_BLANK)
            bare = _BARE_KEY.match(self._text, self._place)
            text = bare[0] if bare is not None else self._quoted()
            self._place += len(text)
            parts.append(text if bare is not None else next(iter(_parse(f"{text} = 0"))))
            self._skip(_BLANK)
            if not self._text.startswith(".", self._place):
                return tuple(parts)
            self._place += 1

    def _value(self, key: KeyPath) -> None:
        sign, line = self._text[self._place], self._line()
        if sign == "[":
            self._contain(key, "sequence", line)
            self._elements(key, end="]")
        elif sign == "{":
            self._contain(key, "mapping", line)
            self._elements(key, end="}")
        else:
            text = self._quoted() if sign in "\"'" else self._word()
            value = _parse(f"value = {text}")["value"]
            self._values.append(PlacedValue(key, line, self._place, self._place + len(text), *_as_scalar(value, text)))
            self._place += len(text)

    def _elements(self, key: KeyPath, *, end: str) -> None:
        """Read what stands between brackets, to behind the closing one."""
        self._place += 1
        number = 0
        while self._skip(_BETWEEN) and self._text[self._place] != end:
            if self._text[self._place] == ",":
                self._place += 1
            elif end == "]":
                self._value((*key, str(number)))
                number += 1
            else:
                self._assignment(key)
        self._place += 1

    def _quoted(self) -> str:
        return next(found[0] for pattern in _TEXTS if (found := pattern.match(self._text, self._place)) is not None)

    def _word(self) -> str:
        found = _WORD.match(self._text, self._place)
        assert found is not None  # what is no text and no brackets has at least one sign, as the text is TOML
        return found[0].rstrip()

    def _contain(self, key: KeyPath, kind: str, line: int) -> None:
        self._containers.setdefault(key, Container(kind, line))

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self._text, self._place)
        self._place = found.end() if found is not None else self._place
        return True

    def _line(self) -> int:
        return self._text.count("\n", 0, self._place) + 1


def _as_scalar(value: object, text: str) -> tuple[Scalar, str]:
    """Return *value* as a single value, and why it is none that a plan could write; *text* is how it is written."""
    if isinstance(value, datetime | date | time):
        return None, f"is a date: {text}"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return None, "is more than 64 bits hold"
    assert isinstance(value, int | float | str)
    return value, ""
