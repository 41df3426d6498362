"""
What a later step may take more than those that ran, where batches differ and nobody can look for the largest.

A function that makes its batches itself, a program without a DataLoader, and one whose batches are of one shape but decide by their values
what is computed (the tokens that are masked) show a few of them. Where these are of fixed length all steps take the same; where a step
trains on texts, boxes or graphs as they come, each is a draw, and the largest of thousands is above that of ten.

A larger step takes more than its own bytes: no block that PyTorch has cached for the others serves it, and those stay while there is room.
A masked language model whose steps allocate 10.7 to 10.85 GiB reserved 11.2 GiB for twelve steps, and 14.3 from the thirteenth on, which
allocated 10.86. So a step is put to the simulated allocator again and again, each of its blocks that differ from step to step as large as
in one of those that ran, or between, and at last as large as a later one may be: with no more memory than need be, and with all it takes.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, stdev
from typing import NamedTuple

from memplan.allocator.replay import least_capacity, replay_by_default
from memplan.execution.run_record import Batch, RunRecord
from memplan.traces.kept import StepEnd, step_bounds
from memplan.traces.requests import EMPTY_CACHE, Requests
from memplan.traces.trace import ALLOC, EVALUATION, FREE, OOM, MemoryTrace

STANDARD_DEVIATIONS = 5.0
"""
Above the mean, up to which a later step is counted. After nine draws from a normal distribution the largest of a thousand more is above
that in one case of eight, by less than half a standard deviation mostly; lengths that have a limit stay below it. Those with a long tail
may not.
"""

LEAST_DRAWS = 4
"""Steps of different sizes that say how much they differ."""

MOST_SHARE = 0.25
"""
Of the highest step, the most that is counted above it: where steps differ by so much, each has one length mostly, and lengths have a limit.
"""

LEAST_SHARE_OF_SIZES = 0.5
"""Of the steps, so many are of a size of their own: a training that does one thing and another in turn repeats two, and is no draw."""

ENOUGH_SIZES = 8
"""However many steps there are: numbers of objects repeat."""

NUM_LATER_STEPS = 20
"""After which what is cached has mostly settled, where none is larger than all before."""

MOST_REQUESTS = 100_000
"""Allocations of all those steps: half a second. Fewer of them are looked at where a step has many."""

MOST_RECORDED = 200_000
"""Allocations of the run itself, which is put to the allocator too."""

APART_SHARE = 0.75
"""Of all by which steps differ, what lies between the highest and the next where that is another kind of step, and no draw."""


class LaterStep(NamedTuple):
    """By how much later steps may be above those that ran."""

    more_bytes: int = 0
    """What they need more, where PyTorch releases what it has cached."""
    cached_bytes: int = 0
    """What is reserved besides while there is room."""


NO_LATER_STEP = LaterStep()


def peaks_of_draws(record: RunRecord, ends: Sequence[StepEnd], batches: Sequence[Batch]) -> list[int]:
    """
    Return what each step but the first took at its peak, beside what lasts; none where the shapes of a DataLoader's *batches*, or an
    evaluation, tell more of the program. *ends*: those of its steps.
    """
    is_evaluated = any(mark.phase == EVALUATION and mark.step > 1 for mark in record.marks)
    full = max(batches, key=lambda batch: batch.num_elements) if batches else None
    others = [batch for batch in batches if full is not None and batch.shapes != full.shapes]
    have_shapes = full is not None and not all(batch.has_fewer_samples_than(full) for batch in others)
    if record.command and (is_evaluated or have_shapes):
        return []
    left = {batch.step for batch in others}  # the last batch of an epoch has what is left
    peaks = [end.peak_bytes for step, end in enumerate(ends, start=1) if step > 1 and step not in left]
    may_be_left = record.command and not is_decided_by_data(record)  # what is left of one step may count in the next
    return [] if may_be_left and peaks == sorted(peaks, reverse=True) else peaks


def is_decided_by_data(record: RunRecord) -> bool:
    """Say whether a line of the program reads one size after another."""
    places = [read.place for read in record.reads if read.basis in ("data", "copied", "drawn")]
    return len(places) > len(set(places))


def later_bytes(peaks: Sequence[int]) -> int:
    """Return the bytes by which a later step may be above the highest of *peaks*, those of `peaks_of_draws`; 0 where they are no draws."""
    return largest_draw(peaks) - max(peaks) if are_draws(peaks) else 0


def are_draws(peaks: Sequence[int]) -> bool:
    """Say whether *peaks*, one of each step, are so many and so different that a later one may be above them."""
    num_sizes = len(set(peaks))
    is_in_order = list(peaks) in (sorted(peaks), sorted(peaks, reverse=True))  # it grows, or has not settled
    differ = num_sizes >= max(LEAST_DRAWS, min(LEAST_SHARE_OF_SIZES * len(peaks), ENOUGH_SIZES))
    return differ and not is_in_order and not _has_one_of_another_kind(peaks)


def largest_draw(sizes: Sequence[int]) -> int:
    """Return what a later draw is counted with, of which *sizes* have been seen; it is none of them where they are all the same."""
    largest = max(sizes)
    return max(largest, round(min(fmean(sizes) + STANDARD_DEVIATIONS * stdev(sizes), (1 + MOST_SHARE) * largest)))


def later_step(trace: MemoryTrace, requests: Requests, *, reserved_bytes: int, allocated_bytes: int) -> LaterStep:
    """
    Return what more steps like those that ran, in no order, and one that is larger than all, reserve beside the peak of *trace*.

    *requests* are those of the trace, *reserved_bytes* the peak that was recorded, *allocated_bytes* what the larger step allocates more:
    that alone where PyTorch's default allocator does not come to the same as was recorded, as under expandable segments, too few steps are
    alike, or the program releases what is cached itself. The steps are the same each time.
    """
    alone = LaterStep(allocated_bytes)
    steps = _steps_in(trace, requests)
    alike = _alike(steps)
    if len(alike) < LEAST_DRAWS or not alike[0].num_allocations or len(requests.sizes) > MOST_RECORDED:
        return alone
    if EMPTY_CACHE in requests.sorted_order[steps[0].begin :] or replay_by_default(requests).peak_reserved_bytes != reserved_bytes:
        return alone
    sizes = _later_sizes([step.sizes_in(requests) for step in alike])
    extended = _with_later_steps(requests, _base_of(steps, alike), sizes, last=steps[-1])
    most = replay_by_default(extended).peak_reserved_bytes
    if most <= reserved_bytes + allocated_bytes:
        return alone
    more = least_capacity(extended, at_least=reserved_bytes + allocated_bytes, enough=most) - reserved_bytes
    return LaterStep(more, max(0, most - reserved_bytes - more))


class _Step(NamedTuple):
    """What a step asks for."""

    first: int
    """Allocations before it."""
    begin: int
    """Of its requests, among all in their order."""
    order: tuple[int, ...]
    """Whatever the sizes: 0 is an allocation, another number frees what was made so many before, in this step or, below 0, in the one
    before. It ends with the last allocation: behind that, a program may end."""

    @property
    def sequence(self) -> tuple[int, ...]:
        """Return what is equal of steps that are alike: what they free of the one before hangs on that one too."""
        return tuple(each for each in self.order if each >= 0)

    @property
    def num_allocations(self) -> int:
        """Return how many it makes."""
        return self.order.count(0)

    def sizes_in(self, requests: Requests) -> Sequence[int]:
        """Return the bytes of each, of *requests*."""
        return requests.sizes[self.first : self.first + self.num_allocations]


def _steps_in(trace: MemoryTrace, requests: Requests) -> list[_Step]:
    """Return the steps of *trace*, whose *requests* these are, but the first, in which there is no optimizer's state yet."""
    bounds = _positions(trace, requests)
    found: list[_Step] = []
    number = before = 0  # allocations so far, and before the step that came last
    for begin, end in pairwise([0, *bounds]):
        first, asked = number, list[int]()
        for request in requests.sorted_order[begin:end]:
            if request > 0:
                number = request
                asked.append(0)
            elif -request > before:
                distance = number + request + 1
                asked.append(distance if -request > first else -distance)
        while asked and asked[-1]:
            asked.pop()
        found.append(_Step(first, begin, tuple(asked)))
        before = first
    return found[2:]  # nor is what comes before the first


