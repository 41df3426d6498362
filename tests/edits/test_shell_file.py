"""Shell scripts: what they set and the options that they give, and one value changed with every other byte as it was."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.edits.edit import EditValue, Found
from memplan.edits.shell_file import ShellFile
from memplan.errors import ConfigError, EditRefusedError
from tests.edits.faults import answer_or_error
from tests.edits.test_python_file import key

CONF = Path("start.sh")

SOURCE = """#!/bin/bash
# batch=3 --batch_size 9
export CUDA_VISIBLE_DEVICES=0,1 PORT=29501
BATCH_SIZE=64 # each, é
LR="1e-4"
ACC=${ACC:-4}
NAME="${1:-33}"
ARGS="--seq_len 512 --flag \\
  --warmup=10"
OPTS=( --eval_steps 7 "--quoted 3" )
cat <<EOF > conf.yaml
x=1 --batch 4
EOF
read -r -d '' words <<EOF
train.py --accumulate 6 \\
  --micro.batch 13
EOF
if [ "$A" = "b" ]; then echo "it's"; fi
torchrun --nproc_per_node 8 \\
    train.py --model_name_or_path meta/llama \\
    --per_device_train_batch_size 21 \\
    --bf16 True --learning_rate $LR --batch-size "$BATCH_SIZE" \\
    --out out/$(date +%s) data.size=5 +extra.n=6 --neg -1 > log.txt 2>&1 &
wait; python x.py --steps=11 | tee 'a b'
"""


def parsed(text: str | bytes) -> ShellFile:
    """The script that *text* is."""
    return ShellFile.parse(CONF, text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("dotted", "value", "before", "after"),
    [
        ("PORT", 29501, "29501", "99"),
        ("BATCH_SIZE", 64, "=64", "=99"),
        ("LR", 1e-4, '"1e-4"', '"99"'),
        ("ACC", 4, ":-4}", ":-99}"),
        ("NAME", 33, "33", "99"),
        ("seq_len", 512, "512", "99"),
        ("warmup", 10, "=10", "=99"),
        ("accumulate", 6, "accumulate 6", "accumulate 99"),
        ("micro.batch", 13, "13", "99"),
        ("eval_steps", 7, "steps 7", "steps 99"),
        ("quoted", 3, 'quoted 3"', 'quoted 99"'),
        ("nproc_per_node", 8, "node 8", "node 99"),
        ("per_device_train_batch_size", 21, "21", "99"),
        ("data.size", 5, "size=5", "size=99"),
        ("extra.n", 6, "n=6", "n=99"),
        ("neg", -1, "-1 >", "99 >"),
        ("steps", 11, "=11", "=99"),
    ],
)
def test_a_value_is_read_and_changed_wherever_it_is_written(dotted: str, value: EditValue, before: str, after: str, line_end: str) -> None:
    """Variables, options, overrides, texts of options; the value alone has other bytes then."""
    text = SOURCE.replace("\n", line_end)
    assert SOURCE.count(before) == 1

    file = parsed(text)

    found = file.get(key(dotted))
    assert found is not None
    assert found.value == value
    assert before in SOURCE.splitlines()[found.line - 1]
    assert file.replace(key(dotted), 99) == text.replace(before, after).encode()


def test_what_only_looks_like_a_value_is_none() -> None:
    """Comments, documents in the script, texts that are printed, switches."""
    assert parsed(SOURCE).keys().isdisjoint({"batch", "batch_size", "x", "flag", "A", "echo", "s"})


@pytest.mark.parametrize(
    "source",
    [
        "f --n 8 \\",
        'X="$(g "it\'s $Y")"; f --n 8',
        "echo \\'; f --n 8",
        "f --n 8 # it's",
        'A=${B:-"${C}/it\'s"}; f --n 8',
        'f ${A[@]+"${A[@]}"} --n 8',
        "echo $'it\\'s'; f --n 8",
        'X=$(echo ")"); f --n 8',
        "x=`echo \\`a\\``; f --n 8",
        "(( T = 1 << S )); f --n 8",
        "cat <<'END-OF-FILE'\nx\nEND-OF-FILE\nf --n 8",
    ],
)
def test_what_else_stands_in_a_script_is_passed_over(source: str) -> None:
    """A backslash at its end, quotes in a command's output, a quote in a comment."""
    assert parsed(source).get(("n",)) == Found(8, source.count("\n") + 1)


