"""The search for the largest batch by trial."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from memplan.batch_finder.trials import MOST_BATCH, Trial, largest_by_trial, largest_that_ran


def run_up_to(limit: int):
    return lambda size: Trial(size=size, problem=None if size <= limit else "out of memory")


@given(limit=st.integers(0, 5000), start=st.integers(1, 10_000))
@example(limit=MOST_BATCH, start=1)
def test_it_ends_where_one_runs_and_the_next_does_not(limit: int, start: int) -> None:
    """From wherever it begins; no size is tried twice."""
    trials, ended = largest_by_trial(run_up_to(limit), lambda size: size <= start, most_tries=300)

    sizes = [trial.size for trial in trials]
    assert ended == "found"
    assert len(sizes) == len(set(sizes))
    assert largest_that_ran(trials) == (limit or None)


@given(limit=st.integers(1, 10_000))
def test_a_start_that_is_right_takes_two_trials(limit: int) -> None:
    """That one, and the next."""
    trials, _ = largest_by_trial(run_up_to(limit), lambda size: size <= limit)

    assert [trial.size for trial in trials] == [limit, limit + 1]


@given(limit=st.integers(0, 5000), start=st.integers(1, 10_000), unit=st.integers(1, 32))
def test_sizes_are_multiples_of_the_unit(limit: int, start: int, unit: int) -> None:
    """A program that takes multiples of 8 is asked for no others."""
    trials, _ = largest_by_trial(run_up_to(limit), lambda size: size <= start, unit=unit, most_tries=300)

    assert all(trial.size % unit == 0 for trial in trials)
    assert largest_that_ran(trials) == (limit // unit * unit or None)


@given(fits=st.sets(st.integers(1, 64)), start=st.integers(1, 64), most_tries=st.integers(1, 10))
def test_what_failed_is_never_returned(fits: set[int], start: int, most_tries: int) -> None:
    """Whatever fits, in whatever order: it ran, it is below all that failed, and there are no more trials than allowed."""
    trials, _ = largest_by_trial(
        lambda size: Trial(size=size, problem=None if size in fits else "no"), lambda size: size <= start, most_tries=most_tries
    )

    found = largest_that_ran(trials)
    assert len(trials) <= most_tries
    assert found is None or (found in fits and all(trial.size > found for trial in trials if not trial.fits))


def test_a_maximum_that_is_known_ends_the_search_after_one_trial() -> None:
    """A data set of 64: a rehearsal saw 65 refused, and so memory is not what ends it."""
    trials, ended = largest_by_trial(run_up_to(1000), lambda size: size <= 64, refused={65, 128})

    assert ([trial.size for trial in trials], ended) == ([64], "refused")


def test_a_maximum_that_is_met_is_knowledge() -> None:
    """Nobody knew of it: what is refused is no larger, and no memory ran out."""

    def run(size: int) -> Trial:
        return Trial(size=size, problem="no" if size > 64 else None, is_refused=size > 64)

    trials, ended = largest_by_trial(run, lambda size: size <= 1, most_tries=40)

    assert (largest_that_ran(trials), ended) == (64, "refused")


def test_no_trial_begins_after_the_time() -> None:
    """A clock that says ten seconds more each time it is asked."""
    seconds = iter(range(0, 1000, 10))

    trials, ended = largest_by_trial(run_up_to(10**6), lambda size: size <= 1, most_seconds=25, clock=lambda: next(seconds))

    assert (len(trials), ended) == (2, "time")
