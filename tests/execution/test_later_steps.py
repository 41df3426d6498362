"""What a later step may take more, where batches are draws."""

from __future__ import annotations

import random
from statistics import fmean, stdev

import pytest

from memplan.execution.later_steps import STANDARD_DEVIATIONS, later_bytes


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


def test_where_steps_differ_widely_a_quarter_is_the_most() -> None:
    """Texts of one length each: the longest is soon there."""
    assert later_bytes([100, 500, 300, 200, 400]) == 125


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([512, 512, 512, 512, 512], id="batches of fixed length"),
        pytest.param([100, 500, 100, 500, 100, 500], id="a generator and a discriminator in turn"),
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
