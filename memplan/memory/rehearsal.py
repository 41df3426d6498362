"""What a rehearsal saw: the peaks of each step, and how it ended."""

from pydantic import NonNegativeInt

from memplan.description import Description
from memplan.memory.estimate import MemoryEstimate


class StepPeaks(Description):
    """The allocator at the end of a step; peaks are those so far."""

    peak_allocated_bytes: NonNegativeInt
    """torch.cuda.max_memory_allocated()."""

    peak_reserved_bytes: NonNegativeInt
    """torch.cuda.max_memory_reserved()."""

    allocated_bytes: NonNegativeInt
    """torch.cuda.memory_allocated()."""

    reserved_bytes: NonNegativeInt
    """torch.cuda.memory_reserved()."""


class OutOfMemory(Description):
    """Where memory ran out."""

    message: str
    """PyTorch's first line: which allocation."""

    phase: str
    """build, or the step."""

    place: str | None
    """The line of the user's file."""


class Rehearsal(Description):
    """A training step that was run on the stand-in device."""

    schema_version: int = 1
    """Of this format."""

    card: str
    """The card that was stood in for."""

    torch: str
    """The PyTorch that ran."""

    fits: bool
    """Whether every step ran to its end."""

    out_of_memory: OutOfMemory | None = None
    """Where memory ran out, where it did."""

    num_alloc_retries: NonNegativeInt
    """How often the allocator had to give cached memory back before it could go on: a program with any is tight."""

    estimate: MemoryEstimate
    """The peak, by category; of what ran before memory ran out, where it did."""

    steps: tuple[StepPeaks, ...]
    """Each step that ran to its end."""

    not_served: tuple[str, ...] = ()
    """Calls of CUDA that the device does not serve: where there are any, nothing here is to be trusted."""

    grows: bool = False
    """The peak still rose from the step before the last to the last."""
