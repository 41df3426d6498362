"""Micro-batch and accumulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.planner.batch import choose_batch


def test_accumulation_makes_up_the_effective_batch() -> None:
    """45 would fit; of the divisors of 256 the largest below is 32, which is more than half of 45."""
    choice = choose_batch(largest=45, target=256)

    assert (choice.micro_batch_size, choice.gradient_accumulation_steps, choice.effective_batch_size) == (32, 8, 256)
    assert "exactly" in choice.rule


@pytest.mark.parametrize(
    ("target", "largest", "chosen", "alternative"),
    [
        (257, 62, (52, 5, 260), (1, 257, 257, "target_tolerance=0")),  # DESIGN, section 8
        (256, 3, (2, 128, 256), (3, 86, 258, "target_tolerance=0.05")),  # DESIGN, section 8
        (37, 37, (37, 1, 37), None),
        (7, 4, (1, 7, 7), (4, 2, 8, "target_effective_batch_size=8")),  # nothing is within 5% of 7 but 7 itself
        (256, 64, (64, 4, 256), None),
    ],
)
def test_the_rule_and_what_it_offers_instead(
    target: int, largest: int, chosen: tuple[int, int, int], alternative: tuple[int, int, int, str] | None
) -> None:
    """An exact batch of at least half the largest that fits; else few steps and a little more; the other one is named with its option."""
    choice = choose_batch(largest=largest, target=target)

    assert choice[:3] == chosen
    assert choice.alternative == alternative


def test_a_tolerance_always_takes_the_fewest_steps() -> None:
    """3 x 86 = 258 is within 5% of 256; within 0% only 2 x 128 is."""
    assert choose_batch(largest=3, target=256, tolerance=0.05)[:3] == (3, 86, 258)
    assert choose_batch(largest=3, target=256, tolerance=0.0)[:3] == (2, 128, 256)
    assert choose_batch(largest=62, target=257, tolerance=0.0)[:3] == (1, 257, 257)


def test_ranks_share_the_effective_batch() -> None:
    """Three GPUs cannot meet 256 exactly: 2 steps of 43 on each are 258."""
    choice = choose_batch(largest=64, target=256, data_parallel_size=3)

    assert choice[:3] == (43, 2, 258)
    assert "at most 5% above" in choice.rule


def test_where_nothing_is_within_the_tolerance_the_nearest_is_taken() -> None:
    """Eight GPUs with one sample each make 8 or 16 of 10."""
    choice = choose_batch(largest=4, target=10, data_parallel_size=8)

    assert choice[:3] == (2, 1, 16)
    assert "nearest" in choice.rule


def test_a_program_that_takes_even_batches_gets_and_is_offered_no_others() -> None:
    """61 x 17 = 1037 would be nearer to 1024 than 62 x 17 = 1054."""
    exact, near = choose_batch(largest=62, target=1024, unit=2), choose_batch(largest=62, target=1024, unit=2, tolerance=0.05)

    assert exact[:3] == (32, 32, 1024)
    assert exact.alternative == (62, 17, 1054, "target_tolerance=0.05")
    assert near[:3] == (62, 17, 1054)
    assert choose_batch(largest=64, target=1000, unit=8, pinned_accumulation=20)[:3] == (56, 20, 1120)


@given(
    largest=st.integers(1, 2000),
    target=st.integers(1, 500),
    unit=st.integers(1, 9),
    tolerance=st.sampled_from([None, 0.0, 0.05]),
    accumulation=st.sampled_from([None, None, 1, 3]),
)
def test_what_is_chosen_and_offered_is_a_multiple_of_what_the_program_takes(
    largest: int, target: int, unit: int, tolerance: float | None, accumulation: int | None
) -> None:
    """And meets the target, unless its accumulation is pinned; what is below the unit is what a program took all the same."""
    choice = choose_batch(largest=largest, target=target, unit=unit, tolerance=tolerance, pinned_accumulation=accumulation)

    for found in filter(None, (choice, choice.alternative)):
        assert found.micro_batch_size % unit == 0 or largest < unit
        assert found.micro_batch_size <= largest
        assert found.micro_batch_size * found.gradient_accumulation_steps == found.effective_batch_size
        assert found.effective_batch_size >= target or accumulation is not None


sizes = {"largest": st.integers(1, 200), "target": st.integers(1, 500), "ranks": st.integers(1, 9)}


@given(**sizes)
def test_the_effective_batch_is_never_below_the_target(largest: int, target: int, ranks: int) -> None:
    """And the micro-batch is one that fits."""
    choice = choose_batch(largest=largest, target=target, data_parallel_size=ranks)

    assert choice.effective_batch_size == choice.micro_batch_size * choice.gradient_accumulation_steps * ranks >= target
    assert 1 <= choice.micro_batch_size <= largest


@given(**sizes)
def test_the_rule_against_every_micro_batch_that_fits(largest: int, target: int, ranks: int) -> None:
    """DESIGN, section 8, word by word: exact from half of the largest on, else the fewest steps within 5%, the smallest excess of those."""
    choice = choose_batch(largest=largest, target=target, data_parallel_size=ranks)
    every = [(micro, steps, micro * steps * ranks) for micro in range(1, largest + 1) for steps in range(1, target + 1)]
    met = [each for each in every if each[2] >= target]
    exact = max((each[0] for each in met if each[2] == target), default=0)
    near = [each for each in met if each[2] <= target * 1.05]

    if exact * 2 >= largest:
        assert (choice.micro_batch_size, choice.effective_batch_size) == (exact, target)
    elif near:
        fewest = min(each[1] for each in near)
        assert choice.gradient_accumulation_steps == fewest
        assert choice.effective_batch_size == min(each[2] for each in near if each[1] == fewest)
    else:
        assert choice.effective_batch_size == min(each[2] for each in met)


@given(**sizes)
def test_an_alternative_takes_fewer_steps_or_is_exact(largest: int, target: int, ranks: int) -> None:
    """And its argument leads to it."""
    choice = choose_batch(largest=largest, target=target, data_parallel_size=ranks)
    offered = choice.alternative
    if offered is None:
        return
    option, _, value = offered.argument.partition("=")
    if option == "target_tolerance":
        again = choose_batch(largest=largest, target=target, data_parallel_size=ranks, tolerance=float(value))
    else:
        again = choose_batch(largest=largest, target=int(value), data_parallel_size=ranks)

    assert again[:3] == offered[:3]
    assert offered.gradient_accumulation_steps < choice.gradient_accumulation_steps or offered.effective_batch_size == target


def test_a_pinned_micro_batch_stays() -> None:
    """Accumulation does what it can: 6 x 48 is above 256."""
    choice = choose_batch(largest=100, target=256, pinned_micro_batch=48)

    assert (choice.micro_batch_size, choice.gradient_accumulation_steps, choice.effective_batch_size) == (48, 6, 288)


def test_a_pinned_accumulation_stays() -> None:
    """The micro-batch makes up the target where it fits, and is the largest that fits where it does not."""
    assert choose_batch(largest=100, target=256, pinned_accumulation=4).micro_batch_size == 64

    limited = choose_batch(largest=50, target=256, pinned_accumulation=4)
    assert (limited.micro_batch_size, limited.effective_batch_size) == (50, 200)
    assert "below" in limited.rule


def test_both_pinned_are_told_to_go_below_the_target() -> None:
    """45 x 5 = 225, as the user said."""
    choice = choose_batch(largest=50, target=256, pinned_micro_batch=45, pinned_accumulation=5)

    assert choice.effective_batch_size == 225
