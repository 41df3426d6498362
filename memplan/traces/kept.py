"""What a program keeps from step to step: by step, how many blocks of an earlier step are still there at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from memplan.traces.trace import ALLOC, CATEGORIES, FREE, MemoryTrace, rounded

LASTING = ("parameters", "gradients", "optimizer_state", "workspaces")
"""What is made once, at whichever step (an optimizer may step late), and does not grow."""


class StepEnd(NamedTuple):
    """A step as it ends."""

    kept_bytes: int
    """In blocks of earlier steps, those that last not counted."""
    num_kept: int
    peak_bytes: int
    """The most that was alive in this step, what lasts not counted."""


def step_ends(trace: MemoryTrace) -> list[StepEnd]:
    """Return the steps that *trace* has marks of, in order; the last may not have been recorded to its end."""
    bounds = step_bounds(trace)
    return list(_ends(trace, [0, *bounds]))[1:] if bounds else []


def step_bounds(trace: MemoryTrace) -> list[int]:
    """Return the event at which each step of *trace* begins, in order, and that behind the last; nothing where it lacks marks of some."""
    begins = {mark.step: mark.position for mark in reversed(trace.marks) if mark.step}
    if not begins or sorted(begins) != list(range(1, len(begins) + 1)):
        return []
    return [*sorted(begins.values()), len(trace.actions)]


def _ends(trace: MemoryTrace, bounds: Sequence[int]) -> Iterator[StepEnd]:
    """Yield what ends at each of *bounds* but the first: what came before the first step, and each step."""
    lasting = [category in LASTING for category in CATEGORIES]
    live: dict[int, tuple[int, int]] = {}
    number = current = 0
    for step, (first, end) in enumerate(pairwise(bounds)):
        most = current
        for action, address, size in trace.columns(first, end):
            if action == ALLOC:
                counted = 0 if lasting[trace.purposes[number]] else rounded(size)
                live[address] = counted, step
                number += 1
                current += counted
                most = current if current > most else most
            elif action == FREE:
                current -= live.pop(address, (0, 0))[0]
        kept = [size for size, made in live.values() if size and 1 <= made < step]
        yield StepEnd(sum(kept), len(kept), most)
