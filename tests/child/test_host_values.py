"""Sizes that data decide: found on the host in a pass of its own, and measured in another that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from memplan.child.host_values import _is_ordinary, _tensors_in
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from memplan.reports.rehearsal_view import view_rehearsal
from tests.conftest import RehearserOf

STEPS = Path(__file__).with_name("values_steps.py")
aten = torch.ops.aten
MIB = 2**20

WORKSPACE = 8.125 * MIB
"""Of cuBLAS, for each thread that multiplies (PyTorch's default for an A100)."""

Run = Callable[..., Rehearsal]


@pytest.fixture
def run(rehearser_of: RehearserOf) -> Run:
    """Rehearse a program by its name, two steps, with answers by a part of the line."""

    def rehearse(program: str, answers: dict[str, str] | None = None, *, steps: int = 2, **values: int | str) -> Rehearsal:
        given = {f"values_steps.py:{line_of(text)}": (answer, None) for text, answer in (answers or {}).items()}
        return rehearser_of(f"{STEPS}:build").rehearse(gpu="a100-80", values={"program": program, **values}, answers=given, steps=steps)

    return rehearse


def line_of(text: str) -> int:
    """The number of the only line of the programs that has *text* in it."""
    (number,) = [number for number, line in enumerate(STEPS.read_text(encoding="utf-8").splitlines(), start=1) if text in line]
    return number


@pytest.mark.heavy
@pytest.mark.parametrize("is_inference", [0, 1])
def test_what_integers_of_the_host_decide_is_what_the_host_computes(run: Run, is_inference: int) -> None:
    """Forty ways to ask: the step itself compares each with the same on the CPU. An evaluation often runs in inference mode."""
    seen = run("reads", is_inference=is_inference)

    assert seen.verdict == "fits"
    assert {read.basis for read in seen.reads} <= {"data", "rule"}


@pytest.mark.heavy
def test_chains_of_operations_are_followed(run: Run) -> None:
    """Sixty random ones of eight operations, in place, on views and of sizes that data decide."""
    assert run("pipelines").verdict == "fits"


@pytest.mark.parametrize("program", ["looks_at_its_weights", "packages_its_model"])
def test_a_weight_that_is_read_decides_nothing(run: Run, program: str) -> None:
    """Operations read it below any method of a tensor, and what saves it reads bytes."""
    seen = run(program)

    assert seen.verdict == "fits"
    assert seen.lower_bound_reasons == ()


@pytest.mark.parametrize("program", ["learns_letters", "acts"])
def test_turns_and_places_are_known(run: Run, program: str) -> None:
    """What is read in the values pass only takes no turn; an action that is drawn is one of those there are."""
    seen = run(program)

    assert (seen.verdict, seen.lower_bound_reasons, len(seen.steps)) == ("fits", (), 2)
    assert (seen.findings, seen.assumed_range) == ((), None)


def test_the_memory_of_rows_that_labels_choose_is_counted_in_forward_and_backward(run: Run) -> None:
    """64 of 256 rows, of 1 MiB each in fp32: the logits, their square's gradient, and the gradient of the logits; the head has 64 MiB."""
    seen = run("keeps_rows")

    head, logits = 64 * MIB, 64 * MIB
    assert seen.verdict == "fits"
    assert seen.breakdown.parameters_bytes == head + 256 * 64 * 4  # and the states, for which gradients are accumulated
    assert seen.peak_allocated_bytes >= 2 * head + 2 * logits
    assert seen.peak_allocated_bytes < run("keeps_rows", rows=512).peak_allocated_bytes - 2 * logits + MIB


def test_a_convolution_is_traced_as_without_memplan(run: Run) -> None:
    """And what data decide after that is followed: of half as many labels 32 rows of logits less, of 1 MiB, and their gradients."""
    seen, fewer = run("is_traced"), run("is_traced", rows=128)

    assert (seen.verdict, seen.lower_bound_reasons) == ("fits", ())
    assert seen.peak_allocated_bytes - fewer.peak_allocated_bytes > 2 * 32 * MIB


def test_what_workers_load_is_followed_once_it_is_there(run: Run) -> None:
    """Their own operations are not, which use no GPU. Of half as many labels 32 rows of logits less, of 1 MiB."""
    seen, fewer = run("is_loaded"), run("is_loaded", rows=128)

    assert (seen.verdict, seen.lower_bound_reasons) == ("fits", ())
    assert seen.peak_allocated_bytes - fewer.peak_allocated_bytes > 2 * 32 * MIB


@pytest.mark.parametrize("way", [0, 1, 2])
def test_an_action_that_is_checked_is_one_of_those_there_are(run: Run, way: int) -> None:
    """As one_hot gives it, with the gradient of the logits behind it, and as a distribution draws it."""
    seen = run("acts_by_one_hot", way=way)

    assert (seen.verdict, len(seen.steps)) == ("fits", 2)


@pytest.mark.parametrize("way", ["max", "min", "median", "amax"])
def test_the_longest_of_what_a_model_computes_is_no_choice(run: Run, way: str) -> None:
    """It was taken for the place of the largest, the first of several, which decides nothing: a false "Fits"."""
    (reason,) = run("decodes_the_longest", way=way).lower_bound_reasons

    assert reason.startswith("sizes were guessed as zero at")


def test_what_edges_are_added_to_is_not_known_as_it_was(run: Run) -> None:
    """Zeros that a sparse matrix was added to in place: that no row has anything is no longer what the data say."""
    assert "data" not in {read.basis for read in run("adds_edges").reads}


def test_the_edges_of_a_graph_are_counted(run: Run) -> None:
    """
    As often as a product asks for them, in backward too, where they stand in another order: 261,773 different ones of 262,144.

    Their places and values lie beside the matrix's own for as long as it multiplies: 20 bytes for each, and what sorting takes.
    """
    places = torch.randint(0, 100_000, (2, 2**18), generator=torch.Generator().manual_seed(0))
    num_edges = places.unique(dim=1).shape[1]

    seen = run("convolves_a_graph")

    assert (seen.verdict, seen.lower_bound_reasons) == ("fits", ())
    assert {(read.answer, read.basis) for read in seen.reads} == {(str(num_edges), "data")}
    given, states = 2**18 * 20, 100_000 * 4 * 4
    assert seen.peak_allocated_bytes > given + num_edges * 20 + 2 * states


def test_nothing_follows_the_memory_pass(run: Run) -> None:
    """What is measured is what the program takes that asks for nothing and keeps as many rows by itself."""
    asked = run("passes_a_threshold", {"(scores > 0.5).nonzero()": "1/2"})

    assert 64 * MIB <= asked.peak_allocated_bytes <= 65 * MIB + WORKSPACE
    assert asked.assumed_range is None


@pytest.mark.parametrize("is_one_hot", [0, 1])
def test_experts_get_equal_shares_or_one_gets_all(run: Run, is_one_hot: int) -> None:
    """Of 64 tokens with two experts each the last of four gets 32, or all 64: both are run, and the larger is told."""
    seen = run("routed", is_one_hot=is_one_hot)

    assert seen.verdict == "fits"
    assert seen.assumed_range is not None
    assert (seen.assumed_range.expected_bytes - seen.assumed_range.low_bytes) // MIB in range(31, 65)
    assert seen.peak_allocated_bytes >= 64 * MIB
    assert "one gets all" in seen.findings[0].message


@pytest.mark.parametrize(("values", "most_rows"), [({}, 128), ({"is_scattered": 0, "experts": 4}, 256)])
def test_two_questions_about_the_same_gates_agree(run: Run, values: dict[str, int], most_rows: int) -> None:
    """Which are not zero, and how many are more than zero: two of eight for each of 64 tokens; else all of four, or none."""
    seen = run("gated", **values)

    assert (seen.verdict, seen.lower_bound_reasons) == ("fits", ())
    assert seen.peak_allocated_bytes == pytest.approx((64 + most_rows) * MIB, abs=MIB + WORKSPACE)


def test_where_a_model_decides_everything_passes_or_nothing(run: Run) -> None:
    """128 rows of 1 MiB, or none."""
    seen = run("passes_a_threshold")

    assert 128 * MIB <= seen.peak_allocated_bytes <= 129 * MIB + WORKSPACE
    assert seen.assumed_range is not None
    assert seen.assumed_range.expected_bytes - seen.assumed_range.low_bytes >= 126 * MIB


@pytest.mark.parametrize("is_of_rows", [0, 1])
def test_a_place_that_a_model_chooses_may_be_a_length(run: Run, is_of_rows: int) -> None:
    """A single one too, which was taken for the first without a word: told is the last of 49, with the range from the first ones."""
    seen = run("chooses_a_length", is_of_rows=is_of_rows)

    assert seen.verdict == "fits"
    assert 49 * MIB <= seen.peak_allocated_bytes <= 50 * MIB + MIB / 8 + WORKSPACE  # what is left of the segment is no block
    assert seen.assumed_range is not None
    segment = 50 * MIB  # one row or four have room beside the workspace
    assert seen.assumed_range.high_bytes - seen.assumed_range.low_bytes == segment
    assert "numbers that the model computes decide sizes at " in seen.findings[0].message


def test_a_histogram_of_integers_is_known(run: Run) -> None:
    """The host has none of integers; 16 of 64 pixels are of class 2, and which of them a model finds decides nothing."""
    seen = run("counts_classes")

    assert (seen.verdict, seen.lower_bound_reasons, seen.assumed_range) == ("fits", (), None)
    assert 16 * MIB <= seen.peak_allocated_bytes <= 17 * MIB + WORKSPACE


@pytest.mark.parametrize("is_of_pool", [0, 1])
def test_labels_that_a_thread_moves_are_followed(run: Run, is_of_pool: int) -> None:
    """16 of 64 rows are chosen, as the host knows; no end of an assumption is run."""
    seen = run("moved_by_a_thread", is_of_pool=is_of_pool)

    assert {(read.basis, read.answer) for read in seen.reads} == {("data", "16")}
    assert 64 * MIB + 2 * 16 * MIB <= seen.peak_allocated_bytes < 64 * MIB + 2 * 16 * MIB + MIB + WORKSPACE
    assert seen.assumed_range is None


@pytest.mark.parametrize(("program", "low_mib"), [("draws_a_size", 1), ("draws_a_branch", 0)])
def test_one_number_that_the_device_draws_goes_both_ways(run: Run, program: str, low_mib: int) -> None:
    """It is no data: the most that can be drawn is told, 64 MiB, with the least beside it."""
    seen = run(program)

    assert seen.verdict == "fits"
    assert seen.peak_allocated_bytes == pytest.approx(64 * MIB, abs=MIB / 8)
    assert seen.assumed_range is not None
    assert seen.assumed_range.high_bytes - seen.assumed_range.low_bytes == pytest.approx((64 - low_mib) * MIB, abs=2 * MIB)
    assert {read.basis for read in seen.reads} == {"drawn"}
    (finding,) = seen.findings
    assert finding.message.startswith("numbers that are drawn at random on the GPU decide sizes at ")


def test_many_numbers_that_the_device_draws_leave_a_lower_bound(run: Run) -> None:
    """An eighth of 4096 rows, give or take what chance does: two draws differ, and a third may take more."""
    seen = run("draws_a_mask")

    assert seen.verdict == "unknown"
    assert seen.lower_bound_reasons[0].startswith("numbers that are drawn at random on the GPU decide sizes at ")
    rows = (seen.peak_allocated_bytes - 64 * MIB) / (MIB / 64)
    assert rows == pytest.approx(512, abs=100)
    told = view_rehearsal(seen, find_gpu("a100-80")).reads
    assert all("drawn at random on the GPU: one draw, and others differ" in line for line in told)


@pytest.mark.parametrize("way", ["beta", "binomial", "poisson", "gamma", "dropout"])
def test_what_a_distribution_of_the_device_draws_is_no_data(run: Run, way: str) -> None:
    """One draw decides some MiB, and others differ: that is said of distributions as of a range."""
    seen = run("draws_by_a_distribution", way=way)

    assert seen.verdict == "unknown"
    assert seen.lower_bound_reasons[0].startswith("numbers that are drawn at random on the GPU decide sizes at ")


def test_the_place_of_a_hard_sample_is_a_choice_of_the_model(run: Run) -> None:
    """Told is the last of 49 places, with the range from the first: soft plus hard minus soft is what the model chose."""
    seen = run("chooses_by_a_hard_sample")

    assert (seen.verdict, {read.basis for read in seen.reads}) == ("fits", {"assumed"})
    assert 49 * MIB <= seen.peak_allocated_bytes <= 50 * MIB + MIB / 8 + WORKSPACE
    assert seen.assumed_range is not None


@pytest.mark.parametrize(("num_points", "verdict"), [(128, "fits"), (16, "unknown")], ids=["many", "few"])
def test_where_a_program_fails_with_everything_passing_one_of_each_row_does_not(run: Run, num_points: int, verdict: str) -> None:
    """A ball around a point has the point in it. Three of its four places are filled up then; one of a few is too much to leave out."""
    seen = run("groups_around_points", num_points=num_points)

    assert seen.verdict == verdict
    if verdict == "fits":
        assert 24 * MIB <= seen.peak_allocated_bytes <= 24 * MIB + WORKSPACE + MIB / 8
        assert {read.reason for read in seen.reads} == {"all but one of each row pass"}
        (told,) = [finding.message for finding in seen.findings if finding.kind == "device_values"]
        assert (
            "all but one of each row pass, since the program fails where all do, and equal shares; nothing passes and one gets all" in told
        )


@pytest.mark.parametrize("way", ["share", "mean", "wrong"])
def test_answers_that_are_compared_with_labels_may_all_be_right(run: Run, way: str) -> None:
    """A training begins with none right, and one that goes well ends with all: by equal shares, an eighth would always be."""
    seen = run("unfreezes_when_right", way=way)

    assert seen.peak_allocated_bytes == pytest.approx(64 * MIB + WORKSPACE, abs=MIB)
    assert seen.assumed_range is not None
    assert seen.assumed_range.high_bytes - seen.assumed_range.low_bytes >= 60 * MIB


@pytest.mark.parametrize("way", ["function", "hook"])
def test_a_size_that_data_decide_in_a_backward_alone_is_counted(run: Run, way: str) -> None:
    """The first run, which reads zero, asks for the same but for these 32 MiB."""
    seen = run("keeps_rows_in_a_backward", way=way)

    assert {(read.basis, read.answer) for read in seen.reads} == {("data", "32")}
    assert seen.peak_allocated_bytes >= 32 * MIB


@pytest.mark.heavy
def test_a_run_with_values_that_does_not_end_costs_no_report(rehearser_of: RehearserOf) -> None:
    """The first run ends at once; with values the loop waits for numbers that the model never computes."""
    seen = rehearser_of(f"{STEPS}:build").rehearse(gpu="t4", values={"program": "waits"}, steps=1, timeout_seconds=10)

    assert seen.verdict == "unknown"
    assert seen.lower_bound_reasons[0].endswith("did not succeed: it took more than 10 seconds")


def test_what_is_drawn_and_decides_no_size_is_no_finding(run: Run) -> None:
    """Which rows are taken is drawn, and not how many; a number that is printed is no choice."""
    seen = run("draws_an_order")

    assert (seen.verdict, seen.findings, seen.assumed_range) == ("fits", (), None)
    assert "drawn" in {read.basis for read in seen.reads}


def test_what_a_model_decides_and_no_size_hangs_on_is_no_finding(run: Run) -> None:
    """How many answers are right is kept: both ends of that assumption take the same."""
    seen = run("counts_what_is_right", is_kept=1)

    assert {read.basis for read in seen.reads} == {"data", "assumed"}
    assert (seen.verdict, seen.assumed_range, seen.findings) == ("fits", None, ())


def test_what_is_only_printed_is_no_choice_of_the_model(run: Run) -> None:
    """How many answers are right stands in a text and nowhere else: no assumption is made of it."""
    seen = run("counts_what_is_right")

    assert {read.basis for read in seen.reads} == {"data", "ordinary"}


def test_what_is_only_shown_or_checked_has_no_memory_behind_it(run: Run) -> None:
    """Known from the data or not: 64 of 64 labels are half of 128. The report names the number, not its bytes."""
    seen = run("shows_a_share")

    assert {read.answer for read in seen.reads if "print" in read.text} == {"0.5", "0.015625"}
    assert {read.basis for read in seen.reads if "isnan" in read.text} == {"rule"}
    assert [read.text for read in seen.reads if read.following_bytes] == [
        "kept = torch.ones(int(counts), MIB_OF_FLOATS, device=device, requires_grad=True)"
    ]


def test_no_factor_of_a_product_is_zero(run: Run) -> None:
    """PyTorch counts them in the product's backward: with none it divides, as on all but a few steps of a real training."""
    seen = run("multiplies")

    assert {(read.basis, read.answer) for read in seen.reads} == {("ordinary", "0")}
    assert (seen.verdict, seen.findings) == ("fits", ())


def test_a_loss_that_is_rounded_to_be_shown_is_no_size(run: Run) -> None:
    """To three places, or to a whole number in a text."""
    seen = run("rounds_what_it_shows")

    assert (seen.verdict, {read.basis for read in seen.reads}) == ("fits", {"ordinary"})


def test_data_that_differ_are_a_reason_to_grow(run: Run) -> None:
    """1 MiB more in every step."""
    (finding,) = run("keeps_more_and_more", steps=3).findings

    assert finding.message.endswith("the peak rose by 2.0 MiB in step 3; the data decide sizes that differ from step to step")


@pytest.mark.parametrize(
    ("program", "values", "size_mib"),
    [("rounds_a_float", {}, 7), ("rounds_a_float_later", {}, 7), ("copies_edges", {}, 5), ("copies_edges", {"is_moved": 1}, 5)],
)
def test_a_size_is_found_whichever_way_it_takes_to_the_host(run: Run, program: str, values: dict[str, int], size_mib: int) -> None:
    """By a float that is rounded, at once or later, or within more than is looked at otherwise."""
    seen = run(program, **values)

    assert seen.verdict == "fits"
    assert size_mib <= seen.peak_allocated_bytes / MIB <= size_mib + 2


def test_a_picture_that_is_copied_to_the_host_has_no_memory_behind_it(run: Run) -> None:
    """What is allocated next is no consequence of it."""
    seen = run("copies_a_picture")

    behind = {read.text.partition(" = ")[0]: read.following_bytes for read in seen.reads}
    assert behind["shown"] == 0
    assert seen.peak_allocated_bytes >= 8 * MIB


@pytest.mark.parametrize("is_mask", [0, 1])
def test_a_picture_of_what_a_model_computes_is_no_size(run: Run, is_mask: int) -> None:
    """It has shades of grey that nobody knows; a mask of as many bytes that data make is known, and so is what it decides: 8 MiB."""
    seen = run("paints_what_it_computes", is_mask=is_mask)

    assert (seen.verdict, seen.lower_bound_reasons) == ("fits", ())
    assert (seen.peak_allocated_bytes > WORKSPACE + 8 * MIB) is bool(is_mask)


def test_a_program_that_checks_its_numbers_goes_on(run: Run) -> None:
    """As it would in an ordinary training."""
    seen = run("checks_its_numbers")

    (finding,) = [finding for finding in seen.findings if finding.kind == "device_values"]
    assert seen.verdict == "fits"
    assert "is made whole, and may be a size" in finding.message
    assert 64 * MIB <= seen.peak_allocated_bytes <= 65 * MIB + 2 * WORKSPACE


def test_a_check_passes_whatever_is_assumed_of_the_numbers(run: Run) -> None:
    """Otherwise the end at which nothing passes would fail in it."""
    seen = run("samples")

    assert {read.basis for read in seen.reads} == {"data", "rule"}
    assert (seen.verdict, seen.findings) == ("fits", ())


@pytest.mark.parametrize("is_copy", [0, 1])
def test_the_history_of_lbfgs_is_counted(run: Run, is_copy: int) -> None:
    """4 directions and 4 steps; of what is replaced within a step, what was there at its end is known by name. Of a changed copy too."""
    seen = run("keeps_a_history", is_copy=is_copy)

    assert seen.verdict == "fits"
    assert seen.breakdown.optimizer_state_bytes in range(8 * MIB, 11 * MIB)
    assert seen.breakdown.batch_data_bytes == 0


@pytest.mark.parametrize("share", ["1/4", "16"])
def test_an_answer_for_a_mask_holds_in_the_backward_too(run: Run, share: str) -> None:
    """16 of 64 rows are chosen; autograd asks for the same mask again, from a thread without a frame of Python."""
    seen = run("keeps_a_share", {"states[mask].sum()": share})

    assert seen.verdict == "fits"
    assert seen.assumed_range is None
    states = gradient = scattered = 64 * MIB
    assert 0 <= seen.peak_allocated_bytes - (states + gradient + scattered + 16 * MIB) <= MIB + WORKSPACE


def test_the_backward_of_a_scatter_counts_the_mask_too(run: Run) -> None:
    """Autograd selects by the mask within an operation of its own: as many elements as were scattered."""
    seen = run("scores_labels")

    assert seen.verdict == "fits"
    assert {(read.basis, read.answer) for read in seen.reads} == {("data", "48"), ("data", str(48 * MIB // 4))}


@pytest.mark.heavy
def test_what_is_generated_is_as_long_as_it_may_be(run: Run) -> None:
    """No token that is chosen ends a text, and the run that only shows what is asked does not wait for the end for ever."""
    seen = run("generates", steps=1)

    assert seen.verdict == "fits"
    assert 300 <= seen.peak_allocated_bytes * 16 / MIB <= 300 + 16 + WORKSPACE * 16 / MIB


@pytest.mark.parametrize(("direction", "length"), [("up", 128), ("down", 100), ("half", 128)])
def test_a_loop_that_waits_for_a_number_ends(run: Run, direction: str, length: int) -> None:
    """The run that only shows what is asked would wait for ever: what it reads never changes. Then the numbers are those of the data."""
    seen = run("grows_until_long_enough", direction=direction, steps=1)

    assert seen.verdict == "fits"
    assert seen.peak_allocated_bytes // MIB == length


def test_numbers_that_a_model_computes_are_finite_ones(run: Run) -> None:
    """Which PyTorch asks by comparing them with themselves and with infinity."""
    assert run("drops_what_is_not_finite").verdict == "fits"


def test_what_attention_saves_on_the_host_decides_nothing(run: Run) -> None:
    """The state of its dropout is integers, and goes where the rest goes."""
    seen = run("attends")

    assert (seen.verdict, seen.lower_bound_reasons, {read.basis for read in seen.reads}) == ("fits", (), {"ordinary"})


def test_operators_that_take_functions_are_no_reason_to_lose_the_values(run: Run) -> None:
    """50 of 128 places are of the second text, as the host knows, beside flex_attention."""
    seen = run("attends_by_a_rule")

    assert (seen.verdict, {(read.basis, read.answer) for read in seen.reads}) == ("fits", {("data", "50")})


def test_a_guess_does_not_hide_behind_a_harmless_number_of_the_same_line(run: Run) -> None:
    """Both read zero: the one is a loss, the other a size."""
    seen = run("copies_two_numbers")

    assert (seen.verdict, {read.basis for read in seen.reads}) == ("unknown", {"ordinary", "zero"})


def test_what_is_saved_decides_nothing(run: Run) -> None:
    """A checkpoint has counts in it, which are read to be written."""
    pytest.importorskip("safetensors")

    seen = run("saves")

    assert (seen.verdict, {read.basis for read in seen.reads}) == ("fits", {"ordinary"})


@pytest.mark.parametrize("is_called", [0, 1])
def test_a_yes_or_no_that_a_model_computes_goes_both_ways(run: Run, is_called: int) -> None:
    """Nothing on the one way, 64 MiB on the other: that is told, with the range."""
    seen = run("branches", is_called=is_called)

    assert seen.verdict == "fits"
    assert seen.peak_allocated_bytes >= 64 * MIB
    assert seen.assumed_range is not None
    assert seen.assumed_range.high_bytes - seen.assumed_range.low_bytes >= 62 * MIB
    (finding,) = seen.findings
    assert finding.message.endswith("it was run both ways, and the larger is reported")


@pytest.mark.parametrize("is_float", [0, 1])
def test_a_size_that_a_branch_gives_a_name_is_told_at_its_largest(run: Run, is_float: int) -> None:
    """Nothing is called within the branch; 64 MiB hang on it all the same."""
    seen = run("branches_by_a_name", is_float=is_float)

    assert seen.peak_allocated_bytes >= 64 * MIB
    assert seen.assumed_range is not None


def test_what_a_program_only_tells_is_no_branch(run: Run) -> None:
    """A word on the loss takes no memory, and nothing else is run."""
    seen = run("branches", is_told=1)

    assert (seen.verdict, seen.assumed_range, seen.findings) == ("fits", None, ())
    assert {read.basis for read in seen.reads} == {"ordinary"}


def test_sizes_on_the_other_way_are_found_too(run: Run) -> None:
    """48 MiB that the data say: as a guess they would be none, and the other way the smaller one."""
    seen = run("branches_to_a_size")

    assert seen.verdict == "fits"
    assert 48 * MIB <= seen.peak_allocated_bytes <= 49 * MIB + WORKSPACE


def test_a_way_that_fails_and_takes_more_leaves_a_lower_bound(run: Run) -> None:
    """Two matrices more, until there is no third."""
    seen = run("branches_and_fails")

    assert seen.verdict == "unknown"
    assert seen.lower_bound_reasons[0].startswith("it failed where it goes another way by a number that the model computes (")
    assert seen.lower_bound_reasons[0].endswith("and what it takes there is not known: RuntimeError: no root")
    assert seen.assumed_range is not None
    assert seen.assumed_range.high_bytes - seen.assumed_range.low_bytes >= 128 * MIB


def test_a_way_that_breaks_leaves_a_lower_bound(run: Run) -> None:
    """A product of shapes that do not match: nobody knows what would have come after it."""
    seen = run("branches_and_breaks")

    assert (seen.verdict, seen.assumed_range) == ("unknown", None)
    assert "what it takes there is not known: RuntimeError: mat1 and mat2 shapes" in seen.lower_bound_reasons[0]


def test_a_way_on_which_the_program_ends_itself_takes_no_more(run: Run) -> None:
    """It says so: `raise`."""
    seen = run("branches_and_breaks", is_chosen=1)

    assert (seen.verdict, seen.lower_bound_reasons) == ("fits", ())


def test_a_constant_stays_known_when_a_statistic_is_written_beside_it(run: Run) -> None:
    """As a memory bank keeps its number of negatives in one buffer with what the model's outputs add up to."""
    seen = run("constant_beside_statistic", steps=3)

    assert seen.verdict == "fits"
    assert seen.peak_allocated_bytes >= 16 * MIB
    assert [step.peak_allocated_bytes for step in seen.steps[1:]] == [seen.peak_allocated_bytes] * 2


def test_a_whole_number_that_is_said_for_a_float_is_that_number(run: Run) -> None:
    """A program makes a count of it; of the bytes of an integer it would make 0."""
    seen = run("statistic_as_size", {"mib = int(model(": "16"})

    assert seen.peak_allocated_bytes >= 16 * MIB


@pytest.mark.parametrize("way", ["where", "max"])
def test_the_class_that_lies_beside_a_box_is_known(run: Run, way: str) -> None:
    """All eight classes are found, of eight MiB each; where nothing passes the threshold, none is."""
    seen = run("finds_boxes", way=way)

    assert (seen.verdict, seen.lower_bound_reasons) == ("fits", ())
    assert seen.assumed_range is not None
    assert seen.assumed_range.high_bytes - seen.assumed_range.low_bytes == 64 * MIB


OTHERS = st.recursive(st.sampled_from([1, None, "sum", 2.5, torch.float16]), lambda parts: st.lists(parts, max_size=3))


@given(data=OTHERS, count=st.integers(0, 4))
def test_the_tensors_in_an_operation_are_found_in_its_lists(data: Any, count: int) -> None:
    """As PyTorch's own walk finds them, in the same order."""
    tensors = [torch.zeros(number) for number in range(count)]
    arguments = ((tensors[:1], data, *tensors[1:2]), {"others": [[data, *tensors[2:]]], "out": None})

    found = list(_tensors_in(arguments))

    assert [id(tensor) for tensor in found] == [id(leaf) for leaf in tree_flatten(arguments)[0] if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(
    ("operations", "is_ordinary"),
    [
        (
            [
                aten.mm.default,
                aten.add.Tensor,
                aten._to_copy.default,
                aten.cat.default,
                aten._foreach_add_.List,
                aten.native_layer_norm.default,
            ],
            True,
        ),
        ([aten.view.default, aten.copy_.default, aten._local_scalar_dense.default, aten.empty_like.default], False),
        ([aten.nonzero.default, aten.index_put_.default, aten.masked_select.default, aten._ctc_loss.default], False),
        ([aten.zeros_like.default, aten.fill_.Scalar, aten.isnan.default, aten.lt.Tensor, aten.topk.default, aten.argmax.default], False),
        ([aten.rand_like.default, aten.native_dropout.default, aten.bernoulli_.float, aten.randperm.default], False),
        ([aten.sub.Tensor, aten.scatter.value, aten._scaled_dot_product_flash_attention.default], False),
    ],
)
def test_what_an_ordinary_operation_makes_has_a_value_only_where_its_arguments_have(operations: list[Any], *, is_ordinary: bool) -> None:
    """Those that choose, draw, compare, fill or wait for the device are looked at whatever they are given."""
    assert [_is_ordinary(operation) for operation in operations] == [is_ordinary] * len(operations)
