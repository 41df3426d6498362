"""Python files: which values their source writes out, and one of them changed with every other byte as it was."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.edits.edit import EditValue, Found
from memplan.edits.python_file import PythonFile
from memplan.errors import ConfigError, EditRefusedError
from tests.edits.faults import answer_or_error

CONF = Path("conf.py")

SOURCE = '''"""Settings."""
import os
batch_size = 12  # each GPU, é
steps = 5 * 8
config = edict({"train": {"batch_size": 8, 'lr': -1e-3}})
config.data.workers = 4
config["data"]["size"] = 224
args = TrainingArguments(per_device_train_batch_size=16, output_dir="out")

class Config(Base):
    batch: int = 9
    def __init__(self):
        self.crop = 10

def main(batch_size=64, *, accumulate=2):
    loader = DataLoader(data, batch_size=batch_size, num_workers=WORKERS)
    return dict(precision='bf16', sizes=[1, 2])

WORKERS, SEED = 3, (4)
train_dataloader = dict(batch_size=32, dataset=dict(pipeline=[dict(type="Resize", size=7)]))
if os.environ.get("LARGE"):
    large = 100
for batch in DataLoader(data, batch_size=6): pass
Trainer(args=TrainingArguments(eval_steps=30)).train(resume=False)
é = "ü"; after = 11
'''


def parsed(text: str | bytes) -> PythonFile:
    """The file that *text* is."""
    return PythonFile.parse(CONF, text if isinstance(text, bytes) else text.encode())


def key(dotted: str) -> tuple[str, ...]:
    """A key as edits take it."""
    return tuple(dotted.split("."))


PLACES: list[tuple[str, EditValue | float, str, str]] = [
    ("batch_size", 12, "batch_size = 12 ", "batch_size = 99 "),
    ("steps", 40, "5 * 8", "99"),
    ("config.train.batch_size", 8, '"batch_size": 8', '"batch_size": 99'),
    ("config.train.lr", -1e-3, "-1e-3", "99"),
    ("config.data.workers", 4, "workers = 4", "workers = 99"),
    ("config.data.size", 224, "224", "99"),
    ("args.per_device_train_batch_size", 16, "=16", "=99"),
    ("Config.batch", 9, "int = 9", "int = 99"),
    ("Config.__init__.self.crop", 10, "crop = 10", "crop = 99"),
    ("main.batch_size", 64, "=64", "=99"),
    ("main.accumulate", 2, "accumulate=2", "accumulate=99"),
    ("main.return.sizes.1", 2, "[1, 2]", "[1, 99]"),
    ("WORKERS", 3, "SEED = 3", "SEED = 99"),
    ("SEED", 4, "(4)", "(99)"),
    ("train_dataloader.batch_size", 32, "=32", "=99"),
    ("train_dataloader.dataset.pipeline.0.size", 7, "size=7", "size=99"),
    ("large", 100, "100", "99"),
    ("DataLoader.batch_size", 6, "=6)", "=99)"),
    ("Trainer.args.eval_steps", 30, "30", "99"),
    ("after", 11, "= 11", "= 99"),
]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize(("dotted", "value", "before", "after"), PLACES)
def test_a_value_is_read_and_changed_wherever_it_is_written(
    dotted: str, value: EditValue, before: str, after: str, line_end: str, mark: str
) -> None:
    """Assignments, attributes, dictionaries, calls, classes, defaults of parameters: the value alone has other bytes then."""
    text = mark + SOURCE.replace("\n", line_end)
    assert SOURCE.count(before) == 1

    file = parsed(text)

    found = file.get(key(dotted))
    assert found is not None
    assert found.value == value
    assert before in SOURCE.splitlines()[found.line - 1]
    assert file.replace(key(dotted), 99) == text.replace(before, after).encode()


@pytest.mark.parametrize(
    ("source", "value", "changed"),
    [
        ("x = True", False, "x = False"),
        ("x = False", True, "x = True"),
        ("x = None", 3, "x = 3"),
        ("x = 1e-4", "0.5", "x = 0.5"),
        ("x = True", "None", "x = None"),
        ("x = None", "bf16", 'x = "bf16"'),
        ("x = 'fp16'", "bf16", "x = 'bf16'"),
        ('x = "8"', 16, 'x = "16"'),
        ("x = 8", -1, "x = -1"),
        ("x = f(y=2*3)", 5, "x = f(y=5)"),
    ],
)
def test_a_value_is_written_as_python_has_it(source: str, value: EditValue, changed: str) -> None:
    """Truth values in capitals, text in the quotes that stand there."""
    file = parsed(source)
    place = max(file.keys(), key=len)

    assert file.replace(key(place), value).decode() == changed


@pytest.mark.parametrize(
    ("source", "dotted", "said", "hint"),
    [
        ("x = f()\ny = g.h", "y", "conf.py:2: `y` is computed: `g.h`", "write a number there"),
        ("x = os.environ['X']", "x", r"is computed: `os.environ\['X'\]`", "word of the command"),
        ("x = 2 ** 100", "x", r"is computed: `2 \*\* 100`", "write a number"),
        ("x = 1 if y else 2", "x", "is computed: `1 if y else 2`", "write a number"),
        ("x = 1\nif y:\n    x = 2\n", "x", r"conf.py:3: `x` is set 2 times \(lines 1, 3\)", "keep one of them"),
        ("x = 8\nx //= ranks\n", "x", r"conf.py:2: `x` is set 2 times \(lines 1, 2\)", "keep one of them"),
        ("size = 4\nx = size", "x", "`x` is size", "change its source `size` in line 1 instead"),
        ("def f(n=2):\n    x = n", "f.x", "`f.x` is n", "change its source `f.n` in line 1 instead"),
        ("a = b = 3", "a", "changing `a` would also change `b`", "write the values out"),
        ("x = dict(y=3)", "x", "`x` is a mapping, not a single value", "name one of its values, `x.y`"),
        ("x = [3]", "x", "`x` is a sequence, not a single value", r"name one of its values, `x\.0`"),
        ("x = f()", "x", "`x` is a mapping, not a single value", "write one value there"),
        ("x = 3", "y", "conf.py: has no key `y`", "add it"),
        ("x = 'a' 'b'", "x", "`x` is 'a' 'b'", "plain text in one pair of quotes"),
    ],
)
def test_what_cannot_be_changed_without_guessing_is_refused(source: str, dotted: str, said: str, hint: str) -> None:
    """With the line, and what to do."""
    with pytest.raises(EditRefusedError, match=said) as caught:
        parsed(source).replace(key(dotted), "8" if source.startswith("x = 'a'") else 8)

    assert caught.value.hint is not None
    assert hint.replace("\\", "") in caught.value.hint


def test_a_name_of_another_value_is_followed_for_reading() -> None:
    """From the inside outwards; a circle, and what is computed, are errors."""
    file = parsed("size = 4\nclass C:\n    size = 5\n    x = size\ny = C.x\nz = w\nw = z\nq = f(1)[0]\n")

    assert file.get(("C", "x")) == Found(5, 3)
    assert file.get(("y",)) == Found(5, 3)
    with pytest.raises(ConfigError, match="`z` stands for itself"):
        file.get(("z",))
    with pytest.raises(ConfigError, match="`q` is computed"):
        file.get(("q",))
    assert file.get(("nothing",)) is None


@pytest.mark.parametrize(
    "again",
    [
        "x, y = load()",
        "for x in (1, 2): pass",
        "for y, x in z: pass",
        "with f() as x: pass",
        "if (x := 8): pass",
        "from base import x",
        "import other as x",
        "def f():\n    global x\n    x = 8",
        "x += 1",
    ],
)
def test_a_name_that_gets_a_value_in_another_way_too_is_set_twice(again: str) -> None:
    """A loop, a context, an import, a function that says `global`: nobody knows which value counts."""
    file = parsed(f"x = 64\n{again}\n")

    with pytest.raises(EditRefusedError, match="`x` is set 2 times"):
        file.replace(("x",), 8)


@pytest.mark.parametrize(
    ("source", "dotted", "said"),
    [
        ("c = dict(x=64)\nc = load()\n", "c.x", r"`c.x` is part of `c`, which is set several times \(lines 1, 2\)"),
        ("c = {'x': 64, **over}\n", "c.x", r"`c.x` may be replaced by `\*\*over` behind it"),
        ("x = 64\ndef f(x):\n    y = dict(x=x)\n", "f.y.x", "`f.y.x` is computed: `x`"),
        ("x = 64\ndef f():\n    for x in z: y = x\n", "f.y", "`f.x` is changed by `for x in z: y = x`|is computed"),
        ("def g(x=64): ...\ny = g(p).x\n", "y", r"`y` is computed: `g\(p\).x`"),
        ("s(64)\ny = s(8)[0]\n", "y", r"`y` is computed: `s\(8\)\[0\]`"),
        (f"x = f({'1' * 4000} + n)", "x.0", "is computed: `1111"),
        (f"x = f(0x{'f' * 5000} + n)", "x.0", "is computed: `…`"),
    ],
)
def test_what_another_value_may_replace_is_not_read(source: str, dotted: str, said: str) -> None:
    """And a name is looked up as Python looks it up."""
    with pytest.raises(ConfigError, match=said):
        parsed(source).get(key(dotted))


@pytest.mark.parametrize(
    ("source", "dotted"),
    [
        ("def f(c=None):\n    c = c or C()\n    c.x = 8\n", "f.c.x"),
        ("c = {}\nc = D(c)\nc.x = 8\n", "c.x"),
        ("c.update(dict(x=8))", "c.x"),
        ("c = D()\nc.update(x=8, y=f(3))", "c.x"),
    ],
)
def test_what_is_set_last_counts(source: str, dotted: str) -> None:
    """Behind the last time that what it is a part of gets a value."""
    found = parsed(source).get(key(dotted))

    assert found is not None
    assert found.value == 8


def test_what_an_update_sets_again_is_set_twice() -> None:
    """And an import in a function is a value of that function's."""
    with pytest.raises(EditRefusedError, match=r"`d\.x` is set 2 times"):
        parsed("d = dict(x=4)\nd.update(x=9)\n").replace(("d", "x"), 8)
    with pytest.raises(ConfigError, match="is computed: `n`"):
        parsed("n = 3\ndef f():\n    from a import n\n    return dict(x=n)\n").get(("f", "return", "x"))


