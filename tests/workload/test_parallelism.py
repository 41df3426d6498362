"""How GPUs share the work: what its fields may say of each other, and how many batches there are at once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from memplan.workload.parallelism import Parallelism


@pytest.mark.parametrize(
    ("given", "field", "problem"),
    [
        ({"devices": 8, "strategy": "fsdp", "sharding_degree": 3}, "sharding_degree", "3 does not divide the 8 ranks"),
        ({"devices": 8, "strategy": "zero3", "sharding_degree": 4}, "sharding_degree", "is for the strategy fsdp"),
        ({"devices": 8, "reshard_after_forward": False}, "reshard_after_forward", "is for the strategy fsdp"),
        ({"devices": 8, "tensor_parallel_size": 3}, "tensor_parallel_size", "tensor_parallel_size 3 does not divide the 8 GPUs"),
        (
            {"devices": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 4},
            "pipeline_parallel_size",
            "tensor_parallel_size 2 × pipeline_parallel_size 4 = 8 does not divide the 4 GPUs",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "2 does not divide 1 GPU "),
        (
            {"devices": 4, "tensor_parallel_size": 2, "strategy": "zero1"},
            "strategy",
            "for data-parallel GPUs alone, without tensor_parallel_size",
        ),
        (
            {"devices": 8, "tensor_parallel_size": 2, "strategy": "fsdp", "sharding_degree": 8},
            "sharding_degree",
            "8 does not divide the 4 ranks",
        ),
    ],
)
def test_what_makes_no_sense_together_is_told_of_its_field(given: dict[str, Any], field: str, problem: str) -> None:
    """By its name in a workload file."""
    with pytest.raises(ValidationError, match=problem) as error:
        Parallelism.model_validate(given)

    assert error.value.errors()[0]["ctx"]["field"] == f"parallelism.{field}"


@pytest.mark.parametrize(
    ("given", "shards"),
    [
        ({"devices": 8}, 1),
        ({"devices": 8, "nodes": 2, "strategy": "fsdp"}, 16),
        ({"devices": 8, "nodes": 2, "strategy": "fsdp", "sharding_degree": 8}, 8),
        ({"devices": 8, "strategy": "zero1"}, 8),
        ({"strategy": "fsdp"}, 1),
    ],
)
def test_a_copy_is_shared_by_all_ranks_or_by_those_of_a_group(given: dict[str, Any], shards: int) -> None:
    """One rank shares with nobody."""
    parallelism = Parallelism.model_validate(given)

    assert parallelism.shards == shards
    assert parallelism.is_sharded == (shards > 1)


@pytest.mark.parametrize(
    ("given", "batches", "copies", "shards"),
    [
        ({"devices": 8, "nodes": 4, "strategy": "fsdp"}, 32, 32, 32),
        ({"devices": 8, "nodes": 4, "strategy": "fsdp", "tensor_parallel_size": 8}, 4, 4, 4),
        ({"devices": 8, "nodes": 4, "strategy": "fsdp", "context_parallel_size": 4}, 8, 32, 32),
        ({"devices": 8, "nodes": 64, "strategy": "fsdp", "tensor_parallel_size": 8, "pipeline_parallel_size": 8}, 8, 8, 8),
        ({"devices": 8, "tensor_parallel_size": 8}, 1, 1, 1),
    ],
)
def test_gpus_that_work_on_one_batch_are_counted_once(given: dict[str, Any], batches: int, copies: int, shards: int) -> None:
    """Batches at once, ranks with the same weights (as those have that split a sequence), and those of them that share one copy."""
    parallelism = Parallelism.model_validate(given)

    assert (parallelism.data_parallel_size, parallelism.num_copies, parallelism.shards) == (batches, copies, shards)
