"""What is worked out from a few rehearsals, beside rehearsals of the same sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memplan.allocator.replay import replay_by_default
from memplan.errors import UsageError
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.planner.search import largest_fitting
from memplan.traces.parametric import Sweep
from memplan.traces.requests import Requests, requests_of

FILE = Path(__file__).with_name("programs_to_plan.py")
CARDS = ("t4", "a100-40", "rtx4090")
LOW, HIGH = 1, 64
POINTS = (3, 7, 13, 21, 27, 35, 43, 51, 59)
"""Where what was worked out is compared."""


@dataclass(frozen=True)
class Assessment:
    """One program on one kind of GPU."""

    program: str
    card: str
    errors: tuple[float, ...]
    """Of the peak reserved at each point that was worked out: worked out over rehearsed, less 1."""
    num_rehearsals: int
    """That working them out, and the search, took."""
    largest: int
    """The largest batch that was called fitting."""
    fits: bool
    """Whether it ran on such a GPU without giving anything back."""
    next_fits: bool
    """Whether the next larger one did too."""
    reported_bytes: int
    """The peak reserved that was reported for the largest."""
    rehearsed_bytes: int
    """What a fresh rehearsal reserves there."""


def assess(program: str, name: str) -> Assessment:
    """Work out the batches of *program* on the GPU called *name*, of a size that is full in the middle, and hold it to rehearsals."""
    kind = find_gpu(name)
    with Rehearser(step_source_from(f"{FILE}:{program}")) as rehearser:
        sweep = Sweep(lambda batch: requests(run(rehearser, kind.endless(), batch)))

        def reserved(batch: int) -> int:
            found, sizes = sweep.at(batch, low=LOW, high=HIGH)
            return replay_by_default(found, sizes=sizes).peak_reserved_bytes

        capacity_bytes = (reserved(LOW) + reserved(HIGH)) // 2

        def answer() -> int:
            fits = largest_fitting(
                lambda batch: reserved(batch) <= capacity_bytes, low=LOW, high=HIGH, guess=lambda batch: batch <= HIGH // 2
            )
            assert fits is not None
            return fits

        largest = answer()
        while largest not in sweep.rehearsed:  # what is recommended has itself been rehearsed
            sweep.ask(largest)
            largest = answer()
        worked_out = {batch: reserved(batch) for batch in POINTS}
        worked_out = {batch: bytes_ for batch, bytes_ in worked_out.items() if batch not in sweep.rehearsed}
        num_rehearsals = len(sweep.rehearsed)
    with Rehearser(step_source_from(f"{FILE}:{program}")) as fresh:
        errors = tuple(bytes_ / run(fresh, kind.endless(), batch).peak_reserved_bytes - 1 for batch, bytes_ in worked_out.items())
        real = kind.model_copy(update={"total_memory_bytes": capacity_bytes})
        return Assessment(
            program=program,
            card=name,
            errors=errors,
            num_rehearsals=num_rehearsals,
            largest=largest,
            fits=runs(fresh, real, largest),
            next_fits=runs(fresh, real, largest + 1),
            reported_bytes=reserved_of(sweep.rehearsed[largest]),
            rehearsed_bytes=run(fresh, kind.endless(), largest).peak_reserved_bytes,
        )


def run(rehearser: Rehearser, gpu: GpuSpec, batch: int) -> Rehearsal:
    return rehearser.rehearse(gpu=gpu, values={"batch": batch}, steps=3, context_bytes=0)


def runs(rehearser: Rehearser, gpu: GpuSpec, batch: int) -> bool:
    """Say whether the program runs on *gpu* without giving anything back."""
    try:
        seen = run(rehearser, gpu, batch)
    except UsageError:
        return False
    return seen.failure is None and seen.out_of_memory is None and seen.num_alloc_retries == 0


def requests(rehearsal: Rehearsal) -> Requests:
    assert rehearsal.trace is not None
    return requests_of(rehearsal.trace)


def reserved_of(found: Requests) -> int:
    return replay_by_default(found).peak_reserved_bytes
