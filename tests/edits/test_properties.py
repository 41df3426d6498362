"""What holds for every YAML file: generated files, edited, and read again by a parser that is not ours."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from memplan.edits.edit import EditValue
from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError
from tests.edits.faults import answer_or_error
from tests.edits.test_yaml_file import CONF, parsed
from tests.edits.yaml_texts import Leaf, Yaml, numbers, words, yaml_files

modest = settings(
    deadline=None,
    max_examples=int(os.environ.get("MEMPLAN_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

values = st.one_of(numbers, words)


def flat(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every scalar and every empty collection with its path."""
    if isinstance(tree, (dict, list)) and tree:
        children = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, child in children:
            yield from flat(child, (*path, str(key)))
    else:
        yield path, repr(tree)


def read_by_another(data: bytes) -> dict[tuple[str, ...], Any]:
    """Read *data* with ruamel.yaml's own loader; that cannot read tabs before comments or line ends, which are spaces to it here."""
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an anchor that is used again is valid
        return dict(flat(yaml.load(without_tabs(data.decode()))))


def without_tabs(text: str) -> str:
    for tabs, spaces in (("\t#", " #"), (" \t", "  "), ("\t\r\n", " \r\n"), ("\t\n", " \n")):
        text = text.replace(tabs, spaces)
    return text.rstrip("\t")


def fits(leaf: Leaf, value: EditValue) -> bool:
    """Say whether *value* can be read back from where *leaf* stands: no word becomes an integer."""
    return isinstance(value, int) or "!!int" not in leaf.before


@modest
@given(file=yaml_files(), value=values, data=st.data())
def test_one_value_changes_and_every_other_byte_stays(file: Yaml, value: EditValue, data: st.DataObject):
    """Wherever the scalar stands, however the file is laid out; and another parser agrees on what changed."""
    number = data.draw(st.integers(0, len(file.leaves) - 1))
    path, leaf = file.leaves[number]
    assume(fits(leaf, value))
    before = file.data()

    after = YamlFile.parse(CONF, before).replace(path, value)

    if str(leaf):
        assert after == file.data(number=number, text=str(value))
    else:  # an empty value: something is inserted
        assert after in (file.data(number=number, text=str(value)), file.data(number=number, text=f" {value}"))
    old, new = read_by_another(before), read_by_another(after)
    assert old.keys() == new.keys()
    assert {key for key in old if old[key] != new[key]} <= {path}
    assert new[path] == repr(str(value) if leaf.quote or "!!str" in leaf.before else value) or "!!int" in leaf.before


@modest
@given(file=yaml_files(), value=values, data=st.data())
def test_the_original_value_restores_the_file(file: Yaml, value: EditValue, data: st.DataObject):
    """Set to something else and set back: byte for byte what it was."""
    restorable = [(path, leaf) for path, leaf in file.leaves if leaf.quote or leaf.text.lstrip("-").isalnum()]
    restorable = [(path, leaf) for path, leaf in restorable if leaf.text not in ("null", "True", "2e", "") or leaf.quote]
    assume(restorable)
    path, leaf = data.draw(st.sampled_from(restorable))
    assume(fits(leaf, value))
    before = file.data()

    changed = YamlFile.parse(CONF, before).replace(path, value)

    assert YamlFile.parse(CONF, changed).replace(path, leaf.text) == before


@modest
@given(file=yaml_files())
def test_every_value_is_found_where_it_stands(file: Yaml):
    """Text and line of each scalar are what the generator wrote."""
    data = file.data()
    found = YamlFile.parse(CONF, data)
    text = data.decode().removeprefix("\ufeff")

    for number, (path, leaf) in enumerate(file.leaves):
        scalar = found.get(path)
        assert scalar is not None
        template = file.template[: file.template.index(chr(0xE000 + number))]
        assert scalar.line == template.count("\n") + 1, text
        if leaf.quote:
            assert scalar.value == leaf.text


PLACES = ["a: ", "a: ", "b: ", "c:\n  b: ", "d:\n- ", "'a': ", "<<: ", "? a\n: ", "a : "]
BEFORE = ["", "", "&x ", "&y ", "!!int ", "# c\n ", "\n "]
VALUES = ["1", "'x'", "*x", "*y", "{a: 1, b: *x}", "[1, *y]", "", "~", "${a}", "\n  p\n  q", "{<<: *y, a: 1}", "{}", "8"]
BLOCKS = ["|\n  b: 1", ">-\n  2\n  3"]
BEHIND = ["\n", "\n", " # c\n", "\t# c\n", "\r\n", "\n\n  \n"]
LUMPS = [*PLACES, *BEFORE, *VALUES, *BLOCKS, *BEHIND, "- ", "{", "}", "[", "]", ", ", "? ", ": ", "---\n", "!t ", "\n  "]

a_line = st.tuples(*map(st.sampled_from, (PLACES, BEFORE, [*VALUES, *BLOCKS], BEHIND))).map("".join)
lines = st.lists(a_line, min_size=1, max_size=4).map(lambda found: "x: &x 7\ny: &y {d: 2}\n" + "".join(found))
lumps = st.lists(st.sampled_from(LUMPS), max_size=16).map("".join)
signs = st.text(st.sampled_from(list(" \t\n\r:-[]{}#&*!|>'\"%@,?~<ab1$.é\ufeff\x85")), max_size=40)
texts = st.one_of(signs, lumps, lines, st.text(max_size=30))


@settings(modest, max_examples=modest.max_examples * 3)
@given(text=texts, key=st.lists(st.sampled_from(["a", "b", "x", "0", "1", "<<", ""]), max_size=3).map(tuple))
def test_any_text_is_read_or_refused(text: str, key: tuple[str, ...]):
    """Nothing that somebody calls YAML ends in a traceback, whatever is asked of it."""
    file = answer_or_error(lambda: parsed(text))
    if isinstance(file, ConfigError):
        return
    questions = [
        lambda: file.get(key),
        lambda: file.length_of(key),
        lambda: file.line_of(key),
        file.duplicate_keys,
        file.to_python,
        lambda: file.replace(key, 8),
    ]
    for question in questions:
        found = answer_or_error(question)
        assert not isinstance(found, ConfigError) or str(found).startswith("conf.yaml")


@modest
@given(data=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes):
    """A picture that is called .yaml is an error with a name."""
    file = answer_or_error(lambda: parsed(data))

    assert str(file).startswith("conf.yaml") if isinstance(file, ConfigError) else file.data == data


@settings(modest, max_examples=modest.max_examples * 3)
@given(text=lines)
def test_an_edit_of_any_text_changes_one_value_for_another_parser_too(text: str):
    """Where an edit is accepted, another parser sees that value changed and no other; where it is not, nothing is written."""
    try:
        old = read_by_another(text.encode())
    except Exception:  # whatever it means by that: its own reason not to read the file
        return
    after = answer_or_error(lambda: parsed(text).replace(("a",), 8))
    if isinstance(after, ConfigError):
        return

    new = read_by_another(after)
    assert new[("a",)] in ("8", repr("8"))
    assert {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} <= {("a",)}
