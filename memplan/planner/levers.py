"""Levers: changes that would save memory, each estimated by itself for the workload that does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.estimators.base import Estimator, rough_of
from memplan.hardware.catalog import cards
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryRange
from memplan.planner.negatives import with_negatives
from memplan.planner.plan import Lever
from memplan.planner.search import Fits, largest_fitting
from memplan.units import format_bytes
from memplan.workload.model import ContrastiveEncoderModel, Lora, TransformerModel, encoder_of
from memplan.workload.optimizer import Optimizer
from memplan.workload.workload import Workload


def find_levers(workload: Workload, worst: int, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator) -> tuple[Lever, ...]:
    """
    Return the changes that would save memory, the largest saving first; cards that would do come last.

    The saving is that of stage number *worst*, which takes most; a lever fits when every stage does with it.
    """
    used = _used(workload, gpu, estimator)
    found = []
    for change, candidate in _candidates(workload, gpu=gpu, budget=budget, estimator=estimator):
        after = _used(candidate, gpu, estimator)
        saving_bytes = used[worst].high_bytes - after[worst].high_bytes
        if saving_bytes * 100 > used[worst].high_bytes:  # less than a percent is no help
            found.append(Lever(change=change, saving_bytes=saving_bytes, fits=all(map(budget.fits, after))))
    found.sort(key=lambda lever: -lever.saving_bytes)
    return (*found, *_larger_card(workload, budget=budget, estimator=estimator))


def _used(workload: Workload, gpu: GpuSpec, estimator: Estimator) -> list[MemoryRange]:
    """Return what each stage takes."""
    return [estimator(workload, gpu, stage).device_used for stage in workload.stages or (None,)]


def _candidates(workload: Workload, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator) -> Iterator[tuple[str, Workload]]:
    """Yield each change in words, and the workload with it."""
    training = workload.training
    encoder = encoder_of(workload.model)
    if encoder is not None and not training.activation_checkpointing and not encoder.is_in_eval_mode:
        yield "turn activation checkpointing on", workload.with_training(activation_checkpointing=True)
    if encoder is not None and encoder.is_in_eval_mode:
        yield "put the encoders in training mode with checkpointing", in_training_mode(workload)
    yield from ((change, workload.with_training(precision=precision)) for change, precision in _precisions(workload, gpu))
    if workload.optimizer.name in ("adam", "adamw", "nadam", "radam"):
        yield "use an 8-bit Adam", workload.model_copy(update={"optimizer": Optimizer(name="adam8bit")})
        if workload.optimizer.implementation != "fused":
            fused = workload.optimizer.model_copy(update={"implementation": "fused"})
            yield "use the fused optimizer (fused=True)", workload.model_copy(update={"optimizer": fused})
    if isinstance(workload.model, TransformerModel) and workload.model.lora is None:
        adapted = workload.model.model_copy(update={"lora": Lora(rank=8)})
        yield "train LoRA adapters of rank 8 instead of all weights", workload.model_copy(update={"model": adapted})
    if encoder is not None and training.sequence_length > 1:
        half = training.sequence_length // 2
        yield f"halve the sequence length to {half}", workload.with_training(sequence_length=half)
    if training.micro_batch_size > 1:
        yield "use a micro-batch of 1", workload.with_training(micro_batch_size=1)
    yield from _fewer_negatives(workload, gpu=gpu, budget=budget, estimator=estimator)
    yield from _fewer_positives(workload)


def _precisions(workload: Workload, gpu: GpuSpec) -> Iterator[tuple[str, str]]:
    has_bf16 = (gpu.compute_capability or (8, 0)) >= (8, 0)
    if workload.training.precision == "fp32":
        mixed = "bf16-mixed" if has_bf16 else "fp16-mixed"
        yield f"train in mixed precision ({mixed})", mixed
    if workload.training.precision != "bf16" and has_bf16:
        yield "keep weights, gradients and optimizer state in bf16", "bf16"


def _fewer_negatives(workload: Workload, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator) -> Iterator[tuple[str, Workload]]:
    """Yield the most negatives with which every stage fits; one where even that is too much."""
    most = max((stage.n_negatives for stage in workload.stages), default=0)
    if most < 2:
        return

    def fits_by(judge: Estimator) -> Fits:
        return lambda count: all(map(budget.fits, _used(_with_at_most(workload, count), gpu, judge)))

    rough = rough_of(estimator)
    count = largest_fitting(fits_by(estimator), low=1, high=most - 1, rough=fits_by(rough) if rough else None) or 1
    yield f"at most {count} negatives in every stage instead of {most}", _with_at_most(workload, count)


def _with_at_most(workload: Workload, count: int) -> Workload:
    stages = tuple(with_negatives(stage, min(count, stage.n_negatives)) for stage in workload.stages)
    return workload.model_copy(update={"stages": stages})


def _fewer_positives(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield half the positives where they are encoded with their anchor: with pairs they cost nothing."""
    most = max((stage.n_positives for stage in workload.stages), default=1)
    if workload.contrastive is None or workload.contrastive.sampling == "pair" or most < 2:
        return
    stages = tuple(stage.model_copy(update={"n_positives": min(most // 2, stage.n_positives)}) for stage in workload.stages)
    yield f"at most {most // 2} positives in every stage instead of {most}", workload.model_copy(update={"stages": stages})


def _larger_card(workload: Workload, *, budget: MemoryBudget, estimator: Estimator) -> Iterator[Lever]:
    """Yield the smallest whole card of the catalogue on which every stage fits."""
    whole = (card.spec for card in cards() if not card.is_mig and not card.spec.unified_memory)
    larger = (spec for spec in whole if spec.total_memory_bytes > budget.total_bytes)
    for spec in sorted(larger, key=lambda spec: spec.total_memory_bytes):
        card_budget = MemoryBudget(total_bytes=spec.total_memory_bytes, margin=budget.margin)
        if all(map(card_budget.fits, _used(workload, spec, estimator))):
            change = f"use a card like {spec.name} ({format_bytes(spec.total_memory_bytes)})"
            yield Lever(change=change, saving_bytes=0, fits=True)
            return


def in_training_mode(workload: Workload) -> Workload:
    """Return the workload with its encoder in training mode and checkpointing on."""
    model = workload.model
    if isinstance(model, ContrastiveEncoderModel):
        model = model.model_copy(update={"encoder": model.encoder.model_copy(update={"is_in_eval_mode": False})})
    elif isinstance(model, TransformerModel):
        model = model.model_copy(update={"is_in_eval_mode": False})
    return workload.model_copy(update={"model": model}).with_training(activation_checkpointing=True)
