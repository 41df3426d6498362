"""Values that a program reads from the device: what it gets, what is remembered, and what is told of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.errors import UsageError
from memplan.execution.read_answers import REMEMBERED, Answers, read_answers, remember
from memplan.execution.rehearsal import DeviceRead, Rehearsal
from tests.conftest import RehearserOf

STEPS = Path(__file__).parents[1] / "child" / "findings_steps.py"
MIB = 2**20

Run = Callable[..., Rehearsal]


# what is asked for, and what is remembered


@pytest.mark.parametrize("answer", ["true", "false", "0", "-3", "128", "0.5", "-1.", "1/8", "0/1"])
def test_an_answer_is_read(tmp_path: Path, answer: str) -> None:
    """A yes or no, a number, a share."""
    assert read_answers([f"sub/train.py:12={answer}"], tmp_path) == Answers({"sub/train.py:12": answer}, {})


@pytest.mark.parametrize(
    "text",
    [
        "", "=true", "train.py=true", "train.py:=true", "train.py:x=true", "train:12=true", "train.py:12", "train.py:12=",
        "train.py:12=yes", "train.py:12=True", "train.py:12=1/0", "train.py:12=1/8/2", "train.py:12=0x10", "train.py:12=1e3",
        "train.py:12=nan", "train.py:12= true",
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(tmp_path: Path, text: str) -> None:
    """With the form that it should have had."""
    with pytest.raises(UsageError, match=r"does not say FILE\.py:LINE=ANSWER") as caught:
        read_answers([text], tmp_path)

    assert "1/8" in (caught.value.hint or "")


def read(given: str, text: str) -> DeviceRead:
    """A read that the user's answer for *given* was for."""
    reason = f"your answer for {given}"
    return DeviceRead(place="/project/a.py:1", text="another line", count=1, answer="true", reason=reason, basis="answer", given_for=text)


def test_an_answer_that_was_used_is_remembered_with_its_line(tmp_path: Path) -> None:
    """Beside those of earlier calls; one that nobody asked for is returned, and forgotten."""
    first = read_answers(["train.py:12=true", "train.py:99=false"], tmp_path)

    assert remember(first, [read("train.py:12", "if flag:")], tmp_path) == ["train.py:99"]
    second = read_answers(["other.py:5=1/8"], tmp_path)
    assert remember(second, [read("other.py:5", "x[mask]"), read("train.py:12", "if flag:")], tmp_path) == []

    assert read_answers([], tmp_path).request() == {"train.py:12": ("true", "if flag:"), "other.py:5": ("1/8", "x[mask]")}


def test_a_new_answer_stands_over_a_remembered_one(tmp_path: Path) -> None:
    """For whatever the line says now."""
    remember(read_answers(["train.py:12=true"], tmp_path), [read("train.py:12", "if flag:")], tmp_path)

    assert read_answers(["train.py:12=false"], tmp_path).request() == {"train.py:12": ("false", None)}


def test_a_new_answer_stands_over_one_for_another_spelling_of_the_file(tmp_path: Path) -> None:
    """It is asked first, and takes the other's place."""
    remember(read_answers(["train.py:12=true"], tmp_path), [read("train.py:12", "if flag:")], tmp_path)
    answers = read_answers(["tool/train.py:12=false"], tmp_path)

    assert list(answers.request()) == ["tool/train.py:12", "train.py:12"]
    assert remember(answers, [read("tool/train.py:12", "if flag:")], tmp_path) == []
    assert read_answers([], tmp_path).request() == {"tool/train.py:12": ("false", "if flag:")}


