"""TOML files: the place of every value, and one of them changed with every other byte as it was."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.edits.edit import EditValue
from memplan.edits.toml_file import TomlFile
from memplan.errors import ConfigError, EditRefusedError
from tests.edits.test_python_file import key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONF = Path("conf.toml")

SOURCE = '''title = "run" # a name
[training]
batch_size = 8  # each GPU
"seq len"=1_024
lr = 1e-4
compile = true
since = 1979-05-27T07:32:00Z
sizes = [ 1,
  22, # é
]
[model . layers]
deep.er = 3
"q.r" = { x = 5, y = 'z' }
[[datasets]]
rows = 6
[[datasets]]
rows = 7
[datasets.split]
text = """a
"b" \\""""
[[datasets.parts]]
n = 0x1F
'''


def parsed(text: str | bytes) -> TomlFile:
    """The file that *text* is."""
    return TomlFile.parse(CONF, text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize(
    ("dotted", "value", "before", "after"),
    [
        ("training.batch_size", 8, "= 8 ", "= 99 "),
        ("training.seq len", 1024, "1_024", "99"),
        ("training.lr", 1e-4, "1e-4", "99"),
        ("training.sizes.1", 22, "22", "99"),
        ("model.layers.deep.er", 3, "= 3", "= 99"),
        ("model.layers.q.r.x", 5, "x = 5", "x = 99"),
        ("datasets.0.rows", 6, "6", "99"),
        ("datasets.1.rows", 7, "rows = 7", "rows = 99"),
        ("datasets.1.parts.0.n", 31, "0x1F", "99"),
    ],
)
def test_a_value_is_read_and_changed_wherever_it_is_written(
    dotted: str, value: EditValue, before: str, after: str, line_end: str, mark: str
) -> None:
    """In tables, dotted keys, arrays and inline tables: the value alone has other bytes then."""
    text = mark + SOURCE.replace("\n", line_end)
    assert SOURCE.count(before) == 1 or before == "6"

    file = parsed(text)

    found = file.get(key(dotted))
    assert found is not None
    assert found.value == value
    assert before in SOURCE.splitlines()[found.line - 1]
    assert (
        file.replace(key(dotted), 99)
        == text.replace("rows = 6" if before == "6" else before, "rows = 99" if before == "6" else after).encode()
    )


@pytest.mark.parametrize(
    ("source", "value", "changed"),
    [
        ("x = true", False, "x = false"),
        ("x = true", "false", "x = false"),
        ("x = 1e-4", "0.5", "x = 0.5"),
        ("x = 'fp16'", "bf16", "x = 'bf16'"),
        ('x = "8" # n', 16, 'x = "16" # n'),
        ("x = 8", "bf16", 'x = "bf16"'),
    ],
)
def test_a_value_is_written_as_toml_has_it(source: str, value: EditValue, changed: str) -> None:
    """Text in quotes, those that stand there."""
    assert parsed(source).replace(("x",), value).decode() == changed


@pytest.mark.parametrize(
    ("dotted", "value", "said"),
    [
        ("training.since", 8, "conf.toml:7: `training.since` is a date"),
        ("training", 8, "conf.toml:2: `training` is a mapping, not a single value"),
        ("training.sizes", 8, "conf.toml:8: `training.sizes` is a sequence"),
        ("datasets.1.split.text", "a", "conf.toml:19: `datasets.1.split.text` is"),
        ("title", 'a"b', "`title` is"),
        ("training.batch", 8, "conf.toml: has no key `training.batch`"),
    ],
)
def test_what_cannot_be_changed_without_guessing_is_refused(dotted: str, value: EditValue, said: str) -> None:
    """With the line."""
    with pytest.raises(EditRefusedError, match=said):
        parsed(SOURCE).replace(key(dotted), value)


def test_the_whole_file_is_what_an_independent_parser_reads() -> None:
    """Except dates, which nobody plans, and are told as they are written."""
    data = tomllib.loads(SOURCE)
    data["training"]["since"] = "${ 1979-05-27T07:32:00Z }"

    assert nested(parsed(SOURCE).to_python()) == nested(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x = \n", "conf.toml:1: is not valid TOML"),
        (b"a = 1\na = 2\n", "conf.toml:2: is not valid TOML"),
        (b"x = '\xff'\n", "conf.toml:1: is not UTF-8"),
        (b"x = " + b"[" * 5000 + b"]" * 5000, "conf.toml.*: is"),
    ],
)
def test_what_is_not_toml_is_one_error(data: bytes, said: str) -> None:
    """With its line where that is known."""
    with pytest.raises(ConfigError, match=said):
        parsed(data)


def test_what_is_no_number_of_ordinary_size_is_left_alone() -> None:
    """Beside them a value is changed; numbers of thousands of digits are an error, or of none whom memory concerns."""
    assert parsed("b = 64\nc = nan\n").replace(("b",), 8) == b"b = 8\nc = nan\n"
    large = f"b = 64\nc = 0x{'f' * 5000}\n"
    assert parsed(large).replace(("b",), 8).decode() == large.replace("64", "8")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        parsed(f"c = {'1' * 5000}")


def nested(data: Any) -> Any:
    """Mappings in the order of their keys, to be compared."""
    if isinstance(data, dict):
        return {name: nested(data[name]) for name in sorted(data)}
    return [nested(each) for each in data] if isinstance(data, list) else data


keys = st.one_of(st.text("abc_-1", min_size=1, max_size=3), st.sampled_from(['"q.r"', "'s t'", '"\\u00e9"']))
scalars = st.sampled_from(["1", "-2_0", "3.5", "inf", "true", '"a # b"', "'[c]'", '"""d\n= "e" """', "'''f'''", "0o17", '""', '"\\""'])
inline = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: "[" + ",\n ".join(parts) + (" , # last\n]" if parts else "]")),
        st.dictionaries(keys, inner, max_size=2).map(
            lambda pairs: "{ " + ", ".join(f"{name}={value}" for name, value in pairs.items()) + "}"
        ),
    ),
    max_leaves=5,
)
assignments = st.tuples(st.lists(keys, min_size=1, max_size=2).map(" . ".join), inline, st.sampled_from(["", " # why", "\t"])).map(
    lambda three: f"{three[0]}={three[1]}{three[2]}"
)
headers = (
    st.lists(keys, min_size=1, max_size=2).map(".".join).flatmap(lambda name: st.sampled_from([f"[{name}]", f"[[ {name} ]] # of many"]))
)
files = st.lists(st.one_of(assignments, headers, st.just(""), st.just("  # alone")), max_size=8).map("\n".join)


@settings(
    deadline=None,
    max_examples=3 * int(os.environ.get("MEMPLAN_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(source=files, line_end=st.sampled_from(["\n", "\r\n"]), data=st.data())
def test_whatever_the_file_one_value_changes_or_nothing(source: str, line_end: str, data: st.DataObject) -> None:
    """What is valid is read as an independent parser reads it; an edit changes the value at its place, and no other byte."""
    text = source.replace("\n", line_end)
    try:
        expected = tomllib.loads(source)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ConfigError, match="is not valid TOML"):
            parsed(text)
        return

    file = parsed(text)

    assert nested(file.to_python()) == nested(expected)
    if file.content.values:
        chosen = data.draw(st.sampled_from(file.content.values))
        try:
            after = file.replace(chosen.key, 4242).decode()
        except EditRefusedError:
            return
        assert after.startswith(text[: chosen.start])
        assert after.endswith(text[chosen.end :])
        assert str(parsed(after).get(chosen.key)[0]) == "4242"  # type: ignore[index]  # it was just written
