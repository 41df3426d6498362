"""
A shell script that starts a training: what it sets and the options that it gives are read, or one is changed; nothing is run.

A key is a variable's name, an option's without its dashes, or what stands before the sign of equality in a word:

    BATCH_SIZE=64                                       BATCH_SIZE
    torchrun train.py --per_device_batch 8 --lr=1e-4    per_device_batch, lr
    python train.py data.batch_size=64                  data.batch_size
    ARGS="--bsz 64 --bf16"                              bsz, beside ARGS itself
    SEED=${1:-7}                                        SEED, what counts by default
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memplan.edits.edit import EditValue, KeyPath, Scalar, as_text
from memplan.edits.flat_file import Content, FlatFile, PlacedValue
from memplan.errors import ConfigError, EditRefusedError

_COMMAND = r"\$\((?:[^()]|\([^()]*\))*\)"
"""What a command prints; other brackets may stand in it, once."""
_EXPANDED = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
_QUOTED = rf'"(?:{_COMMAND}|{_EXPANDED}|\$(?![({{])|[^"\\$]|\\.)*"|"(?:[^"\\]|\\.)*"'
"""In double quotes, those of a command in them apart where that can be told."""

# One piece of a script. Quotes may run over several lines; a backslash at the end of a line joins it with the next.
_TOKEN = re.compile(
    rf"""
    (?P<blank>(?:[ \t\r]|\\\r?\n|\\\Z)+)
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<here><<-?[ \t]*(?P<mark>["']?\w+["']?))
  | (?P<end>\n|;|&&|\|\||[&|()]|<<<|>>|[<>])
  | (?P<word>(?:'[^']*'|{_QUOTED}|\\.|{_COMMAND}|{_EXPANDED}|`[^`]*`|[^\s'"\\;&|()<>`])+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)=", re.DOTALL)
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset", "env"})
_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)(?P<sign>=)?")
_OVERRIDE = re.compile(r"\+{0,2}(?P<name>[A-Za-z_][\w./@-]*)=")
_REFERENCE = re.compile(r"\$(?:\{(?P<inner>[A-Za-z_]\w*)\}|(?P<name>[A-Za-z_]\w*))")
_DEFAULT = re.compile(r"\$\{\w+:?-(?P<default>[\w.,/:+@%=-]+)\}")
"""What counts where a variable is not set."""
_PLAIN = re.compile(r"[\w.,/:+@%=-]*")
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")


SHELL_SUFFIXES = (".sh", ".bash")


class Word(NamedTuple):
    """A word of a script, with what quotes it."""

    text: str
    start: int
    is_first: bool
    """It is where a command's name is, or stands before that."""
    command: int
    """Which command it is of, in the order of the script."""

    @property
    def end(self) -> int:
        """Return where it ends."""
        return self.start + len(self.text)


class ShellFile(FlatFile):
    """A parsed shell script and its text, unchanged."""

    @classmethod
    def read(cls, path: Path, text: str) -> Content:
        """Return what *text* sets. Raises ConfigError where a quote is not closed."""
        words = list(_words(path, text, 0))
        found = list(_placed(path, text, words))
        keys = {key for key, _, _ in found}
        values = [_value(text, key, start, end, keys) for key, start, end in found]
        # `--lr $lr` says nothing of its own where the script sets `lr`.
        return Content(tuple(value for value in values if value.source != value.key), {})

    def commands(self) -> list[list[str]]:
        """Return the words of each command, without quotes, variables that the script sets filled in."""
        words = list(_words(self.path, self.text, 0))
        grouped = itertools.groupby(words, key=lambda word: word.command)
        return [[_REFERENCE.sub(self._filled, word.text.strip("\"'")) for word in command] for _, command in grouped]

    def _filled(self, reference: re.Match[str]) -> str:
        try:
            found = self.get((reference["inner"] or reference["name"],))
        except ConfigError:
            found = None
        return reference[0] if found is None else as_text(found.value)

    def written(self, value: EditValue, present: PlacedValue) -> str:
        """Return *value* in the quotes that stand there. Raises EditRefusedError where it would need others."""
        text, stands = as_text(value), self.text[present.start : present.end]
        if isinstance(value, bool) and stands.strip("\"'") in ("True", "False"):
            text = text.capitalize()
        if not text or not _PLAIN.fullmatch(text):
            problem = f"`{'.'.join(present.key)}` cannot be set to {text!r}, which a shell reads as more than one plain word"
            raise EditRefusedError(problem, file=self.path, line=present.line, hint="give it as a word of the command")
        quote = stands[0] if stands[:1] in ("'", '"') else ""
        return f"{quote}{text}{quote}"

    def is_as_before(self, edited: FlatFile, changed: PlacedValue, literal: str) -> bool:
        """Say whether the words of *edited* are those of this script, but for the one with *changed* in it."""
        moved = len(literal) - (changed.end - changed.start)
        before, after = list(_words(self.path, self.text, 0)), list(_words(self.path, edited.text, 0))
        same = [
            one.text == now.text or (one.start <= changed.start and changed.end <= one.end and now.end == one.end + moved)
            for one, now in zip(before, after, strict=False)
        ]
        return len(before) == len(after) and all(same)


def _words(path: Path, text: str, start: int) -> Iterator[Word]:
    """Yield the words of *text*, which begins at *start* of a file; without comments and documents that stand in the script."""
    place, is_first, command = 0, True, 0
    marks: list[str] = []
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            line = text.count("\n", 0, place) + 1
            raise ConfigError("has a quote or bracket that is not closed", file=path, line=line, hint="repair the file first")
        place = token.end()
        if token["word"] is not None:
            word = token["word"]
            yield Word(word, start + token.start(), is_first, command)
            is_first = is_first and (word in _DECLARING or _ASSIGNED.match(word) is not None)
        elif token["here"] is not None:
            marks.append(token["mark"].strip("\"'"))
        elif token["end"] is not None:
            is_first, command = True, command + 1
            if token["end"] == "\n" and marks:
                place = _behind_documents(text, place, marks)
                marks = []


def _behind_documents(text: str, place: int, marks: list[str]) -> int:
    """Return where the documents end that begin at *place*, each with a line of its mark alone."""
    for mark in marks:
        end = re.compile(rf"^[ \t]*{re.escape(mark)}\r?$", re.MULTILINE).search(text, place)
        place = len(text) if end is None else end.end()
    return place


def _placed(path: Path, text: str, words: list[Word]) -> Iterator[tuple[KeyPath, int, int]]:
    """Yield the keys that *words* set, and where their values stand."""
    for number, word in enumerate(words):
        after = words[number + 1] if number + 1 < len(words) and not words[number + 1].is_first else None
        assigned, option = _ASSIGNED.match(word.text), _OPTION.match(word.text)
        override = _OVERRIDE.match(word.text)
        if word.is_first and assigned is not None:
            yield (assigned["name"],), word.start + assigned.end(), word.end
        elif option is not None and option["sign"]:
            yield _key(option["name"]), word.start + option.end(), word.end
        elif option is not None and option.end() == len(word.text):
            if after is not None and not _OPTION.match(after.text):
                yield _key(option["name"]), after.start, after.end
        elif override is not None and not word.is_first:
            yield _key(override["name"]), word.start + override.end(), word.end
        yield from _inside_quotes(path, text, word)


def _inside_quotes(path: Path, text: str, word: Word) -> Iterator[tuple[KeyPath, int, int]]:
    """Yield what options in a quoted text set: `ARGS="--bsz 64"`."""
    first = word.text.find('"')
    inner = word.text[first + 1 : -1]
    if first >= 0 and word.text.endswith('"') and "--" in inner and '"' not in inner and "\\\\" not in inner:
        begin = word.start + first + 1
        inside = [each._replace(is_first=False) for each in _words(path, inner, begin)] if inner.count("'") % 2 == 0 else []
        yield from _placed(path, text, inside)


def _key(name: str) -> KeyPath:
    return tuple(name.split("."))


def _value(text: str, key: KeyPath, start: int, end: int, keys: set[KeyPath]) -> PlacedValue:
    line, stands = text.count("\n", 0, start) + 1, text[start:end]
    quote = stands[0] if stands[:1] in ("'", '"') and stands[-1:] == stands[0] and len(stands) > 1 else ""
    plain = stands[1:-1] if quote else stands
    default = _DEFAULT.fullmatch(plain) if quote != "'" else None
    if default is not None:
        start, plain = start + len(quote) + default.start("default"), default["default"]
        end = start + len(plain)
    reference = _REFERENCE.fullmatch(plain) if quote != "'" else None
    if reference is not None:
        source = (reference["inner"] or reference["name"],)
        if source in keys:
            return PlacedValue(key, line, start, end, source=source)
        return PlacedValue(key, line, start, end, problem=f"is {plain}, which this file does not set")
    if not _PLAIN.fullmatch(plain):
        return PlacedValue(key, line, start, end, problem=f"is no plain word: {' '.join(stands.split())[:60]}")
    return PlacedValue(key, line, start, end, value=_meant(plain))


def _meant(text: str) -> Scalar:
    """Return a number or a truth value as what it is."""
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
