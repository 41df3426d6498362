"""Where a search for the largest batch begins: a rehearsal of the program sees the end, without the card."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memplan.errors import MissingError, UsageError
from memplan.estimators.context import context_of
from memplan.estimators.rehearsed import Rehearser
from memplan.estimators.target import Target
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryRange
from memplan.memory.measurement import Measurement
from memplan.memory.rehearsal import Rehearsal
from memplan.planner.search import largest_fitting
from memplan.planner.trials import MOST_BATCH
from memplan.planner.would_fit import batch_name
from memplan.units import format_bytes

MOST_POWER = 5
"""The largest power of two that is tried for the least that a program takes."""


class Guess:
    """
    Guesses whether a size fits: as if memory were a straight line through the two nearest sizes of which it is known.

    *reserved*: peaks that a rehearsal saw, by size. Until two sizes are known, *start* is where it thinks that the end is.
    """

    def __init__(self, start: int, budget: MemoryBudget, outside_bytes: int, reserved: Mapping[int, int] | None = None) -> None:
        self._start = start
        self._budget_bytes = budget.budget_bytes
        self._outside_bytes = outside_bytes
        self._reserved = dict(reserved or {})

    def learn(self, size: int, measured: Measurement) -> None:
        """Take in what a trial showed that ran to its end: its own peak, and what CUDA takes beside PyTorch."""
        self._reserved[size] = measured.peak_reserved_bytes
        self._outside_bytes = measured.device_used.expected_bytes - measured.peak_reserved_bytes

    def __call__(self, size: int) -> bool:
        """Say whether *size* fits, as far as is known."""
        nearest = sorted(sorted(self._reserved.items(), key=lambda each: abs(each[0] - size))[:2])
        if len(nearest) < 2:
            return size <= self._start
        (low, low_bytes), (high, high_bytes) = nearest
        return low_bytes + max(0, high_bytes - low_bytes) * (size - low) // (high - low) + self._outside_bytes <= self._budget_bytes


class Beginning(NamedTuple):
    """Where a search begins."""

    name: str
    """The value to vary."""
    size: int
    origin: str
    """Who said so."""
    unit: int = 1
    """What sizes are multiples of: a program may take no others."""
    reserved: Mapping[int, int] | None = None
    """Peaks that a rehearsal saw, by size."""


def beginning_of(
    target: Target, card: GpuSpec, budget: MemoryBudget, values: dict[str, Any], name: str | None, start: int | None
) -> Beginning:
    """
    Return where to begin: at *start*, or where a rehearsal on a card like *card* sees the end of *budget*.

    *name*: the value that is the batch; None takes the one that is called so. Raises UsageError where none is, and for a program that fails
    for another reason than memory. Where nothing can be rehearsed, the program's own value is where to begin.
    """
    try:
        with Rehearser(target) as rehearser:

            def rehearse(tried: Mapping[str, Any]) -> Rehearsal:
                return rehearser.rehearse(gpu=of_some_kind(card).endless(), values=tried, looks=False)

            varied = name or _name_of(rehearse, values)

            def reserved(size: int) -> int:
                return rehearse(values | {varied: size}).peak_reserved_bytes

            if start is None:
                return _foreseen(varied, budget, context_of(card), reserved)
            least, unit = _least_and_unit(reserved)
            return Beginning(
                varied, max(least, start // unit * unit), "you" if start % unit == 0 and start >= least else "the program", unit
            )
    except MissingError as error:
        name = name or batch_name(values)
        if name is None:
            raise UsageError(
                "nobody knows which value is the batch, since the program cannot be rehearsed here: " + error.message,
                hint="name it with `--value NAME`, and its value with `--set`",
            ) from error
        found = values.get(name)
        return Beginning(name, start or (found if isinstance(found, int) and found > 0 else 1), f"the program, since {error.message}")


def _name_of(rehearse: Callable[[Mapping[str, Any]], Rehearsal], values: Mapping[str, Any]) -> str:
    """Return which value of the program is the batch. Raises UsageError where none is called so."""
    try:
        present = rehearse(values).values
    except UsageError as error:
        required = re.search(r"missing a required argument: '(\w+)'", error.message)  # as inspect says it, of the first
        if required is None or batch_name({required[1]: 1}) is None:
            raise
        return required[1]
    name = batch_name(present)
    if name is None:
        called = ", ".join(present) or "none"
        raise UsageError(f"no value of the program is called batch (its values: {called})", hint="name it with `--value NAME`")
    return name


def _foreseen(name: str, budget: MemoryBudget, context: MemoryRange, rehearse: Callable[[int], int]) -> Beginning:
    """Return the largest size that fits *budget* with its reserved peak, by *rehearse*, and *context*."""
    known: dict[int, int] = {}

    def reserved(size: int) -> int:
        if size not in known:
            known[size] = rehearse(size)
        return known[size]

    least, unit = _least_and_unit(reserved)
    reserved(least + unit)

    def fits(count: int) -> bool:
        try:
            return reserved(count * unit) + context.expected_bytes <= budget.budget_bytes
        except UsageError:  # a size that the program does not take
            return False

    def rough(count: int) -> bool:
        return Guess(least, budget, context.expected_bytes, known)(count * unit)

    found = largest_fitting(fits, low=least // unit, high=MOST_BATCH // unit, rough=rough)
    size = least if found is None else found * unit
    told = f"a rehearsal, {'with' if found else 'though even that takes'} {format_bytes(known[size])}"
    return Beginning(name, size, told, unit, known)


def _least_and_unit(reserved: Callable[[int], int]) -> tuple[int, int]:
    """
    Return the smallest power of two that the program takes, and what the sizes that it takes are multiples of.

    Batch normalisation refuses a single sample and takes all others; some programs take multiples of 8 only. Raises UsageError where the
    program takes none.
    """
    for power in range(MOST_POWER + 1):
        least = 2**power
        try:
            reserved(least)
        except UsageError:
            if power == MOST_POWER:
                raise
        else:
            break
    if least > 1:
        try:
            reserved(least + 1)
        except UsageError:
            return least, least
    return least, 1
