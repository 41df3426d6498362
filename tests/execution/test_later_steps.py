"""What a later step may take more, where batches are draws."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from memplan.allocator.replay import replay_by_default
from memplan.execution.later_steps import STANDARD_DEVIATIONS, LaterStep, largest_draw, later_bytes, later_step, peaks_of_draws
from memplan.execution.run_record import Batch, RunRecord
from memplan.traces.kept import StepEnd
from memplan.traces.requests import EMPTY_CACHE, requests_of
from memplan.traces.trace import CountedMark, EventColumns, MemoryTrace, make_trace
from memplan.units import MIB


def test_the_largest_of_a_thousand_draws_is_mostly_within_what_nine_say() -> None:
    """21 pictures with 1 to 40 objects each, a picture as large as 40 objects: below the bound in five cases of six."""
    rng = random.Random(0)

    def batch() -> int:
        return sum(40 + rng.randint(1, 40) for _ in range(21))

    cases = [([batch() for _ in range(9)], max(batch() for _ in range(1000))) for _ in range(200)]
    within = sum(largest <= max(seen) + later_bytes(seen) for seen, largest in cases)

    assert within >= 5 / 6 * len(cases)


def test_it_is_the_mean_and_standard_deviations() -> None:
    """Worked by hand."""
    seen = [1000, 1040, 1020, 1010, 1030]

    assert fmean(seen) == 1020
    assert later_bytes(seen) == round(1020 + STANDARD_DEVIATIONS * stdev(seen)) - 1040 == 59


def test_numbers_of_objects_repeat() -> None:
    """Eight of them say enough, in however many steps."""
    rng = random.Random(0)

    assert later_bytes([rng.randint(50, 59) for _ in range(60)]) > 0


def test_where_steps_differ_widely_a_quarter_is_the_most() -> None:
    """Texts of one length each: the longest is soon there."""
    assert later_bytes([100, 500, 300, 200, 400]) == 125


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([512, 512, 512, 512, 512], id="batches of fixed length"),
        pytest.param([100, 500, 100, 500, 100, 500], id="a generator and a discriminator in turn"),
        pytest.param([100, 500, 300] * 5, id="three things in turn"),
        pytest.param([100, 300, 200], id="too few"),
        pytest.param([100, 120, 140, 160], id="memory that grows"),
        pytest.param([160, 140, 120, 100], id="what has not settled"),
        pytest.param([100, 101, 99, 102, 98, 103, 97, 104, 300], id="one step in nine with a further loss"),
        pytest.param([], id="nothing"),
    ],
)
def test_what_is_no_draw_says_nothing_of_a_later_step(seen: list[int]) -> None:
    """An allowance would be of nothing."""
    assert later_bytes(seen) == 0


def steps_of(*sizes: int, extra: int = 0) -> MemoryTrace:
    """Steps of two blocks that are there together, of one size in each step; *extra* ones at the end of the last."""
    events, addresses, asked = "", list[int](), list[int]()
    for size in sizes:
        events, addresses, asked = events + "aaff", [*addresses, 1, 2, 1, 2], [*asked, size, size, size, size]
    events, addresses, asked = events + "af" * extra, [*addresses, *[3, 3] * extra], [*asked, *[512, 512] * extra]
    marks = [CountedMark(2 * number, 2 * number, number + 1, "forward") for number in range(len(sizes))]
    return make_trace(EventColumns(events, addresses, asked, [0] * len(events)), marks=marks, notes={})


def reserved_of(trace: MemoryTrace) -> int:
    """What PyTorch's default allocator reserves for it."""
    return replay_by_default(requests_of(trace)).peak_reserved_bytes


def test_no_cached_block_serves_a_larger_step() -> None:
    """Worked by hand: 102.75 MiB and five standard deviations of 0.559 are 105.5 MiB, for which two segments of 106 MiB come beside all."""
    sizes = [int(each * MIB) for each in (100, 102, 103.5, 102.5, 103, 102.75)]
    trace = steps_of(*sizes)

    reserved = reserved_of(trace)

    assert reserved == 2 * (100 + 102 + 104) * MIB
    assert largest_draw(sizes[1:]) == pytest.approx((102.75 + 5 * stdev([102, 103.5, 102.5, 103, 102.75])) * MIB)
    assert later_step(trace, requests_of(trace), reserved_bytes=reserved, allocated_bytes=0) == LaterStep(0, 2 * 106 * MIB)


def test_where_nothing_is_left_cached_that_can_be_released_a_larger_step_needs_more() -> None:
    """All have segments of 102 MiB; one of 100.5 MiB and five standard deviations of 0.316 needs two of 104."""
    sizes = [int(each * MIB) for each in (100.1, 100.1, 100.3, 100.9, 100.5, 100.7)]
    trace = steps_of(*sizes)

    found = later_step(trace, requests_of(trace), reserved_bytes=204 * MIB, allocated_bytes=MIB)

    assert 4 * MIB <= found.more_bytes <= (4 + 412 / 64) * MIB
    assert found.more_bytes + found.cached_bytes == 208 * MIB


