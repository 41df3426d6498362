"""One value of somebody else's YAML file changes, and every other byte stays."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from memplan.edits.edit import DuplicateKey, EditValue, Found, as_text
from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError, EditRefusedError
from tests.edits.faults import answer_or_error

CONF = Path("conf.yaml")


def parsed(text: str | bytes) -> YamlFile:
    """Parse *text* as the content of conf.yaml."""
    return YamlFile.parse(CONF, text if isinstance(text, bytes) else text.encode())


def path(key: str) -> tuple[str, ...]:
    """Return the path that a test writes as `a/b/0`; dots belong to keys here."""
    return tuple(key.split("/"))


# The shape, the path, the file before and the file after: the value becomes 8.
SHAPES = [
    ("block mapping", "a", "a: 4\nb: 2\n", "a: 8\nb: 2\n"),
    ("nested block mapping", "a/b", "a:\n    b: 4\n    c: 4\nb: 4\n", "a:\n    b: 8\n    c: 4\nb: 4\n"),
    ("flow mapping", "a", "{a: 4, b: 2}\n", "{a: 8, b: 2}\n"),
    ("flow mapping over lines", "a/c/1", "a: {b: 1,\n  c: [1,\n    4 ], # x\n}\n", "a: {b: 1,\n  c: [1,\n    8 ], # x\n}\n"),
    ("block sequence", "a/1", "a:\n- 4\n- 4\n- 4\n", "a:\n- 4\n- 8\n- 4\n"),
    ("flow sequence", "a/0", "a: [4, 4]\n", "a: [8, 4]\n"),
    (
        "sequence of mappings",
        "a/1/b",
        "a:\n  - b: 4\n    c: 1\n  -   c: 1\n      b: 4\n",
        "a:\n  - b: 4\n    c: 1\n  -   c: 1\n      b: 8\n",
    ),
    ("sequence of sequences", "0/0/b", "- - a: 1\n    b: 4\n", "- - a: 1\n    b: 8\n"),
    ("value on its own line", "a", "a:\n  # why\n  4\nb: 1\n", "a:\n  # why\n  8\nb: 1\n"),
    ("explicit key", "a", "? a\n: 4\n", "? a\n: 8\n"),
    ("scalar document", "", "4 # all there is\n", "8 # all there is\n"),
    ("single quotes", "a", "a: '4' # c\n", "a: '8' # c\n"),
    ("double quotes", "a", 'a: "4"\n', 'a: "8"\n'),
    ("quoted key", "a b", "'a b': 4\n\"c\": 4\n", "'a b': 8\n\"c\": 4\n"),
    ("comment", "a", "# 4\na: 4   # 4 fit\n", "# 4\na: 8   # 4 fit\n"),
    ("comment behind a tab", "a", "a: 4\t# four\nb: 2\n", "a: 8\t# four\nb: 2\n"),
    ("comment behind spaces and tabs", "a", "a: '4' \t # four\n", "a: '8' \t # four\n"),
    ("neighbour's comment behind a tab", "b", "a:\t# group\n  - 1\t# one\nb: 4\n", "a:\t# group\n  - 1\t# one\nb: 8\n"),
    ("value behind a tab", "a", "a:\t4\n", "a:\t8\n"),
    ("tab at the end of the line", "a", "a: 4\t\nb: 1\n", "a: 8\t\nb: 1\n"),
    ("CRLF", "a", "a: 4\r\nb: 1\r\n", "a: 8\r\nb: 1\r\n"),
    ("CRLF, quotes, comment", "b", 'a: 1\r\nb: "4" # c\r\n', 'a: 1\r\nb: "8" # c\r\n'),
    ("BOM", "a", "\ufeffa: 4\n", "\ufeffa: 8\n"),
    ("BOM before a comment, CRLF", "a", "\ufeff# c\r\na: 4\r\n", "\ufeff# c\r\na: 8\r\n"),
    ("no last newline", "a", "b: 1\na: 4", "b: 1\na: 8"),
    ("blank lines carrying spaces", "b", "a: 1\n   \n\n  \nb: 4\n    \n", "a: 1\n   \n\n  \nb: 8\n    \n"),
    ("blank line carrying a tab", "b", "a: 1\n\t\nb: 4\n", "a: 1\n\t\nb: 8\n"),
    ("empty value", "a", "a:\nb: 1\n", "a: 8\nb: 1\n"),
    ("empty value before a comment", "a", "a:   # c\n", "a: 8   # c\n"),
    ("empty value before a comment and a key", "a", "a:   # c\n# d\n\nb: 1\n", "a: 8   # c\n# d\n\nb: 1\n"),
    ("empty value, CRLF", "a", "a:\r\nb: 1\r\n", "a: 8\r\nb: 1\r\n"),
    ("empty value at the end of a mapping", "a/b", "a:\n  b:\n\nc: 1\n", "a:\n  b: 8\n\nc: 1\n"),
    ("empty value at the end of the file", "a", "b: 1\na:", "b: 1\na: 8"),
    ("empty value in a flow mapping", "a", "{a: , b: 1}\n", "{a: 8 , b: 1}\n"),
    ("empty value in JSON's manner", "a", '{"a":}\n', '{"a": 8}\n'),
    ("empty element", "0", "-\n- 4\n", "- 8\n- 4\n"),
    ("empty element before a comment", "0", "- # c\n- 4\n", "- 8 # c\n- 4\n"),
    ("empty value with an anchor", "a", "a: &x\nb: 1\n", "a: &x 8\nb: 1\n"),
    ("null", "a", "a: null\nb: null\n", "a: 8\nb: null\n"),
    ("tilde", "a", "a: ~ # none\n", "a: 8 # none\n"),
    ("anchor that nothing aliases", "a", "a: &x 4\nb: &y 2\nc: *y\n", "a: &x 8\nb: &y 2\nc: *y\n"),
    ("mapping with an anchor that nothing aliases", "a/b", "a: &x\n  b: 4\n", "a: &x\n  b: 8\n"),
    ("own key beside a merged one", "b/y", "a: &x {y: 1}\nb:\n  <<: *x\n  y: 4\n", "a: &x {y: 1}\nb:\n  <<: *x\n  y: 8\n"),
    ("tag", "a", "a: !!int 4\nb: !!float 2\n", "a: !!int 8\nb: !!float 2\n"),
    ("tag and anchor and quotes", "a", "a: !!int &x '4' # c\n", "a: !!int &x '8' # c\n"),
    ("anchor and tag of the same letters as the value", "a", "a: &4 !!4 4 # 4\n", "a: &4 !!4 8 # 4\n"),
    ("scientific neighbours", "b", "a: 2e-4\nb: 4\nc: 1.0E+5\n", "a: 2e-4\nb: 8\nc: 1.0E+5\n"),
    ("underscores", "a", "a: 1_000\nb: 1_000\n", "a: 8\nb: 1_000\n"),
    ("wide characters before it", "b", "é😀: 'é😀' # ü\nb: 4 # ü\n", "é😀: 'é😀' # ü\nb: 8 # ü\n"),
    ("wide characters in its line", "é/c", "é: {😀: ü, c: 4}\n", "é: {😀: ü, c: 8}\n"),
    ("text before the document", "a", "# c\n---\n# d\na: 4\n...\n", "# c\n---\n# d\na: 8\n...\n"),
    ("directive", "a", "%YAML 1.1\n---\na: 4\n", "%YAML 1.1\n---\na: 8\n"),
    ("JSON with comments", "b/c/0", '{ # c\n\t"a":1,# d\n\t"b": {"c":[4]}\n}\n', '{ # c\n\t"a":1,# d\n\t"b": {"c":[8]}\n}\n'),
    ("dotted key", "a.b", "a.b: 4\na:\n  b: 5\n", "a.b: 8\na:\n  b: 5\n"),
    ("key beside a dotted key", "a/b", "a.b: 4\na:\n  b: 5\n", "a.b: 4\na:\n  b: 8\n"),
    ("key with dots in its name", "v/x/n/d", "v:\n  x.n: {d: 4}  # e\n", "v:\n  x.n: {d: 8}  # e\n"),
    ("key whose name is all of its path", "v/x/n", "v.x.n: 4\nv: {x: 1}\n", "v.x.n: 8\nv: {x: 1}\n"),
    ("number as key", "1/2", "1:\n  2: 4\n", "1:\n  2: 8\n"),
    ("duplicate key elsewhere", "a", "a: 4\nb: {c: 1, c: 2}\n", "a: 8\nb: {c: 1, c: 2}\n"),
    ("interpolation elsewhere", "a", "a: 4\nb: ${a}\nc: ${oc.env:HOME}\n", "a: 8\nb: ${a}\nc: ${oc.env:HOME}\n"),
    ("block text elsewhere", "b", "a: |\n  b: 4\n  # no\tcomment\nb: 4\n", "a: |\n  b: 4\n  # no\tcomment\nb: 8\n"),
]


@pytest.mark.parametrize(("key", "before", "after"), [pytest.param(*shape[1:], id=shape[0]) for shape in SHAPES])
def test_only_the_value_changes(key: str, before: str, after: str):
    """Whatever the file looks like, the value's characters are replaced and nothing else."""
    edited = parsed(before).replace(path(key) if key else (), 8)

    assert edited.decode() == after


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [
        ("a: 4", -1, "a: -1"),
        ("a: fp16", "bf16", "a: bf16"),
        ("a: fp16", "bf16-mixed", "a: bf16-mixed"),
        ("a: false", True, "a: true"),
        ("a: True", False, "a: false"),
        ("a: 'fp16'", "bf16", "a: 'bf16'"),
        ("a: 2", "2", "a: 2"),
        ("a: '32'", "bf16: yes # really", "a: 'bf16: yes # really'"),
    ],
)
def test_numbers_words_and_flags_can_be_written(before: str, value: EditValue, after: str):
    """A value is written in YAML's spelling, in the quotes that are there."""
    assert parsed(before).replace(("a",), value).decode() == after


