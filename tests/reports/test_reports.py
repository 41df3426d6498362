"""What a report shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from memplan.reports.view import view_plan

from memplan.analysis.make_plan import make_guide_plan, make_plan
from memplan.edits.apply import FileChange
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.hardware.catalog import find_card
from memplan.planner.pins import read_pins
from memplan.planner.plan import Plan
from memplan.reports.diff import diff_lines
from memplan.reports.json import plan_as_json
from memplan.reports.terminal import print_diff, print_plan, print_table
from memplan.workload.parallelism import Parallelism
from memplan.workload.workload import Workload


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def plan(built_in: Workload) -> Plan:
    """The plan of the built-in workload for an RTX 4090."""
    return make_plan(built_in, find_card("rtx4090"), AnalyticEstimator())


def test_the_breakdown_adds_up_to_its_total(plan: Plan) -> None:
    """Shares of the card: the last row is the sum of the others."""
    view = view_plan(plan, source="here")

    for breakdown in view.breakdowns:
        *parts, total = breakdown.rows
        assert total[0] == "total"
        assert abs(sum(share for _, _, share in parts) - total[2]) < 1e-9


def test_stages_that_take_the_same_share_a_breakdown(built_in: Workload) -> None:
    """The stage with more negatives has a breakdown of its own."""
    plan = make_plan(built_in, find_card("rtx4090"), AnalyticEstimator(), pins=read_pins(["02_stage.n_negatives=24"]))

    titles = [breakdown.title for breakdown in view_plan(plan, source="here").breakdowns]

    assert titles == [
        "01_stage and 02_stage, at the peak (start of backward)",
        "03_stage, 04_stage and 05_stage, at the peak (start of backward)",
    ]


def test_changes_stand_beside_the_present_values(plan: Plan) -> None:
    """A value that stays is shown once, one that changes as before and after."""
    row = dict(zip(view_plan(plan, source="here").columns, view_plan(plan, source="here").rows[1], strict=True))

    assert row["n_positives"] == "16"
    assert row["micro-batch"] == "4 → 2"
    assert row["n_negatives"] == "8"
    assert row["n_negatives that fit"] == "32 (3.4× items)"


def test_a_plan_that_does_not_fit_says_so_first(built_in: Workload) -> None:
    """What is missing is in the headline, what would help below."""
    view = view_plan(make_plan(built_in, find_card("rtx4060"), AnalyticEstimator()), source="here")

    assert view.headline.startswith("Does not fit on NVIDIA GeForce RTX 4060: ")
    assert view.headline.endswith("are missing")
    assert any("fits then" in lever for lever in view.levers)
    assert view.columns[6] == "minimum"
    assert not any("→" in value for value in view.rows[0])


def test_several_gpus_and_others_memory_are_among_the_facts(built_in: Workload) -> None:
    """The table is for each GPU, and the budget says what others hold."""
    workload = built_in.model_copy(update={"parallelism": Parallelism(devices=2)})
    busy = find_card("h100").model_copy(update={"others_used_bytes": 2**30})

    facts = dict(view_plan(make_plan(workload, busy, AnalyticEstimator()), source="here").facts)

    assert facts["GPUs"].startswith("2, data parallel")
    assert "less 1.00 GiB that others hold" in facts["budget"]


def test_the_guide_has_a_batch_for_each_stage(built_in: Workload, a100: object) -> None:
    """Its headline names none."""
    view = view_plan(make_guide_plan(built_in, find_card("rtx4090"), memory_gib=24), source="here")

    assert view.headline == "The guide's batches for NVIDIA GeForce RTX 4090"


def test_a_pipe_gets_the_same_words_without_colour(plan: Plan) -> None:
    """No escape codes, no blanks at the ends of lines; a terminal gets colour and the same words."""
    pipe, terminal = io.StringIO(), Terminal()

    print_plan(plan, source="here", notes=["noticed"], stream=pipe)
    print_plan(plan, source="here", stream=terminal)

    assert "\x1b" not in pipe.getvalue()
    assert not any(line.endswith(" ") for line in pipe.getvalue().splitlines())
    assert "noticed" in pipe.getvalue()
    assert "Fits on NVIDIA GeForce RTX 4090" in terminal.getvalue()


def test_json_has_bytes_as_integers_and_a_version(plan: Plan) -> None:
    """Every field whose name ends in _bytes is an int."""
    answer = json.loads(plan_as_json(plan, {"applied": False}))

    def check(value: object, name: str = "") -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                check(part, key)
        elif isinstance(value, list):
            for part in value:
                check(part, name)
        elif name.endswith("_bytes") and value is not None:
            assert type(value) is int, name

    check(answer)
    assert answer["schema_version"] == 1
    assert answer["stages"][0]["estimate"]["device_used_bytes"] == answer["stages"][0]["estimate"]["device_used"]["expected_bytes"]


def test_a_diff_marks_a_missing_last_newline(tmp_path: Path) -> None:
    """As diff does, so that `patch` can take it; blanks at the ends of lines stay."""
    path = tmp_path / "config.yaml"
    change = FileChange(path, path, b"a: 1  \nb: 2", b"a: 1  \nb: 3", ())
    stream = io.StringIO()

    print_diff(diff_lines([change]), stream=stream)

    assert stream.getvalue().splitlines()[3:] == [
        " a: 1  ",
        "-b: 2",
        "\\ No newline at end of file",
        "+b: 3",
        "\\ No newline at end of file",
    ]


def test_a_table_has_a_head() -> None:
    """Columns are aligned, the first to the left."""
    stream = io.StringIO()

    print_table(("name", "size"), [("a", "10"), ("bcd", "5")], stream=stream)

    assert stream.getvalue().splitlines() == ["name  size", "a       10", "bcd      5"]
