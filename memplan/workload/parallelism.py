"""How many GPUs train together, and what each of them keeps of the model."""

from typing import Literal, get_args

from pydantic import PositiveInt, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import LiteralString

from memplan.description import Description

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
"""How data-parallel ranks keep the model: each all of it, or shards of some or all of its states."""

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

ZERO_STAGES: dict[Strategy, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""The strategies that are DeepSpeed's, by stage."""

ZERO_PACKAGE = "deepspeed"
"""What trains with them."""


NOT_DIVIDED: LiteralString = "not_divided"
"""The type of pydantic's error for ranks that make no whole number of groups."""


class Parallelism(Description):
    """Data parallelism: every rank has a batch of its own, and all of the model or a shard of it."""

    devices: PositiveInt = 1
    """GPUs in each machine."""

    nodes: PositiveInt = 1
    """Machines."""

    strategy: Strategy = "ddp"
    """What a rank keeps of the model: ddp, all of it (DistributedDataParallel); fsdp, a shard (`fully_shard`, FSDP2); zero1, zero2, zero3,
    DeepSpeed's stages: optimizer state, gradients and parameters sharded in turn. With one rank, nothing is sharded. A program of your own
    does what its code says."""

    sharding_degree: PositiveInt | None = None
    """Ranks that share one copy of the model, of fsdp; the groups of so many hold copies (HSDP). Default: all ranks share one."""

    reshard_after_forward: bool = True
    """Of fsdp: give up a block's gathered parameters after its forward, and gather them again for its backward."""

    @model_validator(mode="after")
    def _degree_makes_sense(self) -> "Parallelism":
        if self.sharding_degree is not None and self.strategy != "fsdp":
            raise _field_error("sharding_degree", f"sharding_degree is for the strategy fsdp, and this one is {self.strategy}")
        if self.data_parallel_size % self.shards and self.strategy == "fsdp":
            size = self.data_parallel_size
            message = f"sharding_degree {self.sharding_degree} does not divide {f'the {size} ranks' if size > 1 else '1 rank'}"
            raise _field_error("sharding_degree", message, kind=NOT_DIVIDED)
        if not self.reshard_after_forward and self.strategy != "fsdp":
            raise _field_error("reshard_after_forward", f"reshard_after_forward is for the strategy fsdp, and this one is {self.strategy}")
        return self

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks."""
        return self.devices * self.nodes

    @property
    def is_sharded(self) -> bool:
        """Say whether a rank keeps less than all of the model's states."""
        return self.strategy != "ddp" and self.shards > 1

    @property
    def shards(self) -> int:
        """Return how many ranks share one copy of what is sharded."""
        return 1 if self.strategy == "ddp" else self.sharding_degree or self.data_parallel_size

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """
        Return how many ranks each group has that communicates: all of them, over which losses are reduced, and those of the strategy.

        DeepSpeed has a second group of all ranks (0.19, `groups._clone_world_group`); HSDP has those that share a copy, and the copies.
        """
        ranks = self.data_parallel_size
        if self.strategy in ZERO_STAGES:
            return (ranks, ranks)
        return (ranks, self.shards, ranks // self.shards) if self.is_sharded and self.shards < ranks else (ranks,)

    def leaves_open(self, field: str) -> bool:
        """Say whether *field* decides nothing here: one rank shares with nobody, and not every strategy has every choice."""
        if field == "strategy":
            return self.data_parallel_size == 1
        return field == "reshard_after_forward" and not (self.strategy == "fsdp" and self.is_sharded)


def _field_error(field: str, message: str, *, kind: LiteralString = "parallelism") -> PydanticCustomError:
    """Return the error of one field, which the errors of workloads name."""
    return PydanticCustomError(kind, "{problem}", {"problem": message, "field": f"parallelism.{field}"})
