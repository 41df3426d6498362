"""
The recommended settings of one program for many GPUs, side by side.

A kind of GPU is its compute capability and its number of multiprocessors: that is what a simulated GPU answers differently, and PyTorch
reads both whatever it runs. Most kinds ask the same of memory all the same. So one kind is searched in earnest, for the sizes of others
too; on another what that search recommends is run, and where every request is the same to the byte, the figures are the same. Where one
differs, that kind is searched by itself, and further ones are compared with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt
from typing_extensions import Unpack

from memplan.description import Description
from memplan.errors import NoKernelsError
from memplan.estimators.base import Estimator, ReplayingEstimator
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.planner.decision import NO_PINS, DecisionOptions, decide, smallest_try
from memplan.planner.fitting import stages_of
from memplan.planner.pins import Pins
from memplan.planner.plan import StageValues
from memplan.planner.planning import values_of
from memplan.workload.program import Program


class ComparedStage(Description):
    """One stage on one GPU."""

    name: str
    """The stage's name; the program's where it has no stages."""

    planned: StageValues
    """As planned; where nothing fits, the smallest try."""

    device_used_bytes: NonNegativeInt
    """What that takes, CUDA context included."""


class ComparedGpu(Description):
    """One GPU of a comparison."""

    gpu: GpuSpec
    """The GPU."""

    num_gpus: PositiveInt = 1
    """How many of them train together."""

    budget_bytes: NonNegativeInt
    """What the plan may use of it; 0 where it was not planned."""

    fits: bool
    """Whether there is a plan for it."""

    missing_bytes: NonNegativeInt
    """What is missing where there is none."""

    stages: tuple[ComparedStage, ...]
    """Each stage, in order; none where it was not planned."""

    problem: str | None = None
    """Why it was not planned: the training cannot be divided over that many GPUs, or PyTorch does not run on them."""

    @property
    def device_used_bytes(self) -> int:
        """Return what the stage takes that takes most."""
        return max((stage.device_used_bytes for stage in self.stages), default=0)

    @property
    def machine_bytes(self) -> int:
        """Return the memory of all its GPUs."""
        return self.num_gpus * self.gpu.total_memory_bytes


def not_planned(gpu: GpuSpec, num_gpus: int, problem: str) -> ComparedGpu:
    """Return the row of so many of *gpu* that nothing is planned for."""
    return ComparedGpu(gpu=gpu, num_gpus=num_gpus, budget_bytes=0, fits=False, missing_bytes=0, stages=(), problem=problem)


def compare(
    program: Program,
    gpus: Sequence[GpuSpec],
    estimator: Estimator,
    *,
    pins: Pins = NO_PINS,
    most_at_once: int = 1,
    **options: Unpack[DecisionOptions],
) -> list[ComparedGpu]:
    """
    Return what is decided for *program* on each of *gpus*, in their order; *options* are those of `decide`.

    *most_at_once*: how many are looked at at a time, where what one finds is kept for the others.
    """
    work = _Work(program, gpus, pins, options)
    others = [estimator.another() for _ in range(most_at_once - 1)] if isinstance(estimator, ReplayingEstimator) else []
    with ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
        beside = [pool.submit(work.do, other, newest_first=not number % 2) for number, other in enumerate(filter(None, others))]
        try:
            work.do(estimator, newest_first=False)
            for each in beside:
                each.result()
        finally:
            work.stop()
    return [work.found[gpu] for gpu in gpus]


class _Found(NamedTuple):
    """What is planned for a GPU."""

    searched: GpuSpec
    """The GPU with the kind that was searched: its own, or one that asks the same."""
    planned: Program
    """As planned; where nothing fits, the smallest try."""
    budget: MemoryBudget
    fits: bool


class _Reference(NamedTuple):
    """A kind of GPU that was searched in earnest."""

    found: _Found
    capabilities: set[tuple[int, int]]
    """Of the kinds that ask the same."""


class _Work:
    """The GPUs that are still to be looked at, by capability: kinds that may ask the same come after each other."""

    def __init__(self, program: Program, gpus: Sequence[GpuSpec], pins: Pins, options: DecisionOptions) -> None:
        self._program, self._pins, self._options = program, pins, options
        self._left = deque(sorted(set(gpus), key=lambda gpu: (capability_of(gpu), gpu.total_memory_bytes, gpu.name)))
        self._references: list[_Reference] = []
        self.found: dict[GpuSpec, ComparedGpu] = {}

    def stop(self) -> None:
        """Begin no further GPU."""
        self._left.clear()

    def do(self, estimator: Estimator, *, newest_first: bool) -> None:
        """Look at GPUs until none is left: two at once begin at both ends, where kinds are least alike."""
        while (gpu := self._next(newest_first=newest_first)) is not None:
            self.found[gpu] = self._row(gpu, estimator)

    def _row(self, gpu: GpuSpec, estimator: Estimator) -> ComparedGpu:
        try:
            return _compared(gpu, self._search(gpu, estimator), estimator)
        except NoKernelsError:
            return not_planned(gpu, self._program.parallelism.num_gpus, "this PyTorch has no kernels for it")

    def _next(self, *, newest_first: bool) -> GpuSpec | None:
        try:
            return self._left.pop() if newest_first else self._left.popleft()
        except IndexError:  # another has taken the last
            return None

    def _search(self, gpu: GpuSpec, estimator: Estimator) -> _Found:
        if isinstance(estimator, ReplayingEstimator):
            for reference in self._likest_references(gpu):
                shared = self._as_another(gpu, reference, estimator)
                if shared is not None:
                    return shared
        found = self._found(gpu, estimator)
        self._references.append(_Reference(found, {capability_of(gpu)}))
        return found

    def _likest_references(self, gpu: GpuSpec) -> list[_Reference]:
        """Return the kinds that *gpu* may be like: those first to which the nearest capability was found to be like."""
        return sorted(self._references, key=lambda each: min(_distance(capability_of(gpu), known) for known in set(each.capabilities)))

    def _found(self, gpu: GpuSpec, estimator: Estimator) -> _Found:
        decision = decide(self._program, gpu, estimator, pins=self._pins, **self._options)
        return _Found(gpu, decision.after or smallest_try(decision, self._pins), decision.budget, decision.after is not None)

    def _as_another(self, gpu: GpuSpec, reference: _Reference, estimator: ReplayingEstimator) -> _Found | None:
        """Return what the kind of *reference* makes of the size of *gpu*; None where what is planned asks other memory on its own kind."""
        own = of_some_kind(gpu)
        twin = own.model_copy(update={"kernels_of": of_some_kind(reference.found.searched).kind})
        is_new = capability_of(gpu) not in reference.capabilities
        searched = reference.found.planned
        if is_new and not estimator.asks_alike(searched, own, twin, stages_of(searched)[0]):  # before anything is searched in vain
            return None
        found = self._found(twin, estimator)
        if not all(estimator.asks_alike(found.planned, own, twin, stage) for stage in stages_of(found.planned)):
            return None
        reference.capabilities.add(capability_of(gpu))
        return found


def capability_of(gpu: GpuSpec) -> tuple[int, int]:
    """Return the compute capability of *gpu*, or of the kind that it is taken for."""
    return of_some_kind(gpu).compute_capability or (0, 0)


def _distance(capability: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(10 * capability[0] + capability[1] - 10 * other[0] - other[1])


def _compared(gpu: GpuSpec, found: _Found, estimator: Estimator) -> ComparedGpu:
    used = [estimator(found.planned, found.searched, stage).device_used for stage in stages_of(found.planned)]
    return ComparedGpu(
        gpu=gpu,
        num_gpus=found.planned.parallelism.num_gpus,
        budget_bytes=found.budget.budget_bytes,
        fits=found.fits,
        missing_bytes=max(map(found.budget.missing_bytes, used)),
        stages=tuple(
            ComparedStage(
                name=stage.name if stage else found.planned.name,
                planned=values_of(found.planned, stage),
                device_used_bytes=each.expected_bytes,
            )
            for stage, each in zip(stages_of(found.planned), used, strict=True)
        ),
    )
