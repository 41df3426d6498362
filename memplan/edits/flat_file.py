"""
A file as the list of its values, each with its place in the text: what Python, TOML and shell files have in common.

What is changed is the text of one value. The result is parsed again, and exactly that value must have changed; each format adds what it
knows of its own structure. What cannot be changed without guessing is refused with file, line and reason: a key that is set twice, a
value that is computed, or that stands for another.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Self

from memplan.edits.edit import DuplicateKey, EditValue, Found, KeyPath, Scalar
from memplan.edits.text import decode, encode, read_whole
from memplan.errors import ConfigError, EditRefusedError

_MOST_REFERENCES = 20

_PLAIN_TEXT = re.compile(r"""(?P<quote>["'])[^"'\\\n]*(?P=quote)""")
_UNWRITABLE = re.compile(r"""["'\\\x00-\x1f]""")

LONGEST_TOLD = 60
"""Characters of a source that are told."""


class PlacedValue(NamedTuple):
    """A value of a file, and where it stands."""

    key: KeyPath
    line: int
    start: int
    """Where its text begins (character)."""
    end: int
    value: Scalar = None
    problem: str = ""
    """Why it is no value that a plan could write: "is computed: `args.batch_size`"."""
    source: KeyPath | None = None
    """The key whose value it stands for."""
    is_argument: bool = False
    """It is a parameter's default, or an argument of a call whose result has no name: no setting by its form."""


class Container(NamedTuple):
    """What has values below it."""

    kind: str
    """mapping or sequence."""
    line: int


class Content(NamedTuple):
    """What a file holds."""

    values: tuple[PlacedValue, ...]
    """In the order of the file."""
    containers: dict[KeyPath, Container]


@dataclass(frozen=True)
class FlatFile(ABC):
    """A parsed file and its text, unchanged."""

    path: Path
    data: bytes
    text: str
    """The text without a byte order mark."""
    content: Content

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and parse *path*. Raises ConfigError when it cannot be read, is not UTF-8 or not of its format."""
        return cls.parse(path, read_whole(path))

    @classmethod
    def parse(cls, path: Path, data: bytes) -> Self:
        """Parse *data* as the content of *path*. Raises ConfigError when it is not UTF-8 or not of its format."""
        text = decode(path, data)
        return cls(path, data, text, cls.read(path, text))

    @classmethod
    @abstractmethod
    def read(cls, path: Path, text: str) -> Content:
        """Return what *text* holds. Raises ConfigError where it is not of this format."""

    @abstractmethod
    def written(self, value: EditValue, present: PlacedValue) -> str:
        """Return *value* as this format writes it in the place of *present*. Raises EditRefusedError where that is not sure."""

    @abstractmethod
    def is_as_before(self, edited: Self, changed: PlacedValue, literal: str) -> bool:
        """Say whether *edited* differs from this file in nothing but *changed*, in whose place *literal* stands now."""

    def get(self, key: KeyPath) -> Found | None:
        """
        Return the value at *key*, or None where nothing stands there; a name of another value of the file is followed.

        Raises ConfigError where the key is set twice, or is not a single value.
        """
        found = self._only(key, refused=False)
        return None if found is None else self._meant(found)

    def _meant(self, found: PlacedValue) -> Found:
        for _ in range(_MOST_REFERENCES):
            if found.source is None:
                break
            source = self._only(found.source, refused=False)
            assert source is not None
            found = source
        if found.problem or found.source is not None:
            problem = found.problem or "stands for itself"
            raise self._error(f"`{'.'.join(found.key)}` {problem}", found.line, hint="write the value there", refused=False)
        return Found(found.value, found.line)

    def replace(self, key: KeyPath, value: EditValue) -> bytes:
        """
        Return the file's bytes with the value at *key* set to *value*, every other byte as it was.

        Raises EditRefusedError where that cannot be done without guessing.
        """
        found, dotted = self._only(key), ".".join(key)
        if found is None:
            raise EditRefusedError(f"has no key `{dotted}`", file=self.path, hint="add it with any value, then run again")
        if found.source is not None:
            source = self._only(found.source)
            assert source is not None
            hint = f"change its source `{'.'.join(source.key)}` in line {source.line} instead"
            raise self._error(f"`{dotted}` is {self._text_of(found)}", found.line, hint=hint)
        if found.problem:
            hint = "write a number there, or give the value as a word of the command: `{micro_batch_size}`"
            raise self._error(f"`{dotted}` {found.problem}", found.line, hint=hint)
        literal = self.written(value, found)
        text = self.text[: found.start] + literal + self.text[found.end :]
        try:
            edited = type(self).parse(self.path, encode(text, like=self.data))
        except ConfigError as error:
            raise self._cannot_be_set(found, value) from error
        self._verify(edited, found)
        if not self.is_as_before(edited, found, literal):
            raise self._cannot_be_set(found, value)
        return edited.data

    def quoted(self, text: str, present: PlacedValue) -> str:
        """Return *text* in the quotes that stand at *present*, else in double ones. Raises EditRefusedError where it would need others."""
        stands, is_text = self._text_of(present), isinstance(present.value, str)
        if _UNWRITABLE.search(text) or (is_text and not _PLAIN_TEXT.fullmatch(stands)):
            hint = "write it as plain text in one pair of quotes"
            raise self._error(f"`{'.'.join(present.key)}` is {stands}", present.line, hint=hint)
        quote = stands[0] if is_text else '"'
        return f"{quote}{text}{quote}"

    def _verify(self, edited: Self, changed: PlacedValue) -> None:
        """Check that exactly the value at *changed* has another value, and what it is a part of."""
        before, after = self.content.values, edited.content.values
        if [one.key for one in before] != [one.key for one in after] or self.content.containers.keys() != edited.content.containers.keys():
            raise self._cannot_be_set(changed, "it")
        others = [
            one.key
            for one, now in zip(before, after, strict=True)
            if not _holds(one, changed) and repr((one.value, one.problem, one.source)) != repr((now.value, now.problem, now.source))
        ]
        if others:
            problem = f"changing `{'.'.join(changed.key)}` would also change `{'.'.join(others[0])}`"
            raise self._error(problem, changed.line, hint="write the values out instead of sharing them")

    def keys(self) -> set[str]:
        """Return every path of the file, dotted."""
        return {".".join(key) for key in self.content.containers if key} | {".".join(value.key) for value in self.content.values}

    def to_python(self, *, with_arguments: bool = True) -> Any:
        """
        Return the file as dicts, lists and single values, of a key that is set twice the last value.

        `${other.key}` stands for the name of another value, as in YAML, and `${ a + b }` for what is computed. *with_arguments*: those of
        functions count as settings.
        """
        root: dict[str, Any] = {}
        for key in self.content.containers:
            _mapping_at(root, key)
        for value in self.content.values:
            if value.is_argument and not with_arguments:
                continue
            *above, name = value.key
            mapping = _mapping_at(root, above)
            if not isinstance(mapping.get(name), dict):
                mapping[name] = self._plain(value)
        return self._with_lists(root, ())

    def _plain(self, value: PlacedValue) -> Scalar:
        for _ in range(_MOST_REFERENCES):
            source = self._values(value.source) if value.source is not None else []
            if len(source) != 1 or source[0].source is None:
                break
            value = source[0]
        if value.source is not None:
            return f"${{{'.'.join(value.source)}}}"
        return f"${{ {' '.join(self._text_of(value).split())[:LONGEST_TOLD]} }}" if value.problem else value.value

    def _with_lists(self, data: Any, key: KeyPath) -> Any:
        if not isinstance(data, dict):
            return data
        parts = {name: self._with_lists(below, (*key, name)) for name, below in data.items()}
        container, places = self.content.containers.get(key), [str(place) for place in range(len(parts))]
        is_list = container is not None and container.kind == "sequence" and parts.keys() == set(places)
        return [parts[place] for place in places] if is_list else parts

    def duplicate_keys(self) -> list[DuplicateKey]:
        """Return every key that is set twice, wherever that is."""
        first: dict[KeyPath, int] = {}
        duplicates = []
        for value in self.content.values:
            if value.key in first:
                duplicates.append(DuplicateKey(".".join(value.key), first[value.key], value.line))
            first.setdefault(value.key, value.line)
        return duplicates

    def length_of(self, key: KeyPath) -> int | None:
        """Return how many elements the sequence at *key* has; None where no sequence stands there."""
        if self._container(key) != "sequence":
            return None
        dotted, found = ".".join(key), set[str]()
        for other in self.keys():
            if other.startswith(f"{dotted}."):
                found.add(other[len(dotted) + 1 :].partition(".")[0])
        return len(found)

    def kind_of(self, key: KeyPath) -> str | None:
        """Return what stands at *key*: scalar, mapping or sequence; None where nothing stands there, or one that is empty."""
        if self._values(key):
            return "scalar"
        dotted = ".".join(key)
        return self._container(key) if any(other.startswith(f"{dotted}.") for other in self.keys()) else None

    def line_of(self, key: KeyPath) -> int | None:
        """Return the line of what stands at *key*, or of the nearest thing above it."""
        for length in range(len(key), 0, -1):
            container = self._containers.get(".".join(key[:length]))
            lines = [value.line for value in self._values(key[:length])] + ([] if container is None else [container.line])
            if lines:
                return min(lines)
        return 1

    def _values(self, key: KeyPath) -> list[PlacedValue]:
        """Return the values at *key*; a name may have dots in it."""
        return self._by_name.get(".".join(key), [])

    @cached_property
    def _by_name(self) -> dict[str, list[PlacedValue]]:
        found: dict[str, list[PlacedValue]] = {}
        for value in self.content.values:
            found.setdefault(".".join(value.key), []).append(value)
        return found

    @cached_property
    def _containers(self) -> dict[str, Container]:
        return {".".join(name): container for name, container in reversed(self.content.containers.items())}

    def _container(self, key: KeyPath) -> str | None:
        found = self._containers.get(".".join(key))
        return None if found is None else found.kind

    def _only(self, key: KeyPath, *, refused: bool = True) -> PlacedValue | None:
        """Return the one value at *key*, None where there is nothing. Raises ConfigError where there are several, or no single value."""
        found, dotted = self._values(key), ".".join(key)
        if len(found) > 1:
            lines = ", ".join(str(value.line) for value in found)
            problem = f"`{dotted}` is set {len(found)} times (lines {lines})"
            raise self._error(problem, found[-1].line, hint="keep one of them, or give the value as a word of the command", refused=refused)
        kind = self._container(key)
        if not found and kind is not None:
            below = next(self._below(dotted), None)
            hint = "write one value there" if below is None else f"name one of its values, `{below}`"
            raise self._error(f"`{dotted}` is a {kind}, not a single value", self.line_of(key), hint=hint, refused=refused)
        return found[0] if found else None

    def _below(self, dotted: str) -> Iterator[str]:
        """Yield the keys of the values below *dotted*, in the order of the file."""
        for value in self.content.values:
            name = ".".join(value.key)
            if name.startswith(f"{dotted}."):
                yield name

    def _text_of(self, value: PlacedValue) -> str:
        return self.text[value.start : value.end]

    def _cannot_be_set(self, present: PlacedValue, value: EditValue) -> ConfigError:
        hint = "write a plain number or word there first"
        return self._error(f"`{'.'.join(present.key)}` cannot be set to {value!r} in place", present.line, hint=hint)

    def _error(self, problem: str, line: int | None, *, hint: str, refused: bool = True) -> ConfigError:
        return (EditRefusedError if refused else ConfigError)(problem, file=self.path, line=line, hint=hint)


def _holds(outer: PlacedValue, inner: PlacedValue) -> bool:
    """Say whether *inner* is *outer*, or an option in its text; another name of the same value is neither."""
    is_around = outer.start <= inner.start and inner.end <= outer.end
    return outer.key == inner.key or (is_around and (outer.start, outer.end) != (inner.start, inner.end))


def _mapping_at(root: dict[str, Any], key: Sequence[str]) -> dict[str, Any]:
    """Return the mapping at *key* of *root*, made where there is none."""
    for name in key:
        below = root.get(name)
        root[name] = root = below if isinstance(below, dict) else {}
    return root
