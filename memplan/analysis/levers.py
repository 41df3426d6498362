"""Levers: changes to a program, each found out about by itself: what it takes with it, and the batch that it allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memplan.errors import NoKernelsError, NotEstimatedError, NotRehearsedError
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.estimators.base import Estimator, ReplayingEstimator
from memplan.hardware.catalog import catalog_gpus
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryEstimate
from memplan.planner.fitting import all_stages_fit, all_stages_seem_to_fit, heaviest_stage, largest_micro_batch
from memplan.planner.negatives import with_negatives
from memplan.planner.plan import Lever
from memplan.planner.search import largest_fitting
from memplan.units import format_bytes
from memplan.workload.model import ContrastiveEncoderModel, Lora, TransformerModel, encoder_of
from memplan.workload.optimizer import Optimizer
from memplan.workload.parallelism import Strategy
from memplan.workload.program import Program
from memplan.workload.workload import Workload

ALLOCATOR_SETTINGS = ("expandable_segments:True", "max_split_size_mb:256", "roundup_power2_divisions:8")
"""What is tried of the allocator's settings; whether one helps depends on the program, and some make it worse."""

CACHED_ITEMS = 16
"""Items in memory at a time under the cached loss that is tried."""

LEAST_SHARE = 0.01
"""A change of less than this is no help."""


class Candidate(NamedTuple):
    """A change that is to be tried."""

    change: str
    program: Program
    settings: str | None = None
    """Other allocator settings, which need no other rehearsal."""
    is_trade: bool = False
    """It costs memory and buys time."""


def find_levers(
    program: Program, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator, most: int, fits: bool = False
) -> tuple[Lever, ...]:
    """
    Return the changes that would save memory, the largest saving first; of a program that *fits* also what it may be worth to pay for;
    of one that does not, last, a GPU that would do.

    *most* is the largest micro-batch that is of use.
    """
    found = []
    for candidate in _candidates(program, gpu=gpu, budget=budget, estimator=estimator, fits=fits):
        try:
            lever = _tried(candidate, program, gpu=gpu, budget=budget, estimator=estimator, most=most)
        except (NotRehearsedError, NotEstimatedError):  # it does not run so, and there are no formulas for it
            continue
        if candidate.is_trade or lever.saving_bytes > LEAST_SHARE * (lever.device_used_bytes + lever.saving_bytes):
            found.append(lever)
    found.sort(key=lambda lever: -lever.saving_bytes)
    return (*found, *(() if fits else _larger_gpu(program, budget=budget, estimator=estimator)))


def _tried(candidate: Candidate, before: Program, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator, most: int) -> Lever:
    """
    Return what *candidate* takes and allows; of a workload by formulas where it cannot be rehearsed (a package that it needs is missing).

    Raises NotRehearsedError for a program that does not run with it, NotEstimatedError for a workload that has no formulas either.
    """
    by = estimator
    if candidate.settings is not None:
        assert isinstance(estimator, ReplayingEstimator)  # only then are settings a candidate
        by = estimator.with_allocator_settings(candidate.settings)
    usual = _heaviest(before, gpu, estimator).device_used
    try:
        lever = _measured(candidate, gpu, budget, by, most=most)
        saving_bytes = usual.expected_bytes - lever.device_used_bytes
    except NotRehearsedError:
        if not isinstance(candidate.program, Workload):
            raise
        formulas = AnalyticEstimator()
        lever = _measured(candidate, gpu, budget, formulas, most=most)
        saving_bytes = _heaviest(before, gpu, formulas).device_used.expected_bytes - lever.device_used_bytes
        # The formulas' own totals are not those of rehearsals: only their difference is told, and what it leaves of the rehearsed step.
        fits = usual.high_bytes - saving_bytes <= budget.budget_bytes
        lever = lever.model_copy(update={"fits": fits, "micro_batch_size": None})
    return lever.model_copy(update={"saving_bytes": saving_bytes, "device_used_bytes": max(0, usual.expected_bytes - saving_bytes)})


def _heaviest(program: Program, gpu: GpuSpec, estimator: Estimator) -> MemoryEstimate:
    """Return what the heaviest stage takes."""
    return estimator(program, gpu, heaviest_stage(program, gpu, estimator))