def test_an_option_of_a_variables_name_stands_for_it() -> None:
    """`--batch_size $batch_size`; with another value than the variable's, nobody knows which one is meant."""
    file = parsed("batch_size=8\nf --batch_size ${batch_size} \\\n  --lr 1\n")

    assert file.replace(("batch_size",), 16) == b"batch_size=16\nf --batch_size ${batch_size} \\\n  --lr 1\n"
    with pytest.raises(EditRefusedError, match=r"`n` is set 2 times \(lines 1, 2\)"):
        parsed("n=8\nf --n 4\n").replace(("n",), 16)


@pytest.mark.parametrize(
    "source",
    ["n+=0", "for n in 1 2; do f; done", "read -r n", "((n *= 2))", "let n=n*2", "while getopts a n; do f; done", "unset n", "n=9"],
)
def test_a_variable_that_gets_another_value_is_set_twice(source: str) -> None:
    """Nobody knows which one counts."""
    with pytest.raises(EditRefusedError, match=r"`n` is set 2 times \(lines 1, 2\)"):
        parsed(f"n=8\n{source}\n").replace(("n",), 16)


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("for lr in 1 2; do\n  RUN=$lr\n  f --lr $lr --name $RUN\ndone", "RUN", r"is \$lr, which this file does not set"),
        ("f --lr 3 --bsz $lr", "bsz", r"is \$lr, which this file does not set"),
        ("A=$A; B=$A", "B", "`A` is|stands for itself|does not set"),
    ],
)
def test_what_no_variable_of_the_script_says_is_not_read(source: str, name: str, said: str) -> None:
    """An option is no variable."""
    with pytest.raises(ConfigError, match=said):
        parsed(source).get((name,))


def test_a_default_counts_where_the_script_does_not_set_the_variable() -> None:
    """Else the variable does."""
    assert parsed("f --n ${N:-32}").get(("n",)) == Found(32, 1)
    assert parsed("N=64\nf --n ${N:-32}").get(("n",)) == Found(64, 1)


@pytest.mark.parametrize(
    "source",
    [
        'echo "use --n 64"',
        "echo n=64",
        "grep -- '--n 3' log",
        "awk -v n=64 x",
        "[ x --n 3 ]",
        "cat <<\\EOF\nn=3\nEOF",
        "cat <<-EOF\n\tn=3\n\tEOF",
    ],
)
def test_texts_and_documents_are_no_settings(source: str) -> None:
    """What is printed, compared or written into another file."""
    assert parsed(f"{source}\nf --n 8\n").get(("n",)) == Found(8, source.count("\n") + 2)


def test_a_document_that_is_read_with_half_a_quote_is_passed_over() -> None:
    """A quote in it is a letter, which the words of a command are not read with."""
    assert parsed("read -d '' args <<EOF\n--n 8 it's\nEOF\nf --m 3\n").keys() == {"args", "m"}


@pytest.mark.parametrize("source", ["cat <<EOF\n  EOF\nn=3\n", "f <<n\nx"])
def test_a_document_whose_end_is_not_seen_is_refused(source: str) -> None:
    """The rest of the script would be taken for a part of it."""
    with pytest.raises(ConfigError, match=r"start.sh:1: has a document in the script whose end memplan does not see"):
        parsed(source)


def test_a_variable_is_followed_for_reading() -> None:
    """And an edit is refused with where it is set."""
    file = parsed(SOURCE)

    assert file.get(("batch-size",)) == Found(64, 4)
    with pytest.raises(EditRefusedError, match=r'start.sh:22: `batch-size` is "\$BATCH_SIZE"') as refused:
        file.replace(("batch-size",), 8)
    assert refused.value.hint == "change its source `BATCH_SIZE` in line 4 instead"


