"""For a step or a program that does not fit as it is: how much it needs, which GPUs have that, and how much smaller it would have to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from memplan.description import Description
from memplan.errors import NothingSeenError, UsageError
from memplan.estimators.interpolation import PeakLine
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.step_source import batch_name, count_of
from memplan.hardware.catalog import catalog_gpus
from memplan.hardware.gpu import GpuSpec
from memplan.planner.search import Outcome, largest_accepted

MOST_GPUS = 4
STEPS_BEYOND = 3
"""How many steps a program runs behind the one that memory ended: in the next ones the optimizer's state is there, and caches are full."""


class WouldFit(Description):
    """What would fit in place of what did not."""

    device_used_bytes: NonNegativeInt | None
    """A size of such a GPU with which the step ran, CUDA context included. None: it does not run with unlimited memory either."""

    is_lower_bound: bool = False
    """It may take more than that: sizes were guessed, or it was ended too early."""

    gpus: tuple[str, ...]
    """The smallest GPUs of the catalogue that offer so much; another kind of GPU may take other kernels, and so other memory."""

    name: str | None = None
    """The value that was tried smaller: the batch, as the program calls it."""

    value: NonNegativeInt | None = None
    """The largest of it that ran to its end. None: not even 1 did."""

    num_steps: PositiveInt | None = None
    """How many steps of a program the size is of. None: it is of a function's step, or of the program to its end."""

    is_of_program: bool = False
    """It is of a whole program, for which nothing smaller was tried: nothing says where its batch is written."""


def what_would_fit(
    run: Callable[[GpuSpec, Mapping[str, Any]], Rehearsal],
    *,
    gpu: GpuSpec,
    values: Mapping[str, Any],
    runs_on: Callable[[GpuSpec], bool] = lambda _: True,
) -> WouldFit:
    """
    Return what would fit where a rehearsal with *values* on *gpu* did not; *run* rehearses, *runs_on* says which GPUs may be named.

    A program that fails for another reason with more memory, or with a smaller batch, does not fit there: what is known of it stands.
    """
    line = PeakLine()
    whole, needed = _needed(lambda kind: run(kind, values), gpu)
    known = dict(values) if whole is None else whole.values
    is_lower_bound = whole is not None and whole.fits is None
    name = batch_name(known)
    tried = count_of(known[name]) if name else None
    if tried and whole is not None and whole.fits:
        line.learn(tried, whole.device_used_bytes)
    return WouldFit(
        device_used_bytes=needed,
        is_lower_bound=is_lower_bound,
        gpus=_gpus_with(needed, runs_on) if needed else (),
        name=name,
        value=_largest(lambda value: run(gpu, dict(values) | {name: value}), tried, line, gpu.total_memory_bytes) if name else None,
    )


def what_program_needs(
    run: Callable[[GpuSpec, int | None], Rehearsal],
    seen: Rehearsal,
    *,
    gpu: GpuSpec,
    steps: int | None,
    runs_on: Callable[[GpuSpec], bool] = lambda _: True,
) -> WouldFit | None:
    """
    Return how much memory a program needs that did not fit on *gpu* in *seen*; *run* rehearses it on a GPU for so many steps, None: all.

    One that memory ended is run a few steps further than it came, but not for more than *steps*: its later ones may be many. None where
    that shows nothing: it takes too long, or is interrupted.
    """
    if seen.out_of_memory is not None and not seen.out_of_memory.is_caught:
        further = len(seen.steps) + STEPS_BEYOND
        steps = further if steps is None else min(steps, further)
    was_interrupted = False

    def run_watched(kind: GpuSpec) -> Rehearsal:
        nonlocal was_interrupted
        found = run(kind, steps)
        was_interrupted = was_interrupted or found.was_interrupted
        return found

    if seen.needs is not None:
        return WouldFit(
            device_used_bytes=seen.needs.high_bytes, gpus=_gpus_with(seen.needs.high_bytes, runs_on), num_steps=steps, is_of_program=True
        )
    whole, needed = _needed(run_watched, gpu)
    if whole is None or was_interrupted:
        return None
    return WouldFit(
        device_used_bytes=needed,
        is_lower_bound=whole.fits is None,
        gpus=_gpus_with(needed, runs_on) if needed else (),
        num_steps=steps,
        is_of_program=True,
    )


def _needed(run: Callable[[GpuSpec], Rehearsal], gpu: GpuSpec) -> tuple[Rehearsal | None, int | None]:
    """
    Return how *run* goes with unlimited memory of this kind of *gpu*, and a size with which it runs, None each where it does not.

    Where it may take more than it shows, the size is what it took.
    """
    try:
        whole = run(gpu.endless())
        if whole.fits is None and whole.failure is None:
            return whole, whole.device_used_bytes
        if whole.takes_what_is_free and whole.fits:
            return whole, whole.device_used.high_bytes
        return whole, _least(run, gpu, whole.device_used.high_bytes) if whole.fits else None
    except (UsageError, NothingSeenError):
        return None, None


def _least(run: Callable[[GpuSpec], Rehearsal], gpu: GpuSpec, used_bytes: int) -> int:
    """
    Return a size of *gpu* with which *run* fits: the most that it used of endless memory, or more where giving back tears holes.

    Where it ran to its end with less than its upper bound there, that bound is next. A program may be run five times for each size: there
    are no more than three.
    """
    size = used_bytes
    for factor in (1.05, 1.2, 1.5):
        found = run(gpu.model_copy(update={"total_memory_bytes": size}))
        if found.fits:
            return size
        size = max(int(used_bytes * factor), int(size * 1.05), found.device_used.high_bytes if found.out_of_memory is None else 0)
    return size


def _largest(run: Callable[[int], Rehearsal], tried: int | None, line: PeakLine, capacity_bytes: int) -> int | None:
    """Return the largest value below *tried* that fits, of those that the program takes."""
    assert tried is not None

    def ask(value: int) -> Outcome:
        try:
            found = run(value)
        except UsageError:  # it does not run with that value
            return Outcome.REFUSED
        if found.fits:
            line.learn(value, found.device_used_bytes)
        return Outcome.FITS if found.fits else Outcome.TOO_LARGE

    def guess(value: int) -> bool:
        peak_bytes = line.at(value)
        if peak_bytes is not None:
            return peak_bytes <= capacity_bytes
        known = max(line.known.items(), default=None)  # what little is known: no more than its share
        return known is None or known[1] * value <= capacity_bytes * known[0]

    return largest_accepted(ask, high=tried - 1, guess=guess).size


def _gpus_with(needed_bytes: int, runs_on: Callable[[GpuSpec], bool]) -> tuple[str, ...]:
    whole = sorted((card.spec for card in catalog_gpus() if not card.is_mig), key=lambda spec: spec.total_memory_bytes)
    return tuple(spec.name for spec in whole if spec.total_memory_bytes >= needed_bytes and runs_on(spec))[:MOST_GPUS]
