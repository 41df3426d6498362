"""
What a rank keeps of the model's states, and what it gathers and reduces, by the strategy with which ranks train together.

With P bytes of parameters as they are computed with, n ranks that share a copy, and reductions in r bytes an element:

    ddp    everything, and buckets as large as the gradients (torch/nn/parallel/distributed.py, gradient_as_bucket_view=False)
    fsdp   1/n of parameters, gradients and moments, each tensor cut along its first dimension and padded to n equal parts
           (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, PyTorch 2.13); the root's parameters whole from forward to backward; of
           blocks the one that computes and the next one whole, each beside the buffer that it was gathered in, and two buffers of
           gradients that are reduced (_fsdp_collectives.py, _fsdp_param_group.py)
    zero   DeepSpeed's stages: 1/n of fp32 copies and moments; from stage 2 on of gradients, in stage 3 of parameters, of which a billion
           may be gathered; and a bucket of half a billion elements (deepspeed/runtime/zero/config.py of 0.19: reduce_bucket_size,
           stage3_max_live_parameters, stage3_prefetch_bucket_size, stage3_param_persistence_threshold)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from memplan.dtypes import ELEMENT_BYTES, DType, compute_dtype, is_mixed, parameter_dtype
from memplan.estimators.analytic import optimizer_state
from memplan.estimators.analytic.parameters import ParameterGroup, count, parameter_groups, rounded
from memplan.workload.model import ContrastiveEncoderModel, Model, TransformerModel
from memplan.workload.parallelism import ZERO_STAGES
from memplan.workload.workload import Workload

REDUCE_BUCKET, MOST_LIVE, PREFETCHED, PERSISTENT = 500_000_000, 1_000_000_000, 50_000_000, 100_000
"""DeepSpeed's defaults, in elements: its bucket; what stage 3 has gathered at most, and gathers ahead; tensors that it does not shard."""

COUNTED_PARTS = 32
"""Parts in which a model by counts is sharded (child/models/counted.py)."""


class ModelStates(NamedTuple):
    """Bytes on one rank. Without ranks that share it, the whole model's."""

    parameters_bytes: int
    """That stay."""
    gradients_bytes: int
    """When the backward is over."""
    accumulated_bytes: int
    """Gradients of earlier micro-batches, where there are any."""
    optimizer_state_bytes: int
    temporaries_bytes: int
    """Of the optimizer's step."""
    buckets_bytes: int = 0
    """There for the whole step."""
    in_forward_bytes: int = 0
    """Gathered parameters when the forward ends."""
    in_backward_bytes: int = 0
    """Gathered parameters, and gradients that are reduced, beside a block's backward."""
    at_end_bytes: int = 0
    """The same where the last gradients are reduced: those of the root."""
    passing_bytes: int = 0
    """What comes and goes in large pieces, and leaves free memory of a size that little else has."""


def states_of(workload: Workload, groups: Sequence[ParameterGroup]) -> ModelStates:
    """Return what a rank of *workload* keeps of *groups*, all its parameters."""
    parallelism = workload.parallelism
    if parallelism.is_sharded:
        return _zero(workload, groups) if parallelism.strategy in ZERO_STAGES else _fsdp(workload, groups)
    dtype = parameter_dtype(workload.training.precision)
    gradients_bytes = optimizer_state.gradient_bytes(groups, dtype=dtype)
    return ModelStates(
        parameters_bytes=optimizer_state.parameter_bytes(groups, dtype=dtype),
        gradients_bytes=gradients_bytes,
        accumulated_bytes=gradients_bytes,
        optimizer_state_bytes=optimizer_state.optimizer_state_bytes(groups, workload.optimizer, dtype=dtype),
        temporaries_bytes=optimizer_state.optimizer_temporary_bytes(groups, workload.optimizer, dtype=dtype),
        buckets_bytes=gradients_bytes if parallelism.data_parallel_size > 1 else 0,
    )


