"""
The rehearsed estimator: the step of a workload, built as torch modules (`child/models/built_in.py`) and run on the simulated GPU.

The GPU of an estimate has unlimited memory, so that every size has a peak to compare with the budget. On a real one the allocator does the
same until that is full: a size whose peak is within the budget fits, without giving anything back. Beyond, cached memory goes back first;
a step that fits only so is *tight*. Whether it does, the simulated allocator says (`replay_with_capacity`), and no plan relies on it.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.errors import NotEstimatedError, NotRehearsedError, UsageError
from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.base import Estimator, Interpolated, ReplayingEstimator, StepOfValue
from memplan.estimators.interpolation import PeakLine
from memplan.estimators.rehearsal_cache import RehearsalCache, family_of
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import UNLIMITED_BYTES, GpuSpec
from memplan.hardware.torch_install import find_torch
from memplan.memory.cuda_context import with_context
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.traces.parametric import Sweep
from memplan.traces.requests import Replayed, Requests, requests_of
from memplan.traces.trace import MemoryTrace
from memplan.workload.model import TransformerModel
from memplan.workload.optimizer import OPTIMIZER_PACKAGES
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

if TYPE_CHECKING:
    from memplan.execution.rehearse import Rehearser

# A plan whose rehearsals are kept is there at once: what runs and simulates them is loaded where it is needed.

MOST_MICRO_BATCHES = 2
"""Micro-batches of a step that are run: with the second the gradients are there, and each that follows is like it."""


class Step(NamedTuple):
    """A step to be rehearsed: what it has in common with other sizes, and its size."""

    family: str
    """Equal for steps that differ in nothing but their micro-batch."""
    micro_batch_size: int
    likeness: str
    """Equal for steps that differ in nothing but their micro-batch and the kind of GPU."""
    workload: Mapping[str, object]
    """Of one stage, as JSON."""
    gpu: GpuSpec
    """With unlimited memory."""


class RehearsedEstimator(ReplayingEstimator):
    """
    Rehearses steps of workloads, each once.

    *cache*: where they are kept from one command to the next; None: nowhere. *on_rehearsal* is called before each rehearsal.
    """

    method = "rehearsed"

    def __init__(self, cache: RehearsalCache | None = None, on_rehearsal: Callable[[Step], None] | None = None) -> None:
        self._cache = cache
        self._on_rehearsal = on_rehearsal
        self._estimates: dict[tuple[str, int], Rehearsal] = {}
        self._kinds: dict[str, dict[str, GpuSpec]] = {}
        self._requests: dict[tuple[str, int], Requests] = {}
        self._traces: dict[tuple[str, int], MemoryTrace] = {}

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> Rehearsal:
        """
        Return the memory of one step of *workload* in *stage* on *gpu*, by running it; without its trace.

        Raises NotRehearsedError where the step cannot be built or run, MissingError where this machine cannot rehearse.
        """
        return with_context(self._rehearsal(step_of(workload, gpu, stage)), gpu)

    def _rehearsal(self, step: Step) -> Rehearsal:
        key = step.family, step.micro_batch_size
        if key not in self._estimates:
            found = self._cache.get(*key) if self._cache else None
            self._estimates[key] = found or self._rehearsed(step).model_copy(update={"trace": None})
            self._kinds.setdefault(step.likeness, {})[step.family] = step.gpu
        return self._estimates[key].model_copy(update={"gpu_name": step.gpu.name})

    def _rehearsed(self, step: Step) -> Rehearsal:
        """Run *step*, and keep what was seen."""
        check_packages(step)
        if self._on_rehearsal is not None:
            self._on_rehearsal(step)
        training = step.workload["training"]
        assert isinstance(training, dict)
        settings = allocator_environment(training["allocator_settings"])
        try:
            rehearsal = _rehearser().rehearse(gpu=step.gpu, values={"workload": step.workload}, environment=settings, has_padding=True)
        except UsageError as error:
            from memplan.execution.runner import not_run  # noqa: PLC0415

            raise not_run(error, instead=instead_of_running(step)) from error
        refuse_guesses(rehearsal)
        rehearsal = rehearsal.model_copy(update={"values": {}})
        assert rehearsal.trace is not None
        if not (self._cache and self._cache.put(step.family, step.micro_batch_size, rehearsal)):
            self._traces[step.family, step.micro_batch_size] = rehearsal.trace  # a trace has megabytes: in memory only where it is not kept
        return rehearsal

    def trace(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryTrace:
        """Return every event of the allocator in that step."""
        return self._trace(step_of(workload, gpu, stage))

    def _trace(self, step: Step) -> MemoryTrace:
        key = step.family, step.micro_batch_size
        found = self._traces.get(key) or (self._cache.get_trace(*key) if self._cache else None) or self._rehearsed(step).trace
        assert found is not None
        return found

    def requests(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> Requests:
        """Return what that step asks of the allocator."""
        return self._requests_of(step_of(workload, gpu, stage))

    def _requests_of(self, step: Step) -> Requests:
        key = step.family, step.micro_batch_size
        if key not in self._requests:
            self._requests[key] = requests_of(self._trace(step))
        return self._requests[key]

    # without a rehearsal

    def quick_estimate(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """
        Return about what that step takes, without running it; None where nothing is known of it.

        From the sizes nearest to it that this process has asked for, as if the peak were a straight line, or else from those of the GPU
        that is most like it; from the formulas where there is one or none, corrected by how far they were off at the one. What others have
        kept on disk plays no part: a plan is the same whatever the cache holds.
        """
        step = step_of(workload, gpu, stage)
        size = step.micro_batch_size
        known = self._asked(step.family)
        if size in known:
            return known[size].device_used
        known = known or self._of_likest_card(step)
        guessed = PeakLine({other: rehearsal.device_used.high_bytes for other, rehearsal in known.items()}).at(size)
        if guessed is None:
            guessed = _by_formula(workload, gpu, stage, known)
        return None if guessed is None else MemoryRange(low_bytes=guessed, expected_bytes=guessed, high_bytes=guessed)

    def _asked(self, family: str) -> dict[int, Rehearsal]:
        """Return what this process has asked for of *family*, by size."""
        return {size: rehearsal for (other, size), rehearsal in self._estimates.items() if other == family}

    def _of_likest_card(self, step: Step) -> dict[int, Rehearsal]:
        """Return what was run of *step* here on the GPU with the nearest capability and number of multiprocessors, by size."""
        cards = self._kinds.get(step.likeness, {})
        if not cards:
            return {}
        likest = min(cards, key=lambda family: _unlikeness(cards[family], step.gpu))
        return self._asked(likest)

    def replay_with_capacity(
        self, workload: Workload, gpu: GpuSpec, stage: Stage | None, *, capacity_bytes: int, settings: str | None = None
    ) -> Replayed:
        """
        Return how that step goes where the allocator can have *capacity_bytes*, with its own settings or others.

        By the simulated allocator, from one rehearsal of the step.
        """
        step = step_of(workload, gpu, stage)
        text = workload.training.allocator_settings if settings is None else settings
        question = f"{capacity_bytes} of {gpu.total_memory_bytes} with {text!r}"
        answers = self._cache.get_answers(step.family, step.micro_batch_size) if self._cache else {}
        if question not in answers:
            from memplan.allocator.config import read_settings  # noqa: PLC0415
            from memplan.allocator.replay import replay  # noqa: PLC0415
            from memplan.allocator.simulator import CachingAllocator, Card  # noqa: PLC0415

            allocator = CachingAllocator(Card(gpu.total_memory_bytes, capacity_bytes), read_settings(text))
            answers[question] = asdict(replay(self._requests_of(step), allocator))
            if self._cache:
                self._cache.put_answers(step.family, step.micro_batch_size, answers)
        answer: dict[str, Any] = answers[question]
        return Replayed(**answer)

    def interpolate(self, of_value: StepOfValue, values: Sequence[int], gpu: GpuSpec) -> list[Interpolated]:
        """
        Return what the step takes that *of_value* makes of each of *values*: rehearsed, or worked out between rehearsed ones.

        The two ends are rehearsed. Worked out is the reserved peak; what is added to it is as at the low end.
        """
        from memplan.allocator.config import read_settings  # noqa: PLC0415
        from memplan.allocator.replay import replay  # noqa: PLC0415
        from memplan.allocator.simulator import CachingAllocator, Card  # noqa: PLC0415

        sweep = Sweep(lambda value: self.requests(*_with_gpu(of_value(value), gpu)))
        low, high = min(values), max(values)
        for value in values:
            step = step_of(*_with_gpu(of_value(value), gpu))
            if step.micro_batch_size in self._asked(step.family):
                sweep.ask(value)
        ends = {value: self(*_with_gpu(of_value(value), gpu)) for value in (low, high)}
        found = []
        for value in values:
            requests, sizes = sweep.at(value, low=low, high=high)
            if value in sweep.rehearsed:
                found.append(Interpolated(self(*_with_gpu(of_value(value), gpu)).device_used, "rehearsed"))
                continue
            allocator = CachingAllocator(
                Card(UNLIMITED_BYTES, UNLIMITED_BYTES), read_settings(of_value(value)[0].training.allocator_settings)
            )
            reserved_bytes = replay(requests, allocator, sizes=sizes).peak_reserved_bytes
            found.append(Interpolated(_with_reserved(ends[low], reserved_bytes).device_used, "worked out"))
        return found

    def with_allocator_settings(self, settings: str) -> Estimator:
        """Return the estimator of the same steps under other allocator *settings*."""
        return _WithSettings(self, settings)


def _with_gpu(step: tuple[Workload, Stage | None], gpu: GpuSpec) -> tuple[Workload, GpuSpec, Stage | None]:
    workload, stage = step
    return workload, gpu, stage


def _by_formula(workload: Workload, gpu: GpuSpec, stage: Stage | None, known: Mapping[int, Rehearsal]) -> int | None:
    """Return the bytes that the formulas say, corrected by how far they are off at the nearest of *known*; None where there are none."""
    try:
        formula = estimate(workload, gpu, stage).device_used.high_bytes
        if not known:
            return formula
        nearest = min(known, key=lambda other: (abs(other - workload.training.micro_batch_size), other))
        there = estimate(workload.with_training(micro_batch_size=nearest), gpu, stage).device_used.high_bytes
    except NotEstimatedError:
        return None
    return formula * known[nearest].device_used.high_bytes // there


class _WithSettings(Estimator):
    """The same steps under other allocator settings: each rehearsed once, and its requests put to an allocator with those."""

    method = "rehearsed"

    def __init__(self, rehearsals: RehearsedEstimator, settings: str) -> None:
        self._rehearsals = rehearsals
        self._settings = settings

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return the memory of the step with these settings."""
        usual = self._rehearsals(workload, gpu, stage)
        seen = self._rehearsals.replay_with_capacity(workload, gpu, stage, capacity_bytes=UNLIMITED_BYTES, settings=self._settings)
        return _with_reserved(usual, seen.peak_reserved_bytes)

    def quick_estimate(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """Return about what it takes: what it takes without these settings."""
        return self._rehearsals.quick_estimate(workload, gpu, stage)


def _with_reserved(estimate: MemoryEstimate, reserved_bytes: int) -> MemoryEstimate:
    """Return *estimate* with another reserved peak: what is more or less is slack."""
    more = reserved_bytes - estimate.peak_reserved_bytes
    used, slack = estimate.device_used, max(0, estimate.breakdown.allocator_slack_bytes + more)
    return estimate.model_copy(
        update={
            "peak_reserved_bytes": reserved_bytes,
            "breakdown": estimate.breakdown.model_copy(update={"allocator_slack_bytes": slack}),
            "device_used": MemoryRange(
                low_bytes=used.low_bytes + more, expected_bytes=used.expected_bytes + more, high_bytes=used.high_bytes + more
            ),
        }
    )


def refuse_guesses(rehearsal: Rehearsal) -> None:
    """Raise NotRehearsedError where sizes were read from the device and taken as zero: more than that would be called a fit."""
    if rehearsal.lower_bound_reasons:
        raise NotRehearsedError(
            f"the memory of this step is not known: {'; '.join(rehearsal.lower_bound_reasons)}",
            hint="rehearse your own program, which has the data, and say what it reads",
        )


def allocator_environment(settings: str) -> dict[str, str]:
    """Return the variables under which a step runs with *settings* and nothing else, whatever this shell and the PyTorch there."""
    return {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}


def instead_of_running(step: Step) -> str:
    """Return what can be done where *step* does not run."""
    model: Any = step.workload["model"]
    return "rehearse your own program" if model["kind"] == "huggingface" else 'plan by formulas: `method="analytic"`'


def check_packages(step: Step) -> None:
    """Raise NotRehearsedError where the step's optimizer comes from a package that is missing: no process has to begin for that."""
    optimizer: Any = step.workload["optimizer"]
    package = OPTIMIZER_PACKAGES.get(optimizer["name"])
    if package is not None and PathFinder.find_spec(package) is None:
        raise NotRehearsedError(
            f"the optimizer {optimizer['name']} is that of {package}, which is not installed", hint=f"`pip install {package}`"
        )


def step_of(workload: Workload, gpu: GpuSpec, stage: Stage | None) -> Step:
    """Return what of *workload*, *gpu* and *stage* decides a rehearsal."""
    micro_batches = min(workload.training.gradient_accumulation_steps, MOST_MICRO_BATCHES)
    reduced = workload.with_training(gradient_accumulation_steps=micro_batches, target_effective_batch_size=None)
    anonymous = () if stage is None else (stage.model_copy(update={"name": "stage", "max_n_negatives": None}),)
    reduced = reduced.model_copy(update={"name": "", "stages": anonymous})
    card = of_some_kind(gpu).endless()
    alone = reduced.with_training(micro_batch_size=1)
    likeness = alone.model_dump_json()
    family = _family(likeness, card, _packages_of(workload))
    return Step(family, workload.training.micro_batch_size, likeness, json.loads(reduced.model_dump_json()), card)


def _unlikeness(gpu: GpuSpec, other: GpuSpec) -> tuple[int, int]:
    """Return how far two kinds of GPU are apart: by capability, then by multiprocessors."""
    (major, minor), (other_major, other_minor) = (kind.compute_capability or (8, 0) for kind in (gpu, other))
    return abs(10 * major + minor - 10 * other_major - other_minor), abs((gpu.multiprocessors or 0) - (other.multiprocessors or 0))


@lru_cache(maxsize=4096)
def _family(step: str, gpu: GpuSpec, packages: tuple[str, ...]) -> str:
    kind = {name: getattr(gpu, name) for name in ("compute_capability", "multiprocessors")}
    versions: dict[str, object] = {"torch": find_torch()[:3]}
    if packages:
        from importlib import metadata  # noqa: PLC0415

        versions |= {package: metadata.version(package) for package in packages if PathFinder.find_spec(package)}
    return family_of({"step": step, "card": kind, "packages": versions})


def _packages_of(workload: Workload) -> tuple[str, ...]:
    """Return the packages besides PyTorch that build the step."""
    is_huggingface = isinstance(workload.model, TransformerModel) and workload.model.huggingface_config is not None
    optimizer = OPTIMIZER_PACKAGES.get(workload.optimizer.name)
    return (*(["transformers"] if is_huggingface else []), *([optimizer] if optimizer else []))


@lru_cache(maxsize=1)
def _rehearser() -> Rehearser:
    """Return the process that rehearses workloads; it lives as long as this one."""
    from memplan.execution.rehearse import Rehearser  # noqa: PLC0415
    from memplan.execution.step_source import StepSource  # noqa: PLC0415

    rehearser = Rehearser(StepSource("memplan.child.models.built_in", "build"), allow_writes=True)  # it writes nothing
    atexit.register(rehearser.close)
    return rehearser
