"""
A shell script that starts a training: what it sets and the options that it gives are read, or one is changed; nothing is run.

A key is a variable's name, an option's without its dashes, or what stands before the sign of equality in a word:

    BATCH_SIZE=64                                       BATCH_SIZE
    torchrun train.py --per_device_batch 8 --lr=1e-4    per_device_batch, lr
    python train.py data.batch_size=64                  data.batch_size
    ARGS="--bsz 64 --bf16"                              bsz, beside ARGS itself
    SEED=${1:-7}                                        SEED, what counts by default
    read -r -d '' ARGS <<EOF, and lines of options      those

What a script does with its variables beside that (loops, functions, `read`) is not followed: a name that gets a value there too is set
several times, and refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memplan.edits.edit import EditValue, KeyPath, Scalar, as_text
from memplan.edits.flat_file import LONGEST_TOLD, Content, FlatFile, PlacedValue
from memplan.errors import ConfigError, EditRefusedError

SHELL_SUFFIXES = (".sh", ".bash")

_TEXT = r"""'[^']*'|\$'(?:[^'\\]|\\.)*'"""
_COMMAND = rf"""\$\((?:{_TEXT}|"(?:[^"\\]|\\.)*"|[^()'"]|\([^()]*\))*\)"""
"""What a command prints; other brackets may stand in it, once."""
_EXPANDED = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
_QUOTED = rf'"(?:{_COMMAND}|{_EXPANDED}|\$(?![({{])|[^"\\$]|\\.)*"|"(?:[^"\\]|\\.)*"'
"""In double quotes, those of a command in them apart where that can be told."""

# One piece of a script. Quotes may run over several lines; a backslash at the end of a line joins it with the next.
_TOKEN = re.compile(
    rf"""
    (?P<blank>(?:[ \t\r]|\\\r?\n|\\\Z)+)
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<calculation>\(\((?:[^()]|\([^()]*\))*\)\))
  | (?P<here><<(?P<tabs>-)?[ \t]*(?P<mark>(?:'[^'\n]*'|"[^"\n]*"|\\?[^\s'"\\;&|()<>])+))
  | (?P<end>\n|;|&&|\|\||[&|()]|<<<|>>|[<>])
  | (?P<word>(?:{_TEXT}|{_QUOTED}|\\.|{_COMMAND}|{_EXPANDED}|`(?:[^`\\]|\\.)*`|[^\s'"\\;&|()<>`])+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+)?=", re.DOTALL)
_CHANGED = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?:[-+*/%]=|=(?!=)|\+\+|--)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset", "env"})
_KEYWORDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "time", "exec", "{", "!"})
"""Words behind which a command begins."""
_READING = frozenset({"for", "select", "read", "mapfile", "readarray", "getopts", "unset"})
"""Words behind which variables get values that are not written out."""
_PRINTING = frozenset({"echo", "printf", "grep", "sed", "awk", "test", "[", "[["})
"""Commands whose words are texts, and no settings of a training."""
_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)(?P<sign>=)?")
_OVERRIDE = re.compile(r"\+{0,2}(?P<name>[A-Za-z_][\w./@-]*)=")
_REFERENCE = re.compile(r"\$(?:\{(?P<inner>[A-Za-z_]\w*)\}|(?P<name>[A-Za-z_]\w*))")
_DEFAULT = re.compile(r"\$\{(?P<name>\w+):?-(?P<default>[\w.,/:+@%=-]+)\}")
"""What counts where a variable is not set."""
_PLAIN = re.compile(r"[\w.,/:+@%=-]*")
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")


class Word(NamedTuple):
    """A word of a script, with what quotes it."""

    text: str
    start: int
    is_first: bool
    """It is where a command's name is, or stands before that."""
    command: str = ""
    """The name of its command, where that stands before it."""

    @property
    def end(self) -> int:
        """Return where it ends."""
        return self.start + len(self.text)


class _Mark(NamedTuple):
    """What ends a document that stands in the script."""

    text: str
    may_be_indented: bool
    is_read: bool
    """It is put into a variable."""


class _Setting(NamedTuple):
    """What a word sets, and where its value stands."""

    key: KeyPath
    start: int
    end: int
    is_variable: bool = False
    problem: str = ""


class ShellFile(FlatFile):
    """A parsed shell script and its text, unchanged."""

    @classmethod
    def read(cls, path: Path, text: str) -> Content:
        """Return what *text* sets. Raises ConfigError where a quote or a document in it has no end that memplan sees."""
        settings = list(_settings(path, text, list(_words(path, text, 0))))
        variables = {each.key for each in settings if each.is_variable and not each.problem}
        values = [_value(text, each, variables) for each in settings]
        # `--lr $lr` says nothing of its own where the script sets `lr`.
        return Content(tuple(value for value in values if value.source != value.key), {})

    def word_texts(self) -> list[str]:
        """Return all words, those in quoted texts too, without quotes."""
        texts = (word.text for word in _words(self.path, self.text, 0))
        return [part for text in texts for part in text.replace('"', " ").replace("'", " ").split()]

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
    """
    Yield the words of *text*, which begins at *start* of a file; without comments, and of the documents that stand in it those alone that
    `read` puts into a variable: `read -r -d '' ARGS <<EOF`, and the words of a command behind that.
    """
    place, is_first, command = 0, True, ""
    marks: list[_Mark] = []
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise _unreadable(path, text, place, "a quote or bracket")
        place = token.end()
        if token["word"] is not None:
            word = token["word"]
            yield Word(word, start + token.start(), is_first, command)
            stands_before = word in _DECLARING or word in _KEYWORDS or _ASSIGNED.match(word) is not None
            was_first, is_first = is_first, is_first and stands_before
            command = word if was_first and not is_first else command
        elif token["calculation"] is not None:
            yield Word(token["calculation"], start + token.start(), is_first, command)
        elif token["here"] is not None:
            marks.append(_Mark(re.sub(r"[\\'\"]", "", token["mark"]), token["tabs"] is not None, is_read=command == "read"))
        elif token["end"] is not None:
            is_first, command = True, ""
            for mark in marks if token["end"] == "\n" else ():
                end = _end_of_document(path, text, place, mark)
                if mark.is_read:
                    yield from _words_of_document(path, text[place : end.start()], start + place)
                place = end.end()
            marks = [] if token["end"] == "\n" else marks


