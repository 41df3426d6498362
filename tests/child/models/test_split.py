"""GPUs that work on one batch together, one of them rehearsed: what each has of the model, worked out by hand."""

from __future__ import annotations

from math import prod

import pytest

from memplan.estimators.analytic.parameters import parameter_groups, rounded
from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from memplan.workload.workload import Workload
from tests.child.models.test_built_in import run, small
from tests.conftest import RehearserOf, SharedRehearser

LLAMA = {
    "num_layers": 4, "num_positions": 0, "rotary": True, "activation": "silu", "is_gated": True, "norm": "rms_norm",
    "num_key_value_heads": 4, "has_linear_bias": False, "ties_embeddings": False, "has_attention_mask": False,
}  # fmt: skip
"""Changes of `small` that make it a Llama of packed texts."""


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    """One process for all."""
    return rehearser_of("memplan.child.models.built_in:build")


def llama(
    devices: int, model: dict[str, object] | None = None, training: dict[str, object] | None = None, **parallelism: object
) -> Workload:
    """The Llama, on so many GPUs."""
    together = {"devices": devices, "strategy": "fsdp"} | parallelism
    return small({"precision": "bf16-mixed"} | (training or {}), model=LLAMA | (model or {}), parallelism=together)


def run_stage(rehearser: SharedRehearser, workload: Workload, stage: int) -> Rehearsal:
    """The first rank of a stage of the pipeline."""
    parallelism = workload.parallelism
    rank = stage * parallelism.num_gpus // parallelism.pipeline_parallel_size
    values = {"workload": workload.model_dump(mode="json")}
    ranks = Ranks(parallelism.devices, parallelism.nodes, rank)
    return rehearser.rehearse(gpu=find_gpu("a100-80"), values=values, context_bytes=0, environment={}, ranks=ranks)


def moments_bytes(workload: Workload) -> int:
    """
    Adam's two moments in fp32 of the first rank, each in a block of its own: of a matrix its part of one side, a shard of it.

    Rows are split of what makes heads and inner values (and of the embeddings), columns of what joins them; norms are whole.
    """
    parallelism, total = workload.parallelism, 0
    for group in parameter_groups(workload.model):
        rows, *columns = group.shape
        if columns and columns[0] > rows and rows == 256:  # `down`: what comes in is split
            columns = [columns[0] // parallelism.tensor_parallel_size]
        elif columns and group.shape == (256, 256):
            columns = [columns[0] // parallelism.tensor_parallel_size]  # of a square matrix both sides are alike
        elif columns:
            rows //= parallelism.tensor_parallel_size
        total += 2 * group.num_tensors * rounded(4 * -(-rows // parallelism.shards) * prod(columns))
    return total


@pytest.mark.parametrize(("tensor", "devices"), [(2, 2), (2, 8), (4, 8)])
def test_tensor_parallel_ranks_have_a_part_of_each_matrix(rehearser: SharedRehearser, tensor: int, devices: int) -> None:
    """And FSDP a shard of that part: moments to the byte."""
    workload = llama(devices, tensor_parallel_size=tensor)

    assert run(rehearser, workload).breakdown.optimizer_state_bytes == moments_bytes(workload)


def test_ranks_that_split_matrices_or_the_sequence_have_a_part_of_the_activations(rehearser: SharedRehearser) -> None:
    """Most of a half: what comes in and goes out of the blocks is split along the sequence too."""
    alone, tensor, context = (
        run(rehearser, llama(2, **split)) for split in ({}, {"tensor_parallel_size": 2}, {"context_parallel_size": 2})
    )

    for found in (tensor, context):
        assert 0.4 < found.breakdown.activations_bytes / alone.breakdown.activations_bytes < 0.7


def test_ranks_that_split_the_sequence_share_the_weights(rehearser: SharedRehearser) -> None:
    """They have the same ones: the moments are those of as many shards without it."""
    split, whole = (run(rehearser, llama(4, context_parallel_size=size)).breakdown for size in (2, 1))

    assert split.optimizer_state_bytes == whole.optimizer_state_bytes


def test_the_stages_of_a_pipeline_have_all_of_the_model_together(rehearser: SharedRehearser) -> None:
    """Each its layers; what is in the last one alone is the head, in the first one alone the embedding."""
    whole = run(rehearser, llama(1)).breakdown.optimizer_state_bytes
    training = {"gradient_accumulation_steps": 4, "micro_batch_size": 2}
    workload = llama(4, training=training, pipeline_parallel_size=4)
    stages = [run_stage(rehearser, workload, stage).breakdown.optimizer_state_bytes for stage in range(4)]

    assert sum(stages) == whole
    assert stages[1] == stages[2]


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages(rehearser: SharedRehearser) -> None:
    """Each further one takes its ids and one buffer of hidden states more, into which PyTorch receives what the next stage sends back."""

    def peak(micro_batches: int) -> int:
        training = {"gradient_accumulation_steps": micro_batches, "micro_batch_size": 8}
        return run_stage(rehearser, llama(2, training=training, pipeline_parallel_size=2), 0).peak_allocated_bytes

    one, two, four, eight = (peak(count) for count in (1, 2, 4, 8))
    ids_bytes, hidden_bytes = 8 * 8 * 128, 4 * 8 * 128 * 256  # autocast leaves the residual stream in fp32

    assert two - one > 10 * hidden_bytes
    assert eight - four == 4 * (ids_bytes + hidden_bytes)


@pytest.mark.parametrize(
    ("split", "model"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "context_parallel_size": 2}, {}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
        ({"tensor_parallel_size": 8}, {"num_attention_heads": 8, "num_key_value_heads": 8, "ties_embeddings": True}),
        ({"tensor_parallel_size": 2}, {"num_key_value_heads": 2}),
        ({"tensor_parallel_size": 2}, {"has_fused_qkv": True, "norm": "layer_norm", "rotary": False, "num_positions": 256}),
        ({"tensor_parallel_size": 2}, {"has_qk_norm": True, "has_attention_mask": True}),
        ({"context_parallel_size": 2, "strategy": "ddp"}, {}),
        ({"pipeline_parallel_size": 2, "strategy": "ddp"}, {"ties_embeddings": True}),
    ],
)
def test_what_can_be_split_trains(rehearser: SharedRehearser, split: dict[str, object], model: dict[str, object]) -> None:
    """On eight GPUs, with checkpointing: three steps, and no more than two need."""
    workload = llama(8, model, {"gradient_accumulation_steps": 2, "activation_checkpointing": True}, **split)

    found = run(rehearser, workload)

    assert len(found.steps) >= 3
    assert found.breakdown.nccl_buffers_bytes > 0
