"""What a rank keeps of the model's states: worked out by hand, and held to rehearsals."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest

from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.analytic.model_states import REDUCE_BUCKET, states_of
from memplan.estimators.analytic.parameters import count, parameter_groups, rounded
from memplan.execution.ranks import Ranks
from memplan.hardware.gpu import GpuSpec
from memplan.workload.workload import Workload
from tests.child.models.test_together import HAS_DEEPSPEED
from tests.conftest import RehearserOf

GPT2 = {
    "kind": "transformer", "architecture": "decoder", "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "intermediate_size": 3072, "vocab_size": 50_257, "num_positions": 1024, "activation": "gelu_new", "head": "language_model",
    "ties_embeddings": True,
}  # fmt: skip
LLAMA = {
    "kind": "transformer", "architecture": "decoder", "num_layers": 8, "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 32_000,
    "intermediate_size": 5632, "rotary": True, "norm": "rms_norm", "activation": "silu", "is_gated": True, "has_linear_bias": False,
    "head": "language_model",
}  # fmt: skip
CHECKPOINTED = {"micro_batch_size": 1, "activation_checkpointing": True, "gradient_accumulation_steps": 2}


def workload(model: dict[str, Any], strategy: str, ranks: int, **changes: Any) -> Workload:
    training = {"micro_batch_size": 4, "sequence_length": 512, "precision": "bf16-mixed"} | changes.pop("training", {})
    parallelism = {"devices": min(8, ranks), "nodes": max(1, ranks // 8), "strategy": strategy} | changes
    return Workload.model_validate({"model": model, "training": training, "parallelism": parallelism})


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_fsdp_shards_every_tensor_along_its_first_dimension(ranks: int) -> None:
    """Fp32 weights, gradients and two moments of ceil(rows / ranks) rows, each in a block; whole gradients between micro-batches."""
    described = workload(GPT2, "fsdp", ranks)
    groups = parameter_groups(described.model)
    by_hand = sum(group.num_tensors * rounded(4 * -(-group.shape[0] // ranks) * prod(group.shape[1:])) for group in groups)

    states = states_of(described, groups)

    assert (states.parameters_bytes, states.gradients_bytes, states.optimizer_state_bytes) == (by_hand, by_hand, 2 * by_hand)
    assert states.accumulated_bytes == pytest.approx(4 * count(groups), rel=0.005)


def test_the_stages_of_zero_shard_one_more_each() -> None:
    """Mixed precision with Adam on 8 ranks: of 2 + 2 + 12 bytes a parameter 12, 14, 16 are shared (arXiv:1910.02054, figure 1)."""
    groups = parameter_groups(workload(LLAMA, "ddp", 1).model)
    parameters = count(groups)
    first, second, third = (states_of(workload(LLAMA, f"zero{stage}", 8), groups) for stage in (1, 2, 3))
    fp32 = 4 * parameters / 8

    assert first.optimizer_state_bytes == second.optimizer_state_bytes == third.optimizer_state_bytes == pytest.approx(parameters, rel=0.01)
    assert first.parameters_bytes == second.parameters_bytes == pytest.approx(2 * parameters + fp32, rel=0.005)
    assert third.parameters_bytes == pytest.approx(2 * parameters / 8 + fp32, rel=0.005)  # norms are not sharded
    assert first.gradients_bytes - second.gradients_bytes == pytest.approx(2 * parameters * 7 / 8)
    assert first.buckets_bytes == second.buckets_bytes == third.buckets_bytes == 2 * REDUCE_BUCKET


def test_one_rank_shares_with_nobody(a100: GpuSpec) -> None:
    """Whatever the strategy, it takes what it would alone."""
    assert estimate(workload(GPT2, "fsdp", 1), a100, None) == estimate(workload(GPT2, "ddp", 1), a100, None)


def test_hybrid_sharding_is_that_of_its_group() -> None:
    """Four of sixty-four."""
    groups = parameter_groups(workload(GPT2, "ddp", 1).model)

    assert states_of(workload(GPT2, "fsdp", 64, sharding_degree=4), groups) == states_of(workload(GPT2, "fsdp", 4), groups)


CASES = {"mixed": (GPT2, {}, 8), "checkpointed": (LLAMA, CHECKPOINTED, 64), "bf16": (LLAMA, {"precision": "bf16"}, 8)}
"""Every value of the model, of how it trains and of the number of ranks; all of their combinations are alike."""


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "training", "ranks"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_rehearsals_are_within_the_range(
    rehearser_of: RehearserOf, a100: GpuSpec, model: dict[str, Any], training: dict[str, Any], strategy: str, ranks: int
) -> None:
    """None takes more than the formulas' upper bound, or less than their lower one; what DDP and FSDP allocate is at most 5% more."""
    if strategy.startswith("zero") and not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    described = workload(model, strategy, ranks, training=training)
    parallelism = described.parallelism
    formula = estimate(described, a100.endless(), None)

    rehearsal = rehearser_of("memplan.child.models.built_in:build").rehearse(
        gpu=a100.endless(),
        values={"workload": json.loads(described.model_dump_json())},
        ranks=Ranks(parallelism.devices, parallelism.nodes),
        has_padding=True,
    )

    assert formula.device_used.low_bytes <= rehearsal.device_used.expected_bytes <= formula.device_used.high_bytes
    if not strategy.startswith("zero"):
        assert 0.95 * rehearsal.peak_allocated_bytes <= formula.peak_allocated_bytes <= 1.25 * rehearsal.peak_allocated_bytes