@pytest.mark.parametrize(
    "value", ["x: y", "[]", "{}", "5 # c", "a\nb: 2", "*x", "&x 5", "!!str 5", "", "true", "null", "'5'", "5}", "0x8", "- 5"]
)
@pytest.mark.parametrize("text", ["a: 4\n", "{a: 4}\n", "a: 'it'\n"], ids=["block", "flow", "quoted"])
def test_a_word_that_would_not_be_read_back_is_refused(text: str, value: str):
    """What was meant is read back, or the edit is refused: no word becomes syntax."""
    edited = answer_or_error(lambda: parsed(text).replace(("a",), value))

    if isinstance(edited, ConfigError):
        assert isinstance(edited, EditRefusedError)
        assert edited.line == 1
    else:
        found = parsed(edited).get(("a",))
        assert found is not None
        assert as_text(found.value) == value


@pytest.mark.parametrize("value", ["it's", "x\n\n  y"])
def test_a_word_that_its_quotes_cannot_hold_is_refused(value: str):
    """The refusal blames the edit and not the file, which is valid."""
    with pytest.raises(EditRefusedError) as caught:
        parsed("a: 'x'\n").replace(("a",), value)

    assert "repair the file" not in (caught.value.hint or "")


# The reason, the path, the file, the line that the message names and some of its words.
REFUSALS = [
    ("duplicate key", "a", "b: 1\na: 1\nc: 1\na: 2\n", 4, "`a` stands 2 times (lines 2, 4)"),
    ("duplicate key on the way", "a/b", "a: {b: 1}\na: {c: 2}\n", 2, "`a` stands 2 times (lines 1, 2)"),
    ("duplicate key in other quotes", "a", "a: 1\n'a': 2\n", 2, "`a` stands 2 times (lines 1, 2)"),
    ("alias", "b", "a: &x 4\n\nb: *x\n", 3, "`b` is an alias of `&x` (line 1)"),
    ("inside an alias", "b/y", "a: &x\n  y: 1\nb: *x\n", 3, "`b` is an alias of `&x` (line 1)"),
    ("inside a merged mapping", "b/y", "a: &x\n  y: 1\nb:\n  <<: *x\n", 4, "`b.y` comes from a merged mapping (line 2)"),
    ("inside merged mappings", "c/z", "a: &x {y: 1}\nb: &w {z: 1}\nc:\n  <<: [*x, *w]\n", 4, "`c.z` comes from a merged mapping (line 2)"),
    ("inside a mapping merged twice over", "c/y", "a: &x {y: 1}\nb: &w {<<: *x}\nc: {<<: *w}\n", 3, "`c.y` comes from a merged mapping"),
    ("aliased elsewhere", "a", "a: &x 4\nb: *x\n", 1, "changing `a` would also change `b`, through the anchor &x"),
    ("aliased elsewhere, often", "b", "a: 1\nb: &x 4\nc: [*x, *x]\n", 2, "would also change `c.0` and 1 more"),
    ("in a mapping aliased elsewhere", "a/y", "a: &x\n  y: 4\nb: *x\n", 2, "changing `a.y` would also change `b.y`"),
    ("in a mapping merged elsewhere", "a/y", "a: &x\n  z: 1\n  y: 4\nb:\n  <<: *x\n", 3, "changing `a.y` would also change `b.<<.y`"),
    ("aliased before the anchor is used again", "a", "a: &x 4\nb: *x\nc: &x 2\n", 1, "changing `a` would also change `b`"),
    ("interpolation", "a", "b:\n  c: 4\na: ${b.c}\n", 3, "`a` is ${b.c}"),
    ("interpolation in quotes", "a", "b: 4\na: '${b}'\n", 2, "`a` is ${b}"),
    ("interpolation inside a word", "a", "b: 4\na: x-${b}\n", 2, "`a` is x-${b}"),
    ("interpolation of the environment", "a", "a: ${oc.env:BATCH,4}\n", 1, "`a` is ${oc.env:BATCH,4}"),
    ("several documents", "a", "a: 4\n---\na: 4\n", 1, "holds 2 documents"),
    ("no document", "a", "# nothing yet\n", 1, "holds 0 documents"),
    ("literal block", "a", "b: 1\na: |\n  4\n", 2, "`a` is a block of text"),
    ("folded block", "a", "b: 1\na: >-\n  4\n", 2, "`a` is a block of text"),
    ("mapping", "a", "a:\n  b: 4\n", 2, "`a` is a mapping"),
    ("flow sequence", "a", "b: 1\na: [4]\n", 2, "`a` is a sequence"),
    ("unknown tag", "a", "b: 1\na: !size 4\n", 2, "`a` has the tag !size"),
    ("unknown long tag", "a", "a: !<tag:example.org,2024:size> 4\n", 1, "`a` has the tag tag:example.org,2024:size"),
    ("plain over lines", "a", "a: four\n  five\n", 1, "`a` runs over several lines"),
    ("quoted over lines", "a", "b: 1\na: 'four\n  five'\n", 2, "`a` runs over several lines"),
    ("missing", "a", "b: 4\n", None, "has no key `a`"),
    ("missing in a mapping", "b/c", "b: {d: 4}\n", None, "has no key `b.c`"),
    ("missing below a value", "b/c", "b: 4\n", None, "has no key `b.c`"),
    ("missing element", "b/1", "b: [4]\n", None, "has no key `b.1`"),
    ("element that no number names", "b/-1", "b: [4]\n", None, "has no key `b.-1`"),
    ("element that no plain number names", "b/²", "b: [4]\n", None, "has no key `b.²`"),
    ("key without a colon", "a", "{a, b: 1}\n", 1, "`a`"),
]


