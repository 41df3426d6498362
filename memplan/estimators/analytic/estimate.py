"""The analytic estimator: closed formulas, no torch, milliseconds.

A step has a few moments that can be its peak: the loss, the first and the last block of the backward, the optimizer's step. Each is the
sum of what is alive then; the largest is the estimate. The parts are in `parameters.py`, `optimizer_state.py` and `activations.py`,
each with its source; what the allocator reserves over them is in `fragmentation.py`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.dtypes import ELEMENT_BYTES, Precision, compute_dtype, is_mixed
from memplan.errors import NotEstimatedError
from memplan.estimators.analytic import activations as act
from memplan.estimators.analytic import optimizer_state
from memplan.estimators.analytic.fragmentation import reserved_range
from memplan.estimators.analytic.model_states import ModelStates, states_of
from memplan.estimators.analytic.parameters import ParameterGroup, parameter_groups
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.cuda_context import context_of
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.memory.nccl_buffers import USUAL_VERSION, Communicator, nccl_buffers
from memplan.workload.contrastive import EncodedTexts
from memplan.workload.model import ContrastiveEncoderModel, Model, ParametersModel, TransformerModel, encoder_of
from memplan.workload.parallelism import ZERO_STAGES
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload, workload_of

# cuBLAS workspaces, one for the forward's thread and one for autograd's: 32 MiB on capability 9.0, 4096 KiB x 2 + 16 KiB x 8 elsewhere
# (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize, PyTorch 2.13).
WORKSPACES_PER_STEP = 2
HOPPER_WORKSPACE_BYTES = 33_554_432
WORKSPACE_BYTES = 8_519_680


class _Moment(NamedTuple):
    """One moment of the step and what is alive in it, besides weights, optimizer state, batch and fixed workspaces."""

    phase: str
    gradients_bytes: int = 0
    activations_bytes: int = 0
    workspaces_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.gradients_bytes + self.activations_bytes + self.workspaces_bytes


class _Forward(NamedTuple):
    """What the forward of all calls leaves, and the widest block of the backward."""

    kept_bytes: int
    """Activations alive when the forward is done, casts of weights left out."""
    kept_casts_bytes: int
    """Casts of weights that the graph still holds then."""
    forward_casts_bytes: int
    """Casts of weights alive while autocast's region lasts."""
    loss_bytes: int
    """Logits and what the loss makes of them, in backward."""
    block_bytes: int
    """One block of the largest call, as recomputed (checkpointing) or still kept (without: already in kept_bytes)."""
    backward_bytes: int
    """The working set of one block's backward."""
    head_gradient_bytes: int
    """The gradient of the head's weights, made before any block's."""
    embedding_gradient_bytes: int
    """A second gradient of a tied embedding, until it is added to the first; and what its backward sorts."""


