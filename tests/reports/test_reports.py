"""What a report shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from memplan.analysis.make_plan import make_guide_plan, make_plan
from memplan.edits.apply import FileChange
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.execution.rehearsal import StepPeaks
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.planner.pins import read_pins
from memplan.planner.plan import Plan
from memplan.reports.diff import diff_lines
from memplan.reports.json import plan_as_json
from memplan.reports.plan_view import MOST_LEVERS, MOST_NOTES, view_plan
from memplan.reports.terminal import print_diff, print_plan, print_table
from memplan.workload.parallelism import Parallelism
from memplan.workload.workload import Workload
from tests.reports.test_rehearsal_view import rehearsal_with


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def plan(built_in: Workload) -> Plan:
    """The plan of the built-in workload for an RTX 4090."""
    return make_plan(built_in, find_gpu("rtx4090"), AnalyticEstimator())


def test_the_breakdown_adds_up_to_its_total(plan: Plan) -> None:
    """Shares of the GPU: the last row is the sum of the others."""
    view = view_plan(plan, source="here")

    for breakdown in view.breakdowns:
        *parts, total = breakdown.rows
        assert total[0] == "total"
        assert abs(sum(share for _, _, share in parts) - total[2]) < 1e-9


def test_stages_that_take_the_same_share_a_breakdown(built_in: Workload) -> None:
    """The stage with more negatives has a breakdown of its own."""
    plan = make_plan(built_in, find_gpu("rtx4090"), AnalyticEstimator(), pins=read_pins(["02_stage.n_negatives=24"]))

    titles = [breakdown.title for breakdown in view_plan(plan, source="here").breakdowns]

    assert titles == [
        "01_stage and 02_stage at the peak (start of backward)",
        "03_stage, 04_stage and 05_stage at the peak (start of backward)",
    ]


def test_changes_stand_beside_the_present_values(plan: Plan) -> None:
    """A value that stays is shown once, one that changes as before and after."""
    view = view_plan(plan, source="here")
    row = dict(zip(view.columns, view.rows[1], strict=True))

    assert row["n_positives"] == "16"
    assert row["micro-batch"] == "4 → 2"
    assert row["n_negatives"] == "8"
    assert view.columns.index("would fit") == view.columns.index("n_negatives") + 1
    assert row["would fit"] == "35 (3.7× items)"


def test_a_plan_that_does_not_fit_says_so_first(built_in: Workload) -> None:
    """What is missing is in the headline, what would help below."""
    view = view_plan(make_plan(built_in, find_gpu("rtx4060"), AnalyticEstimator()), source="here")

    assert view.headline.startswith("Does not fit on NVIDIA GeForce RTX 4060: ")
    assert view.headline.endswith(" short")
    assert any("would fit" in lever for lever in view.levers)
    assert "minimum" in view.columns
    assert not any("→" in value for value in view.rows[0])


def test_several_gpus_and_others_memory_are_among_the_facts(built_in: Workload) -> None:
    """The table is for each GPU, and the budget says what others hold."""
    workload = built_in.model_copy(update={"parallelism": Parallelism(devices=2)})
    busy = find_gpu("h100").model_copy(update={"others_used_bytes": 2**30})

    facts = dict(view_plan(make_plan(workload, busy, AnalyticEstimator()), source="here").facts)

    assert facts["GPUs"].startswith("2, data parallel")
    assert "less 1.00 GiB that other processes hold" in facts["budget"]


def test_of_a_program_that_was_ended_the_steps_are_told(plan: Plan, a100: GpuSpec) -> None:
    """What comes behind them, an evaluation perhaps, no plan has seen."""
    stage = plan.stages[0]
    step = StepPeaks(peak_allocated_bytes=1, peak_reserved_bytes=1, allocated_bytes=1, reserved_bytes=1)
    whole = rehearsal_with(a100, steps=(step,) * 4)
    cut = whole.model_copy(update={"was_cut": True})

    told = [
        dict(view_plan(plan.model_copy(update={"stages": (stage.model_copy(update={"estimate": each}),)}), source="here").facts).get(
            "steps"
        )
        for each in (stage.estimate, whole, cut)
    ]

    assert told == [None, None, "4 of the program; what comes after them, as an evaluation, was not run"]


def test_the_guide_has_a_batch_for_each_stage(built_in: Workload, a100: object) -> None:
    """Its headline names none."""
    view = view_plan(make_guide_plan(built_in, find_gpu("rtx4090"), memory_gib=24), source="here")

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


def lines_of(plan: Plan, *, is_short: bool) -> list[str]:
    """The report in a pipe."""
    stream = io.StringIO()
    print_plan(plan, source="here", is_short=is_short, more=" with --verbose", stream=stream)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("gpu", ["rtx4060", "t4", "rtx4090", "a100-80"])
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed"])
def test_a_short_report_is_thirty_lines(built_in: Workload, gpu: str, precision: str) -> None:
    """Verdict, table, breakdown, the costliest reasons and warnings, of a tree with five stages; else also what would help."""
    plan = make_plan(built_in.with_training(precision=precision), find_gpu(gpu), AnalyticEstimator())

    lines = lines_of(plan, is_short=True)

    assert len(lines) <= (30 if plan.fits else 40)
    assert sum(line.startswith("  - ") for line in lines) <= MOST_NOTES + (0 if plan.fits else MOST_LEVERS)


def test_what_a_short_report_leaves_out_is_counted_and_in_the_whole_one(plan: Plan) -> None:
    """Each reason and warning that is not in it, and the breakdowns of the other stages."""
    short, whole = view_plan(plan, source="here", is_short=True), view_plan(plan, source="here")

    left_out = set(whole.reasons) | set(whole.warnings)
    left_out -= set(short.reasons) | set(short.warnings)
    assert short.num_left_out == len(left_out) + len(whole.breakdowns) - 1
    assert f"warnings ({short.num_left_out} more with --verbose)" in lines_of(plan, is_short=True)
    assert whole.num_left_out == 0
    assert all(any(reason[:40] in line for line in lines_of(plan, is_short=False)) for reason in left_out)


def test_a_short_breakdown_sums_what_it_joins(plan: Plan) -> None:
    """Model states are parameters, gradients and optimizer state; the total is the same."""
    short, whole = (view_plan(plan, source="here", is_short=is_short).breakdowns[0].rows for is_short in (True, False))

    assert [name for name, _, _ in short] == ["model states", "activations", "other"]
    shares = {name: share for name, _, share in whole}
    assert short[0][2] == pytest.approx(shares["parameters"] + shares["gradients"] + shares["optimizer state"])
    assert sum(share for _, _, share in short) == pytest.approx(shares["total"])


@pytest.mark.parametrize(
    ("parallelism", "said"),
    [
        (Parallelism(devices=8), "8, data parallel (DDP); the table is for each"),
        (Parallelism(devices=8, strategy="fsdp"), "8, fully sharded (FSDP2); the table is for each"),
        (Parallelism(devices=8, strategy="fsdp", sharding_degree=4), "8, fully sharded (FSDP2) in groups of 4; the table is for each"),
        (Parallelism(devices=8, nodes=2, strategy="zero1"), "16, optimizer state sharded (DeepSpeed ZeRO-1); the table is for each"),
    ],
)
def test_the_report_says_how_gpus_share_the_model(built_in: Workload, a100: GpuSpec, parallelism: Parallelism, said: str) -> None:
    """Beside how many they are."""
    workload = built_in.model_copy(update={"parallelism": parallelism})

    assert dict(view_plan(make_plan(workload, a100, AnalyticEstimator()), source="here").facts)["GPUs"] == said


@pytest.mark.parametrize(
    ("parallelism", "said"),
    [
        (
            Parallelism(devices=8, strategy="fsdp", tensor_parallel_size=2, context_parallel_size=2),
            "8, tensor parallel 2, context parallel 2, fully sharded (FSDP2) over 4; the table is for each",
        ),
        (Parallelism(devices=4, pipeline_parallel_size=4), "4, pipeline parallel 4; the table is for each"),
    ],
)
def test_the_report_says_how_gpus_split_the_model(built_in: Workload, a100: GpuSpec, parallelism: Parallelism, said: str) -> None:
    """And over how many the weights are shared that are left."""
    plan = make_plan(built_in, a100, AnalyticEstimator())
    split = plan.model_copy(update={"after": plan.after.model_copy(update={"parallelism": parallelism})})

    assert dict(view_plan(split, source="here").facts)["GPUs"] == said
