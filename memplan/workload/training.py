"""One training step on one rank: batch, accumulation, precision, checkpointing.

effective batch = micro batch x accumulation steps x data-parallel size
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt

from memplan.description import Description
from memplan.dtypes import Precision

MOST_STEPS = 1_000_000
"""Of a micro-batch and of accumulation: what is above has a digit too many."""

TargetBatch: TypeAlias = int | Literal["max"]
"""Samples that an optimizer step should see; "max": as many as fit at once, without accumulation."""


class Batching(Description):
    """What a plan decides of a step, and what it runs under."""

    micro_batch_size: Annotated[PositiveInt, Field(le=MOST_STEPS)] = 1
    """Samples (anchors) in one forward and backward on one GPU."""

    gradient_accumulation_steps: Annotated[PositiveInt, Field(le=MOST_STEPS)] = 1
    """Micro-batches before an optimizer step."""

    target_effective_batch_size: PositiveInt | None = None
    """Samples that an optimizer step should see. None: as many as it sees now."""

    allocator_settings: str = ""
    """The PYTORCH_ALLOC_CONF that the training runs under, as `roundup_power2_divisions:4`; empty for PyTorch's defaults."""


class Training(Batching):
    """How a step is run."""

    sequence_length: PositiveInt = 512
    """Tokens of a sample, padding included."""

    precision: Precision = "fp32"
    """fp32, autocast over fp32 weights (fp16-mixed, bf16-mixed), or everything in the short type (fp16, bf16)."""

    activation_checkpointing: bool = False
    """Keep each block's input only and compute the rest again in backward."""
