"""For a step that does not fit as it is: how much it needs, which cards have that, and how much smaller it would have to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import NonNegativeInt

from memplan.description import Description
from memplan.errors import UsageError
from memplan.hardware.catalog import cards
from memplan.hardware.spec import GpuSpec
from memplan.memory.rehearsal import Rehearsal
from memplan.planner.search import largest_fitting

BATCH_NAMES = (
    "micro_batch_size",
    "batch_size",
    "per_device_train_batch_size",
    "train_batch_size",
    "batch",
    "micro_batch",
    "micro",
    "bsz",
    "bs",
    "mbs",
    "n_samples",
    "num_samples",
    "b",
    "B",
    "n",
    "N",
)
"""What people call the number of samples in a step; the first that is there is tried smaller."""

MOST_CARDS = 4


class WouldFit(Description):
    """What would fit in place of what did not."""

    device_used_bytes: NonNegativeInt | None
    """A size of such a card with which the step ran, CUDA context included. None: it does not run with memory without end either."""

    cards: tuple[str, ...]
    """The smallest cards of the catalogue that offer so much; another kind of card may take other kernels, and so other memory."""

    name: str | None = None
    """The value that was tried smaller: the batch, as the program calls it."""

    value: NonNegativeInt | None = None
    """The largest of it that ran to its end. None: not even 1 did."""


def what_would_fit(run: Callable[[GpuSpec, Mapping[str, Any]], Rehearsal], *, gpu: GpuSpec, values: Mapping[str, Any]) -> WouldFit:
    """
    Return what would fit where a rehearsal with *values* on *gpu* did not; *run* rehearses.

    A program that fails for another reason with more memory, or with a smaller batch, does not fit there: what is known of it stands.
    """
    try:
        whole = run(gpu.endless(), values)
        needed, known = _least(run, gpu, values, whole.device_used_bytes) if whole.fits else None, whole.values
    except UsageError:
        needed, known = None, dict(values)
    name = batch_name(known)
    return WouldFit(
        device_used_bytes=needed,
        cards=_cards_with(needed) if needed else (),
        name=name,
        value=_largest(lambda value: run(gpu, dict(values) | {name: value}).fits, known[name]) if name else None,
    )


def batch_name(values: Mapping[str, Any]) -> str | None:
    """Return which of *values* is the batch, by its name; None where none is."""
    return next((name for name in BATCH_NAMES if type(values.get(name)) is int), None)  # True is no batch


def _least(run: Callable[[GpuSpec, Mapping[str, Any]], Rehearsal], gpu: GpuSpec, values: Mapping[str, Any], used_bytes: int) -> int:
    """Return a size of *gpu* with which the step runs: what it used of endless memory, or more where giving segments back tears holes."""
    tried = (int(used_bytes * factor) for factor in (1, 1.01, 1.02, 1.05, 1.1, 1.2))
    return next((size for size in tried if run(gpu.model_copy(update={"total_memory_bytes": size}), values).fits), int(used_bytes * 1.5))


def _largest(fits: Callable[[int], bool], tried: object) -> int | None:
    """
    Return the largest value below *tried* that fits; raised by *fits*, UsageError says that the program does not run with it.

    Batch normalisation refuses a single sample, others what is no multiple of 8: so the smallest power of two that the program takes is
    the step of the search, and only its last stretch is gone through by ones.
    """
    assert isinstance(tried, int)

    def runs(value: int) -> bool:
        try:
            return fits(value)
        except UsageError:
            return False

    unit = 1
    while unit < tried:
        try:
            if not fits(unit):
                return None
            break
        except UsageError:
            unit *= 2
    multiple = largest_fitting(lambda count: runs(count * unit), low=1, high=(tried - 1) // unit)
    return largest_fitting(runs, low=multiple * unit, high=min(multiple * unit + unit, tried) - 1) if multiple else None


def _cards_with(needed_bytes: int) -> tuple[str, ...]:
    whole = sorted((card.spec for card in cards() if not card.is_mig), key=lambda spec: spec.total_memory_bytes)
    return tuple(spec.name for spec in whole if spec.total_memory_bytes >= needed_bytes)[:MOST_CARDS]
