"""What a program needs that releases cached memory for steps that are larger than all before."""

from __future__ import annotations

import pytest

from memplan.execution.released_memory import least_reserved
from memplan.traces.requests import EMPTY_CACHE, Requests
from memplan.units import MIB


def steps_of(*sizes: int, after: int | None = None) -> Requests:
    """Two blocks of a size in each step, in MiB; what is cached is released after the step with the number *after*."""
    order: list[int] = []
    for number in range(len(sizes)):
        order += [2 * number + 1, 2 * number + 2, -2 * number - 1, -2 * number - 2]
        if number == after:
            order.append(EMPTY_CACHE)
    asked = [size * MIB for size in sizes for _ in range(2)]
    return Requests(order, asked, [0] * len(asked))


def test_it_is_what_the_largest_step_takes_where_each_is_larger_than_all_before() -> None:
    """All of them stay cached where there is room: 2 * (100 + 102 + 104 + 106) MiB; the last two blocks are what is needed."""
    least = least_reserved(steps_of(100, 102, 104, 106), reserved_bytes=824 * MIB, num_alloc_retries=0)

    assert least is not None
    assert 212 * MIB <= least <= (212 + 824 / 64) * MIB


def test_what_was_released_during_the_run_counts_as_kept() -> None:
    """Where there is less memory, the allocator releases it by itself."""
    recorded = {"reserved_bytes": 824 * MIB, "num_alloc_retries": 0}

    without, having = (least_reserved(steps_of(100, 102, 104, 106, after=after), **recorded) for after in (None, 1))

    assert without == having


def test_it_is_not_known_where_even_that_does_not_do() -> None:
    """As of a run that the simulated allocator does not come through."""
    assert least_reserved(steps_of(100, 102), reserved_bytes=150 * MIB, num_alloc_retries=0) is None


@pytest.mark.parametrize(("reserved_mib", "retries"), [(832, 0), (824, 1)])
def test_nothing_is_said_of_an_allocator_that_goes_another_way(reserved_mib: int, retries: int) -> None:
    """As under expandable segments, or with requests rounded up."""
    assert least_reserved(steps_of(100, 102, 104, 106), reserved_bytes=reserved_mib * MIB, num_alloc_retries=retries) is None


def test_what_was_released_where_the_gpu_was_full_is_released_again() -> None:
    """With 700 MiB the fourth step finds 612 MiB cached, and 212 are not free: one retry."""
    least = least_reserved(steps_of(100, 102, 104, 106), reserved_bytes=612 * MIB, num_alloc_retries=1)

    assert least is not None
    assert 212 * MIB <= least <= (212 + 612 / 64) * MIB