@pytest.mark.parametrize(("key", "text", "line", "words"), [pytest.param(*refusal[1:], id=refusal[0]) for refusal in REFUSALS])
def test_what_needs_guessing_is_refused_with_its_line(key: str, text: str, line: int | None, words: str):
    """The message names the file, the line that is at fault and the reason."""
    with pytest.raises(EditRefusedError) as caught:
        parsed(text).replace(path(key), 8)

    assert caught.value.line == line
    assert str(caught.value).startswith("conf.yaml: " if line is None else f"conf.yaml:{line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a: ${b.c}\nb:\n  c: 4\n", "change its source `b.c` in line 3 instead"),
        ("a: x-${b.c}\nb: {c: 4}\n", "change its source `b.c` in line 2 instead"),
        ("a: ${b.c}\nb: 4\n", "change b.c where it is defined"),
        ("a: ${b}\nb: 1\nb: 2\n", "change b where it is defined"),
    ],
)
def test_an_interpolation_is_refused_with_its_source(text: str, hint: str):
    """The value to change is the one that it points to."""
    with pytest.raises(EditRefusedError) as caught:
        parsed(text).replace(("a",), 8)

    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("a: 1\nb: [1\n", 3, id="open bracket"),
        pytest.param("a: 1\nb: c: 2\n", 2, id="two colons"),
        pytest.param("a: 1\n\tb: 2\n", 2, id="tab as indentation"),
        pytest.param("a: 1\nb: *x\n", 2, id="alias without an anchor"),
        pytest.param("a: 1\nb: &x [*x]\n", 2, id="alias of itself"),
        pytest.param("a: 1\nb: &x {c: *x}\n", 2, id="alias of a mapping around it"),
        pytest.param(b"a: 1\nb: \xff\n", 2, id="not UTF-8"),
        pytest.param("a: 1\n".encode("utf-16"), 1, id="UTF-16"),
        pytest.param("a: 1\nb: '\n", 3, id="open quote"),
    ],
)
def test_a_broken_file_is_named_with_its_line(text: str | bytes, line: int):
    """That is the user's to repair, and no refusal of an edit."""
    with pytest.raises(ConfigError) as caught:
        parsed(text)

    assert type(caught.value) is ConfigError
    assert str(caught.value).startswith(f"conf.yaml:{line}: ")


