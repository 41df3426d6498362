"""Stretches of requests that are the same again and again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memplan.traces.repeats import Stretch, stretches_in
from memplan.traces.requests import Requests


def program(*parts: tuple[Sequence[int], int]) -> Requests:
    """What is asked for by rounds, each as many times: a size is an allocation, freed one round later; so is all of the last one."""
    order: list[int] = []
    sizes: list[int] = []
    last: list[int] = []
    for asked, times in parts:
        for _ in range(times):
            mine = []
            for size in asked:
                sizes.append(size)
                mine.append(len(sizes))
                order.append(len(sizes))
            order.extend(-number for number in last)
            last = mine
    return Requests([*order, *(-number for number in last)], sizes, [0] * len(sizes))


def of_layers(batch: int) -> list[int]:
    """Round of a model whose twelve layers ask alike, as layers do; the batch and the head differ from them."""
    return [batch, *(12 * [512 * batch, 2048 * batch, 512 * batch]), 50257 * batch]


def test_rounds_are_found_between_what_differs() -> None:
    requests = program((range(512, 512 * 90, 512), 1), (of_layers(8), 100), (range(1024, 1024 * 70, 512), 1))

    (found,) = requests.stretches

    assert found.length == 2 * len(of_layers(8))
    assert found.num_allocations == len(of_layers(8))
    assert 96 <= found.num_rounds <= 100
    assert found.end <= len(requests.order)


def test_two_loops_are_two_stretches() -> None:
    """An evaluation on two sets of data, with batches of different size."""
    requests = program((of_layers(8), 60), (of_layers(16), 40))

    first, second = requests.stretches

    assert (first.num_allocations, second.num_allocations) == (38, 38)
    assert first.num_rounds >= 56
    assert second.num_rounds >= 36
    assert first.end <= second.begin


def test_what_a_stretch_says_is_so() -> None:
    """Each round asks for the same bytes, and frees what was made as many allocations ago."""
    rounds = random.Random(0)
    parts = [([512 * rounds.randint(1, 9) for _ in range(rounds.randint(3, 40))], rounds.randint(1, 60)) for _ in range(12)]
    requests = program(*parts)

    assert requests.stretches
    for found in requests.stretches:
        order, made = requests.sorted_order, found.first_allocation
        first = [request - made if request > 0 else request + made for request in order[found.begin : found.begin + found.length]]
        for number in range(1, found.num_rounds):
            begin, made = found.begin + number * found.length, found.first_allocation + number * found.num_allocations
            assert [request - made if request > 0 else request + made for request in order[begin : begin + found.length]] == first
        assert found.repeats(requests.sizes)


def test_a_program_without_rounds_has_no_stretch() -> None:
    chance = random.Random(1)
    sizes = [chance.randint(1, 10**6) for _ in range(3000)]

    assert stretches_in(range(1, 3001), sizes, [0] * 3000) == ()
    assert stretches_in([], [], []) == ()


def test_layers_of_one_step_are_no_stretch() -> None:
    """They are a small part of it; a plan is of what comes between them as well."""
    asked = [*range(512, 512 * 200, 512), *(4 * [777, 888, 999]), *range(512 * 200, 512 * 400, 512)]

    assert program((asked, 1)).stretches == ()


def test_other_sizes_have_to_repeat_as_well() -> None:
    """Those of another batch: where one of them differs in some round, all rounds have to be put."""
    stretch = Stretch(begin=0, length=4, num_rounds=3, first_allocation=1, num_allocations=2)

    assert stretch.repeats([9, 1, 2, 1, 2, 1, 2, 5])
    assert not stretch.repeats([9, 1, 2, 1, 3, 1, 2, 5])
