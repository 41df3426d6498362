"""What a program asked of the allocator."""

from __future__ import annotations

from memplan.traces.requests import Requests, requests_of
from memplan.traces.trace import ACTIONS, MemoryTrace


def trace_of(*events: tuple[str, int, int]) -> MemoryTrace:
    actions = "".join(ACTIONS[name] for name, _, _ in events)
    return MemoryTrace(actions, [address for _, address, _ in events], [size for _, _, size in events], [0] * len(events), b"", ())


def test_allocations_are_numbered_and_frees_name_them() -> None:
    trace = trace_of(
        ("segment_alloc", 0, 2**21), ("alloc", 0, 100), ("alloc", 512, 200), ("free_requested", 0, 100), ("free_completed", 0, 100),
        ("alloc", 0, 300),
    )  # fmt: skip

    requests = requests_of(trace)

    assert list(requests.order) == [1, 2, -1, 3]
    assert list(requests.sizes) == [100, 200, 300]


def test_segments_given_back_are_one_request_to_empty_the_cache() -> None:
    """Each time: two of them, with frees between."""
    trace = trace_of(
        ("alloc", 0, 100), ("segment_free", 5000, 4096), ("segment_free", 9000, 4096), ("free_completed", 0, 100), ("segment_free", 0, 4096)
    )  # fmt: skip

    assert list(requests_of(trace).order) == [1, 0, -1, 0]


def test_what_was_there_before_has_the_first_numbers() -> None:
    requests = requests_of(trace_of(("alloc", 0, 100), ("free_completed", 4096, 700)), live_before={4096: 700})

    assert (list(requests.order), list(requests.sizes)) == ([2, -1], [700, 100])


def test_the_order_of_frees_between_two_allocations_is_none() -> None:
    """It varies from run to run; that between allocations does not."""
    one = Requests([1, 2, -1, -2, 3], [1, 1, 1], [0, 0, 0])
    other = Requests([1, 2, -2, -1, 3], [9, 9, 9], [0, 0, 0])
    third = Requests([1, 2, -1, 3, -2], [1, 1, 1], [0, 0, 0])

    assert one.sequence == other.sequence
    assert one.sequence != third.sequence
    assert one.sequence != Requests([1, 2, -1, -2, 3], [1, 1, 1], [0, 0, 7]).sequence


def test_the_peak_is_of_what_is_alive() -> None:
    assert Requests([1, -1, 2, 3, -2], [500, 300, 100], [0, 0, 0]).peak_bytes == 500


def test_a_shorter_run_is_how_a_longer_one_begins() -> None:
    """Frees at its end may be fewer or more; another size, stream or sequence is another beginning."""
    longer = Requests(order=[1, 2, -2, -1, 3, -3], sizes=[8, 16, 32], streams=[0, 0, 0])

    assert longer.begins_with(Requests([1, 2, -1, -2, 3], [8, 16, 32], [0, 0, 0]))
    assert longer.begins_with(Requests([1, 2, -2], [8, 16], [0, 0]))
    assert not longer.begins_with(Requests([1, 2], [8, 17], [0, 0]))
    assert not longer.begins_with(Requests([1, 2], [8, 16], [0, 1]))
    assert not longer.begins_with(Requests([1, -1, 2], [8, 16], [0, 0]))
    assert not Requests([1, 2], [8, 16], [0, 0]).begins_with(longer)
