"""A MemoryEstimate: what every estimator answers, however it found out."""

from typing import Literal

from pydantic import NonNegativeInt, computed_field, model_validator

from memplan.description import Description
from memplan.memory.breakdown import MemoryBreakdown

Method = Literal["analytic", "guide", "rehearsed", "measured"]

SET_UP = "set-up before the first step"
"""The phase of a peak while a program makes its model and loads the weights."""


class MemoryRange(Description):
    """How sure a figure is."""

    low_bytes: NonNegativeInt
    """It is hardly less than this."""

    expected_bytes: NonNegativeInt
    """The estimate."""

    high_bytes: NonNegativeInt
    """It is hardly more than this; a plan has to fit with this."""

    @model_validator(mode="after")
    def _is_ordered(self) -> "MemoryRange":
        if not self.low_bytes <= self.expected_bytes <= self.high_bytes:
            raise ValueError(f"not in order: {self.low_bytes} <= {self.expected_bytes} <= {self.high_bytes}")
        return self


class MemoryEstimate(Description):
    """The memory of one training step on one GPU."""

    method: Method
    """How the figures were found."""

    breakdown: MemoryBreakdown
    """Bytes by category at the peak; they add up to the expected device memory."""

    peak_allocated_bytes: NonNegativeInt
    """torch.cuda.max_memory_allocated()."""

    peak_reserved_bytes: NonNegativeInt
    """torch.cuda.max_memory_reserved()."""

    device_used: MemoryRange
    """What the driver shows for the process: reserved and context."""

    peak_phase: str
    """Where in the step the peak is."""

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated properties
    @property
    def device_used_bytes(self) -> int:
        """Return the expected peak of the device."""
        return self.device_used.expected_bytes
