"""The one quick guess."""

from __future__ import annotations

import pytest

from memplan.estimators.interpolation import Line, PeakLine, line_through, peak_of_phases


@pytest.mark.parametrize(("size", "bytes_"), [(1, 1100), (8, 1800), (4, 1400), (16, 2600), (0, 1000)])
def test_between_and_beyond_two_sizes_it_is_their_line(size: int, bytes_: int) -> None:
    """1000 bytes and 100 a sample, known at 1 and 8."""
    assert PeakLine({1: 1100, 8: 1800}).at(size) == bytes_


def test_one_size_or_none_tells_nothing() -> None:
    """But of itself."""
    assert [PeakLine().at(3), PeakLine({4: 5}).at(3), PeakLine({4: 5}).at(4)] == [None, None, 5]


def test_neighbours_make_no_line() -> None:
    """100 and 101 share a segment: the line is that through 50, which is apart."""
    assert PeakLine({50: 6000, 100: 11_000, 101: 11_000}).at(150) == 15_803


def test_a_larger_size_that_takes_less_tells_nothing() -> None:
    """A threshold lies between them."""
    assert PeakLine({10: 5000, 20: 4000}).at(30) is None


def test_what_is_learnt_counts() -> None:
    """The nearest are taken."""
    line = PeakLine({1: 100, 2: 200})
    line.learn(4, 1000)

    assert line.at(5) == 1400


def test_between_sizes_that_are_far_apart_it_is_the_line_through_both() -> None:
    """2 and 3 say little of 400 where 3000 is known; 100 and 200 say of 300 what is near, and 1000 of what is beyond."""
    assert [line_through([2, 3, 3000], 400), line_through([100, 200, 1000], 300)] == [Line(3, 3000), Line(100, 200)]
    assert line_through([100, 200, 1000], 2000) == Line(200, 1000)
    assert line_through([7], 8) is None


def test_the_phase_that_is_highest_in_small_steps_is_not_that_of_a_large_one() -> None:
    """The optimizer's takes 1000 whatever the batch, the backward 10 a sample; one that only the larger size has says nothing."""
    low = {(1, "backward"): 20, (1, "optimizer"): 1000}
    high = {(1, "backward"): 30, (1, "optimizer"): 1000, (2, "backward"): 5}

    assert [peak_of_phases(Line(2, 3), low, high, size=size) for size in (4, 500)] == [1000, 5000]
    assert peak_of_phases(Line(2, 3), low, {}, size=4) is None