class AnalyticEstimator(Estimator):
    """The formulas as an estimator."""

    method = "analytic"

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return what the formulas say of one step. Raises NotEstimatedError for a program that there are none for."""
        return estimate(workload_of(program), gpu, stage)


def estimate(workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
    """
    Return the analytic estimate of one step of *workload* in *stage* on *gpu*; see the module's first lines.

    Raises NotEstimatedError for a model that there are no formulas for, one that GPUs split, or an optimizer that steps in the backward.
    """
    training = workload.training
    unknown = [*workload.parallelism.split_by, *(["steps_in_backward"] if workload.optimizer.steps_in_backward else [])]
    if unknown:
        raise NotEstimatedError(
            f"there are no formulas for {' and '.join(unknown)}",
            hint='the step is rehearsed, where a CUDA build of torch is installed: leave `method="analytic"` out',
        )
    groups = parameter_groups(workload.model)
    states = states_of(workload, groups)
    fixed_bytes = WORKSPACES_PER_STEP * (HOPPER_WORKSPACE_BYTES if gpu.compute_capability == (9, 0) else WORKSPACE_BYTES)
    fixed_bytes += states.buckets_bytes + (workload.model.overhead_bytes if isinstance(workload.model, ParametersModel) else 0)
    moments = list(_moments(workload, gpu, stage, groups, states))
    moments.append(_Moment("optimizer step", gradients_bytes=states.gradients_bytes, workspaces_bytes=states.temporaries_bytes))
    peak = max(moments, key=lambda moment: moment.total_bytes)
    tensors = MemoryBreakdown(
        parameters_bytes=states.parameters_bytes,
        gradients_bytes=peak.gradients_bytes,
        optimizer_state_bytes=states.optimizer_state_bytes,
        activations_bytes=peak.activations_bytes,
        batch_data_bytes=_batch_data_bytes(workload, stage),
        workspaces_bytes=fixed_bytes + peak.workspaces_bytes,
    )
    tensors = _rounded_up(tensors, training.allocator_settings)
    tokens = max(call.tokens for call in _calls(workload, stage))
    reserved = reserved_range(workload, allocated_bytes=tensors.total_bytes, largest_call_tokens=tokens, passing_bytes=states.passing_bytes)
    return _assemble(tensors, reserved, context_of(gpu), _nccl(workload, gpu), peak.phase)


def _nccl(workload: Workload, gpu: GpuSpec) -> MemoryRange:
    """Return what NCCL takes, with its own settings: a communicator for each group of ranks; a process alone begins none."""
    parallelism = workload.parallelism
    groups = [Communicator(size) for size in parallelism.group_sizes if size > 1]
    return nccl_buffers(groups, gpu=gpu, num_gpus=parallelism.devices, version=USUAL_VERSION, settings={})


def _rounded_up(tensors: MemoryBreakdown, allocator_settings: str) -> MemoryBreakdown:
    """
    Return the bytes as `roundup_power2_divisions:N` makes them, where the settings have it.

    The allocator then rounds every size up to the next of N steps between two powers of two. For sizes spread evenly over their logarithm
    that adds 1 / (4 N ln 2) in the mean.
    """
    match = re.search(r"roundup_power2_divisions:(\d+)", allocator_settings)
    if match is None or int(match[1]) < 2:
        return tensors
    share = 1 + 1 / (4 * int(match[1]) * math.log(2))
    return MemoryBreakdown(**{name: int(value * share) for name, value in tensors})


def _assemble(tensors: MemoryBreakdown, reserved: MemoryRange, context: MemoryRange, nccl: MemoryRange, phase: str) -> MemoryEstimate:
    """Add slack, context and NCCL to the bytes of tensors, and say how sure the sum is."""
    allocated_bytes = tensors.total_bytes
    slack_bytes = reserved.expected_bytes - allocated_bytes
    beside = {"cuda_context_bytes": context.expected_bytes, "nccl_buffers_bytes": nccl.expected_bytes}
    breakdown = tensors.model_copy(update={"allocator_slack_bytes": slack_bytes, **beside})
    return MemoryEstimate(
        method="analytic",
        breakdown=breakdown,
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=breakdown.reserved_bytes,
        device_used=MemoryRange(
            low_bytes=reserved.low_bytes + context.low_bytes + nccl.low_bytes,
            expected_bytes=breakdown.total_bytes,
            high_bytes=reserved.high_bytes + context.high_bytes + nccl.high_bytes,
        ),
        peak_phase=phase,
    )


def _batch_data_bytes(workload: Workload, stage: Stage | None) -> int:
    """Token ids and mask in int64 for every item of the micro-batch, labels for a language model."""
    training, model = workload.training, workload.model
    if isinstance(model, ParametersModel):
        return training.micro_batch_size * model.batch_data_bytes_per_sample
    tensors = 3 if workload.contrastive is None else 2
    channels = model.num_channels if isinstance(model, ContrastiveEncoderModel) else 1
    tokens = sum(texts.tokens for texts in _batch(workload, stage))  # a cached loss holds all of the batch's data
    return tokens * channels * tensors * ELEMENT_BYTES["int64"]


def _batch(workload: Workload, stage: Stage | None) -> tuple[EncodedTexts, ...]:
    """Return the texts of the micro-batch, for each call of the model."""
    contrastive, training = workload.contrastive, workload.training
    if contrastive is None or stage is None:
        return (EncodedTexts(training.micro_batch_size, training.sequence_length),)
    return contrastive.encoded_texts(stage, micro_batch_size=training.micro_batch_size, sequence_length=training.sequence_length)


def _calls(workload: Workload, stage: Stage | None) -> tuple[EncodedTexts, ...]:
    """Return the texts of each call of the model, as memory sees them: a cached loss holds one mini-batch of them at a time."""
    batch = _batch(workload, stage)
    if workload.contrastive is None or workload.contrastive.cached_loss_mini_batch_size is None:
        return batch
    number = min(workload.contrastive.cached_loss_mini_batch_size, sum(texts.number for texts in batch))
    return (EncodedTexts(number, max(texts.length for texts in batch if texts.number)),)


def _moments(
    workload: Workload, gpu: GpuSpec, stage: Stage | None, groups: Sequence[ParameterGroup], states: ModelStates
) -> Iterator[_Moment]:
    """Yield the moments of forward and backward that can be the peak."""
    training = workload.training
    # The gradients of the micro-batches before this one.
    before = states.accumulated_bytes if training.gradient_accumulation_steps > 1 else 0
    after = max(before, states.gradients_bytes)
    if isinstance(workload.model, ParametersModel):
        kept = training.micro_batch_size * workload.model.activation_bytes_per_sample
        yield _Moment("forward and loss", gradients_bytes=before, activations_bytes=kept, workspaces_bytes=states.in_backward_bytes)
        yield _Moment("end of backward", gradients_bytes=after, workspaces_bytes=states.at_end_bytes)
        return
    forward = _forward(workload, gpu, stage, groups)
    sums = _partial_sums_bytes(workload, gpu)
    yield _Moment(
        "loss",
        gradients_bytes=before,
        activations_bytes=forward.kept_bytes + forward.kept_casts_bytes + forward.loss_bytes,
        workspaces_bytes=states.in_forward_bytes,
    )
    compute_bytes = ELEMENT_BYTES[compute_dtype(training.precision)]
    yield _Moment(
        "end of forward",
        gradients_bytes=before,
        activations_bytes=forward.kept_bytes + forward.forward_casts_bytes + forward.loss_bytes * (compute_bytes + 8) // 12,
        workspaces_bytes=states.in_forward_bytes,
    )
    yield _Moment(
        "start of backward",
        gradients_bytes=before + forward.head_gradient_bytes,  # the new one lies beside the accumulated until it is added
        activations_bytes=forward.kept_bytes + forward.kept_casts_bytes + forward.block_bytes + forward.backward_bytes,
        workspaces_bytes=sums + states.in_backward_bytes,
    )
    yield _Moment(
        "end of backward",
        gradients_bytes=after + forward.embedding_gradient_bytes + (forward.head_gradient_bytes if before else 0),
        activations_bytes=forward.block_bytes + forward.backward_bytes,
        workspaces_bytes=sums + states.at_end_bytes,
    )


def _forward(workload: Workload, gpu: GpuSpec, stage: Stage | None, groups: Sequence[ParameterGroup]) -> _Forward:
    model, training = workload.model, workload.training
    encoder, channels = _encoder(model)
    # Hugging Face's blocks checkpoint in training mode only (modeling_layers.py, GradientCheckpointingLayer, transformers 4.57).
    checkpoints = training.activation_checkpointing and not encoder.is_in_eval_mode
    calls = [
        act.make_call(
            encoder,
            sequences=texts.number,
            sequence_length=texts.length,
            precision=_precision_of_activations(workload),
            compute_capability=gpu.compute_capability,
        )
        for texts in _calls(workload, stage)
        if texts.number
    ]
    largest = max(calls, key=lambda call: call.tokens)
    kept = sum(channels * _encoder_bytes(encoder, call, checkpoints=checkpoints) for call in calls)
    if isinstance(model, ContrastiveEncoderModel):
        kept += sum(_pooled_bytes(model, call) for call in calls) + _similarity_bytes(workload, model, stage)
    head = act.head_bytes(encoder, largest)
    weight_bytes = largest.compute_bytes if workload.parallelism.is_sharded else largest.stream_bytes
    block = act.block_bytes(encoder, largest)
    casts = _casts(workload, groups, num_calls=len(calls), checkpoints=checkpoints)
    head_elements = encoder.vocab_size * encoder.hidden_size if encoder.predicts_tokens and encoder.lora is None else 0
    return _Forward(
        kept_bytes=kept + head.kept_bytes,
        kept_casts_bytes=casts.kept_bytes,
        forward_casts_bytes=casts.forward_bytes,
        loss_bytes=head.loss_peak_bytes,
        block_bytes=block + casts.block_bytes if checkpoints else 0,
        backward_bytes=act.block_backward_bytes(encoder, largest),
        head_gradient_bytes=head_elements * weight_bytes,
        embedding_gradient_bytes=_embedding_gradient_bytes(encoder, largest, weight_bytes=weight_bytes),
    )


def _precision_of_activations(workload: Workload) -> Precision:
    """Return the precision that decides activations: DeepSpeed's engine has the whole model in the short type, without autocast."""
    is_zero = workload.parallelism.is_sharded and workload.parallelism.strategy in ZERO_STAGES
    precision = workload.training.precision
    return {"fp16-mixed": "fp16", "bf16-mixed": "bf16"}.get(precision, precision) if is_zero else precision  # type: ignore[return-value]


