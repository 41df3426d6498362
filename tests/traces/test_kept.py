"""What is kept from step to step."""

from __future__ import annotations

from memplan.traces.kept import StepEnd, step_ends
from memplan.traces.trace import CountedMark, EventColumns, MemoryTrace, Note, make_trace

UNIT = 512


def trace(events: str, addresses: list[int], marks: list[CountedMark], notes: dict[str, list[Note]] | None = None) -> MemoryTrace:
    """A trace whose allocations are of one unit each."""
    columns = EventColumns(events, addresses, [UNIT] * len(events), [0] * len(events))
    return make_trace(columns, marks=marks, notes=notes or {})


STEPS = [CountedMark(1, 0, 1, "forward"), CountedMark(3, 1, 2, "forward"), CountedMark(5, 2, 3, "forward")]
"""A block of the build; then in each of three steps two that are allocated, and one of them is freed."""


def test_blocks_of_earlier_steps_are_kept_and_those_of_the_build_are_not() -> None:
    """Each step leaves one; its own is not counted at its end, and at its peak it has two."""
    ends = step_ends(trace("a" + "aaf" * 3, [1, 2, 3, 3, 4, 5, 5, 6, 7, 7], STEPS))

    assert ends == [StepEnd(0, 0, 3 * UNIT), StepEnd(UNIT, 1, 4 * UNIT), StepEnd(2 * UNIT, 2, 5 * UNIT)]


def test_what_lasts_is_not_counted_whenever_it_was_made() -> None:
    """The block that the second step leaves is an optimizer's state."""
    ends = step_ends(trace("a" + "aaf" * 3, [1, 2, 3, 3, 4, 5, 5, 6, 7, 7], STEPS, {"optimizer_state": [Note(4, 5)]}))

    assert [end.num_kept for end in ends] == [0, 1, 1]


def test_a_trace_without_steps_has_none() -> None:
    """As that of a program that only built its model."""
    assert step_ends(trace("a", [1], [])) == []
