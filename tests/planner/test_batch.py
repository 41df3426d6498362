"""Micro-batch and accumulation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.planner.batch import choose_batch


def test_accumulation_makes_up_the_effective_batch() -> None:
    """45 would fit; of the divisors of 256 the largest below is 32."""
    choice = choose_batch(largest=45, target=256)

    assert (choice.micro_batch_size, choice.gradient_accumulation_steps, choice.effective_batch_size) == (32, 8, 256)
    assert "exactly" in choice.rule


def test_ranks_share_the_effective_batch() -> None:
    """Three GPUs cannot meet 256 exactly: 258 is nearest from above, and 43 the largest micro-batch that meets it."""
    choice = choose_batch(largest=64, target=256, data_parallel_size=3)

    assert (choice.micro_batch_size, choice.gradient_accumulation_steps, choice.effective_batch_size) == (43, 2, 258)
    assert "nearest" in choice.rule


@given(largest=st.integers(1, 200), target=st.integers(1, 500), ranks=st.integers(1, 9))
def test_no_choice_is_nearer_and_none_as_near_is_larger(largest: int, target: int, ranks: int) -> None:
    """The rule of DESIGN, section 8, against every micro-batch that fits: never below the target."""
    choice = choose_batch(largest=largest, target=target, data_parallel_size=ranks)
    excess = {micro: -(-target // (micro * ranks)) * micro * ranks - target for micro in range(1, largest + 1)}

    assert choice.effective_batch_size - target == min(excess.values()) >= 0
    assert choice.micro_batch_size == max(micro for micro, over in excess.items() if over == min(excess.values()))


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
