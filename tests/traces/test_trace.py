"""Traces: which allocation a note means, what lay there at the peak, and in which phase that was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.traces.trace import (
    CATEGORIES,
    Block,
    CountedMark,
    EventColumns,
    MemoryTrace,
    Note,
    allocation_of,
    allocations_by_address,
    bytes_by_category,
    make_trace,
)

UNIT = 512
Event = tuple[str, int, int]

EVENTS: list[Event] = [
    ("a", 1, 10 * UNIT), ("a", 2, 20 * UNIT), ("f", 1, 0), ("a", 1, 25 * UNIT),
    ("a", 3, 5 * UNIT), ("f", 2, 0), ("f", 3, 0), ("a", 4, 15 * UNIT),
]  # fmt: skip


def columns(events: list[Event]) -> EventColumns:
    return EventColumns(
        actions="".join(event[0] for event in events),
        addresses=[event[1] for event in events],
        sizes=[event[2] for event in events],
        streams=[0 for _ in events],
    )


def trace(events: list[Event], marks: tuple[tuple[int, int, int, str], ...] = (), **notes: list[tuple[int, int]]) -> MemoryTrace:
    return make_trace(
        columns(events),
        marks=[CountedMark(*mark) for mark in marks],
        notes={name: [Note(*note) for note in found] for name, found in notes.items()},
    )


def test_the_peak_is_the_highest_moment() -> None:
    """10 + 20, then 25 + 20 + 5 = 50, then 25 + 15: the middle one."""
    position, blocks = trace(EVENTS).peak()

    assert position == 4
    assert {address: (block.number, block.size_bytes) for address, block in blocks.items()} == {
        2: (2, 20 * UNIT),
        1: (3, 25 * UNIT),
        3: (4, 5 * UNIT),
    }


def test_a_peak_at_the_end_counts() -> None:
    """Nothing is freed behind it."""
    assert trace([("a", 1, 10), ("a", 2, 1)]).peak()[1].keys() == {1, 2}


def test_what_is_alive_from_an_event_on_counts_what_was_there_before() -> None:
    """25 + 20 + 5 at event 4, of which 25 are left at event 7, when 15 come."""
    assert [trace(EVENTS).allocated_from(position) // UNIT for position in (0, 5, 7)] == [50, 50, 40]


def test_each_phase_of_each_step_has_a_peak_of_its_own() -> None:
    """What is held when it begins counts; what the build holds is in it, and has none itself."""
    sizes = [("a", 1, 10), ("a", 2, 20), ("f", 2, 20), ("a", 3, 5), ("f", 3, 5), ("a", 4, 1)]
    events = [(action, address, size * UNIT) for action, address, size in sizes]
    marks = [(0, 0, 0, "build"), (1, 0, 1, "forward"), (2, 1, 1, "backward"), (3, 2, 1, "optimizer"), (4, 2, 2, "forward")]

    found = trace(events, marks=tuple(marks)).peaks_of_phases()

    assert {phase: peak // UNIT for phase, peak in found.items()} == {
        (1, "forward"): 30,
        (1, "backward"): 15,
        (1, "optimizer"): 11,
    }


def test_only_moments_behind_the_first_allocation_count() -> None:
    """As for the step that is looked at closely: what it found alive counts, what was before does not."""
    assert trace(EVENTS).peak(first_allocation=4)[1].keys() == {1, 4}


def test_sizes_count_as_the_allocator_rounds_them() -> None:
    """One byte is one unit of 512."""
    assert bytes_by_category([Block(1, 1, "activations"), Block(2, 513, "parameters")]) == dict.fromkeys(CATEGORIES, 0) | {
        "activations": UNIT,
        "parameters": 2 * UNIT,
    }


def test_an_address_that_is_used_again_is_another_allocation() -> None:
    """Which one lay there is told by how many allocations there had been."""
    numbers = allocations_by_address(trace(EVENTS), [1, 3, 7])

    assert numbers == {1: [1, 3], 3: [4], 7: []}
    assert [allocation_of(numbers, Note(1, count)) for count in (0, 1, 2, 3, 9)] == [None, 1, 1, 3, 3]
    assert allocation_of(numbers, Note(99, 3)) is None


def test_notes_say_what_an_allocation_was_for_and_the_first_category_wins() -> None:
    """Address 1 held a gradient first and a weight later; address 2 is claimed twice."""
    seen = trace(EVENTS, gradients=[(1, 2), (2, 2)], parameters=[(1, 5), (2, 2)])

    assert [CATEGORIES[purpose] for purpose in seen.purposes] == ["gradients", "parameters", "parameters", "activations", "activations"]


def test_what_an_optimizer_allocates_and_nobody_claims_is_its_workspace() -> None:
    """The second and third allocation are made while it steps; the third is its state."""
    marks = ((1, 0, 1, "optimizer"), (3, 1, 1, "forward"))

    seen = trace(EVENTS, marks, optimizer_state=[(1, 3)])

    assert [CATEGORIES[purpose] for purpose in seen.purposes][1:4] == ["workspaces", "optimizer_state", "activations"]
    assert [seen.phase_at(position).phase for position in range(5)] == ["build", "optimizer", "optimizer", "optimizer", "forward"]


def test_an_odd_size_that_a_library_asked_for_is_its_workspace() -> None:
    """No tensor of numbers has an odd size; one of bytes has only by chance the very one that was asked for."""
    events: list[Event] = [("a", 1, 2047), ("a", 2, 2048), ("a", 3, 1023), ("a", 4, 2047)]

    seen = make_trace(columns(events), marks=[], notes={"parameters": [Note(4, 4)]}, workspace_sizes=(2047, 2048))

    assert [CATEGORIES[purpose] for purpose in seen.purposes] == ["workspaces", "activations", "activations", "parameters"]


FORWARD: list[Event] = [
    ("a", 1, UNIT), ("a", 9, UNIT), ("f", 9, 0),  # the batch, and what is given up again
    ("a", 2, 8 * UNIT), ("a", 3, UNIT), ("a", 4, 8 * UNIT),  # the model's, between them positions that it works out
]  # fmt: skip
"""What is asked for until a backward begins."""


def test_what_the_model_makes_in_its_forward_is_no_batch() -> None:
    """What is older than all that is kept for the backward was given to it; 3 was made by it, though it has no gradient either."""
    marks = ((0, 0, 1, "forward"), (5, 1, 1, "backward"))

    seen = trace([*FORWARD, ("f", 4, 0)], marks, batch_data=[(1, 5), (3, 5)])

    assert [CATEGORIES[purpose] for purpose in seen.purposes] == ["batch_data", *["activations"] * 4]


def test_the_backward_behind_its_forward_decides_whose_a_tensor_is() -> None:
    """
    By the next one, of a penalty or another micro-batch, all of the first forward is old; a new batch comes before a new forward.

    What is noted later only, as an image that was generated and is collected, is none.
    """
    second: list[Event] = [("f", 2, 0), ("a", 5, UNIT), ("a", 6, 8 * UNIT), ("f", 6, 0)]
    marks = ((0, 0, 1, "forward"), (5, 1, 1, "backward"), (5, 2, 1, "forward"), (7, 2, 1, "backward"))

    seen = trace(FORWARD + second, marks, batch_data=[(1, 5), (1, 7), (3, 7), (5, 7)])

    assert [CATEGORIES[purpose] for purpose in seen.purposes] == ["batch_data", *["activations"] * 4, "batch_data", "activations"]


def test_without_anything_kept_for_the_backward_all_that_is_given_is_the_batch() -> None:
    """A weight is noted as that, and what was freed before the backward began is not kept for it."""
    marks = ((0, 0, 1, "forward"), (3, 2, 1, "backward"))

    seen = trace(
        [("a", 1, UNIT), ("f", 1, 0), ("a", 2, UNIT), ("f", 2, 0), ("a", 3, UNIT)], marks, batch_data=[(3, 3)], parameters=[(1, 1)]
    )

    assert [CATEGORIES[purpose] for purpose in seen.purposes] == ["parameters", "activations", "batch_data"]


def test_a_trace_ends_where_the_recorder_began_to_look_closer() -> None:
    """After four allocations and two frees: events beyond are not the program's own."""
    seen = make_trace(columns(EVENTS), marks=[CountedMark(0, 0, 1, "forward"), CountedMark(5, 3, 2, "forward")], notes={}, end=(4, 2))

    assert seen.actions == "aafaaf"
    assert [mark.step for mark in seen.marks] == [1]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4000)), max_size=60))
def test_the_peak_is_what_a_plain_count_finds(wishes: list[tuple[int, int]]) -> None:
    """Any order of allocations and frees: an address that is taken is freed, one that is free is allocated."""
    events: list[Event] = []
    live: dict[int, int] = {}
    most = 0
    for address, size in wishes:
        events.append(("f", address, 0) if address in live else ("a", address, size))
        if address in live:
            del live[address]
        else:
            live[address] = -(-size // UNIT) * UNIT
        most = max(most, sum(live.values()))

    _, blocks = trace(events).peak()

    assert sum(bytes_by_category(blocks.values()).values()) == most