def _end_of_document(path: Path, text: str, place: int, mark: _Mark) -> re.Match[str]:
    """Return the line of its *mark* alone that ends the document that begins at *place*, behind tabs where it says so."""
    tabs = "\t*" if mark.may_be_indented else ""
    end = re.compile(rf"^{tabs}{re.escape(mark.text)}\r?$", re.MULTILINE).search(text, place)
    if end is None:
        raise _unreadable(path, text, place - 1, "a document in the script")
    return end


def _words_of_document(path: Path, document: str, start: int) -> list[Word]:
    """Return the words of a *document* that are arguments, none where its quotes, which are letters there, are no pairs."""
    with suppress(ConfigError):
        return [word._replace(is_first=False, command="") for word in _words(path, document, start)]
    return []


def _unreadable(path: Path, text: str, place: int, what: str) -> ConfigError:
    line = text.count("\n", 0, place) + 1
    hint = "give the value as a word of the command, `{micro_batch_size}`"
    return ConfigError(f"has {what} whose end memplan does not see", file=path, line=line, hint=hint)


def _settings(path: Path, text: str, words: list[Word]) -> Iterator[_Setting]:
    """Yield what *words* set."""
    for number, word in enumerate(words):
        assigned, option, override = (pattern.match(word.text) for pattern in (_ASSIGNED, _OPTION, _OVERRIDE))
        after = words[number + 1] if number + 1 < len(words) and not words[number + 1].is_first else None
        if word.text.startswith("((") or word.command == "let":
            for name in _CHANGED.finditer(word.text):
                yield _Setting((name["name"],), word.start, word.end, is_variable=True, problem=f"is changed by `{_short(word.text)}`")
        elif word.command in _READING:
            if _NAME.fullmatch(word.text) and (word.command != "for" or words[number - 1].text == "for"):
                yield _Setting((word.text,), word.start, word.end, is_variable=True, problem=f"is changed by `{word.command}`")
        elif word.is_first and assigned is not None:
            problem = f"is changed by `{_short(word.text)}`" if assigned["more"] else ""
            yield _Setting((assigned["name"],), word.start + assigned.end(), word.end, is_variable=True, problem=problem)
        elif word.command in _PRINTING:
            continue
        elif option is not None and option["sign"]:
            yield _Setting(_key(option["name"]), word.start + option.end(), word.end)
        elif option is not None and option.end() == len(word.text):
            if after is not None and not _OPTION.match(after.text):
                yield _Setting(_key(option["name"]), after.start, after.end)
        elif override is not None and not word.is_first:
            yield _Setting(_key(override["name"]), word.start + override.end(), word.end)
        yield from _inside_quotes(path, text, word)


def _inside_quotes(path: Path, text: str, word: Word) -> Iterator[_Setting]:
    """Yield what options in a quoted text set: `ARGS="--bsz 64"`."""
    first = word.text.find('"')
    inner = word.text[first + 1 : -1]
    is_plain = not set("\"'`\\").intersection(inner.replace("\\\r\n", "").replace("\\\n", ""))
    if first >= 0 and word.text.endswith('"') and "--" in inner and is_plain:
        inside = [each._replace(is_first=False) for each in _words(path, inner, word.start + first + 1)]
        yield from _settings(path, text, inside)


def _key(name: str) -> KeyPath:
    return tuple(name.split("."))


def _short(text: str) -> str:
    return " ".join(text.split())[:LONGEST_TOLD]


def _value(text: str, setting: _Setting, variables: set[KeyPath]) -> PlacedValue:
    key, start, end = setting.key, setting.start, setting.end
    line, stands = text.count("\n", 0, start) + 1, text[start:end]
    if setting.problem:
        return PlacedValue(key, line, start, end, problem=setting.problem)
    quote = stands[0] if stands[:1] in ("'", '"') and stands[-1:] == stands[0] and len(stands) > 1 else ""
    plain = stands[1:-1] if quote else stands
    default = _DEFAULT.fullmatch(plain) if quote != "'" else None
    reference = _REFERENCE.fullmatch(plain) if quote != "'" else None
    named = None if reference is None else reference["inner"] or reference["name"]
    if default is not None and (default["name"],) in variables and (default["name"],) != key:  # it is set: its default does not count
        named, default = default["name"], None
    if default is not None:
        start, plain = start + len(quote) + default.start("default"), default["default"]
        end = start + len(plain)
    if named is not None:
        if (named,) in variables and not (setting.is_variable and (named,) == key):
            return PlacedValue(key, line, start, end, source=(named,))
        return PlacedValue(key, line, start, end, problem=f"is {plain}, which this file does not set")
    if not _PLAIN.fullmatch(plain):
        return PlacedValue(key, line, start, end, problem=f"is no plain word: {_short(stands)}")
    return PlacedValue(key, line, start, end, value=_meant(plain))


def _meant(text: str) -> Scalar:
    """Return a number or a truth value as what it is."""
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
