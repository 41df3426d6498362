"""What an estimator is: from a program, a GPU and a stage to a MemoryEstimate. What it can do beyond that is declared in its type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryEstimate, MemoryRange, Method
from memplan.workload.program import Program
from memplan.workload.stage import Stage

if TYPE_CHECKING:
    from memplan.traces.requests import Replayed
    from memplan.traces.trace import MemoryTrace


class Estimator(ABC):
    """Tells the memory of a training step. The planner takes one as an argument."""

    method: ClassVar[Method]
    """How it finds out."""

    is_slow: bool = False
    """An answer takes minutes of a GPU, or a run of the user's program: only what a plan cannot do without is asked."""

    @abstractmethod
    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return the memory of one step of *program* in *stage* (None: it has no stages) on *gpu*."""

    def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """
        Return about what the step takes of the device, without running it; None where nothing is known.

        It orders what is tried, and never decides.
        """
        return self(program, gpu, stage).device_used

    def expect(self, program: Program, gpu: GpuSpec, stages: Sequence[Stage | None]) -> None:
        """
        Take note that the memory of *program* in each of *stages* will probably be asked for soon.

        What runs steps may begin with them, beside the one that is asked for next.
        """
        del program, gpu, stages

    def confirm(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> None:
        """
        Check that *program*, which was asked about, reads its micro-batch; run another size, if nothing has shown it.

        Raises UsageError if it does not: the estimate is of another batch.
        """
        del program, gpu, stage

    num_corrections: int = 0
    """How often what a search was told proved wrong, when what it recommends was asked for: it is made again then."""

    def searching(self) -> AbstractContextManager[None]:
        """
        Return a context in which an answer orders or rules out what is asked about, as another size is recommended.

        There values that a program reads may be taken to decide nothing, where they decided nothing with another size. What is recommended
        is asked for outside of it.
        """
        return nullcontext()


StepOfValue: TypeAlias = Callable[[int], tuple[Program, Stage | None]]
"""From a value of what is varied to the step with it."""


class Interpolated(NamedTuple):
    """What a step takes at one value."""

    device_used: MemoryRange
    method: Literal["rehearsed", "worked out", "analytic"]
    """Whether that very value was rehearsed, or its allocations were worked out from others'."""


class ReplayingEstimator(Estimator):
    """An estimator that has run the steps and kept what the allocator did: more than their peaks can be asked of it."""

    @abstractmethod
    def trace(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryTrace:
        """Return every event of the allocator in that step."""

    @abstractmethod
    def replay_with_capacity(
        self, program: Program, gpu: GpuSpec, stage: Stage | None, *, capacity_bytes: int, settings: str | None = None
    ) -> Replayed:
        """Return how the step goes where the allocator can have *capacity_bytes*, with its own settings or others."""

    @abstractmethod
    def interpolate(self, of_value: StepOfValue, values: Sequence[int], gpu: GpuSpec) -> list[Interpolated]:
        """Return what the step takes that *of_value* makes of each of *values*: many from a few that are run."""

    @abstractmethod
    def asks_alike(self, program: Program, gpu: GpuSpec, other: GpuSpec, stage: Stage | None) -> bool:
        """Say whether the step asks the same of memory on *gpu* as on *other*, another kind of GPU: by running it on *gpu*."""

    @abstractmethod
    def another(self) -> ReplayingEstimator | None:
        """Return one that runs steps at the same time as this one, and keeps them where this one does; None where nothing is kept."""

    @abstractmethod
    def with_allocator_settings(self, settings: str) -> Estimator:
        """Return the estimator of the same steps under other allocator settings."""
