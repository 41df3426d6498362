"""A YAML file that belongs to someone else: read a value, or change one and leave every other byte alone.

ruamel.yaml is asked for positions only: its events give the path to a value, its tokens the span of the scalar. The new scalar is
spliced into the text, the result is parsed again, and exactly the intended path must have changed. No dumper ever sees the file.

What cannot be changed without guessing is refused with file, line and reason: duplicate keys on the path, aliases, merged keys,
`${...}`, several documents, values that are not plain scalars.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from memplan.edits.edit import DuplicateKey, EditValue, Found, KeyPath, Scalar, as_text
from memplan.edits.text import decode, encode, read_whole
from memplan.errors import ConfigError, EditRefusedError

MOST_VALUES = 200_000
"""Aliases can make a small file stand for an endless one; past this many values it is refused."""

# Numbers as YAML 1.1 has them, which is what the programs read that such files are for (PyYAML's resolver, and OmegaConf's for floats): a
# leading zero is octal, so that `010` is 8.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_HEXADECIMAL = re.compile(r"[-+]?0x[0-9a-fA-F_]+")
_BINARY = re.compile(r"[-+]?0b[01_]+")
_SEXAGESIMAL = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_INTERPOLATION = re.compile(r"\$\{(?P<source>[^${}]*)\}")


@dataclass(frozen=True)
class Node:
    """One node of the file, with where it stands."""

    kind: str
    """scalar, mapping, sequence or alias."""
    line: int
    start: int
    """Where its text begins (character), behind anchor and tag; for an empty value where it would."""
    end: int
    text: str = ""
    style: str = ""
    """"" for plain, else the quote or the block's sign."""
    tag: str | None = None
    anchor: str | None = None
    target: Node | None = None
    """What an alias stands for: the last anchor of that name before it."""
    pairs: tuple[tuple[Node, Node], ...] = ()
    elements: tuple[Node, ...] = ()

    @property
    def value(self) -> Scalar:
        """Return what the scalar means: words as in YAML 1.2's core schema, numbers as in YAML 1.1."""
        if self.style or self.tag not in (None, "!"):
            return self.text
        return _resolve(self.text)


