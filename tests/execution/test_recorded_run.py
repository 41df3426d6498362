"""What is said of a program that left no report."""

from __future__ import annotations

import signal

import pytest

from memplan.execution.recorded_run import nothing_seen


@pytest.mark.parametrize(("ended_by", "has_advice"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGABRT, True)])
def test_who_ends_a_program_needs_no_advice_to_end_it_sooner(ended_by: signal.Signals, *, has_advice: bool) -> None:
    """What ends by itself may do so later than its first steps."""
    error = nothing_seen(-ended_by)

    assert f"ended by {ended_by.name} before it reported its memory" in error.message
    assert (error.hint is not None) == has_advice