@pytest.mark.parametrize(
    ("source", "dotted", "value", "said"),
    [
        ("X=$HOME", "X", 8, r"`X` is \$HOME, which this file does not set"),
        ("X=$((2 * 4))", "X", 8, "`X` is no plain word"),
        ("f --out a$B", "out", 8, r"`out` is no plain word: a\$B"),
        ("f --n 1\ng --n 2", "n", 8, r"start.sh:2: `n` is set 2 times \(lines 1, 2\)"),
        ("X=8", "Y", 8, "has no key `Y`"),
        ("X=8", "X", "a b", "`X` cannot be set to 'a b'"),
        ("X=8", "X", "$(rm)", r"cannot be set to '\$\(rm\)'"),
    ],
)
def test_what_cannot_be_changed_without_guessing_is_refused(source: str, dotted: str, value: EditValue, said: str) -> None:
    """With the line; nothing that a shell would run is written."""
    with pytest.raises(EditRefusedError, match=said):
        parsed(source).replace(key(dotted), value)


@pytest.mark.parametrize(
    ("source", "value", "changed"),
    [("f --x True", False, "f --x False"), ("f --x=true", False, "f --x=false"), ("X='a'", "b.c", "X='b.c'")],
)
def test_a_value_is_written_as_it_stands(source: str, value: EditValue, changed: str) -> None:
    """Truth values in the spelling that is there, text in its quotes."""
    file = parsed(source)

    assert file.replace(key(next(iter(file.keys()))), value).decode() == changed


@pytest.mark.parametrize(("data", "said"), [(b"a\nX='b\n", "start.sh:2: has a quote"), (b"X=\xff", "is not UTF-8")])
def test_what_is_no_script_is_one_error(data: bytes, said: str) -> None:
    """With its line."""
    with pytest.raises(ConfigError, match=said):
        parsed(data)


WORDS = ["run", "--n", "--n=5", "-b", "7", "A=8", 'A="9"', "'q r'", '"--m 4 --k=3"', "$A", "${A:-6}", "\\\n", "x.y=2", "f", "é"]
words = st.sampled_from([*WORDS, ";", "\n", "&&", "|", "# c", ">", "(", ")"])
scripts = st.lists(words, min_size=1, max_size=12).map(" ".join)


@settings(
    deadline=None,
    max_examples=3 * int(os.environ.get("MEMPLAN_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(source=scripts, data=st.data())
def test_whatever_the_script_one_value_changes_or_nothing(source: str, data: st.DataObject) -> None:
    """No byte beside it, and the shell itself takes the result where it took the script."""
    file = parsed(source)
    plain = [value for value in file.content.values if not value.problem and value.source is None]
    if not plain:
        return
    chosen = data.draw(st.sampled_from(plain))

    after = answer_or_error(lambda: file.replace(chosen.key, 4242))

    if not isinstance(after, ConfigError):
        text = after.decode()
        assert text.startswith(source[: chosen.start])
        assert text.endswith(source[chosen.end :])
        assert parsed(after).get(chosen.key)[0] == 4242  # type: ignore[index]  # it was just written


def test_the_shell_sees_the_changed_value(tmp_path: Path) -> None:
    """Run by bash, every argument but that one is as before."""
    show = 'show() { printf "%s\\n" "$@"; }\n'
    script = show + "B=${B:-4}\nARGS=\"--seq 512 --fast\"\nshow --batch $B $ARGS --name='a b' x.y=3\n"

    def arguments(text: str) -> list[str]:
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env={}).stdout.splitlines()

    before = arguments(script)
    for name, place in (("B", 1), ("seq", 3), ("x.y", 6)):
        after = arguments(parsed(script).replace(key(name), 99).decode())
        assert [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == [place]
        assert after[place].endswith("99")