def _fsdp(workload: Workload, groups: Sequence[ParameterGroup]) -> ModelStates:
    """Shards are kept in the parameters' type; gathered is the type of computation; mixed precision reduces in fp32."""
    parallelism, precision = workload.parallelism, workload.training.precision
    dtype, gathered = parameter_dtype(precision), compute_dtype(precision)
    reduced: DType = "float32" if is_mixed(precision) else dtype
    shards = [_shard(group, parallelism.shards) for group in groups]
    block, num_blocks = _block(workload.model)
    block_bytes, all_bytes = (_padded_bytes(part, parallelism.shards, gathered) for part in (block, groups))
    root_bytes = max(0, all_bytes - num_blocks * block_bytes)
    trained = [group for group in groups if group.is_trainable]
    block_reduced_bytes = _padded_bytes([group for group in block if group.is_trainable], parallelism.shards, reduced)
    all_reduced_bytes = _padded_bytes(trained, parallelism.shards, reduced)
    root_reduced_bytes = max(0, all_reduced_bytes - num_blocks * block_reduced_bytes)
    ratio = ELEMENT_BYTES[gathered] / ELEMENT_BYTES[reduced]
    in_backward_bytes = int(block_reduced_bytes * (ratio + 2)) + root_bytes
    at_end_bytes = int(root_reduced_bytes * (ratio + 1)) + block_reduced_bytes + root_bytes
    kept_bytes = 0 if parallelism.reshard_after_forward else num_blocks * block_bytes
    return ModelStates(
        parameters_bytes=optimizer_state.parameter_bytes(shards, dtype=dtype),
        gradients_bytes=optimizer_state.gradient_bytes(shards, dtype=dtype),
        accumulated_bytes=optimizer_state.gradient_bytes(groups, dtype=reduced),  # whole, until the last micro-batch
        optimizer_state_bytes=optimizer_state.optimizer_state_bytes(shards, workload.optimizer, dtype=dtype),
        temporaries_bytes=optimizer_state.optimizer_temporary_bytes(shards, workload.optimizer, dtype=dtype),
        in_forward_bytes=root_bytes + (kept_bytes or 2 * block_bytes),
        in_backward_bytes=in_backward_bytes + (kept_bytes or 3 * block_bytes),
        at_end_bytes=at_end_bytes,
        passing_bytes=max(in_backward_bytes + 3 * block_bytes, at_end_bytes),
    )


def _zero(workload: Workload, groups: Sequence[ParameterGroup]) -> ModelStates:
    """One flat fp32 copy of the trained parameters is shared out, whatever the precision; the model itself is in the short type."""
    parallelism, stage = workload.parallelism, ZERO_STAGES[workload.parallelism.strategy]
    element_bytes = ELEMENT_BYTES[compute_dtype(workload.training.precision)]
    parameters, trained = count(groups), count(groups, trainable_only=True)
    share = -(-trained // parallelism.shards)
    flat = [ParameterGroup("linear", (share,), 1, True)]
    persistent = sum(group.num_parameters for group in groups if prod(group.shape) < PERSISTENT)
    kept = parameters if stage < 3 else -(-parameters // parallelism.shards) + persistent
    gathered = 0 if stage < 3 else min(parameters, MOST_LIVE + PREFETCHED)
    return ModelStates(
        parameters_bytes=element_bytes * kept + rounded(4 * share),
        gradients_bytes=element_bytes * (trained if stage == 1 else share) + 4 * share,
        accumulated_bytes=4 * (trained if stage == 1 else share),
        optimizer_state_bytes=optimizer_state.optimizer_state_bytes(flat, workload.optimizer, dtype="float32"),
        temporaries_bytes=optimizer_state.optimizer_temporary_bytes(flat, workload.optimizer, dtype="float32"),
        buckets_bytes=element_bytes * REDUCE_BUCKET,
        in_forward_bytes=element_bytes * gathered,
        in_backward_bytes=element_bytes * gathered,
        at_end_bytes=element_bytes * gathered,
        passing_bytes=element_bytes * (parameters + REDUCE_BUCKET),  # the model as it was before it was made flat, and the bucket
    )


def _shard(group: ParameterGroup, shards: int) -> ParameterGroup:
    """Return what the first rank has of *group*: it has the most where the first dimension does not divide."""
    return group._replace(shape=(-(-group.shape[0] // shards), *group.shape[1:]))


def _padded_bytes(groups: Sequence[ParameterGroup], shards: int, dtype: DType) -> int:
    """Return the bytes of *groups* gathered: as often the first rank's shard as there are shards."""
    return sum(shards * _shard(group, shards).num_parameters for group in groups) * ELEMENT_BYTES[dtype]


def _block(model: Model) -> tuple[list[ParameterGroup], int]:
    """Return the parameters of one of the parts of *model* that are sharded one by one, and how many of those there are."""
    if isinstance(model, TransformerModel):
        return _added(model, model.model_copy(update={"num_layers": model.num_layers + 1})), model.num_layers
    if isinstance(model, ContrastiveEncoderModel):
        encoder = model.encoder
        more = model.model_copy(update={"encoder": encoder.model_copy(update={"num_layers": encoder.num_layers + 1}), "num_channels": 1})
        return _added(model.model_copy(update={"num_channels": 1}), more), encoder.num_layers * model.num_channels
    groups = parameter_groups(model)
    most = max(group.num_tensors for group in groups)
    parts = min(COUNTED_PARTS, most)
    return [group._replace(num_tensors=-(-group.num_tensors // parts)) for group in groups], parts


def _added(model: Model, larger: Model) -> list[ParameterGroup]:
    """Return the parameters that *larger*, of the same kind, has over *model*."""
    pairs = zip(parameter_groups(model), parameter_groups(larger), strict=False)
    return [more._replace(num_tensors=more.num_tensors - less.num_tensors) for less, more in pairs if more.num_tensors > less.num_tensors]
