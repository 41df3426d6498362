"""What a real GPU showed of a step that was run on it, and how that compares with what was planned."""

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import NonNegativeFloat, NonNegativeInt, computed_field

from memplan.execution.rehearsal import Rehearsal, Verdict
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.units import format_bytes


class Measurement(Rehearsal):
    """A training step that was run on a real GPU: what its allocator did, and what the driver said of it."""

    device_bytes: NonNegativeInt | None = None
    """What the driver showed for the process at its peak; None where it does not tell."""

    context_bytes: NonNegativeInt | None = None
    """Of that, what was there before the first tensor: the CUDA context. None where the driver does not tell."""

    libraries_bytes: NonNegativeInt = 0
    """Of that, what came later and is not PyTorch's allocator's: kernels as they were loaded, what libraries allocate for themselves."""

    step_seconds: tuple[NonNegativeFloat, ...] = ()
    """What each step took, of at most two micro-batches, with its loading; the first also loads kernels."""

    driver_version: str | None = None
    """The driver that ran the GPU."""

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated properties
    @property
    def verdict(self) -> Verdict:
        """Return whether it fits: it ran on the GPU itself, and what it gave back meanwhile is told beside."""
        return "fits" if self.out_of_memory is None else "does_not_fit"

    @property
    def outside_bytes(self) -> int | None:
        """Return what the process took beside PyTorch's allocator; None where the driver does not tell."""
        return None if self.context_bytes is None else self.context_bytes + self.libraries_bytes


class Compared(NamedTuple):
    """One figure as planned and as measured."""

    name: str
    planned_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Return how much more was measured."""
        return self.measured_bytes - self.planned_bytes

    @property
    def percent(self) -> float | None:
        """Return that in percent of what was planned; None where nothing was."""
        return 100 * self.difference_bytes / self.planned_bytes if self.planned_bytes else None


def compare(planned: MemoryEstimate, measured: Measurement) -> Iterator[Compared]:
    """Yield every category, and the three peaks behind them; of the device only where the driver tells of it."""
    told = dict(measured.breakdown)
    for name, planned_bytes in planned.breakdown:
        if name != "cuda_context_bytes" or measured.outside_bytes is not None:
            yield Compared(name.removesuffix("_bytes").replace("_", " ").replace("cuda", "CUDA"), planned_bytes, told[name])
    yield Compared("peak allocated", planned.peak_allocated_bytes, measured.peak_allocated_bytes)
    yield Compared("peak reserved", planned.peak_reserved_bytes, measured.peak_reserved_bytes)
    if measured.device_bytes is not None:
        yield Compared("peak of the device", planned.device_used_bytes, measured.device_bytes)


def contradiction(measured: Measurement, budget: MemoryBudget) -> str | None:
    """Return why *measured* does not go with a plan that says it fits *budget*; None where it does."""
    ended = measured.out_of_memory
    if not measured.fits and ended is not None:
        where = f" at {ended.place}" if ended.place else ""
        when = f"step {ended.step}, {ended.phase}" if ended.step else "the build of the model"
        return f"memory ran out in {when}{where}: {format_bytes(ended.requested_bytes)} asked for, {format_bytes(ended.free_bytes)} free"
    if measured.num_alloc_retries:
        times = f"{measured.num_alloc_retries} time" + ("s" if measured.num_alloc_retries > 1 else "")
        return f"it ran only by giving cached memory back {times}"
    if not budget.fits(measured.device_used):
        over = format_bytes(budget.missing_bytes(measured.device_used))
        return f"it took {format_bytes(measured.device_used_bytes)}, {over} over the budget"
    return None


def measured_range(size_bytes: int) -> MemoryRange:
    """Return the range of a figure that was measured."""
    return MemoryRange(low_bytes=size_bytes, expected_bytes=size_bytes, high_bytes=size_bytes)
