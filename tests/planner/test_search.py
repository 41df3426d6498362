"""The largest size that fits, of those that a program takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memplan.planner.search import Outcome, largest_accepted, largest_fitting

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


@given(low=BOUNDS, high=BOUNDS, limit=BOUNDS, end=BOUNDS)
@example(low=-48, high=253, limit=293, end=-22)
@example(low=0, high=9, limit=5, end=0)
def test_a_guess_changes_the_way_and_not_the_answer(low: int, high: int, limit: int, end: int) -> None:
    """However wrong it is, and whatever the sign of the values: each question leaves less to ask about."""
    expected = largest_fitting(lambda value: value <= limit, low=low, high=high)

    asked: set[int] = set()

    def fits(value: int) -> bool:
        assert value in range(low, high + 1)
        assert value not in asked
        asked.add(value)
        return value <= limit

    assert largest_fitting(fits, low=low, high=high, guess=lambda value: value <= end) == expected


@given(limit=st.integers(1, 100_000), error=st.integers(-3, 3))
def test_a_near_guess_spares_most_questions(limit: int, error: int) -> None:
    """Off by three or less: six questions at most."""
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= limit

    assert largest_fitting(fits, low=1, high=10**9, guess=lambda value: value <= limit + error) == limit
    assert len(asked) <= 6


def test_a_guess_that_is_right_about_the_end_is_believed() -> None:
    """It put the end at 19 first and sees then that 20 fits, and 21 does not: no question leaps over that."""
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 20

    def guess(size: int) -> bool:
        return size <= (20 if 19 in asked else 19 if 2 in asked else 0)

    assert largest_fitting(fits, low=1, high=65_536, guess=guess, leaps=True) == 20
    assert asked == [1, 2, 19, 20, 21]


class Program:
    """Runs sizes up to *limit* out of memory, and of those only what it *takes*; no size may be asked about twice."""

    def __init__(self, takes: Callable[[int], bool], limit: int) -> None:
        self.takes, self.limit = takes, limit
        self.asked: list[int] = []

    def __call__(self, size: int) -> Outcome:
        assert size not in self.asked
        self.asked.append(size)
        if not self.takes(size):
            return Outcome.REFUSED
        return Outcome.FITS if size <= self.limit else Outcome.TOO_LARGE


KINDS: dict[str, Callable[[int], bool]] = {
    "any": lambda size: size > 0,
    "no single sample": lambda size: size > 1,
    "multiples of 8": lambda size: size % 8 == 0,
    "a data set of 64": lambda size: size <= 64,
    "eights of a data set of 64": lambda size: size % 8 == 0 and size <= 64,
    "what divides 64": lambda size: 64 % size == 0,
    "powers of two": lambda size: size & (size - 1) == 0,
}


@pytest.mark.parametrize("kind", KINDS)
@given(limit=st.integers(0, 500), end=st.one_of(st.none(), st.integers(1, 1000)))
def test_what_a_program_refuses_is_knowledge(kind: str, limit: int, end: int | None) -> None:
    """The largest that it takes and that fits, wherever the search begins; and whether a refusal or memory is what ended it."""
    program = Program(KINDS[kind], limit)

    found = largest_accepted(program, high=2**20, guess=None if end is None else lambda size: size <= end)

    expected = max((size for size in range(1, 501) if program.takes(size) and size <= limit), default=None)
    assert found.size == expected
    assert found.size is None or found.size % found.unit == 0
    if kind == "a data set of 64" and limit >= 64:
        assert found.is_refused_beyond
    if kind in ("any", "no single sample", "multiples of 8"):
        assert not found.is_refused_beyond
    assert len(program.asked) <= 60  # the guess is wrong, and never learns


@pytest.mark.parametrize(("kind", "limit", "num_asked"), [("powers of two", 43, 5), ("powers of two", 100, 6), ("what divides 64", 60, 6)])
def test_what_takes_powers_of_two_is_found_in_a_few_questions(kind: str, limit: int, num_asked: int) -> None:
    """The guess, one, the power below the guess, and what is beside and beyond it: a program may compile for minutes at each."""
    program = Program(KINDS[kind], limit)

    found = largest_accepted(program, high=256, guess=lambda size: size <= limit, leaps=True)

    assert found.size == max(size for size in range(1, limit) if program.takes(size))
    assert len(program.asked) == num_asked


@pytest.mark.parametrize(("present", "limit", "asked"), [(64, 62, [62, 32, 48, 33]), (16, 150, [150, 128, 192, 129, 256])])
def test_a_power_of_two_that_is_taken_leads_to_the_others(present: int, limit: int, asked: list[int]) -> None:
    """The smallest is not asked about: it may have the most steps of accumulation."""
    program = Program(KINDS["powers of two"], limit)
    known = {present: Outcome.FITS if present <= limit else Outcome.TOO_LARGE}

    found = largest_accepted(program, high=1000, guess=lambda size: size <= limit, leaps=True, known=known)

    assert found.size == max(size for size in range(1, limit) if program.takes(size))
    assert program.asked == asked


@pytest.mark.parametrize("kind", KINDS)
@given(limit=st.integers(0, 500), end=st.integers(1, 1000), present=st.integers(1, 600))
def test_what_is_known_changes_the_way_and_not_the_answer(kind: str, limit: int, end: int, present: int) -> None:
    """Whichever size the program has now."""
    program = Program(KINDS[kind], limit)
    known = {} if not program.takes(present) else {present: Outcome.FITS if present <= limit else Outcome.TOO_LARGE}

    found = largest_accepted(program, high=2**20, guess=lambda size: size <= end, leaps=True, known=known)

    assert found.size == max((size for size in range(1, 501) if program.takes(size) and size <= limit), default=None)
    assert present not in known or present not in program.asked


def test_what_divides_96_is_found_beside_the_powers_of_two() -> None:
    """Half as much again is worth one question."""
    program = Program(lambda size: 96 % size == 0, 60)

    assert largest_accepted(program, high=256, guess=lambda size: size <= 60, leaps=True)[:2] == (48, 16)


def test_a_size_that_is_taken_tells_of_units_that_are_no_powers_of_two() -> None:
    """Multiples of 6, known from the program's own 48."""
    program = Program(lambda size: size % 6 == 0, 100)

    assert largest_accepted(program, high=1000, guess=lambda size: size <= 48)[:2] == (96, 6)