def _measured(candidate: Candidate, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator, *, most: int) -> Lever:
    """Return what *estimator* says of *candidate*, without a saving."""
    program = candidate.program
    used = _heaviest(program, gpu, estimator)
    return Lever(
        change=candidate.change,
        method=used.method,
        device_used_bytes=used.device_used.expected_bytes,
        saving_bytes=0,
        fits=budget.fits(used.device_used) and all_stages_fit(program, gpu, estimator, budget),
        micro_batch_size=largest_micro_batch(
            lambda size: program.with_training(micro_batch_size=size), gpu, estimator, budget, most=most
        ).size,
    )


def _candidates(program: Program, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator, fits: bool) -> Iterator[Candidate]:
    """Yield each change in words, and the program with it."""
    training = program.training
    if isinstance(program, Workload):
        yield from _of_workload(program, gpu, fits=fits)
    if training.micro_batch_size > 1 and not fits:
        yield Candidate("use a micro-batch of 1", program.with_training(micro_batch_size=1))
    if isinstance(estimator, ReplayingEstimator) and not training.allocator_settings:
        for settings in ALLOCATOR_SETTINGS:
            yield Candidate(f"run with PYTORCH_ALLOC_CONF={settings}", program, settings)
    yield from _fewer_negatives(program, gpu=gpu, budget=budget, estimator=estimator, fits=fits)
    yield from _fewer_positives(program)


def _of_workload(workload: Workload, gpu: GpuSpec, *, fits: bool) -> Iterator[Candidate]:
    """Yield the changes of what only a workload tells of itself: its model, its optimizer, its precision."""
    training = workload.training
    encoder = encoder_of(workload.model)
    if encoder is not None and not training.activation_checkpointing and not encoder.is_in_eval_mode:
        yield Candidate("turn activation checkpointing on", workload.with_training(activation_checkpointing=True))
    if encoder is not None and encoder.is_in_eval_mode:
        yield Candidate("put the encoders in training mode with checkpointing", in_training_mode(workload))
    if encoder is not None and training.activation_checkpointing and not encoder.is_in_eval_mode and fits:
        yield Candidate(
            "turn activation checkpointing off, which is faster", workload.with_training(activation_checkpointing=False), is_trade=True
        )
    for change, precision in _precisions(workload, gpu):
        yield Candidate(change, workload.with_training(precision=precision))
    yield from _optimizers(workload)
    yield from _strategies(workload)
    if isinstance(workload.model, TransformerModel) and workload.model.lora is None:
        adapted = workload.model.model_copy(update={"lora": Lora(rank=8)})
        yield Candidate("train LoRA adapters of rank 8 instead of all weights", workload.model_copy(update={"model": adapted}))
    if encoder is not None and training.sequence_length > 1:
        half = training.sequence_length // 2
        yield Candidate(f"halve the sequence length to {half}", workload.with_training(sequence_length=half))
    if workload.contrastive is not None and workload.contrastive.cached_loss_mini_batch_size is None:
        cached = workload.contrastive.model_copy(update={"cached_loss_mini_batch_size": CACHED_ITEMS})
        change = f"use a cached contrastive loss (GradCache) with {CACHED_ITEMS} items at a time"
        yield Candidate(change, workload.model_copy(update={"contrastive": cached}))


def _optimizers(workload: Workload) -> Iterator[Candidate]:
    present = workload.optimizer
    if present.name not in ("adam", "adamw", "nadam", "radam", "adam32bit"):
        return
    for change, name in (("use an 8-bit Adam", "adam8bit"), ("use Adafactor, whose second moments are factored", "adafactor")):
        kept = {field: getattr(present, field) for field in ("quantizes_embeddings", "steps_in_backward")}
        optimizer = Optimizer(name=name, **kept)
        yield Candidate(change, workload.model_copy(update={"optimizer": optimizer}))
    if present.implementation != "fused" and present.name != "adam32bit":
        fused = present.model_copy(update={"implementation": "fused"})
        yield Candidate("use the fused optimizer (fused=True)", workload.model_copy(update={"optimizer": fused}))


_SHARDED: dict[Strategy, str] = {
    "zero1": "DeepSpeed ZeRO-1 (strategy zero1), the optimizer's state sharded",
    "zero2": "DeepSpeed ZeRO-2 (strategy zero2), optimizer's state and gradients sharded",
    "zero3": "DeepSpeed ZeRO-3 (strategy zero3), everything sharded",
    "fsdp": "FSDP (strategy fsdp), everything sharded",
}
"""Strategies in words, those that shard less first."""


