"""Levers: changes that would save memory, each estimated by itself for the step that does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.estimators.base import Estimator
from memplan.hardware.catalog import cards
from memplan.hardware.spec import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.planner.negatives import with_negatives
from memplan.planner.plan import Lever
from memplan.planner.search import largest_fitting
from memplan.units import format_bytes
from memplan.workload.model import ContrastiveEncoderModel, Lora, TransformerModel
from memplan.workload.optimizer import Optimizer
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload


def find_levers(workload: Workload, stage: Stage | None, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator) -> tuple[Lever, ...]:
    """Return the changes that would save memory in *stage*, the largest saving first; cards that would do come last."""
    used = estimator(workload, gpu, stage).device_used
    found = []
    for change, candidate, candidate_stage in _candidates(workload, stage, gpu=gpu, budget=budget, estimator=estimator):
        saved = estimator(candidate, gpu, candidate_stage).device_used
        saving_bytes = used.high_bytes - saved.high_bytes
        if saving_bytes * 100 > used.high_bytes:  # less than a percent is no help
            found.append(Lever(change=change, saving_bytes=saving_bytes, fits=budget.fits(saved)))
    found.sort(key=lambda lever: -lever.saving_bytes)
    return (*found, *_larger_card(workload, stage, budget=budget, estimator=estimator))


def _candidates(
    workload: Workload, stage: Stage | None, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator
) -> Iterator[tuple[str, Workload, Stage | None]]:
    """Yield each change in words, the workload with it and the stage with it."""
    training = workload.training
    encoder = encoder_of(workload)
    if encoder is not None and not training.activation_checkpointing and not encoder.is_in_eval_mode:
        yield "turn activation checkpointing on", workload.with_training(activation_checkpointing=True), stage
    if encoder is not None and encoder.is_in_eval_mode:
        yield "put the encoders in training mode with checkpointing", in_training_mode(workload), stage
    yield from ((change, workload.with_training(precision=precision), stage) for change, precision in _precisions(workload, gpu))
    if workload.optimizer.name in ("adam", "adamw", "nadam", "radam"):
        yield "use an 8-bit Adam", workload.model_copy(update={"optimizer": Optimizer(name="adam8bit")}), stage
        if workload.optimizer.implementation != "fused":
            fused = workload.optimizer.model_copy(update={"implementation": "fused"})
            yield "use the fused optimizer (fused=True)", workload.model_copy(update={"optimizer": fused}), stage
    if isinstance(workload.model, TransformerModel) and workload.model.lora is None:
        adapted = workload.model.model_copy(update={"lora": Lora(rank=8)})
        yield "train LoRA adapters of rank 8 instead of all weights", workload.model_copy(update={"model": adapted}), stage
    if encoder is not None and training.sequence_length > 1:
        half = training.sequence_length // 2
        yield f"halve the sequence length to {half}", workload.with_training(sequence_length=half), stage
    if training.micro_batch_size > 1:
        yield "use a micro-batch of 1", workload.with_training(micro_batch_size=1), stage
    yield from _fewer_negatives(workload, stage, gpu=gpu, budget=budget, estimator=estimator)


def _precisions(workload: Workload, gpu: GpuSpec) -> Iterator[tuple[str, str]]:
    has_bf16 = (gpu.compute_capability or (8, 0)) >= (8, 0)
    if workload.training.precision == "fp32":
        mixed = "bf16-mixed" if has_bf16 else "fp16-mixed"
        yield f"train in mixed precision ({mixed})", mixed
    if workload.training.precision != "bf16" and has_bf16:
        yield "keep weights, gradients and optimizer state in bf16", "bf16"


def _fewer_negatives(
    workload: Workload, stage: Stage | None, *, gpu: GpuSpec, budget: MemoryBudget, estimator: Estimator
) -> Iterator[tuple[str, Workload, Stage | None]]:
    if stage is None or stage.n_negatives == 0:
        return
    count = largest_fitting(
        lambda tried: budget.fits(estimator(workload, gpu, with_negatives(stage, tried)).device_used), low=0, high=stage.n_negatives - 1
    )
    fewer = count if count is not None else 0
    yield f"{fewer} negatives instead of {stage.n_negatives} in {stage.name}", workload, with_negatives(stage, fewer)


def _larger_card(workload: Workload, stage: Stage | None, *, budget: MemoryBudget, estimator: Estimator) -> Iterator[Lever]:
    """Yield the smallest whole card of the catalogue on which the step fits."""
    whole = (card.spec for card in cards() if not card.is_mig and not card.spec.unified_memory)
    larger = (spec for spec in whole if spec.total_memory_bytes > budget.total_bytes)
    for spec in sorted(larger, key=lambda spec: spec.total_memory_bytes):
        card_budget = MemoryBudget(total_bytes=spec.total_memory_bytes, margin=budget.margin)
        if card_budget.fits(estimator(workload, spec, stage).device_used):
            change = f"use a card like {spec.name} ({format_bytes(spec.total_memory_bytes)})"
            yield Lever(change=change, saving_bytes=0, fits=True)
            return


def encoder_of(workload: Workload) -> TransformerModel | None:
    """Return the transformer that decides the activations, or None for a model by counts."""
    if isinstance(workload.model, ContrastiveEncoderModel):
        return workload.model.encoder
    return workload.model if isinstance(workload.model, TransformerModel) else None


def in_training_mode(workload: Workload) -> Workload:
    """Return the workload with its encoder in training mode and checkpointing on."""
    model = workload.model
    if isinstance(model, ContrastiveEncoderModel):
        model = model.model_copy(update={"encoder": model.encoder.model_copy(update={"is_in_eval_mode": False})})
    elif isinstance(model, TransformerModel):
        model = model.model_copy(update={"is_in_eval_mode": False})
    return workload.model_copy(update={"model": model}).with_training(activation_checkpointing=True)
