"""What would be reserved where workspaces may be other on the GPU."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.execution.unsure_workspaces import Spread, reserved_spread
from memplan.traces.requests import Requests

MIB = 2**20


def in_turn(*sizes: int) -> Requests:
    """Each freed before the next is asked for."""
    numbers = range(1, len(sizes) + 1)
    return Requests(order=[each for number in numbers for each in (number, -number)], sizes=list(sizes), streams=[0] * len(sizes))


def test_where_all_workspaces_are_known_nothing_differs() -> None:
    assert reserved_spread(in_turn(100 * MIB), {}) == Spread(0, 0)


def test_a_workspace_that_may_come_has_a_segment_of_its_own() -> None:
    """Of 20 MiB (kLargeBuffer), and of whole 2 MiB where it is larger."""
    assert reserved_spread(in_turn(100 * MIB), {0: 17 * MIB}) == Spread(20 * MIB, 20 * MIB)
    assert reserved_spread(in_turn(100 * MIB), {0: 31 * MIB + 1}) == Spread(32 * MIB, 32 * MIB)


def test_a_workspace_that_no_longer_finds_room_has_its_segment_beside_the_other() -> None:
    """100 MiB are cached, and 99 are asked for afterwards: 1 MiB more, and they are 200."""
    fits, does_not = (reserved_spread(in_turn(100 * MIB, size), {size: 16 * MIB}) for size in (60 * MIB + 1, 99 * MIB + 1))

    assert fits == Spread(0, 0)
    assert 99 * MIB < does_not.more_bytes <= 116 * MIB


def test_a_workspace_that_is_nowhere_in_the_requests_moves_nothing() -> None:
    assert reserved_spread(in_turn(100 * MIB, 99 * MIB), {12345: 16 * MIB}) == Spread(0, 0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 60 * MIB), min_size=1, max_size=20), st.integers(1, 20 * MIB), st.data())
def test_the_trials_are_the_same_each_time(sizes: list[int], by_bytes: int, data: st.DataObject) -> None:
    """And what one workspace may take more is never more than all of them together."""
    unsure = set(data.draw(st.lists(st.sampled_from(sizes), max_size=5)))
    requests = in_turn(*sizes)

    first, second = (reserved_spread(requests, dict.fromkeys(unsure, by_bytes)) for _ in range(2))

    assert first == second
    assert 0 <= first.more_bytes <= sum(size + by_bytes + 20 * MIB for size in sizes if size in unsure)