def test_the_names_of_a_class_are_not_those_of_its_methods() -> None:
    """Python looks in the file."""
    file = parsed("n = 3\nclass C:\n    n = 64\n    m = n\n    def f(self):\n        x = dict(n=n)\n")

    assert file.get(("C", "f", "x", "n")) == Found(3, 1)
    assert file.get(("C", "m")) == Found(64, 3)


def test_what_comes_before_others_in_braces_counts_where_it_comes_last() -> None:
    """`{**others, "x": 64}`."""
    assert parsed("c = {**others, 'x': 64}\n").get(("c", "x")) == Found(64, 1)


def test_arguments_of_functions_are_no_settings() -> None:
    """A plan takes one of them where it is named."""
    file = parsed("def plot(batch_size=4): ...\nrun(batch_size=5)\nloader = dict(batch_size=6)\n")

    assert file.to_python(with_arguments=False)["loader"] == {"batch_size": 6}
    assert {"plot", "run"}.isdisjoint(name for name, below in file.to_python(with_arguments=False).items() if below)
    assert file.get(("plot", "batch_size")) == Found(4, 1)


def test_the_whole_file_is_told_as_mappings_and_lists() -> None:
    """A name of another value is `${name}`, as in YAML, what is computed `${ as it is }`; of two branches the last counts."""
    file = parsed("a = 1\nb = dict(c=[1, {'d': 2}], e=())\nf = g()\nif a:\n    h = 1\nelse:\n    h = 2\ni = a\nj = b.k\n")

    assert file.to_python() == {"a": 1, "b": {"c": [1, {"d": 2}], "e": []}, "f": {}, "h": 2, "i": "${a}", "j": "${ b.k }"}
    assert file.keys() == {"a", "b", "b.c", "b.c.0", "b.c.1", "b.c.1.d", "b.e", "f", "h", "i", "j"}
    assert [file.kind_of(key(name)) for name in ("a", "b", "b.c", "b.e", "x")] == ["scalar", "mapping", "sequence", None, None]
    assert file.length_of(("b", "c")) == 2
    assert file.length_of(("b",)) is None
    assert [file.line_of(key(name)) for name in ("h", "b.c.x", "x")] == [5, 2, 1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x = \n", "conf.py:1: is not valid Python"),
        (b"ok = 1\nprint 'two'\n", "conf.py:2: is not valid Python"),
        (b"x = '\xff'\n", "conf.py:1: is not UTF-8"),
        (b"x = 1\0\n", "conf.py.*: is not valid Python"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "conf.py.*: is not valid Python"),
        (b"x = " + b"-" * 100_000 + b"1", "conf.py.*: is"),
        (b"x = " + b"1+" * 100_000 + b"1", "conf.py.*: is"),
    ],
)
def test_what_is_not_python_is_one_error(data: bytes, said: str) -> None:
    """With its line where that is known; however deeply it is nested."""
    with pytest.raises(ConfigError, match=said):
        parsed(data)