def test_an_answer_of_a_rule_is_not_the_users(tmp_path: Path) -> None:
    """Nothing is remembered of a line that got its answer elsewhere, and no folder is made."""
    answers = read_answers(["train.py:12=true"], tmp_path)
    by_rule = read("train.py:12", "if flag:").model_copy(update={"reason": "an assertion holds", "basis": "rule"})

    assert remember(answers, [by_rule], tmp_path) == ["train.py:12"]
    assert remember(Answers({}, {}), [read("train.py:12", "if flag:")], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_name_is_not_meant(tmp_path: Path) -> None:
    """An answer counts as used where a read got it, as it was given."""
    answers = read_answers(["./train.py:12=true"], tmp_path)

    assert remember(answers, [read("pretrain.py:12", "if flag:")], tmp_path) == ["./train.py:12"]
    assert remember(answers, [read("./train.py:12", "if flag:")], tmp_path) == []


@pytest.mark.parametrize("content", ["", "[]", "{", '{"train.py:1": "true"}', '{"train.py:1": {"answer": "true"}}', "\x00"])
def test_a_broken_memory_is_refused(tmp_path: Path, content: str) -> None:
    """Named, with what to do."""
    path = tmp_path / REMEMBERED
    path.parent.mkdir()
    path.write_text(content)

    with pytest.raises(UsageError, match=r"reads.json is not what memplan wrote") as caught:
        read_answers([], tmp_path)

    assert "delete it" in (caught.value.hint or "")


def test_the_memory_is_json_that_a_person_reads(tmp_path: Path) -> None:
    """Place, answer and line."""
    remember(read_answers(["train.py:12=true"], tmp_path), [read("train.py:12", "if flag:")], tmp_path)

    assert json.loads((tmp_path / REMEMBERED).read_text()) == {"train.py:12": {"answer": "true", "line": "if flag:"}}


# what programs get


@pytest.fixture
def run(rehearser_of: RehearserOf) -> Run:
    """Rehearse a program by its name, with answers by a part of the line."""

    def rehearse(name: str, answers: dict[str, str] | None = None, *, line: str | None = None) -> Rehearsal:
        given = {f"findings_steps.py:{line_of(text)}": (answer, line) for text, answer in (answers or {}).items()}
        return rehearser_of(f"{STEPS}:build").rehearse(gpu="t4", values={"name": name}, answers=given)

    return rehearse


def line_of(text: str) -> int:
    """The number of the only line of the programs that has *text* in it."""
    lines = STEPS.read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return number


def test_a_value_that_decides_nothing_is_counted_and_no_finding(run: Run) -> None:
    """Four reads in each of three steps; the step that is looked at closely counts for nothing."""
    seen = run("reads_item")

    (found,) = seen.reads
    assert (found.place, found.text, found.count, found.answer) == (f"{STEPS}:{line_of('loss.item()')}", "loss.item()", 12, "1.0")
    assert seen.findings == ()


def test_a_step_is_taken_for_an_ordinary_one(run: Run) -> None:
    """Its values are finite and none of them is a NaN: 4 MiB, and not 64. Nobody need be told."""
    seen = run("reads_finite")

    assert [found.answer for found in seen.reads] == ["true", "false"]
    assert seen.peak_allocated_bytes < 5 * MIB
    assert seen.findings == ()


def test_what_a_loss_scaler_keeps_in_a_checkpoint_is_no_size(run: Run) -> None:
    """How many steps ago the scale was raised is an integer, and is read where the program's own line only asks for its state."""
    seen = run("reads_scaler_state")

    assert [found.basis for found in seen.reads] == ["ordinary"]
    assert seen.lower_bound_reasons == ()


def test_checks_pass(run: Run) -> None:
    """Assertions hold, and what comes before a `raise` is not the case."""
    assert [found.answer for found in run("reads_checks").reads] == ["true", "false", "false", "true"]


def test_a_distributions_checks_pass(run: Run) -> None:
    """Under the closer look as well: it calls the checks in another way."""
    seen = run("reads_distribution")

    assert {found.answer for found in seen.reads} == {"true"}
    assert {found.reason for found in seen.reads} == {"a distribution's check of its arguments passes"}


def test_anomaly_detection_finds_no_nan(run: Run) -> None:
    """It looks at every gradient of a backward: more often than a loop is waited for, and nothing hangs on it."""
    seen = run("reads_anomalies")

    assert {(found.answer, found.basis) for found in seen.reads} == {("false", "rule")}
    assert sum(found.count for found in seen.reads) > 3 * 400
    assert seen.findings == ()


def test_a_mask_is_what_the_program_made_it_until_the_user_says_otherwise(run: Run) -> None:
    """Without padding this program takes a short cut."""
    assert run("reads_mask").peak_allocated_bytes < MIB
    told = run("reads_mask", {"if mask.all()": "false"})

    assert told.peak_allocated_bytes > 4 * MIB
    assert [found.reason for found in told.reads] == [f"your answer for findings_steps.py:{line_of('if mask.all()')}"]
    assert told.findings == ()


def test_an_answer_changes_what_the_program_does(run: Run) -> None:
    """16 MiB for yes, which it is, 4 for no; an answer for a line that has changed since is not taken."""
    large, small, changed = (
        run("reads_bool", answers, line=line)
        for answers, line in [({}, None), ({"bool(flag)": "false"}, None), ({"bool(flag)": "false"}, "x")]
    )

    assert (small.peak_allocated_bytes, large.peak_allocated_bytes) == (4 * MIB + 512, 16 * MIB + 512)
    assert changed == large


@pytest.mark.parametrize(("share", "rows_mib"), [("0", 0), ("1/8", 8), ("1/2", 32), ("1/1", 64)])
def test_a_share_of_a_mask_is_that_many_rows(run: Run, share: str, rows_mib: int) -> None:
    """Of 2**18 rows of 64 numbers: those chosen and their copy beside all and the mask. With few, the peak is where that is made."""
    seen = run("reads_nonzero", {"rows[mask]": share})

    assert seen.reads[0].answer == share
    assert seen.peak_allocated_bytes == max(64 + 0.25 + 1, 64 + 0.25 + 2 * rows_mib) * MIB


def test_an_answer_for_an_expression_of_several_lines_is_remembered(run: Run, tmp_path: Path) -> None:
    """Whichever of its lines was named, and though the backward asks as well, from another line."""
    place = f"findings_steps.py:{line_of('chosen  # by a threshold')}"
    told = run("reads_over_lines", {"chosen  # by a threshold": "1/4"})
    remember(read_answers([f"{place}=1/4"], tmp_path), told.reads, tmp_path)

    ((answer, line),) = read_answers([], tmp_path).remembered.values()
    again = run("reads_over_lines", {"chosen  # by a threshold": answer}, line=line)

    assert line == "chosen  # by a threshold"
    assert [read.answer for read in again.reads] == [read.answer for read in told.reads]
    assert again.peak_allocated_bytes == told.peak_allocated_bytes < run("reads_over_lines").peak_allocated_bytes


def test_what_came_straight_back_is_true_and_not_counted(run: Run) -> None:
    """The step asserts it; what is computed of it reads zero, and is counted."""
    (found,) = run("copies_back").reads

    assert "lengths.max()" in found.text


def test_a_wrong_answer_may_fail_the_program(run: Run) -> None:
    """It is the user's word against the rule's."""
    with pytest.raises(UsageError, match=r"failed in its step 1 .*ValueError: negative"):
        run("reads_checks", {"if (values < 0).any()": "true"})


def test_sizes_that_values_decide_can_be_told(run: Run) -> None:
    """
    64 rows of 4 KiB, each repeated three times; half of them chosen; four counts of 32 rows, all the same.

    Beside them their indices and counts, under 64 KiB. A check that PyTorch makes of its arguments passes by itself.
    """
    answers = {"torch.repeat_interleave(rows": "3/1", "rows[rows[:, 0] > 0]": "1/2", "counts.tolist()": "32"}
    seen = run("reads_counts", answers)

    rows = 64 + 3 * 64 + 32 + 4 * 32
    assert rows * 4 * 1024 <= seen.peak_allocated_bytes <= (rows * 4 + 64) * 1024
    assert {found.basis for found in seen.reads} <= {"answer", "rule", "drawn"}