@pytest.mark.parametrize(
    ("text", "problem", "kind"),
    [
        ('{\n  "a": {\n    "b": 1, // how many "c": 2,\n    "d": 3}}', "conf.json:3: has a comment", EditRefusedError),
        ('{\n  /* as in the paper: */ "a": 1,\n "b": [1}\n', "conf.json:2: has a comment", EditRefusedError),
        ('{"a": 1,\n "b": [1}\n', "conf.json:2: is not valid JSON: Expecting ',' delimiter", ConfigError),
        ("[" * 100_000, "conf.json", ConfigError),
    ],
    ids=["comment", "block comment", "broken", "deep"],
)
def test_json_is_called_json(text: str, problem: str, kind: type):
    """Comments, which some programs strip before they read their file, are named as what they are."""
    with pytest.raises(ConfigError) as caught:
        YamlFile.parse(Path("conf.json"), text.encode())

    assert type(caught.value) is kind
    assert str(caught.value).startswith(problem)


def test_a_character_that_yaml_forbids_is_an_error():
    """ruamel.yaml gives no line for these."""
    with pytest.raises(ConfigError, match="not valid YAML"):
        parsed("a: \x01\n")


def test_a_missing_file_is_named(tmp_path: Path):
    """The system's reason is part of the message."""
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        YamlFile.load(tmp_path / "none.yaml")