def _resolve(text: str) -> Scalar:
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= 4000 else text  # Python reads 4300 digits at most
    for pattern, base in ((_OCTAL, 8), (_HEXADECIMAL, 16), (_BINARY, 2)):
        digits = text.replace("_", "")
        if pattern.fullmatch(text) and digits.strip("+-0xb"):
            return int(digits, base)
    if _SEXAGESIMAL.fullmatch(text):
        return _sexagesimal(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _sexagesimal(text: str) -> int:
    """Return the number that YAML 1.1 reads in "1:30": 90."""
    value = 0
    for part in text.lstrip("+-").replace("_", "").split(":"):
        value = value * 60 + int(part)
    return -value if text.startswith("-") else value


@dataclass(frozen=True)
class YamlFile:
    """A parsed YAML file and its text, unchanged."""

    path: Path
    data: bytes
    text: str
    """The text without a byte order mark."""
    documents: tuple[Node, ...]

    @classmethod
    def load(cls, path: Path) -> YamlFile:
        """Read and parse *path*. Raises ConfigError when it cannot be read, is not UTF-8 or not YAML."""
        return cls.parse(path, read_whole(path))

    @classmethod
    def parse(cls, path: Path, data: bytes) -> YamlFile:
        """Parse *data* as the content of *path*. Raises ConfigError when it is not UTF-8 or not YAML, or is JSON with comments."""
        text = decode(path, data)
        problem = _json_problem(path, text)
        if isinstance(problem, EditRefusedError):  # YAML would take a comment for a part of the next key
            raise problem
        try:
            documents = tuple(_Composer(path, text).compose())
        except ConfigError as error:
            if problem is None:
                raise
            raise problem from error
        return cls(path, data, text, documents)

    def get(self, key: KeyPath) -> Found | None:
        """
        Return the scalar at *key*, or None where nothing stands there; a `${other.key}` of the same file is followed.

        Raises ConfigError where the path is ambiguous (duplicate keys), or leads to something else than a scalar.
        """
        seen: set[KeyPath] = set()
        pointing: Node | None = None
        asked = key
        while True:
            seen.add(key)
            node = self._find(key, follow=True)
            if node is None and pointing is None:
                return None
            if node is None:
                raise self._unresolved(asked, pointing)
            if node.kind != "scalar":
                raise self._not_single(key, node, refused=False)
            source = _INTERPOLATION.fullmatch(node.text.strip())
            if source is None:
                return Found(node.value, node.line)
            asked, pointing = key, node
            key = tuple(source["source"].split("."))
            if key in seen or ":" in source["source"]:
                raise self._unresolved(asked, pointing)

    def _unresolved(self, key: KeyPath, node: Node | None) -> ConfigError:
        assert node is not None
        problem = f"`{'.'.join(key)}` is {node.text}, which this file alone does not resolve"
        return self._error(problem, node, hint="write the value there", refused=False)

    def replace(self, key: KeyPath, value: EditValue) -> bytes:
        """
        Return the file's bytes with the value at *key* set to *value*, every other byte as it was.

        Raises EditRefusedError where that cannot be done without guessing.
        """
        if len(self.documents) != 1:
            raise EditRefusedError(
                f"holds {len(self.documents)} documents", file=self.path, line=1, hint="memplan edits files of one document"
            )
        placed = self._placed(key, follow=False)
        if placed is None:
            raise EditRefusedError(f"has no key `{'.'.join(key)}`", file=self.path, hint="add the key with any value, then run again")
        key, node = placed
        self._check_scalar(key, node)
        scalar = f"{node.style}{as_text(value)}{node.style}"
        if node.start == node.end and not self.text[: node.start].endswith((" ", "\t")):
            scalar = " " + scalar  # an empty value: the span is the place behind the colon
        text = self.text[: node.start] + scalar + self.text[node.end :]
        try:
            edited = YamlFile.parse(self.path, encode(text, like=self.data))
            found = edited.get(key)
        except ConfigError as error:
            raise self._cannot_be_set(key, value, node) from error
        self._verify(edited, key, node)
        if found is None or as_text(found.value) != as_text(value):
            raise self._cannot_be_set(key, value, node)
        return edited.data

    def keys(self) -> set[str]:
        """Return every path of the file, dotted. Raises ConfigError for aliases that multiply without end."""
        return {".".join(path) for path, _ in self._flatten() if path}

    def duplicate_keys(self) -> list[DuplicateKey]:
        """Return every key that stands twice in one mapping, wherever that is."""
        return [duplicate for document in self.documents for duplicate in _duplicates(document)]

    def to_python(self, *, may_repeat_keys: bool = False) -> Any:
        """
        Return the only document as dicts, lists and scalars.

        Raises ConfigError for keys that are not scalars, several documents, and duplicate keys unless *may_repeat_keys*: then the last one
        counts, as PyYAML has it.
        """
        self.check_single()
        if not self.documents:
            return None
        for duplicate in [] if may_repeat_keys else self.duplicate_keys():
            problem = f"`{duplicate.key}` is set here and in line {duplicate.first_line}"
            raise ConfigError(problem, file=self.path, line=duplicate.line, hint="keep one of them")
        sum(1 for _ in self._flatten())  # refuses aliases that multiply without end
        return self._plain(self.documents[0])

    def check_single(self) -> None:
        """Raise ConfigError where it holds several documents, which PyYAML's `safe_load` refuses too."""
        if len(self.documents) > 1:
            raise ConfigError(f"holds {len(self.documents)} documents", file=self.path, hint="keep one")

    def length_of(self, key: KeyPath) -> int | None:
        """Return how many elements the sequence at *key* has; None where no sequence stands there."""
        node = self._find(key, follow=True)
        return len(node.elements) if node is not None and node.kind == "sequence" else None

    def kind_of(self, key: KeyPath) -> str | None:
        """Return what stands at *key*: scalar, mapping or sequence; None where nothing stands there, or one that is empty."""
        node = self._find(key, follow=True)
        is_empty = node is not None and node.kind != "scalar" and not (node.pairs or node.elements)
        return None if node is None or is_empty else node.kind

    def line_of(self, key: KeyPath) -> int | None:
        """Return the line of what stands at *key*, or of the nearest thing above it."""
        for length in range(len(key), -1, -1):
            with suppress(ConfigError):
                node = self._find(key[:length], follow=True)
                if node is not None:
                    return node.line
        return None

    def _plain(self, node: Node) -> Any:
        node = self._target(node)
        if node.kind == "scalar":
            return node.value
        if node.kind == "sequence":
            return [self._plain(element) for element in node.elements]
        plain: dict[str, Any] = {}
        for key, value in node.pairs:
            if key.kind != "scalar":
                raise self._error("a key that is not a plain word", key, hint="a key is one word or text", refused=False)
            if key.text == "<<":
                merged = self._plain(value)
                for source in merged if isinstance(merged, list) else [merged]:
                    if not isinstance(source, dict):
                        problem = "`<<` merges something that is not a mapping"
                        raise self._error(problem, key, hint="name the anchor of a mapping", refused=False)
                    plain = {**source, **plain}
            else:
                plain[key.text] = self._plain(value)
        return plain

    def _target(self, node: Node) -> Node:
        """Return what an alias stands for, any other node itself."""
        return node.target or node

    def _find(self, key: KeyPath, *, follow: bool) -> Node | None:
        """Return the node at *key*; *follow* says whether aliases and merges on the way are followed or refused."""
        placed = self._placed(key, follow=follow)
        return None if placed is None else placed[1]

    def _placed(self, key: KeyPath, *, follow: bool) -> tuple[KeyPath, Node] | None:
        """
        Return the path of *key* with the names that the file has, and the node there.

        A name may have dots in it (`val/AudioDataset.n_examples: 250`): it is found where no key below a key is.
        """
        return next(self._below(self.documents[0], (), key, follow=follow), None) if self.documents else None

    def _below(self, node: Node, above: KeyPath, key: KeyPath, *, follow: bool) -> Iterator[tuple[KeyPath, Node]]:
        node = self._stepped(node, above, follow=follow)
        if not key:
            yield above, node
        for length in range(1, len(key) + 1):
            path = (*above, ".".join(key[:length]))
            child = self._child(node, path[-1], path, follow=follow)
            if child is not None:
                yield from self._below(child, path, key[length:], follow=follow)

    def _stepped(self, node: Node, key: KeyPath, *, follow: bool) -> Node:
        if node.kind == "alias" and not follow:
            source = self._target(node)
            raise self._error(
                f"`{'.'.join(key)}` is an alias of `&{node.text}` (line {source.line})",
                node,
                hint="edit the anchored value, or write the value out here",
            )
        return self._target(node)

    def _child(self, node: Node, name: str, key: KeyPath, *, follow: bool, seen: set[int] | None = None) -> Node | None:
        seen = set() if seen is None else seen  # mappings that are merged twice are looked through once
        if id(node) in seen:
            return None
        seen.add(id(node))
        if node.kind == "sequence":
            return node.elements[int(name)] if _INDEX.fullmatch(name) and int(name) < len(node.elements) else None
        matching = [(found, value) for found, value in node.pairs if found.kind == "scalar" and found.text == name]
        if len(matching) > 1:
            lines = ", ".join(str(found.line) for found, _ in matching)
            raise self._error(f"`{'.'.join(key)}` stands {len(matching)} times (lines {lines})", matching[-1][0], hint="keep one of them")
        if matching:
            return matching[0][1]
        for found, value in node.pairs:
            if found.kind == "scalar" and found.text == "<<":
                merged = self._merged(value, name, key, follow=follow, seen=seen)
                if merged is not None:
                    return merged
        return None

    def _merged(self, value: Node, name: str, key: KeyPath, *, follow: bool, seen: set[int]) -> Node | None:
        target = self._target(value)
        for source in target.elements if target.kind == "sequence" else (target,):
            child = self._child(self._target(source), name, key, follow=True, seen=seen)
            if child is not None and not follow:
                raise self._error(
                    f"`{'.'.join(key)}` comes from a merged mapping (line {child.line})",
                    value,
                    hint="write the value out here, or edit its source",
                )
            if child is not None:
                return child
        return None

    def _not_single(self, key: KeyPath, node: Node, *, refused: bool = True) -> ConfigError:
        dotted = ".".join(key)
        hint = f"name one of its values, `{dotted}.0`" if node.elements else "write one value there"
        return self._error(f"`{dotted}` is a {node.kind}, not a single value", node, hint=hint, refused=refused)

    def _check_scalar(self, key: KeyPath, node: Node) -> None:
        dotted = ".".join(key)
        if node.kind != "scalar":
            raise self._not_single(key, node)
        if node.style in ("|", ">"):
            raise self._error(f"`{dotted}` is a block of text", node, hint="write the value on the key's line")
        if node.tag is not None and not node.tag.startswith(("!!", "tag:yaml.org,2002:")):
            raise self._error(f"`{dotted}` has the tag {node.tag}, whose meaning memplan does not know", node, hint="leave the tag out")
        if "\n" in self.text[node.start : node.end]:
            raise self._error(f"`{dotted}` runs over several lines", node, hint="write the value on one line")
        source = _INTERPOLATION.search(node.text)
        if source is not None:
            raise self._error(f"`{dotted}` is {node.text}", node, hint=self._source_hint(source["source"]))

    def _source_hint(self, source: str) -> str:
        try:
            target = self._find(tuple(source.split(".")), follow=True)
        except ConfigError:
            target = None
        if target is None:
            return f"change {source} where it is defined"
        return f"change its source `{source}` in line {target.line} instead"

    def _verify(self, edited: YamlFile, key: KeyPath, node: Node) -> None:
        """Check that exactly the value at *key* changed."""
        before, after = dict(self._flatten()), dict(edited._flatten())
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        others = sorted(".".join(path) for path in changed - {key})
        if others:
            raise self._error(
                f"changing `{'.'.join(key)}` would also change `{others[0]}`"
                + (f" and {len(others) - 1} more" if len(others) > 1 else "")
                + (f", through the anchor &{node.anchor}" if node.anchor else ""),
                node,
                hint="write the values out instead of sharing them",
            )

    def _cannot_be_set(self, key: KeyPath, value: EditValue, node: Node) -> ConfigError:
        return self._error(f"`{'.'.join(key)}` cannot be set to {value!r} in place", node, hint="write a plain number or word there first")

    def _flatten(self) -> Iterator[tuple[KeyPath, Scalar | tuple[str, int]]]:
        """Yield every value with its path, aliases and merges followed, duplicate keys numbered."""
        budget = iter(range(MOST_VALUES))
        for number, document in enumerate(self.documents):
            yield from self._flatten_node(document, () if number == 0 else (f"document {number + 1}",), budget, 0)

    def _flatten_node(
        self, node: Node, path: KeyPath, budget: Iterator[int], depth: int
    ) -> Iterator[tuple[KeyPath, Scalar | tuple[str, int]]]:
        if next(budget, None) is None or depth > 200:
            raise self._error("aliases make this file too large to check", node, hint="write the values out")
        node = self._target(node)
        if node.kind == "scalar":
            yield path, node.value
            return
        children = [(str(number), element) for number, element in enumerate(node.elements)] if node.kind == "sequence" else _numbered(node)
        yield path, (node.kind, len(children))
        for name, child in children:
            yield from self._flatten_node(child, (*path, name), budget, depth + 1)

    def _error(self, problem: str, node: Node, *, hint: str | None, refused: bool = True) -> ConfigError:
        kind = EditRefusedError if refused else ConfigError
        return kind(problem, file=self.path, line=node.line, hint=hint)


def _numbered(node: Node) -> list[tuple[str, Node]]:
    """Return a mapping's values by key; the second of two equal keys is "key#2"."""
    seen: dict[str, int] = {}
    children = []
    for key, value in node.pairs:
        name = key.text if key.kind in ("scalar", "alias") else f"{key.kind}@{key.line}"
        seen[name] = seen.get(name, 0) + 1
        children.append((name if seen[name] == 1 else f"{name}#{seen[name]}", value))
    return children


def _duplicates(node: Node) -> Iterator[DuplicateKey]:
    first: dict[str, int] = {}
    for key, value in node.pairs:
        if key.kind == "scalar" and key.text != "<<":
            if key.text in first:
                yield DuplicateKey(key.text, first[key.text], key.line)
            first.setdefault(key.text, key.line)
        yield from _duplicates(value)
    for element in node.elements:
        yield from _duplicates(element)


class _Composer:
    """From ruamel.yaml's events to nodes that know their place."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.anchors: dict[str, Node] = {}
        self._starts: dict[int, int] | None = None
        self._ends: list[int] = []

    def compose(self) -> Iterator[Node]:
        """Yield the root of each document. Raises ConfigError where the text is not YAML."""
        from ruamel.yaml.error import YAMLError
        from ruamel.yaml.events import DocumentStartEvent, StreamEndEvent

        try:
            events = iter(_parse(self.text))
            for event in events:
                if isinstance(event, StreamEndEvent):
                    return
                if isinstance(event, DocumentStartEvent):
                    yield self._node(next(events), events)
        except YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            problem = getattr(error, "problem", None) or "cannot be parsed"
            line = mark.line + 1 if mark else None
            raise ConfigError(f"is not valid YAML: {problem}", file=self.path, line=line, hint="repair the file first") from error
        except RecursionError as error:
            raise ConfigError("is nested too deeply to be a configuration", file=self.path, hint="is it the right file?") from error

    def _node(self, event: Any, events: Iterator[Any]) -> Node:
        from ruamel.yaml.events import AliasEvent, MappingStartEvent, ScalarEvent

        line, start, end = event.start_mark.line + 1, event.start_mark.index, event.end_mark.index
        anchor = getattr(event, "anchor", None)
        if isinstance(event, AliasEvent):
            if anchor not in self.anchors:
                problem = f"the alias *{anchor} stands before its anchor, or inside it"
                raise ConfigError(problem, file=self.path, line=line, hint="repair the file first")
            return Node("alias", line, start, end, text=anchor, target=self.anchors[anchor])
        tag = _tag_of(event)
        if isinstance(event, ScalarEvent):
            if not event.value and not event.style:  # empty: its event may stand anywhere up to the next token
                start = end = self._behind_token(end)
            elif anchor is not None or tag is not None:  # the event begins at its anchor or tag, the token is the scalar alone
                start = self._tokens()[end]
            node = Node("scalar", self.text.count("\n", 0, start) + 1, start, end, event.value, event.style or "", tag, anchor)
        elif isinstance(event, MappingStartEvent):
            pairs = tuple(self._pairs(events))
            node = Node("mapping", line, start, end, tag=tag, anchor=anchor, pairs=pairs)
        else:
            elements = tuple(self._elements(events))
            node = Node("sequence", line, start, end, tag=tag, anchor=anchor, elements=elements)
        if anchor is not None:
            self.anchors[anchor] = node
        return node

    def _pairs(self, events: Iterator[Any]) -> Iterator[tuple[Node, Node]]:
        from ruamel.yaml.events import MappingEndEvent

        for event in events:
            if isinstance(event, MappingEndEvent):
                return
            key = self._node(event, events)
            yield key, self._node(next(events), events)

    def _elements(self, events: Iterator[Any]) -> Iterator[Node]:
        from ruamel.yaml.events import SequenceEndEvent

        for event in events:
            if isinstance(event, SequenceEndEvent):
                return
            yield self._node(event, events)

    def _tokens(self) -> dict[int, int]:
        """Return where each token that has a text begins, by where it ends; in the order of the file."""
        if self._starts is None:
            tokens = _yaml().scan(self.text)
            spans = ((token.end_mark.index, token.start_mark.index) for token in tokens)
            self._starts = {end: start for end, start in spans if end > start}
            self._ends = list(self._starts)
        return self._starts

    def _behind_token(self, place: int) -> int:
        """Return the end of the last token that ends at *place* or before."""
        self._tokens()
        return self._ends[bisect_right(self._ends, place) - 1]


_COMMENTS = ("//", "/*", "#")


def _json_problem(path: Path, text: str) -> ConfigError | None:
    """Return what is wrong with *text* as JSON; None where *path* is not named so, or nothing is."""
    if path.suffix != ".json":
        return None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if text.startswith(_COMMENTS, error.pos):
            hint = "give the value as a word of the command, `{micro_batch_size}`, or plan with a copy of the file without comments"
            return EditRefusedError("has a comment: JSON with comments is not edited", file=path, line=error.lineno, hint=hint)
        return ConfigError(f"is not valid JSON: {error.msg}", file=path, line=error.lineno, hint="repair the file first")
    except (RecursionError, ValueError):
        return None  # as YAML it is nested too deeply as well; a number that Python finds too long matters only where it is read
    return None


def _yaml() -> Any:
    """Return a parser of ruamel.yaml that takes tabs where YAML allows them."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner = _tab_scanner()
    return yaml


@lru_cache(maxsize=1)
def _tab_scanner() -> type:
    """
    Return ruamel.yaml's scanner, made to skip tabs between tokens.

    YAML allows them before a comment, at the end of a line and behind a colon; ruamel.yaml's own scanner calls the file invalid.
    """
    from ruamel.yaml.scanner import Scanner

    class TabScanner(Scanner):
        def scan_to_next_token(self) -> None:
            while True:
                super().scan_to_next_token()
                peek = self.reader.peek
                if peek() != "\t":
                    return
                width = 0
                while peek(width) in " \t":
                    width += 1
                if self.allow_simple_key and peek(width) not in "#\r\n\0\x85\u2028\u2029":
                    return
                self.reader.forward(width)

    return TabScanner


def _parse(text: str) -> Any:
    return _yaml().parse(text)


def _tag_of(event: Any) -> str | None:
    tag = getattr(event, "tag", None)
    return None if tag is None else str(tag)