def test_what_is_known_is_not_asked_about() -> None:
    """A maximum that a rehearsal saw: one question remains."""
    program = Program(lambda size: size <= 64, 1000)

    found = largest_accepted(program, high=2**20, guess=lambda size: size <= 64, known={65: Outcome.REFUSED, 128: Outcome.REFUSED})

    assert (found.size, found.is_refused_beyond, program.asked) == (64, True, [64])


def test_a_program_that_takes_nothing_has_no_size() -> None:
    """Whatever is asked."""
    assert largest_accepted(Program(lambda size: size < 0, 100), high=1000).size is None


@pytest.mark.parametrize("end", [917, 905, 890, 880])
def test_a_guess_that_creeps_down_is_followed_in_strides(end: int) -> None:
    """Each time it puts the end a little lower than what did not fit: the end is near, and half of the way is far below."""
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= end

    def creeping(size: int) -> bool:
        return size <= (2 if len(asked) < 2 else min((known for known in asked if known > end), default=920) - 2)

    assert largest_fitting(fits, low=1, high=65_536, guess=creeping, leaps=True) == end
    assert len(asked) <= 15  # half of the way each time: 18 to 21
    assert min(size for size in asked if size > 3) > end - 32


@example(end=26_806, slope=2)
@given(end=st.integers(1, 60_000), slope=st.integers(1, 400))
def test_a_guess_that_creeps_costs_few_questions(end: int, slope: int) -> None:
    """Memory rises in steps, and the line through two sizes of one step says that a few more fit: then half of the way is tried."""
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= end

    def creeping(size: int) -> bool:
        return size <= max((known for known in asked if known <= end), default=0) + slope

    assert largest_fitting(fits, low=1, high=65_536, guess=creeping, leaps=True) == end
    assert len(asked) <= 3 * 17 + 17


def test_a_limit_is_no_refusal() -> None:
    """A program that takes no more samples from some size on: the search goes down from there, and does not look for what it takes."""
    refused: list[int] = []

    def ask(size: int) -> Outcome:
        refused.append(size)
        return Outcome.FITS if size <= 50 else Outcome.TOO_LARGE

    assert largest_accepted(ask, high=65_536, guess=lambda size: size <= 60, leaps=True).size == 50
    assert len(refused) <= 12