def test_a_folder_is_no_file(tmp_path: Path):
    """A folder that is called like a file gives an error and no traceback."""
    with pytest.raises(ConfigError, match="is not a regular file"):
        YamlFile.load(tmp_path)


def test_aliases_that_multiply_without_end_are_refused_at_once():
    """Ten lines that stand for two thousand million values cost a moment and no memory."""
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)]
    bomb = parsed("a0: &a0 [x, x]\n" + "".join(levels) + "z: 4\n")
    start = time.process_time()

    with pytest.raises(ConfigError, match="too large"):
        bomb.replace(("z",), 8)
    with pytest.raises(ConfigError, match="too large"):
        bomb.to_python()
    assert bomb.get(("z",)) == Found(4, 11)
    assert time.process_time() - start < 20


def test_merges_that_multiply_without_end_are_refused_at_once():
    """Looking for a key that no mapping has must not walk every way through the merges."""
    levels = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 8)]
    bomb = parsed("a0: &a0 {k: 1}\n" + "".join(levels))
    start = time.process_time()

    found = answer_or_error(lambda: bomb.get(("a7", "missing")))

    assert found is None or isinstance(found, ConfigError)
    assert time.process_time() - start < 5


DEEP = {"[": "[\n" * 5000, "[[": "[" * 600, "[[]]": "[" * 600 + "]" * 600, "-": "- " * 5000, "{": "{a:\n" * 5000}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_file_nested_without_end_is_an_error(text: str):
    """It is no configuration, and no traceback either."""
    with pytest.raises(ConfigError):
        parsed(text)