def _encoder(model: Model) -> tuple[TransformerModel, int]:
    """The transformer that decides the activations, and how many of it there are."""
    encoder = encoder_of(model)
    assert encoder is not None  # a model by counts has none, and comes not here
    return encoder, model.num_channels if isinstance(model, ContrastiveEncoderModel) else 1


def _encoder_bytes(encoder: TransformerModel, call: act.Call, *, checkpoints: bool) -> int:
    """What one encoder keeps of one call."""
    block = act.block_input_bytes(encoder, call) if checkpoints else act.block_bytes(encoder, call)
    ends = act.embedding_bytes(encoder, call) + act.final_norm_bytes(encoder, call) + act.shared_mask_bytes(encoder, call)
    return encoder.num_layers * block + ends


def _pooled_bytes(model: ContrastiveEncoderModel, call: act.Call) -> int:
    """
    What follows the encoders: mean pooling, experts, projection.

    A masked mean keeps the mask at the states' width in fp32 for each channel; a plain mean makes as much in backward, the gradients of
    all channels' states. Experts and projection see one embedding an item.
    """
    width = model.width
    pooling = call.tokens * width * 4
    per_item = 2 * width * 4 + 2 * (model.projection_size or 0) * 4
    if model.experts is not None:
        per_item += model.experts.num_experts * (2 * model.experts.hidden_size + 2 * width) * call.compute_bytes
    return pooling + call.sequences * per_item