def _strategies(workload: Workload) -> Iterator[Candidate]:
    """Yield what shards more than now, where there is more than one GPU."""
    parallelism = workload.parallelism
    ranks = parallelism.num_copies
    if ranks == 1 or parallelism.strategy in ("zero3", "fsdp"):
        return
    known = list(_SHARDED)
    least = known.index(parallelism.strategy) + 1 if parallelism.strategy in known else 0
    tried: list[Strategy] = ["fsdp"] if parallelism.split_by else known[least:]  # DeepSpeed's stages share over all GPUs
    for strategy in tried:
        changed = parallelism.model_copy(update={"strategy": strategy})
        yield Candidate(f"{_SHARDED[strategy]} over {ranks} GPUs", workload.model_copy(update={"parallelism": changed}))


def _precisions(workload: Workload, gpu: GpuSpec) -> Iterator[tuple[str, str]]:
    has_bf16 = (gpu.compute_capability or (8, 0)) >= (8, 0)
    if workload.training.precision == "fp32":
        mixed = "bf16-mixed" if has_bf16 else "fp16-mixed"
        yield f"train in mixed precision ({mixed})", mixed
    if workload.training.precision != "bf16" and has_bf16:
        yield "keep weights, gradients and optimizer state in bf16", "bf16"


def _fewer_negatives(program: Program, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator, fits: bool) -> Iterator[Candidate]:
    """Yield the most negatives with which the heaviest stage fits, one where even that is too much; half of them where all fit."""
    most = max((stage.n_negatives for stage in program.stages), default=0)
    if most < 2:
        return

    def fits_with(count: int) -> bool:
        fewer = _with_at_most(program, count)
        return budget.fits(_heaviest(fewer, gpu, estimator).device_used)

    def seems_to_fit(count: int) -> bool:
        return all_stages_seem_to_fit(_with_at_most(program, count), gpu, estimator, budget)

    count = most // 2
    if not fits:
        count = largest_fitting(fits_with, low=1, high=most - 1, guess=seems_to_fit) or 1
    yield Candidate(f"at most {count} negatives in every stage instead of {most}", _with_at_most(program, count))


def _with_at_most(program: Program, count: int) -> Program:
    stages = tuple(with_negatives(stage, min(count, stage.n_negatives)) for stage in program.stages)
    return program.model_copy(update={"stages": stages})


def _fewer_positives(program: Program) -> Iterator[Candidate]:
    """Yield half the positives where they are encoded with their anchor: with pairs they cost nothing."""
    most = max((stage.n_positives for stage in program.stages), default=1)
    if program.contrastive is None or program.contrastive.sampling == "pair" or most < 2:
        return
    stages = tuple(stage.model_copy(update={"n_positives": min(most // 2, stage.n_positives)}) for stage in program.stages)
    yield Candidate(f"at most {most // 2} positives in every stage instead of {most}", program.model_copy(update={"stages": stages}))


def _larger_gpu(program: Program, *, budget: MemoryBudget, estimator: Estimator) -> Iterator[Lever]:
    """Yield the smallest whole GPU of the catalogue on which every stage fits; those that are far too small are not tried."""
    whole = (card.spec for card in catalog_gpus() if not card.is_mig and not card.spec.unified_memory)
    larger = (spec for spec in whole if spec.total_memory_bytes > budget.total_bytes)
    for spec in sorted(larger, key=lambda spec: spec.total_memory_bytes):
        card_budget = MemoryBudget(total_bytes=spec.total_memory_bytes, margin=budget.margin)
        if not all_stages_seem_to_fit(program, spec, estimator, card_budget):
            continue
        try:
            fits = all_stages_fit(program, spec, estimator, card_budget)
        except NoKernelsError:
            continue
        if fits:
            used = estimator(program, spec, heaviest_stage(program, spec, estimator))
            change = f"use a GPU like {spec.name} ({format_bytes(spec.total_memory_bytes)})"
            yield Lever(change=change, method=used.method, device_used_bytes=used.device_used.expected_bytes, saving_bytes=0, fits=True)
            return


def in_training_mode(workload: Workload) -> Workload:
    """Return the workload with its encoder in training mode and checkpointing on."""
    model = workload.model
    if isinstance(model, ContrastiveEncoderModel):
        model = model.model_copy(update={"encoder": model.encoder.model_copy(update={"is_in_eval_mode": False})})
    elif isinstance(model, TransformerModel):
        model = model.model_copy(update={"is_in_eval_mode": False})
    return workload.model_copy(update={"model": model}).with_training(activation_checkpointing=True)