def test_a_file_nested_as_deep_as_python_allows_can_be_asked_anything():
    """What could be parsed can be read: no question ends in a traceback."""
    depth = sys.getrecursionlimit() // 4
    file = parsed("a: " + "[" * depth + "]" * depth + "\nb: 4\n")

    assert file.get(("b",)) == Found(4, 2)
    assert file.duplicate_keys() == []
    with pytest.raises(ConfigError):
        file.to_python()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-4", -4),
        ("1_000", 1000),
        ("2e-4", 0.0002),
        (".5", 0.5),
        ("1.", 1.0),
        ("true", True),
        ("False", False),
        ("'4'", "4"),
        ('"true"', "true"),
        ("~", None),
        ("NULL", None),
        ("", None),
        ("yes", "yes"),
        ("010", 8),
        ("-010", -8),
        ("08", "08"),
        ("0x10", 16),
        ("0b11", 3),
        ("1:30", 90),
        ("0o10", "0o10"),
        ("010.5", 10.5),
        ("1-2", "1-2"),
        ("four", "four"),
        ("9" * 5000, "9" * 5000),
    ],
    ids=lambda value: str(value)[:12],
)
def test_scalars_mean_what_yaml_says(text: str, value: object):
    """Words as in YAML 1.2's core schema, numbers as in YAML 1.1, which Python programs read; one beyond Python's own limit stays text."""
    found = parsed(f"a: {text}\n").get(("a",))

    assert found == Found(value, 1)
    assert type(found.value) is type(value)


def test_a_number_too_long_for_python_does_not_stop_an_edit_elsewhere():
    """Python reads at most 4300 digits; a file may hold more."""
    digits = "9" * 5000

    assert parsed(f"a: {digits}\nb: 4\n").replace(("b",), 8).decode() == f"a: {digits}\nb: 8\n"
    json = YamlFile.parse(Path("conf.json"), f'{{"a": {digits}, "b": 4}}'.encode())
    assert json.replace(("b",), 8).decode() == f'{{"a": {digits}, "b": 8}}'


@pytest.mark.parametrize(
    ("text", "key", "found"),
    [
        ("a: ${b.c}\nb:\n  c: 4\n", "a", Found(4, 3)),
        ("a: '${b}'\nb: ${c}\nc: x\n", "a", Found("x", 3)),
        ("a: ${b.1}\nb: [3, 4]\n", "a", Found(4, 2)),
        ("a: x-${b}\nb: 4\n", "a", Found("x-${b}", 1)),
        ("a: &x 4\nb: *x\n", "b", Found(4, 1)),
        ("a: &x {c: 4}\nb: *x\n", "b/c", Found(4, 1)),
        ("a: &x {c: 4}\nb:\n  <<: *x\n", "b/c", Found(4, 1)),
        ("a: &x {c: 4}\nb: &y {c: 5}\nd:\n  <<: [*x, *y]\n", "d/c", Found(4, 1)),
        ("a: &x {c: 4}\nb:\n  <<: *x\n  c: 5\n", "b/c", Found(5, 4)),
        ("a: &x 1\nb: *x\nc: &x 2\nd: *x\n", "b", Found(1, 1)),
        ("a: &x 1\nb: *x\nc: &x 2\nd: *x\n", "d", Found(2, 3)),
        ("b: 4\n", "a", None),
        ("b: 4\n", "b/c", None),
        ("", "a", None),
        ("a: &x 1\nb: &x {<<: *x, c: 1}\n", "b/d", None),
    ],
)
def test_a_value_is_read_through_interpolations_aliases_and_merges(text: str, key: str, found: Found | None):
    """The line is that of the value itself, where it would have to be changed."""
    assert parsed(text).get(path(key)) == found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: ${a}\n", 1),
        ("b: ${a}\na: ${b}\n", 1),
        ("a: ${b}\nb: ${c}\nc: ${a}\n", 3),
        ("a: ${none}\n", 1),
        ("a: ${oc.env:HOME}\n", 1),
        ("a: ${b}\nb: {c: 1}\n", 2),
        ("a: 1\na: 2\n", 2),
        ("b: 1\na: [1]\n", 2),
    ],
)
def test_a_value_that_cannot_be_known_is_an_error_with_its_line(text: str, line: int):
    """Circles, other people's resolvers, what is no value, and what stands twice."""
    with pytest.raises(ConfigError) as caught:
        parsed(text).get(("a",))

    assert caught.value.line == line


