"""A MemoryTrace: every event of the caching allocator through the steps of a program, and what each allocation was for.

What a recorder can know at the time are *notes*: "the gradient of some parameter lies at this address, now that there have been 812
allocations". Here, with the whole trace at hand, a note finds its allocation: the last one at that address among the first 812.
"""

from __future__ import annotations

import bisect
import json
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, count, pairwise, zip_longest
from typing import Any, NamedTuple

from memplan.traces.block_sizes import MIN_BLOCK_BYTES

CATEGORIES = ("parameters", "gradients", "optimizer_state", "workspaces", "batch_data", "activations")
"""What an allocation can be for, as MemoryBreakdown's fields have it; where two claim one, the first wins."""

ALLOC, FREE, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = "afrSsMmo"
ACTIONS = {
    "alloc": ALLOC,
    "free_completed": FREE,
    "free_requested": FREE_REQUESTED,
    "segment_alloc": SEGMENT_ALLOC,
    "segment_free": SEGMENT_FREE,
    "segment_map": SEGMENT_MAP,
    "segment_unmap": SEGMENT_UNMAP,
    "oom": OOM,
}
"""PyTorch's names of the events to the letters of a trace."""


def events_of(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """
    Return those of PyTorch's trace *entries* that are events of a trace.

    A block is freed at once when that is requested, unless another stream still uses it: only then is the request an event of its own.
    """
    known = [entry for entry in entries if entry["action"] in ACTIONS]
    return [
        entry
        for entry, after in zip_longest(known, known[1:])
        if entry["action"] != "free_requested" or after is None or after["action"] != "free_completed" or after["addr"] != entry["addr"]
    ]


BUILD = "build"
"""The phase before the first step: the model is made, and its weights are loaded."""

EVALUATION = "evaluation"
"""The phase in which the model is in eval mode, before the next step."""

FORMAT = 1
"""Of a trace in a file."""

_ACTIVATIONS = CATEGORIES.index("activations")
_WORKSPACES = CATEGORIES.index("workspaces")
_BATCH_DATA = CATEGORIES.index("batch_data")


def evaluation_before(step: int) -> str:
    """Return the name of the evaluation that comes before *step*, as people count."""
    return f"evaluation after step {step - 1}" if step > 1 else "evaluation before step 1"


class Mark(NamedTuple):
    """From *position* on, the program was in *phase* of *step*."""

    position: int
    """Number of the event."""
    step: int
    """1 for the first; 0 while a function builds the model. A whole program does so within its first."""
    phase: str
    """build, forward, backward, optimizer or evaluation."""


class EventColumns(NamedTuple):
    """The allocator's events, a column each."""

    actions: str = ""
    """A letter for each event, those of ACTIONS."""
    addresses: Sequence[int] = ()
    sizes: Sequence[int] = ()
    """Bytes."""
    streams: Sequence[int] = ()


class CountedMark(NamedTuple):
    """A mark as a recorder can know it: by how many allocations and frees there had been."""

    num_allocations: int
    num_frees: int
    step: int
    phase: str


class Note(NamedTuple):
    """What lay at an address at some time."""

    address: int
    num_allocations: int
    """Allocations that there had been by then."""


class Block(NamedTuple):
    """An allocation that was alive at some moment."""

    number: int
    """1 for the first allocation of the trace."""
    size_bytes: int
    """As asked for."""
    category: str


class Phase(NamedTuple):
    """What happened from one mark of a trace to the next."""

    step: int
    phase: str
    sizes: list[int]
    """Of the allocations, as asked for."""
    held_bytes: int
    """At its end."""
    peak_bytes: int
    """The most that was alive in it, rounded as the allocator does."""


@dataclass(frozen=True)
class MemoryTrace:
    """The allocator's events in their order, as columns."""

    actions: str
    """One letter an event (ACTIONS)."""
    addresses: Sequence[int]
    sizes: Sequence[int]
    """Bytes asked for; of an out-of-memory event, the bytes that could not be had."""
    streams: Sequence[int]
    purposes: bytes
    """Of each allocation (in their order) the index of its category."""
    marks: tuple[Mark, ...]

    def to_bytes(self) -> bytes:
        """Return the trace as a file holds it: a line of JSON, then the columns, compressed."""
        marks = [tuple(mark) for mark in self.marks]
        header = json.dumps({"format": FORMAT, "events": len(self.actions), "purposes": len(self.purposes), "marks": marks})
        columns = (self.actions.encode(), *(array("Q", column).tobytes() for column in (self.addresses, self.sizes, self.streams)))
        return header.encode() + b"\n" + zlib.compress(b"".join((*columns, self.purposes)), level=1)

    @classmethod
    def from_bytes(cls, content: bytes) -> MemoryTrace:
        """Return the trace that `to_bytes` wrote. Raises ValueError for anything else."""
        header, _, columns = content.partition(b"\n")
        try:
            told = json.loads(header)
            if told["format"] != FORMAT:
                raise ValueError(f"format {told['format']} instead of {FORMAT}")
            count, rest = told["events"], zlib.decompress(columns)
        except (KeyError, TypeError, zlib.error) as error:
            raise ValueError(f"no trace: {error}") from error
        if len(rest) != count * (1 + 3 * 8) + told["purposes"]:
            raise ValueError("a trace that is cut off")
        addresses, sizes, streams = (array("Q", rest[at : at + 8 * count]) for at in (count, 9 * count, 17 * count))
        marks = tuple(Mark(*mark) for mark in told["marks"])
        return cls(rest[:count].decode(), addresses, sizes, streams, purposes=rest[25 * count :], marks=marks)

    def phase_at(self, position: int) -> Mark:
        """Return the mark that holds at event *position*."""
        place = bisect.bisect_right([mark.position for mark in self.marks], position)
        return self.marks[place - 1] if place else Mark(0, 0, BUILD)

    def phases(self) -> list[Phase]:
        """Return what was asked for from each mark to the next, and what was held then."""
        found: list[Phase] = []
        live: dict[int, int] = {}
        current = 0
        ends = [*(mark.position for mark in self.marks), len(self.actions)][1:]
        for mark, end in zip(self.marks, ends, strict=True):
            asked: list[int] = []
            most = current
            for action, address, size in self.columns(mark.position, end):
                if action == ALLOC:
                    asked.append(size)
                    live[address] = size
                    current += rounded(size)
                    most = current if current > most else most
                elif action == FREE and address in live:
                    current -= rounded(live.pop(address))
            found.append(Phase(mark.step, mark.phase, asked, sum(live.values()), most))
        return found

    def peak(self, *, first_allocation: int = 0) -> tuple[int, dict[int, Block]]:
        """
        Return the event at which most bytes were alive, and the blocks that were, by address.

        With *first_allocation* only moments behind that many allocations count.
        """
        position = self._highest(first_allocation)
        live: dict[int, tuple[int, int]] = {}
        number = 0
        for action, address, size in self.columns(0, position + 1):
            if action == ALLOC:
                number += 1
                live[address] = number, size
            elif action == FREE:
                live.pop(address, None)
        return position, {address: Block(number, size, self._category(number)) for address, (number, size) in live.items()}

    def columns(self, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Return the action, the address and the size of each event from *begin* up to *end*."""
        return zip(self.actions[begin:end], self.addresses[begin:end], self.sizes[begin:end], strict=True)

    @property
    def first_step(self) -> Mark | None:
        """Return where the first step begins; None where none does."""
        return next((mark for mark in self.marks if mark.step and mark.phase != BUILD), None)

    def allocated_from(self, position: int) -> int:
        """Return the most bytes that were alive from event *position* on."""
        live: dict[int, int] = {}
        current = most = 0
        for event, action in enumerate(self.actions):
            if event == position:
                most = current
            if action == ALLOC:
                live[self.addresses[event]] = rounded(self.sizes[event])
                current += live[self.addresses[event]]
            elif action == FREE:
                current -= live.pop(self.addresses[event], 0)
            most = max(most, current)
        return most

    def peaks_of_phases(self) -> dict[tuple[int, str], int]:
        """Return the most bytes that were alive in each phase of each step; what comes before the first step is none."""
        found: dict[tuple[int, str], int] = {}
        for phase in self.phases():
            key = phase.step, phase.phase
            if phase.step and phase.phase != BUILD:
                found[key] = max(phase.peak_bytes, found.get(key, 0))
        return found

    def _highest(self, first_allocation: int) -> int:
        """Return the event after which most bytes are alive."""
        live: dict[int, int] = {}
        current = most = number = position = 0
        for event, (action, address, size) in enumerate(self.columns(0, len(self.actions))):
            if action == ALLOC:
                number += 1
                live[address] = rounded(size)
                current += live[address]
                if current > most and number > first_allocation:
                    most, position = current, event
            elif action == FREE:
                current -= live.pop(address, 0)
        return position

    def state_missing_at(self, position: int) -> int:
        """Return how many bytes of the optimizer's state are made behind event *position*, more than there are at it."""
        live: dict[int, int] = {}
        number = current = there = most = 0
        for event, action in enumerate(self.actions):
            if action == ALLOC:
                number += 1
                if self._category(number) == "optimizer_state":
                    live[self.addresses[event]] = rounded(self.sizes[event])
                    current += live[self.addresses[event]]
            elif action == FREE:
                current -= live.pop(self.addresses[event], 0)
            there = current if event == position else there
            most = max(most, current)
        return most - there

    def _category(self, number: int) -> str:
        return CATEGORIES[self.purposes[number - 1]]


@lru_cache(maxsize=2**16)
def rounded(size: int) -> int:
    """Return the bytes that the allocator counts for *size*: at least one smallest block."""
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def bytes_by_category(blocks: Iterable[Block]) -> dict[str, int]:
    """Return the bytes of *blocks*, rounded as the allocator does, by category."""
    found = dict.fromkeys(CATEGORIES, 0)
    for block in blocks:
        found[block.category] += rounded(block.size_bytes)
    return found


def make_trace(
    events: EventColumns,
    *,
    marks: Iterable[CountedMark],
    notes: Mapping[str, Iterable[Note]],
    end: tuple[int, int] | None = None,
    workspace_sizes: Collection[int] = (),
) -> MemoryTrace:
    """
    Return the trace of *events*, as a recorder wrote them; *notes* are by category.

    *end*, as allocations and frees, cuts the trace where the recorder began to look closer. *workspace_sizes*: bytes that libraries asked
    for as their workspaces.
    """
    actions = events.actions
    positions = _positions(actions)
    last = _position(positions, *end) if end else len(actions)
    placed = (Mark(_position(positions, allocs, frees), step, phase) for allocs, frees, step, phase in marks)
    addresses, sizes, streams = (array("Q", column[:last]) for column in events[1:])
    kept = tuple(mark for mark in placed if mark.position < last or not last)
    trace = MemoryTrace(actions[:last], addresses, sizes, streams, purposes=b"", marks=kept)
    return replace(trace, purposes=_purposes(trace, notes, workspace_sizes))


class _Positions(NamedTuple):
    """Where the n-th allocation and the n-th free of a trace are."""

    allocs: list[int]
    frees: list[int]


def _positions(actions: str) -> _Positions:
    return _Positions(list(_of_action(ALLOC, actions, count())), list(_of_action(FREE, actions, count())))


def _of_action(action: str, actions: str, column: Iterable[int]) -> Iterator[int]:
    """Yield what *column* has for the events of that kind."""
    return compress(column, map(action.__eq__, actions))


def _position(positions: _Positions, num_allocs: int, num_frees: int) -> int:
    """Return the event behind the first *num_allocs* allocations and *num_frees* frees, as far as there are so many."""
    last = [
        column[min(count, len(column)) - 1] for column, count in zip(positions, (num_allocs, num_frees), strict=True) if count and column
    ]
    return max(last, default=-1) + 1


def allocations_by_address(trace: MemoryTrace, addresses: Iterable[int]) -> dict[int, list[int]]:
    """Return the numbers of all allocations at each of *addresses*, in order; the first of the trace is 1."""
    numbers: dict[int, list[int]] = {address: [] for address in addresses}
    for number, address in enumerate(_of_action(ALLOC, trace.actions, trace.addresses), start=1):
        if address in numbers:
            numbers[address].append(number)
    return numbers


def allocation_of(numbers: Mapping[int, list[int]], note: Note) -> int | None:
    """Return the number of the allocation that *note* is about, None where there is none."""
    found = numbers.get(note.address, [])
    place = bisect.bisect_right(found, note.num_allocations)
    return found[place - 1] if place else None


def _purposes(trace: MemoryTrace, notes: Mapping[str, Iterable[Note]], workspace_sizes: Collection[int]) -> bytes:
    numbers = allocations_by_address(trace, {note.address for found in notes.values() for note in found})
    purposes = bytearray([_ACTIVATIONS]) * trace.actions.count(ALLOC)
    for number, size in enumerate(_of_action(ALLOC, trace.actions, trace.sizes)) if workspace_sizes else ():
        if size % 2 and size in workspace_sizes:
            purposes[number] = _WORKSPACES
    of_optimizers = list(_optimizer_allocations(trace))
    for first, end in of_optimizers:
        purposes[first:end] = bytes([_WORKSPACES]) * (end - first)
    for index in range(len(CATEGORIES) - 1, -1, -1):  # the first category writes last
        for note in notes.get(CATEGORIES[index], ()):
            found = allocation_of(numbers, note)
            if found is not None:
                purposes[found - 1] = index
    for first, end in of_optimizers:  # L-BFGS has a closure called, which looks at what there is, between what it makes for itself
        purposes[first:end] = purposes[first:end].replace(bytes([_BATCH_DATA]), bytes([_WORKSPACES]))
    for number in _made_by_the_model(trace, purposes, numbers, notes.get("batch_data", ())):
        purposes[number - 1] = _ACTIVATIONS
    return bytes(purposes)


def _made_by_the_model(
    trace: MemoryTrace, purposes: Sequence[int], numbers: Mapping[int, list[int]], notes: Iterable[Note]
) -> Iterator[int]:
    """
    Yield the allocations that *notes* take for the batch, and that the model has made: positions to sample at, targets by another network,
    what it has generated.

    What was given to a forward is older than all that this forward leaves for the backward behind it; else the forward made it.
    """
    found = (allocation_of(numbers, note) for note in notes)
    noted = sorted({number for number in found if number is not None and purposes[number - 1] == _BATCH_DATA})
    live: dict[int, int] = {}
    number = begin = last = 0  # allocations before the forward that is going on, and before the last backward
    for before, mark in pairwise([Mark(0, 0, BUILD), *trace.marks]):
        if not noted or last >= noted[-1]:
            return
        for event in range(before.position, mark.position):
            if trace.actions[event] == ALLOC:
                number += 1
                live[trace.addresses[event]] = number
            elif trace.actions[event] == FREE:
                live.pop(trace.addresses[event], None)
        if mark.phase == "forward":
            begin = number
        elif mark.phase == "backward":
            new = noted[bisect.bisect_right(noted, last) : bisect.bisect_right(noted, number)]
            if new:
                kept = (other for other in live.values() if other > begin and purposes[other - 1] == _ACTIVATIONS)
                first = min(kept, default=number)
                yield from (each for each in new if each > first)
            last = number


def _optimizer_allocations(trace: MemoryTrace) -> Iterator[tuple[int, int]]:
    """
    Yield how many allocations there had been when an optimizer began to step, and when it ended.

    Those between are its temporaries, and its state, which is noted.
    """
    marks = [Mark(0, 0, BUILD), *trace.marks, Mark(len(trace.actions), 0, "end")]
    number = 0
    for mark, after in pairwise(marks):
        first, number = number, number + trace.actions.count(ALLOC, mark.position, after.position)
        if mark.phase == "optimizer":
            yield first, number