# Any source: statements put together at random, mostly valid.
names = st.sampled_from(["a", "b", "batch_size", "é"])
leaves = st.one_of(
    st.integers(-5, 5000).map(str),
    st.sampled_from(["True", "None", "1e-3", "'x'", '"""y\nz"""', "b", "f(1)", "2 * 3", "(4)", "a.b", "-x", "[]"]),
)
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.tuples(names, inner).map(lambda pair: f"dict({pair[0]}={pair[1]})"),
        st.tuples(names, inner).map(lambda pair: f'{{"{pair[0]}": {pair[1]},  # why\n  }}'),
        st.tuples(inner, inner).map(lambda pair: f"f({pair[0]}, x={pair[1]})"),
    ),
    max_leaves=5,
)
targets = st.one_of(names, st.tuples(names, names).map(".".join), st.tuples(names, names).map(lambda pair: f'{pair[0]}["{pair[1]}"]'))
plain_lines = st.one_of(
    st.tuples(targets, expressions).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    st.tuples(names, expressions).map(lambda pair: f"{pair[0]}: int = {pair[1]}  # note"),
    st.tuples(names, expressions).map(lambda pair: f"{pair[0]}(x, y={pair[1]})"),
    st.tuples(names, names, expressions).map(lambda three: f"{three[0]} = {three[1]} = {three[2]}"),
    st.tuples(names, expressions).map(lambda pair: f"{pair[0]} += {pair[1]}"),
)
blocks = st.tuples(st.sampled_from(["if b:", "class C:", "def g(x=3, *, y=4):", "with a as b:", "for i in a:"]), plain_lines).map(
    lambda pair: f"{pair[0]}\n    " + pair[1].replace("\n", "\n    ")
)
sources = st.lists(st.one_of(plain_lines, blocks), min_size=1, max_size=6).map("\n".join)


