"""The largest value that fits."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from memplan.planner.search import largest_fitting

BOUNDS = st.integers(-50, 2000)


@given(low=BOUNDS, high=BOUNDS, limit=BOUNDS)
def test_it_is_the_largest_and_none_where_nothing_fits(low: int, high: int, limit: int) -> None:
    """Against the definition, for every range and every limit."""
    expected = max((value for value in range(low, high + 1) if value <= limit), default=None)

    assert largest_fitting(lambda value: value <= limit, low=low, high=high) == expected


@given(limit=st.integers(1, 100_000))
def test_it_asks_about_twice_the_logarithm(limit: int) -> None:
    """A rehearsal may stand behind every question."""
    asked: list[int] = []

    largest_fitting(lambda value: not asked.append(value) and value <= limit, low=1, high=10**9)  # type: ignore[func-returns-value]

    assert len(asked) <= 2 * limit.bit_length() + 2
    assert max(asked) <= 4 * limit


@given(low=BOUNDS, high=BOUNDS, limit=BOUNDS, guess=BOUNDS)
@example(low=-48, high=253, limit=293, guess=-22)
@example(low=0, high=9, limit=5, guess=0)
def test_a_rough_guess_changes_the_way_and_not_the_answer(low: int, high: int, limit: int, guess: int) -> None:
    """However wrong it is, and whatever the sign of the values: each question leaves less to ask about."""
    expected = largest_fitting(lambda value: value <= limit, low=low, high=high)

    asked: set[int] = set()

    def fits(value: int) -> bool:
        assert value in range(low, high + 1)
        assert value not in asked
        asked.add(value)
        return value <= limit

    assert largest_fitting(fits, low=low, high=high, rough=lambda value: value <= guess) == expected


@given(limit=st.integers(1, 100_000), error=st.integers(-3, 3))
def test_a_near_guess_spares_most_questions(limit: int, error: int) -> None:
    """Off by three or less: six questions at most."""
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= limit

    assert largest_fitting(fits, low=1, high=10**9, rough=lambda value: value <= limit + error) == limit
    assert len(asked) <= 6
