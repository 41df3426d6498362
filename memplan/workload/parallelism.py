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


MODEL_PARALLEL_SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
"""The fields that say how many GPUs work on one batch together."""


class Parallelism(Description):
    """
    How the GPUs share the work: those of a group work on one batch together, and each group has a batch of its own.

        GPUs = data-parallel size x tensor_parallel_size x context_parallel_size x pipeline_parallel_size
    """

    devices: PositiveInt = 1
    """GPUs in each machine."""

    nodes: PositiveInt = 1
    """Machines."""

    strategy: Strategy = "ddp"
    """What a rank keeps of the model: ddp, all of it (DistributedDataParallel); fsdp, a shard (`fully_shard`, FSDP2); zero1, zero2, zero3,
    DeepSpeed's stages: optimizer state, gradients and parameters sharded in turn. With one rank, nothing is sharded. A program of your own
    does what its code says."""

    sharding_degree: PositiveInt | None = None
    """Ranks that share one copy of the model, of fsdp; the groups of so many hold copies (HSDP). Default: all ranks share one that have the
    same weights."""

    reshard_after_forward: bool = True
    """Of fsdp: give up a block's gathered parameters after its forward, and gather them again for its backward."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs that split each layer's matrices, and between them the sequence (PyTorch's `parallelize_module` with sequence parallelism and a
    split loss). Of a program of your own, what its code does."""

    context_parallel_size: PositiveInt = 1
    """GPUs that split the sequence everywhere, and pass keys and values around (PyTorch's `context_parallel`). Of a program of your own,
    what its code does."""

    pipeline_parallel_size: PositiveInt = 1
    """Stages of the model, each on other GPUs, through which the micro-batches of a step go one after the other (1F1B of PyTorch's
    `torch.distributed.pipelining`). Of a program of your own, what its code does."""

    @model_validator(mode="after")
    def _goes_together(self) -> "Parallelism":
        for field in ("sharding_degree", "reshard_after_forward"):
            if getattr(self, field) != type(self).model_fields[field].default and self.strategy != "fsdp":
                raise _field_error(field, f"{field} is for the strategy fsdp, and this one is {self.strategy}")
        if self.num_gpus % self.model_parallel_size:
            product = " × ".join(f"{name} {getattr(self, name)}" for name in self.split_by)
            total = f" = {self.model_parallel_size}" if len(self.split_by) > 1 else ""
            largest = max(self.split_by, key=lambda name: int(getattr(self, name)))
            raise _field_error(largest, f"{product}{total} does not divide {_count(self.num_gpus, 'GPU')}", kind=NOT_DIVIDED)
        if self.strategy in ZERO_STAGES and self.split_by:
            raise _field_error(
                "strategy", f"{self.strategy} is planned for data-parallel GPUs alone, without {' and '.join(self.split_by)}"
            )
        if self.num_copies % self.shards and self.strategy == "fsdp":
            message = f"sharding_degree {self.sharding_degree} does not divide {_count(self.num_copies, 'rank')}"
            raise _field_error("sharding_degree", message, kind=NOT_DIVIDED)
        return self

    @property
    def num_gpus(self) -> int:
        """Return how many GPUs there are, each with a rank of its own."""
        return self.devices * self.nodes

    @property
    def model_parallel_size(self) -> int:
        """Return how many GPUs work on one batch together."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def split_by(self) -> tuple[str, ...]:
        """Return the sizes that split the model or the sequence."""
        return tuple(name for name in MODEL_PARALLEL_SIZES if getattr(self, name) > 1)

    @property
    def data_parallel_size(self) -> int:
        """Return how many batches there are at once."""
        return self.num_gpus // self.model_parallel_size

    @property
    def num_copies(self) -> int:
        """
        Return how many ranks have the same weights, which they reduce gradients over, and can share.

        Those that split a sequence have them too (torchtitan, `ParallelDims`: the mesh "dp_shard_cp").
        """
        return self.data_parallel_size * self.context_parallel_size

    @property
    def is_sharded(self) -> bool:
        """Say whether a rank keeps less than all of its weights' states."""
        return self.strategy != "ddp" and self.shards > 1

    @property
    def shards(self) -> int:
        """Return how many ranks share one copy of what is sharded."""
        return 1 if self.strategy == "ddp" else self.sharding_degree or self.num_copies

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """
        Return how many ranks each group has that communicates: all of them, over which losses are reduced, and those of the strategy.

        DeepSpeed has a second group of all ranks (0.19, `groups._clone_world_group`); HSDP has those that share a copy, and the copies.
        """
        ranks = self.num_gpus
        if self.strategy in ZERO_STAGES:
            return (ranks, ranks)
        return (ranks, self.shards, ranks // self.shards) if self.is_sharded and self.shards < ranks else (ranks,)

    def leaves_open(self, field: str) -> bool:
        """Say whether *field* decides nothing here: one rank shares with nobody, and not every strategy has every choice."""
        if field in MODEL_PARALLEL_SIZES:
            return self.num_gpus == 1
        if field == "strategy":
            return self.num_copies == 1
        return field == "reshard_after_forward" and not (self.strategy == "fsdp" and self.is_sharded)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"the {number} {noun}s"


def _field_error(field: str, message: str, *, kind: LiteralString = "parallelism") -> PydanticCustomError:
    """Return the error of one field, which the errors of workloads name."""
    return PydanticCustomError(kind, "{problem}", {"problem": message, "field": f"parallelism.{field}"})
