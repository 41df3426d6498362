"""YAML files as people write them, generated: with each file, where its scalars are.

A file is built as text in which every scalar is one character of Unicode's private area. Such a mark is no YAML sign, so the text can be
laid out freely, and in the end each mark becomes a scalar: where a value stands is known without any parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from hypothesis import assume
from hypothesis import strategies as st

FIRST_MARK = 0xE000
_MARKS = re.compile("[\ue000-\uf8ff]")

Path = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """A scalar: what stands before it (anchor, tag), its quote, its text."""

    before: str
    quote: str
    text: str

    def __str__(self) -> str:
        return f"{self.before}{self.quote}{self.text}{self.quote}"


@dataclass(frozen=True)
class Yaml:
    """A generated file."""

    template: str
    """The text with a mark for each scalar."""
    leaves: tuple[tuple[Path, Leaf], ...]
    """The scalars by their marks' order."""
    bom: bool
    newline: str
    """How lines end."""

    def data(self, *, number: int | None = None, text: str = "") -> bytes:
        """Return the file's bytes; with *text* in the place of the text of scalar *number*, if that is given."""

        def scalar(mark: re.Match[str]) -> str:
            index = ord(mark[0]) - FIRST_MARK
            leaf = self.leaves[index][1]
            return str(Leaf(leaf.before, leaf.quote, text) if index == number else leaf)

        filled = _MARKS.sub(scalar, self.template).replace("\n", self.newline)
        return (b"\xef\xbb\xbf" if self.bom else b"") + filled.encode()


words = st.from_regex(r"[a-zé][a-z_é-]{0,6}[a-zé]", fullmatch=True).filter(lambda word: word not in ("null", "true", "false"))
numbers = st.integers(-(10**12), 10**12)
comments = st.sampled_from(["", "", "", " # c", "   # é: 4", "\t# tab: [", " \t # '", "  ", "\t", " #"])
names = st.one_of(words, st.sampled_from(["batch size", "a.b", "1", "😀"]))
keys = st.builds(str.format, st.sampled_from(["{}", "{}", "'{}'", '"{}"']), names)


@st.composite
def leaf(draw: st.DrawFn, *, may_be_empty: bool) -> Leaf:
    """A scalar on one line."""
    quote = draw(st.sampled_from(["", "", "'", '"']))
    plain = [numbers.map(str), words, st.sampled_from(["2e-4", "1_000", "null", "~", "True", "1:2", "a#b", "-x"])]
    quoted = [numbers.map(str), words, st.sampled_from(["", " ", "4 # no comment", "a: b", "[", "é\t😀", "{}", "\t#"])]
    text = draw(st.one_of(quoted if quote else plain + [st.just("")] * may_be_empty))
    is_number = text.lstrip("-").isdigit()
    before = draw(st.sampled_from(["", "", "", "&ANCHOR ", "!!int " if is_number else "!!str ", "!!str &ANCHOR "]))
    return Leaf(before if text or quote else "", quote, text)


class _Builder:
    """Lays out one tree and collects its leaves."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.leaves: list[tuple[Path, Leaf]] = []

    def mark(self, path: Path, *, may_be_empty: bool) -> str:
        found = self.draw(leaf(may_be_empty=may_be_empty))
        number = len(self.leaves)
        self.leaves.append((path, Leaf(found.before.replace("ANCHOR", f"a{number}"), found.quote, found.text)))
        return chr(FIRST_MARK + number)

    def keys(self) -> list[str]:
        return self.draw(st.lists(keys, min_size=1, max_size=3, unique_by=lambda key: key.strip("'\"")))

    def tail(self) -> str:
        """A comment, and perhaps empty lines behind it."""
        empty = self.draw(st.lists(st.sampled_from(["", "  ", "        ", "# between", "   # between"]), max_size=1))
        return self.draw(comments) + "".join(f"\n{line}" for line in empty)

    def block(self, path: Path, indent: int, depth: int) -> list[str]:
        """Return the lines of a block mapping or sequence at *indent*."""
        if self.draw(st.booleans()):
            return [line for number in range(self.draw(st.integers(1, 3))) for line in self.element((*path, str(number)), indent, depth)]
        return [line for key in self.keys() for line in self.pair(key, path, indent, depth)]

    def element(self, path: Path, indent: int, depth: int) -> list[str]:
        gap = self.draw(st.sampled_from([" ", "   "]))
        if depth > 0 and self.draw(st.booleans()):  # a collection that begins behind the dash
            lines = self.block(path, indent + 1 + len(gap), depth - 1)
            return [" " * indent + "-" + gap + lines[0].lstrip(" "), *lines[1:]]
        return [" " * indent + "-" + self.value(path, gap, indent, depth) + self.tail()]

    def pair(self, key: str, path: Path, indent: int, depth: int) -> list[str]:
        inner = (*path, key.strip("'\""))
        head = " " * indent + key + self.draw(st.sampled_from(["", "", " "])) + ":"
        if depth > 0 and self.draw(st.booleans()):
            return [head + self.tail(), *self.block(inner, indent + self.draw(st.sampled_from([1, 2, 4])), depth - 1)]
        return [head + self.value(inner, self.draw(st.sampled_from([" ", "   "])), indent, depth) + self.tail()]

    def value(self, path: Path, gap: str, indent: int, depth: int) -> str:
        if depth > 0 and self.draw(st.booleans()):
            return gap + self.flow(path, indent + 1, depth - 1)
        mark = self.mark(path, may_be_empty=True)
        return mark if not str(self.leaves[-1][1]) else gap + mark

    def flow(self, path: Path, indent: int, depth: int) -> str:
        """Return a flow mapping or sequence whose further lines are indented by *indent* at least."""
        item = partial(self.flow_value, indent=indent, depth=depth)
        if self.draw(st.booleans()):
            items = [item((*path, str(number))) for number in range(self.draw(st.integers(0, 3)))]
        else:
            items = [f"{key}: {item((*path, key.strip(chr(39) + chr(34))))}" for key in self.keys()]
            return "{" + self.breaks(indent) + self.joined(items, indent) + self.breaks(indent) + "}"
        return "[" + self.breaks(indent) + self.joined(items, indent) + self.breaks(indent) + "]"

    def joined(self, items: list[str], indent: int) -> str:
        return "".join(item + ("" if number == len(items) - 1 else "," + (self.breaks(indent) or " ")) for number, item in enumerate(items))

    def breaks(self, indent: int) -> str:
        """Nothing, a space, or a new line, perhaps with a comment before it."""
        return self.draw(st.sampled_from(["", "", " ", f"\n{' ' * indent}", f" # in flow\n{' ' * (indent + 2)}", f"\t\n\n{' ' * indent}"]))

    def flow_value(self, path: Path, indent: int, depth: int) -> str:
        if depth > 0 and self.draw(st.booleans()):
            return self.flow(path, indent, depth - 1)
        return self.mark(path, may_be_empty=False)


@st.composite
def yaml_files(draw: st.DrawFn) -> Yaml:
    """A file with at least one scalar."""
    builder = _Builder(draw)
    start = draw(st.sampled_from(["", "", "# first line\n", "---\n", "# c\n--- # d\n\n"]))
    lines = builder.block((), draw(st.sampled_from([0, 0, 0, 2])) if not start.startswith("---") else 0, draw(st.integers(0, 3)))
    assume(builder.leaves)
    end = draw(st.sampled_from(["\n", "\n", "", "\n\n  \n", "\n# last line", "\n...\n"]))
    return Yaml(start + "\n".join(lines) + end, tuple(builder.leaves), draw(st.booleans()), draw(st.sampled_from(["\n", "\r\n"])))
