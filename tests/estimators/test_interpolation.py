"""The one quick guess."""

from __future__ import annotations

import pytest

from memplan.estimators.interpolation import PeakLine


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
