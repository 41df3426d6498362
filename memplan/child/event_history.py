"""
PyTorch's own history of a process's allocator: from when CUDA begins to when it is told, or until it has become too long.

The allocator writes it; here it is begun, ended and read. What PyTorch's history does not say is found by giving it back, as cuBLAS's
workspaces are, or by counting, as DistributedDataParallel's buckets are. A place is an address, and how many allocations there had been.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from memplan.child.device_reads import is_simulated
from memplan.child.repeated_step import Event, RepeatedStep, repeated_step
from memplan.child.tracked_objects import without_collections
from memplan.traces.trace import ACTIONS, ALLOC, events_of

MOST_EVENTS = 10_000_000
MOST_RECORDED = 600_000
MOST_IN_A_STEP = 2_000_000  # L-BFGS may have a closure called 50,000 times in one: PyTorch makes a dict of each event
"""Allocations and frees of which the events are kept; what comes behind them, in a long program, still counts for the peaks."""

MOST_CLEARED = 8
"""How often it is looked where workspaces lay that are given back: all events are copied for that."""

Place = tuple[int, int]
"""An address, and the allocations that there had been when something lay there."""


class ToldEvents(NamedTuple):
    """The history as a run is told."""

    columns: dict[str, Any]
    """The events, a column each."""
    notes: Mapping[str, Iterable[Place]]
    """What lay where, by category."""
    marks: Sequence[tuple[int, int, int, str]]
    """Where the phases begin: allocations and frees, the step, the phase."""
    end: tuple[int, int] | None
    """By how many allocations and frees the events that count end; None: all do."""
    was_stopped: bool
    """It had become too long, and what came behind is not in it."""


class EventHistory:
    """The events of the allocator of *device*, which is asked for each time: a program may use another GPU than its first."""

    def __init__(self, device: Callable[[], int]) -> None:
        self._device = device
        self._has_begun = False
        self._events: Sequence[Event] = ()
        self._ends_at: tuple[int, int] | None = None
        self._counts_until: tuple[int, int] | None = None
        self._repeated: RepeatedStep | None = None
        self._segments: list[int] = []  # counts of them, before a step was repeated
        self._clear_workspaces = torch._C._cuda_clearCublasWorkspaces
        self._num_cleared = 0
        self._given_back: set[Place] = set()  # where cuBLAS's workspaces lay that the program itself gave back
        self._buckets: list[tuple[int, int]] = []  # numbers of the allocations between which DDP's are

    def attach(self) -> None:
        """Note from now on what the history itself does not say."""
        self._watch_buckets()
        self._watch_workspaces()

    def begin(self) -> None:
        """Have the allocator write its history: CUDA has begun."""
        _record()
        self._has_begun = True

    @property
    def is_recording(self) -> bool:
        """Say whether events are kept: not before CUDA has begun, nor when there were too many."""
        return self._has_begun and self._ends_at is None

    def counts(self) -> tuple[int, int]:
        """Return how many allocations and how many frees there have been."""
        counts = torch.cuda.memory_stats_as_nested_dict(self._device()).get("allocation", {}).get("all", {})  # nothing before the first
        return int(counts.get("allocated", 0)), int(counts.get("freed", 0))

    def num_allocs(self) -> int:
        """Return how many allocations there have been."""
        return self.counts()[0]

    def stop_beyond(self, most: int) -> None:
        """Keep no more events where there have been more than *most*."""
        if self.is_recording and sum(self.counts()) > most:
            self._events, _, self._ends_at = self._stopped()

    def count_until_here(self) -> None:
        """Have what is allocated from here on count for nothing."""
        self._counts_until = self.counts()

    def repeated_step(self, begin: tuple[int, int]) -> RepeatedStep | None:
        """
        Return what asks again for all that was asked for since the counts were *begin*; None where such a step has to be run.

        The history goes on for those that only ask, since the allocator may need other segments for them.
        """
        if not self.is_recording or not is_simulated():
            return None
        found = repeated_step(self._snapshot(), begin)
        if found is not None:
            self._repeated, self._ends_at, self._segments = found, self.counts(), self._segment_counts()
            _record_anew()
        return found

    def told(self, notes_with: Callable[[set[Place]], Mapping[str, Iterable[Place]]], marks: Sequence[Any]) -> ToldEvents:
        """End the history and return it; *notes_with* gives the notes of a run, workspaces and buckets lying at those places."""
        was_stopped = not self.is_recording and self._repeated is None
        events, workspaces, has_other_segments = self._ended()
        workspaces |= self._buckets_in(events) | self._given_back
        told, notes = columns(events), notes_with(workspaces)
        repeated = self._repeated
        if repeated is not None and self._ends_at is not None:
            if not has_other_segments:
                own = columns(repeated.request_events)
                told = {name: column + repeated.num_times * own[name] for name, column in told.items()}
                self._ends_at = repeated.end(self._ends_at)
            places = list(compress(told["addresses"], map(ALLOC.__eq__, told["actions"])))
            notes, marks = repeated.notes(notes, places), repeated.marks(marks)
        return ToldEvents(told, notes, marks, self._ends_at if was_stopped else self._counts_until or self._ends_at, was_stopped)

    def _ended(self) -> tuple[Sequence[Event], set[Place], bool]:
        """Return all events, where cuBLAS's workspaces lie, and whether steps that were repeated needed other segments each time."""
        repeated, ends_at = self._repeated, self._ends_at
        if ends_at is None:
            events, workspaces, self._ends_at = self._stopped(clear=True)
            return events, workspaces, False
        if repeated is not None and self._segments != self._segment_counts():
            again, workspaces, self._ends_at = self._stopped(clear=True, frees=self.counts()[1] - ends_at[1])
            return [*repeated.events, *again], workspaces, True
        # Of a long program, or of steps that were repeated, the events ended while its workspaces were in use.
        _record_anew()
        _, given_back, _ = self._stopped(clear=True, frees=0)
        events, self._events = self._events if repeated is None else repeated.events, ()
        return events, {(address, ends_at[0]) for address, _ in given_back}, False

    def _segment_counts(self) -> list[int]:
        """Return what changes where the allocator takes memory from the device, or gives some back."""
        stats = torch.cuda.memory_stats(self._device())
        return [stats[f"{name}.all.{change}"] for name in ("segment", "reserved_bytes") for change in ("allocated", "freed")]

    def _stopped(self, *, clear: bool = False, frees: int | None = None) -> tuple[Sequence[Event], set[Place], tuple[int, int]]:
        """
        Return the events up to now, where cuBLAS's workspaces lie (*clear*: known by giving them back), and where the events end.

        *frees* are those of the history so far, where it is not that of the whole program.
        """
        count, all_frees = self.counts()
        frees = all_frees if frees is None else frees
        if clear:
            self._clear_workspaces()
        events = self._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        return events, {(address, count) for address in _freed_after(events, frees)}, (count, all_frees)

    def _snapshot(self) -> Sequence[Event]:
        with without_collections():
            events: Sequence[Event] = torch.cuda.memory._snapshot()["device_traces"][self._device()]
        return events

    # what the history itself does not say

    def _watch_workspaces(self) -> None:
        """Note where cuBLAS's workspaces lie where the program gives them back, as Lightning does at the end of a training."""
        clear = self._clear_workspaces

        @functools.wraps(clear)
        def cleared() -> None:
            before = self.counts() if self.is_recording and self._num_cleared < MOST_CLEARED else None
            clear()
            if before is not None:
                self._num_cleared += 1
                self._given_back |= {(address, before[0]) for address in _freed_after(self._snapshot(), before[1])}

        torch._C._cuda_clearCublasWorkspaces = cleared

    def _watch_buckets(self) -> None:
        """Note what the reducer of DistributedDataParallel allocates: buckets of gradients, at first and again before the second step."""
        reducer: Any = getattr(torch.distributed, "Reducer", None)
        for name in ("__init__", "_rebuild_buckets"):
            if reducer is not None:
                setattr(reducer, name, self._noting_buckets(getattr(reducer, name)))

    def _noting_buckets(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            before = self.num_allocs() if self.is_recording else 0
            result = function(*arguments, **keywords)
            if self.is_recording:
                self._buckets.append((before, self.num_allocs()))
            return result

        return call

    def _buckets_in(self, events: Sequence[Event]) -> set[Place]:
        """Return where DDP's buckets lie: the events of allocations are in the order of their numbers."""
        if not self._buckets:
            return set()
        places = [event["addr"] for event in events if event["action"] == "alloc"]
        return {(places[number], number + 1) for begin, end in self._buckets for number in range(begin, min(end, len(places)))}


def _record() -> None:
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)


def _record_anew() -> None:
    """Forget the events so far."""
    torch.cuda.memory._record_memory_history(enabled=None)
    _record()


def _freed_after(events: Sequence[Event], count: int) -> list[int]:
    """Return the addresses that were freed after *count* frees."""
    return [event["addr"] for event in events if event["action"] == "free_completed"][count:]


def columns(events: Sequence[Event]) -> dict[str, Any]:
    """Return the allocator's events as columns: one letter each, addresses, bytes, streams."""
    kept = events_of(events)
    return {
        "actions": "".join(ACTIONS[event["action"]] for event in kept),
        "addresses": [event.get("addr", 0) for event in kept],
        "sizes": [event["size"] for event in kept],
        "streams": [event.get("stream", 0) for event in kept],
    }