def _similarity_bytes(workload: Workload, model: ContrastiveEncoderModel, stage: Stage | None) -> int:
    """
    The loss of a batch: every anchor against every candidate, in fp32, kept as log-probabilities and twice more in backward.

    A cached loss keeps the embeddings of the whole batch too, and their gradients.
    """
    contrastive = workload.contrastive
    assert contrastive is not None  # Workload asks for it
    assert stage is not None
    training = workload.training
    batch = training.micro_batch_size
    candidates = 1 + contrastive.negatives_per_anchor(
        stage, micro_batch_size=batch, data_parallel_size=workload.parallelism.data_parallel_size
    )
    cached = 0
    if contrastive.cached_loss_mini_batch_size is not None:
        width = model.projection_size or model.width
        cached = 2 * 4 * width * sum(contrastive.encode_calls(stage, micro_batch_size=batch))
    return 3 * 4 * batch * candidates + cached


class _Casts(NamedTuple):
    """Autocast's copies of weights."""

    kept_bytes: int = 0
    """Held by the graph when the forward is done."""
    forward_bytes: int = 0
    """Alive while autocast's region lasts."""
    block_bytes: int = 0
    """Made again with a block that is recomputed."""


def _casts(workload: Workload, groups: Sequence[ParameterGroup], *, num_calls: int, checkpoints: bool) -> _Casts:
    """
    Return autocast's copies of weights.

    Checkpointed blocks hold none and make their own again when they are recomputed.
    """
    if not is_mixed(workload.training.precision) or workload.parallelism.is_sharded:  # what is sharded is gathered in the short type
        return _Casts()
    dtype = compute_dtype(workload.training.precision)
    cached = optimizer_state.cast_bytes(groups, dtype=dtype)
    frozen = optimizer_state.frozen_cast_bytes(groups, dtype=dtype)
    outside = [group for group in groups if group.role == "head"]
    if not checkpoints:
        kept = cached + num_calls * frozen + _tied_head_cast_bytes(workload)
        return _Casts(kept, kept)
    encoder, channels = _encoder(workload.model)
    head = optimizer_state.cast_bytes(outside, dtype=dtype) + optimizer_state.frozen_cast_bytes(outside, dtype=dtype)
    kept = head + _tied_head_cast_bytes(workload)
    return _Casts(kept, cached + frozen + _tied_head_cast_bytes(workload), (cached + frozen - head) // (channels * encoder.num_layers))


def _tied_head_cast_bytes(workload: Workload) -> int:
    model = workload.model
    if isinstance(model, TransformerModel) and model.predicts_tokens and model.ties_embeddings:
        return model.vocab_size * model.hidden_size * 2
    return 0


def _embedding_gradient_bytes(encoder: TransformerModel, call: act.Call, *, weight_bytes: int) -> int:
    """
    What the token embedding's backward takes besides the gradient itself.

    Above 3072 indices it sorts them: (n/10 + min(n, vocabulary)) x width x 4 bytes, measured on PyTorch 2.13. A tied embedding's gradient
    is made beside the head's before they are added.
    """
    if encoder.lora is not None:
        return 0
    indices = call.tokens
    sorting = (indices // 10 + min(indices, encoder.vocab_size)) * encoder.hidden_size * 4 if indices > 3072 else 0
    tied = encoder.predicts_tokens and encoder.ties_embeddings
    return sorting + (encoder.vocab_size * encoder.hidden_size * weight_bytes if tied else 0)


def _partial_sums_bytes(workload: Workload, gpu: GpuSpec) -> int:
    """
    The temporary of a sum over rows (a bias's gradient): up to multiprocessors x threads x 512 bytes, measured on PyTorch 2.13.

    Sums of fewer than 1024 rows need none.
    """
    training = workload.training
    encoder, _ = _encoder(workload.model)
    if encoder.lora is not None or not encoder.has_linear_bias or training.micro_batch_size * training.sequence_length < 1024:
        return 0
    return gpu.resident_threads * 512
