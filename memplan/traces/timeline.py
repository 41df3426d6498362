"""Memory over time: the bytes of each category, and what is reserved, through one step of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memplan.traces.trace import (
    ALLOC,
    CATEGORIES,
    FREE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Mark,
    MemoryTrace,
    rounded,
)

MOST_SAMPLES = 600
"""More than a screen has columns for."""


class Sample(NamedTuple):
    """A moment, or the highest of several that lie close together."""

    event: int
    allocated: tuple[int, ...]
    """Bytes by category, in the order of CATEGORIES."""
    reserved_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all categories."""
        return sum(self.allocated)


class Timeline(NamedTuple):
    """One step."""

    step: int
    samples: tuple[Sample, ...]
    phases: tuple[Mark, ...]
    """Where its phases begin."""


def timeline(trace: MemoryTrace, step: int | None = None, *, most_samples: int = MOST_SAMPLES) -> Timeline:
    """
    Return step number *step* of *trace*, in at most about *most_samples* moments, each the highest of those around it.

    None: the last step that another follows, since behind the last of all a program gives everything back.
    """
    last = max((mark.step for mark in trace.marks), default=0)
    chosen = max(last - 1, min(1, last)) if step is None else step
    phases = tuple(mark for mark in trace.marks if mark.step == chosen)
    begin = phases[0].position if phases else 0
    end = min((mark.position for mark in trace.marks if mark.step > chosen and mark.position > begin), default=len(trace.actions))
    width = max(1, -(-(end - begin) // most_samples))
    samples: list[Sample] = []
    for sample in _samples(trace):
        if not begin <= sample.event < end:
            continue
        bucket = (sample.event - begin) // width
        if samples and (samples[-1].event - begin) // width == bucket:
            if sample.allocated_bytes > samples[-1].allocated_bytes:
                samples[-1] = sample
        else:
            samples.append(sample)
    return Timeline(chosen, tuple(samples), phases)


def _samples(trace: MemoryTrace) -> Iterator[Sample]:
    """Yield what there is after each event that changes it."""
    live: dict[int, tuple[int, int]] = {}
    by_category = [0] * len(CATEGORIES)
    number = reserved = 0
    for event, (action, address, size) in enumerate(zip(trace.actions, trace.addresses, trace.sizes, strict=True)):
        if action == ALLOC:
            category, bytes_ = trace.purposes[number], rounded(size)
            number += 1
            live[address] = category, bytes_
            by_category[category] += bytes_
        elif action == FREE:
            category, bytes_ = live.pop(address, (0, 0))
            by_category[category] -= bytes_
        elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
            reserved += size
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            reserved -= size
        else:
            continue
        yield Sample(event, tuple(by_category), reserved)
