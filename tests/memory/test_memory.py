"""Breakdown, range and budget."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryRange


def test_allocated_and_reserved_are_parts_of_the_whole() -> None:
    """Allocated has neither slack nor context, reserved no context."""
    breakdown = MemoryBreakdown(parameters_bytes=10, activations_bytes=5, allocator_slack_bytes=3, cuda_context_bytes=2)

    assert (breakdown.allocated_bytes, breakdown.reserved_bytes, breakdown.total_bytes) == (15, 18, 20)


def test_a_range_is_in_order() -> None:
    """Low, expected, high."""
    with pytest.raises(ValidationError, match="not in order: 3 <= 2 <= 4"):
        MemoryRange(low_bytes=3, expected_bytes=2, high_bytes=4)


def test_the_high_end_has_to_fit_into_what_others_leave() -> None:
    """1000 bytes, 200 taken, a tenth left free: 720 are the budget."""
    budget = MemoryBudget(total_bytes=1000, others_used_bytes=200, margin=0.1)
    used = MemoryRange(low_bytes=600, expected_bytes=700, high_bytes=730)

    assert budget.budget_bytes == 720
    assert not budget.fits(used)
    assert budget.missing_bytes(used) == 10
    assert budget.missing_bytes(MemoryRange(low_bytes=1, expected_bytes=1, high_bytes=1)) == 0


def test_a_model_of_a_program_leaves_room_for_what_the_program_may_take_more() -> None:
    """900 bytes of 1000 are the budget; with 12.5% more a step of 800 is within it, and one of 801 is not."""
    budget = MemoryBudget(total_bytes=1000, margin=0.1, model_error=0.125)

    assert budget.budget_bytes == 800
