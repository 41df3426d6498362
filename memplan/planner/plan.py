"""A Plan: the workload before, the workload after, what it takes, why, and what to know before training."""

from collections.abc import Iterable
from typing import TypeAlias

from pydantic import NonNegativeInt, PositiveInt
from typing_extensions import Self

from memplan.description import Description
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryEstimate
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram
from memplan.workload.program import Program
from memplan.workload.workload import Workload

SCHEMA_VERSION = 1

AnyProgram: TypeAlias = Workload | CommandProgram | FunctionProgram
"""What a plan can be of."""


class StageValues(Description):
    """What a plan decides for one stage."""

    micro_batch_size: PositiveInt
    """Samples (anchors) in one forward and backward on one GPU."""

    gradient_accumulation_steps: PositiveInt
    """Micro-batches before an optimizer step."""

    effective_batch_size: PositiveInt
    """Samples that one optimizer step sees."""

    n_positives: PositiveInt | None = None
    """Positives of an anchor; None outside contrastive training."""

    n_negatives: NonNegativeInt | None = None
    """Explicit negatives of an anchor; None outside contrastive training."""

    negatives_per_anchor: NonNegativeInt | None = None
    """All negatives that the loss compares an anchor with. Accumulation adds none."""


class StageRoom(Description):
    """How many negatives and positives a stage could have at the planned micro-batch, and what they cost in items to encode."""

    items_per_anchor: PositiveInt
    """Items that a step encodes for each anchor as planned, itself included."""

    n_negatives: NonNegativeInt | None = None
    """The most explicit negatives that fit; None for a stage that has none. More change the loss and the time of a step."""

    items_per_anchor_with_negatives: PositiveInt | None = None
    """Items for each anchor with so many negatives."""

    n_positives: PositiveInt | None = None
    """The most positives that fit; None where they cost no memory: a step encodes one of them."""

    items_per_anchor_with_positives: PositiveInt | None = None
    """Items for each anchor with so many positives."""


class BatchAlternative(Description):
    """Another micro-batch and accumulation that the user may prefer."""

    micro_batch_size: PositiveInt
    """Samples in one forward and backward on one GPU."""

    gradient_accumulation_steps: PositiveInt
    """Micro-batches before an optimizer step."""

    effective_batch_size: PositiveInt
    """Samples that one optimizer step would see."""

    argument: str
    """The argument that asks for it, as `target_tolerance=0.05`."""


class StagePlan(Description):
    """One stage: its values now and as planned, with what each takes."""

    name: str
    """The stage's name; the workload's where it has no stages."""

    present: StageValues
    """As configured."""

    present_estimate: MemoryEstimate
    """What that takes."""

    present_fits: bool
    """Whether that is within the budget."""

    planned: StageValues
    """As planned; where nothing fits, the smallest try."""

    estimate: MemoryEstimate
    """What the plan takes; where nothing fits, what the smallest try takes."""

    fits: bool
    """Whether the plan is within the budget."""

    room: StageRoom | None = None
    """How many negatives and positives would fit; None outside contrastive training, and where nothing fits."""


class Lever(Description):
    """A change and what it does to memory."""

    change: str
    """What to do, in words."""

    method: str
    """How that was found out: rehearsed, or analytic where the change could not be rehearsed."""

    device_used_bytes: NonNegativeInt
    """What the heaviest stage takes with it, at the same micro-batch."""

    saving_bytes: int
    """What it saves of the device's memory there; less than 0 where it costs some."""

    fits: bool
    """Whether every stage fits with it at that micro-batch."""

    micro_batch_size: PositiveInt | None = None
    """The largest that fits with it, up to what the target needs; None where none does, for a change of GPU, and by formulas."""


class Plan(Description):
    """The answer: which batch, accumulation and negatives to use on that GPU."""

    schema_version: int = SCHEMA_VERSION
    """Of this format; it grows when a field changes its meaning or goes."""

    fits: bool
    """Whether every stage is within the budget."""

    method: str
    """The estimator that was asked."""

    gpu: GpuSpec
    """The GPU."""

    budget: MemoryBudget
    """What the plan may use of it."""

    budget_bytes: NonNegativeInt
    """The same in one number."""

    target_effective_batch_size: PositiveInt
    """What the plan aimed at."""

    effective_batch_size: PositiveInt
    """What it reaches."""

    stages: tuple[StagePlan, ...]
    """Each stage, in order; one where the workload has none."""

    missing_bytes: NonNegativeInt = 0
    """Bytes that the smallest try is over the budget, where nothing fits."""

    rule: str
    """Which rule decided the micro-batch."""

    alternative: BatchAlternative | None = None
    """The best choice under another rule: fewer steps for a little more than the target, or the target exactly."""

    reasons: tuple[str, ...] = ()
    """Why, in words."""

    warnings: tuple[str, ...] = ()
    """What the user should know before training, the costliest first."""

    levers: tuple[Lever, ...] = ()
    """What would make it fit, or more fit."""

    before: AnyProgram
    """As configured; as planned, where what is configured is not known."""

    after: AnyProgram
    """As planned."""

    def with_warnings(self, warnings: Iterable[str]) -> Self:
        """Return a copy with *warnings* behind its own."""
        return self.model_copy(update={"warnings": (*self.warnings, *warnings)})

    def with_first_warnings(self, warnings: Iterable[str]) -> Self:
        """Return a copy with *warnings* before its own: what the whole plan rests on."""
        return self.model_copy(update={"warnings": (*warnings, *self.warnings)})

    @property
    def tried(self) -> Program:
        """Return the program as planned; where nothing fits, with the smallest batch that was tried."""
        if self.fits:
            return self.after
        smallest = self.stages[0].planned
        return self.after.with_training(
            micro_batch_size=smallest.micro_batch_size, gradient_accumulation_steps=smallest.gradient_accumulation_steps
        )
