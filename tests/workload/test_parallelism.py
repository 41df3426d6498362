"""Data parallelism: what its fields may say of each other."""

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