def _positions(trace: MemoryTrace, requests: Requests) -> list[int]:
    """Return where, in the sorted order of *requests*, each step of *trace* begins: behind the allocations and frees before it."""
    bounds = step_bounds(trace)
    counts = [0, *accumulate(action in (ALLOC, OOM, FREE) for action in trace.actions)]
    done = [0, *accumulate(request != EMPTY_CACHE for request in requests.sorted_order)]
    return [bisect_left(done, counts[bound]) for bound in bounds]


def _alike(steps: Sequence[_Step]) -> list[_Step]:
    """Return those of *steps* that ask in the same sequence, of the most that do."""
    groups: dict[tuple[int, ...], list[_Step]] = {}
    for step in steps:
        groups.setdefault(step.sequence, []).append(step)
    return max(groups.values(), key=len, default=[])


def _base_of(steps: Sequence[_Step], alike: Sequence[_Step]) -> _Step:
    """Return the one of *alike* whose requests the later steps make: one that follows another such, if there is any."""
    sequence = alike[0].sequence
    return next((step for before, step in pairwise(steps) if before.sequence == step.sequence == sequence), alike[-1])


def _later_sizes(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """
    Return what each allocation of later steps asks for, where steps that are alike ask for what was *seen*: by chance between two of those
    that are next to each other in size, as the largest of them, and at last as a larger one.
    """
    by_size, chance, sizes = sorted(seen, key=sum), random.Random(0), list[list[int]]()
    for _ in range(min(NUM_LATER_STEPS, MOST_REQUESTS // len(seen[0]))):
        place = chance.random() * (len(by_size) - 1)
        lower, upper = by_size[int(place)], by_size[int(place) + 1]
        share = place - int(place)
        sizes.append([round(less + share * (more - less)) for less, more in zip(lower, upper, strict=True)])
    return [*sizes, list(by_size[-1]), [largest_draw(each) for each in zip(*seen, strict=True)]]


def _with_later_steps(requests: Requests, base: _Step, later: Sequence[Sequence[int]], *, last: _Step) -> Requests:
    """
    Return *requests* up to where the *last* step begins, and with steps in its place that ask as *base* does for what *later* says.

    What such a step keeps, the next one frees where *base* frees that of the step before it; the rest as it begins.
    """
    order = list(requests.sorted_order[: last.begin])
    number, sizes, streams = last.first, list(requests.sizes[: last.first]), list(requests.streams[: last.first])
    streams_of_base = requests.streams[base.first : base.first + base.num_allocations]
    ends = {-request for request in requests.sorted_order[last.begin :] if request < 0}
    kept = {each for each in range(max(1, number - base.num_allocations + 1), number + 1) if each in ends}
    for asked in later:
        alive = kept & _freed_of_before(base, number)
        order += [-each for each in sorted(kept - alive)]
        kept = set()
        for each in base.order:
            made = number - abs(each) + 1
            if each == 0:
                number += 1
                kept.add(number)
                order.append(number)
            elif made in kept or made in alive:
                kept.discard(made)
                alive.discard(made)
                order.append(-made)
        kept |= alive
        sizes += asked
        streams += streams_of_base
    return Requests(order, sizes, streams, by_address=requests.by_address)


def _freed_of_before(base: _Step, number: int) -> set[int]:
    """Return what a step that asks as *base* does frees of the one before it, where *number* allocations have been made by then."""
    freed = set()
    for each in base.order:
        if each == 0:
            number += 1
        elif each < 0:
            freed.add(number + each + 1)
    return freed


def _has_one_of_another_kind(peaks: Sequence[int]) -> bool:
    """Say whether the highest step stands apart, as one with a further loss does: the others say nothing of it."""
    lowest, *_, second, highest = sorted(peaks)
    return highest - second > APART_SHARE * (highest - lowest)