def test_a_chain_of_interpolations_without_end_is_an_error_or_a_value():
    """However many steps it takes, there is no traceback."""
    chain = parsed("k0: 4\n" + "".join(f"k{n}: ${{k{n - 1}}}\n" for n in range(1, 1500)))

    found = answer_or_error(lambda: chain.get(("k1499",)))

    assert found == Found(4, 1) or isinstance(found, ConfigError)


def test_duplicate_keys_are_found_wherever_they_stand():
    """Real stage files have them; the first of two counts once for each that follows."""
    text = "a: 1\nb:\n  - c: 1\n    c: 2\n  - {d: 1, e: {f: 1,\n     f: 2}}\na: 2\na: 3\n<<: {}\n<<: {}\n---\ng: 1\n'g': 2\n"

    duplicates = parsed(text).duplicate_keys()

    assert sorted(duplicates) == [
        DuplicateKey("a", 1, 7),
        DuplicateKey("a", 1, 8),
        DuplicateKey("c", 3, 4),
        DuplicateKey("f", 5, 6),
        DuplicateKey("g", 12, 13),
    ]


def test_a_file_becomes_plain_python():
    """Merges are followed, a mapping's own keys and earlier sources win, keys stay text."""
    text = "a: &x {m: 1, n: 2}\nb: &y {n: 3, o: 4}\nc:\n  <<: [*x, *y]\n  m: 9\nd:\n  m: 9\n  <<: *x\n1: [~, 2e-4, *x]\ne: {}\n"

    assert parsed(text).to_python() == {
        "a": {"m": 1, "n": 2},
        "b": {"n": 3, "o": 4},
        "c": {"m": 9, "n": 2, "o": 4},
        "d": {"m": 9, "n": 2},
        "1": [None, 0.0002, {"m": 1, "n": 2}],
        "e": {},
    }


def test_an_empty_file_is_nothing():
    """Neither a mapping nor an error."""
    assert parsed("# later\n").to_python() is None


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\nb: 1\na: 2\n", "conf.yaml:3: ", "line 1"),
        ("a: 1\n? [b]\n: 2\n", "conf.yaml:2: ", "plain word"),
        ("a: 1\n---\nb: 1\n", "conf.yaml: ", "holds 2 documents"),
    ],
)
def test_what_is_no_plain_tree_has_no_python(text: str, where: str, words: str):
    """Duplicate keys, keys that are no words, several documents."""
    with pytest.raises(ConfigError) as caught:
        parsed(text).to_python()

    assert str(caught.value).startswith(where)
    assert words in str(caught.value)


def test_the_line_of_what_is_missing_is_the_nearest_above():
    """So that an error can point at the place where something should stand."""
    file = parsed("# c\na:\n  b:\n    - 1\n    - c: 4\nd: 1\nd: 2\n")

    assert file.line_of(("a", "b", "1", "c")) == 5
    assert file.line_of(("a", "b", "1", "missing")) == 5
    assert file.line_of(("a", "b", "7")) == 4
    assert file.line_of(("d",)) == 2  # ambiguous: the mapping is the nearest that is not
    assert file.line_of(()) == 2
    assert parsed("").line_of(("a",)) is None


def test_the_length_of_a_sequence():
    """Only a sequence has one."""
    file = parsed("a: [1, 2, 3]\nb:\n  - 1\nc: 4\nd: []\ne: &x [1]\nf: *x\n")

    assert [file.length_of((key,)) for key in "abcdefg"] == [3, 1, None, 0, 1, 1, None]


def test_a_name_with_dots_is_read_where_it_stands():
    """By its whole path, as a person types it."""
    file = parsed("lr: 1\nval/AudioDataset.n_examples: 250\nitems:\n  - a.b: 3\n")

    assert [file.get(tuple(key.split("."))) for key in ("val/AudioDataset.n_examples", "items.0.a.b")] == [Found(250, 2), Found(3, 4)]
    assert file.line_of(("val/AudioDataset", "n_examples")) == 2
    assert file.get(("val/AudioDataset", "duration")) is None


def test_the_line_of_a_value_with_an_anchor_on_another_line():
    """A value's line is where its own text stands."""
    assert parsed("a: &x\n  4\n").get(("a",)) == Found(4, 2)