@settings(
    deadline=None,
    max_examples=3 * int(os.environ.get("MEMPLAN_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(source=sources, line_end=st.sampled_from(["\n", "\r\n"]), data=st.data())
def test_whatever_the_source_one_value_changes_or_nothing(source: str, line_end: str, data: st.DataObject) -> None:
    """The syntax tree has one other value then, and the text no other byte."""
    before = source.replace("\n", line_end).encode()
    file = answer_or_error(lambda: parsed(before))
    if isinstance(file, ConfigError):
        with pytest.raises(SyntaxError):
            ast.parse(before)
        return
    written_out = [value for value in file.content.values if not value.problem and value.source is None]
    if not written_out:
        return
    chosen = data.draw(st.sampled_from(written_out))

    after = answer_or_error(lambda: file.replace(chosen.key, 4242))

    if not isinstance(after, ConfigError):
        text = (
            file.text[: chosen.start]
            + after.decode()[chosen.start : len(after.decode()) - len(file.text) + chosen.end]
            + file.text[chosen.end :]
        )
        assert after.decode() == text
        old, new = ([ast.dump(node) for node in ast.walk(ast.parse(each)) if isinstance(node, ast.stmt)] for each in (before, after))
        assert len(old) == len(new)
        assert str(parsed(after).get(chosen.key)[0]) == "4242"  # type: ignore[index]  # it was just written
