"""Sizes as polynomials, found from a few rehearsals, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.allocator.replay import replay_by_default
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.traces.parametric import Sweep, fit
from memplan.traces.requests import Requests, requests_of
from tests.conftest import RehearserOf

STEPS = Path(__file__).parents[1] / "child" / "steps.py"


def asked(*sizes: int) -> Requests:
    return Requests(range(1, len(sizes) + 1), sizes, [0] * len(sizes))


@given(
    coefficients=st.tuples(*[st.integers(0, 10**9)] * 3),
    points=st.lists(st.integers(1, 512), min_size=4, max_size=6, unique=True),
    value=st.integers(1, 4096),
)
def test_a_polynomial_in_one_variable_is_found_exactly(coefficients: tuple[int, int, int], points: list[int], value: int) -> None:
    """Constant, linear or quadratic: four points settle it, and it holds anywhere, to the byte."""
    constant, slope, square = coefficients

    def size(batch: int) -> int:
        return constant + slope * batch + square * batch * batch

    trace = fit({(batch,): asked(size(batch), 512) for batch in points})

    assert trace is not None
    assert trace.is_exact
    assert trace.sizes_at((value,)) == [size(value), 512]


@given(coefficients=st.tuples(*[st.integers(0, 10**6)] * 6), batch=st.integers(1, 300), negatives=st.integers(0, 64))
def test_batch_and_negatives_are_found_together(coefficients: tuple[int, ...], batch: int, negatives: int) -> None:
    """1, b, n, b², bn, n²: an item for each negative of each anchor, and a matrix of all with all."""

    def size(b: int, n: int) -> int:
        return sum(factor * term for factor, term in zip(coefficients, (1, b, n, b * b, b * n, n * n), strict=True))

    trace = fit({point: asked(size(*point)) for point in [(1, 0), (2, 0), (5, 0), (1, 3), (1, 7), (4, 4), (3, 9)]})

    assert trace is not None
    assert trace.sizes_at((batch, negatives)) == [size(batch, negatives)]


def test_a_product_alone_needs_few_points() -> None:
    """Three points are enough for a multiple of batch × negatives, and for what does not vary."""
    trace = fit({(b, n): asked(4096 * b * n, 77) for b, n in [(1, 2), (2, 2), (3, 5)]})

    assert trace is not None
    assert trace.is_exact
    assert trace.sizes_at((10, 10)) == [409600, 77]


def test_sequences_that_differ_have_no_trace() -> None:
    assert fit({(1,): asked(1), (2,): asked(1, 2)}) is None


def test_two_points_bear_out_a_multiple_and_no_more() -> None:
    """A line through two points goes through any two: it is in doubt, and so it is said."""
    trace = fit({(1,): asked(100, 10), (3,): asked(300, 20)})

    assert trace is not None
    assert not trace.is_exact
    assert [polynomial is None for polynomial in trace.polynomials] == [False, True]


def test_a_temporary_that_fills_the_card_grows_no_further() -> None:
    """A reduction's buffer: a multiple of the batch up to a limit."""
    trace = fit({(batch,): asked(min(100 * batch, 1000)) for batch in (2, 4, 20, 40)})

    assert trace is not None
    assert trace.is_exact
    assert [trace.sizes_at((batch,)) for batch in (9, 10, 11, 30)] == [[900], [1000], [1000], [1000]]


def test_what_rounds_up_is_near_the_line_between_its_neighbours() -> None:
    """A multiple of 16 above 1000·batch: no polynomial, and the doubt is its rounding."""

    def size(batch: int) -> int:
        return -(-1001 * batch // 16) * 16

    trace = fit({(batch,): asked(size(batch)) for batch in (10, 20, 33, 47)})

    assert trace is not None
    assert not trace.is_exact
    assert 0 < trace.doubt_bytes <= 32
    assert abs(trace.sizes_at((25,))[0] - size(25)) <= 32


def sweep_of() -> tuple[Sweep, list[int]]:
    """A sweep over a made-up program that changes its sequence above 40; the values it was rehearsed at."""
    rehearsed: list[int] = []

    def rehearse(batch: int) -> Requests:
        rehearsed.append(batch)
        return asked(1000 * batch, 10**6) if batch <= 40 else asked(1000 * batch, 10**6, 5 * batch)

    return Sweep(rehearse), rehearsed


def test_between_two_of_one_sequence_everything_is_worked_out() -> None:
    sweep, rehearsed = sweep_of()

    found = [sweep.at(batch, low=1, high=40)[1] for batch in (5, 13, 39)]

    assert found == [[5000, 10**6], [13000, 10**6], [39000, 10**6]]
    assert len(rehearsed) <= 3


def test_a_threshold_is_found_where_an_answer_depends_on_it() -> None:
    """At 3 and 60 nothing is asked of the threshold; the two sides of it are told apart to the neighbour."""
    sweep, rehearsed = sweep_of()
    sweep.at(3, low=1, high=64)
    sweep.at(60, low=1, high=64)
    before = len(rehearsed)

    assert [len(sweep.at(batch, low=1, high=64)[1]) for batch in (40, 41)] == [2, 3]
    assert before <= 6
    assert len(rehearsed) <= 13


@pytest.mark.parametrize("name", ["t4", "a100-40"])
def test_a_real_step_is_worked_out_to_the_byte(rehearser_of: RehearserOf, name: str) -> None:
    """An MLP in its batch: three rehearsals say what five others reserve."""
    card = find_gpu(name).model_copy(update={"total_memory_bytes": UNLIMITED_BYTES})
    rehearser = rehearser_of(f"{STEPS}:mlp")

    def rehearse(batch: int) -> Requests:
        trace = rehearser.rehearse(gpu=card, values={"batch": batch}).trace
        assert trace is not None
        return requests_of(trace)

    sweep = Sweep(rehearse)
    for batch in (1024, 1500, 2500, 3333, 4000):
        requests, sizes = sweep.at(batch, low=1000, high=4096)
        worked_out = replay_by_default(requests, sizes=sizes)
        real = rehearser.rehearse(gpu=card, values={"batch": batch})

        assert worked_out.peak_reserved_bytes == real.peak_reserved_bytes
        assert worked_out.peak_allocated_bytes == real.peak_allocated_bytes
    assert len(sweep.rehearsed) <= 4