def test_a_larger_step_comes_beside_a_last_one_that_is_larger_than_all_before() -> None:
    """103.7 MiB and five standard deviations of 1.483 are 111.1 MiB."""
    trace = steps_of(*[int(each * MIB) for each in (100, 102, 104, 103, 103.5, 103.2, 106)])

    assert later_step(trace, requests_of(trace), reserved_bytes=reserved_of(trace), allocated_bytes=0) == LaterStep(0, 2 * 112 * MIB)


def test_under_other_settings_nothing_is_said_of_cached_blocks() -> None:
    """Expandable segments grow by what is asked for: what was recorded is not what the default allocator comes to."""
    trace = steps_of(*[int(each * MIB) for each in (100, 102, 103.5, 102.5, 103, 102.75)])

    assert later_step(trace, requests_of(trace), reserved_bytes=208 * MIB, allocated_bytes=7) == LaterStep(7)


def test_steps_that_ask_in_other_sequences_say_nothing_of_each_others_blocks() -> None:
    """Three are alike, and the last asks once more."""
    trace = steps_of(*[int(each * MIB) for each in (100, 102, 103.5, 102.5, 103)], extra=1)

    assert later_step(trace, requests_of(trace), reserved_bytes=reserved_of(trace), allocated_bytes=7) == LaterStep(7)


def test_a_program_that_releases_what_is_cached_caches_nothing_for_later() -> None:
    """As with `torch.cuda.empty_cache()` in each step."""
    trace = steps_of(*[int(each * MIB) for each in (100, 102, 103.5, 102.5, 103, 102.75)])
    requests = requests_of(trace)
    emptied = replace(requests, order=[*requests.order, EMPTY_CACHE])

    assert later_step(trace, emptied, reserved_bytes=reserved_of(trace), allocated_bytes=7) == LaterStep(7)


def kept_until_the_next(*sizes: int, is_freed_first: bool) -> MemoryTrace:
    """Steps of one block that is freed in the next one: before that makes its own, or after."""
    events, addresses = "a", [0]
    for number in range(1, len(sizes)):
        pair = [number - 1, number]
        events += "fa" if is_freed_first else "af"
        addresses += pair if is_freed_first else reversed(pair)
    asked = [sizes[address] for address in addresses]
    marks = [CountedMark(0, 0, 1, "forward"), *(CountedMark(number, number - 1, number + 1, "forward") for number in range(1, len(sizes)))]
    return make_trace(EventColumns(events, [address + 1 for address in addresses], asked, [0] * len(events)), marks=marks, notes={})


@pytest.mark.parametrize("is_freed_first", [True, False])
def test_what_a_step_keeps_is_freed_where_the_next_one_does(is_freed_first: bool) -> None:
    """Blocks of two steps are there together where the older one is freed late: two of the largest then need segments of their own."""
    trace = kept_until_the_next(*[int(each * MIB) for each in (100, 102, 104, 103, 103.5, 103.2, 106, 103)], is_freed_first=is_freed_first)

    more = later_step(trace, requests_of(trace), reserved_bytes=reserved_of(trace), allocated_bytes=0).cached_bytes

    assert more == 110 * MIB if is_freed_first else more >= 110 * MIB


ONE_SHAPE = [Batch(step, ((8, 16),), num_backwards=step - 1, epoch=1) for step in (1, 2, 3)]
ENDS = [StepEnd(0, 0, peak) for peak in (10, 30, 20, 40)]


def record_of(*marks: tuple[int, str]) -> RunRecord:
    """A program with so many phases."""
    counted = [CountedMark(0, 0, step, phase) for step, phase in marks]
    return RunRecord(gpu_name="GPU", torch="2.11.0", command=("train.py",), marks=tuple(counted))


@pytest.mark.parametrize(
    ("batches", "marks", "draws"),
    [
        pytest.param(ONE_SHAPE, [], [30, 20, 40], id="their values differ"),
        pytest.param([*ONE_SHAPE, Batch(4, ((8, 17),), num_backwards=3, epoch=1)], [], [], id="their shapes differ"),
        pytest.param([*ONE_SHAPE[:2], Batch(3, ((5, 16),), num_backwards=2, epoch=1)], [], [30, 40], id="the last of an epoch has fewer"),
        pytest.param(ONE_SHAPE, [(1, "evaluation"), (1, "forward")], [30, 20, 40], id="an evaluation before the first step"),
        pytest.param(ONE_SHAPE, [(1, "forward"), (3, "evaluation")], [], id="an evaluation between steps"),
    ],
)
def test_what_a_dataloader_and_an_evaluation_tell_more_of_is_no_draw(
    batches: list[Batch], marks: list[tuple[int, str]], draws: list[int]
) -> None:
    """Shapes are looked through for the largest; the values of batches that look alike are not."""
    assert peaks_of_draws(record_of(*marks), ENDS, batches) == draws
