"""The guide's rule of thumb, kept to compare with.

From the GPU memory guide of a contrastive text-embedding trainer (DESIGN, section 8). It counts frozen parameters as trained, knows no
activation checkpointing, rounds accumulation down and so misses its target, caps the batch at 128 and leaves n_positives out. On its own
model it is 2 to 16 times too low by memplan's own estimate. Nothing is ever written into a configuration from it.
"""

from __future__ import annotations

from memplan.errors import UsageError
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.units import GIB, MIB
from memplan.workload.model import ContrastiveEncoderModel
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

# All of it as the guide has it.
ENCODER_PARAMETERS = 22_700_000
ADAPTED_LAYERS = 50
ELEMENT_BYTES = 2
STATE_BYTES = 8
OVERHEAD_BYTES = 1500 * MIB
KEPT_SHARE = 0.25
USABLE_SHARE = 0.85
LARGEST_BATCH = 128
TARGET_BATCH = 256


class GuideEstimator(Estimator):
    """The rule of thumb as an estimator."""

    method = "guide"

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return what the guide says of one step, whatever the GPU. Raises UsageError for a workload that is not the guide's kind."""
        del gpu
        return estimate(program, stage)


def estimate(program: Program, stage: Stage | None) -> MemoryEstimate:
    """
    Return what the guide says of one step.

    Raises UsageError for a program that is not the guide's kind.
    """
    workload = program if isinstance(program, Workload) else None
    if workload is None or not isinstance(workload.model, ContrastiveEncoderModel) or stage is None:
        raise UsageError("the guide's rule of thumb knows contrastive encoders only", hint='use `method="analytic"`')
    model = workload.model
    parameters = num_parameters(model)
    items = workload.training.micro_batch_size * (2 + stage.n_negatives)
    breakdown = MemoryBreakdown(
        parameters_bytes=parameters * ELEMENT_BYTES,
        gradients_bytes=parameters * ELEMENT_BYTES,
        optimizer_state_bytes=parameters * STATE_BYTES,
        activations_bytes=items * activation_bytes_per_item(model, workload.training.sequence_length),
        batch_data_bytes=items * batch_data_bytes_per_item(model, workload.training.sequence_length),
        workspaces_bytes=OVERHEAD_BYTES,
    )
    used = MemoryRange(low_bytes=breakdown.total_bytes, expected_bytes=breakdown.total_bytes, high_bytes=breakdown.total_bytes)
    return MemoryEstimate(
        method="guide",
        breakdown=breakdown,
        peak_allocated_bytes=breakdown.allocated_bytes,
        peak_reserved_bytes=breakdown.reserved_bytes,
        device_used=used,
        peak_phase="the whole step",
    )


def num_parameters(model: ContrastiveEncoderModel) -> int:
    """Return the guide's count: base, LoRA, experts, gate, projection, all of it as trained."""
    hidden = model.encoder.hidden_size
    width = hidden * model.num_channels
    total = ENCODER_PARAMETERS * model.num_channels
    if model.encoder.lora is not None:
        total += 2 * model.encoder.lora.rank * hidden * ADAPTED_LAYERS * model.num_channels
    if model.experts is not None:
        total += model.experts.num_experts * (2 * width * model.experts.hidden_size + width)
    return total + width * (model.projection_size or 0)


def activation_bytes_per_item(model: ContrastiveEncoderModel, sequence_length: int) -> int:
    """Return the guide's activations of one item: attention and feed-forward of every channel, experts, projection; a quarter is kept."""
    encoder = model.encoder
    of_channel = sequence_length**2 * encoder.num_attention_heads + encoder.num_layers * sequence_length * encoder.hidden_size * 4
    of_experts = 2 * model.experts.hidden_size * model.experts.top_k if model.experts is not None else 0
    pooled = 2 * encoder.hidden_size * model.num_channels + of_experts + 2 * (model.projection_size or 0)
    return int((model.num_channels * of_channel + pooled) * KEPT_SHARE * ELEMENT_BYTES)


def batch_data_bytes_per_item(model: ContrastiveEncoderModel, sequence_length: int) -> int:
    """Return the guide's batch data of one item: ids and mask of every channel."""
    return model.num_channels * sequence_length * 2 * 8


def budget_bytes(memory_gib: float) -> int:
    """Return what the guide would use of a GPU of *memory_gib*."""
    return int(memory_gib * GIB * USABLE_SHARE)


def largest_batch(workload: Workload, stage: Stage, *, memory_gib: float) -> int:
    """Return the guide's batch for *stage*: the largest from 1 to 128 within its budget, and 1 even when that is over it."""
    for batch in range(LARGEST_BATCH, 1, -1):
        if estimate(workload.with_training(micro_batch_size=batch), stage).device_used_bytes <= budget_bytes(memory_gib):
            return batch
    return 1


def accumulation(batch: int) -> int:
    """Return the guide's accumulation: rounded down, so that 46 x 5 = 230 stands for 256."""
    return max(1, TARGET_BATCH // batch)
