"""
A stage of a language model, in a pipeline: PyTorch's own (`torch.distributed.pipelining`), one stage for a group of ranks.

The blocks are divided evenly; the first stage has the embeddings besides, the last one the head and the loss. The micro-batches of an
optimizer step go through the pipeline one after the other (1F1B), so that the first stage holds as many of them as there are stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memplan.child.models.split import mesh_of, number_of_stage
from memplan.child.models.together import Trainer, short_type
from memplan.child.models.transformer import TransformerWithHead
from memplan.workload.parallelism import Parallelism
from memplan.workload.workload import Workload


def pipelined_step(workload: Workload, root: nn.Module, trainer: Trainer, device: str) -> Callable[[], None]:
    """Return one step of *workload* in this rank's stage, *root*: all its micro-batches, and the optimizer."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: PLC0415

    assert isinstance(root, TransformerWithHead)
    training, parallelism = workload.training, workload.parallelism
    number, count = number_of_stage(parallelism), parallelism.pipeline_parallel_size
    group = mesh_of(parallelism)["stages"].get_group()
    shapes = _shapes(workload, number)
    stage = PipelineStage(trainer.module, number, count, torch.device(device, 0), input_args=shapes[0], output_args=shapes[1], group=group)
    micro_batches = training.gradient_accumulation_steps
    # With fewer micro-batches than stages, 1F1B would hold all of them, as GPipe does, and PyTorch refuses it.
    kind: Any = Schedule1F1B if micro_batches >= count else ScheduleGPipe
    schedule = kind(stage, micro_batches, loss_fn=_loss_of(root, trainer, parallelism))
    keeps_nothing = {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}  # 2.6 keeps them

    def step() -> None:
        inputs = root.make_batch(training.micro_batch_size * micro_batches, training.sequence_length, device)
        given = (inputs["ids"],) if number == 0 else ()
        target = {"target": inputs["labels"]} if number == count - 1 else {}
        with trainer.split_batch(inputs), trainer.autocast():
            schedule.step(*given, **target, **keeps_nothing)
        trainer.update()

    return step


def _loss_of(root: TransformerWithHead, trainer: Trainer, parallelism: Parallelism) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a micro-batch, of the logits (batch, sequence, words) that this rank has."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if parallelism.tensor_parallel_size == 1:
            return trainer.scaled(root.loss_of_next(logits, labels))
        from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

        whole: Any = DTensor.from_local(logits, mesh_of(parallelism)["tensor"], [Shard(-1)], run_check=False)
        found: Any = root.loss_of_next(whole, labels)
        return trainer.scaled(found.to_local())

    return loss


def _shapes(workload: Workload, number: int) -> tuple[Tensor, Tensor]:
    """Return what the stage *number* takes in and gives out for a micro-batch, without memory."""
    model, training, parallelism = workload.model, workload.training, workload.parallelism
    assert model.kind == "transformer"
    is_mixed, short = training.precision.endswith("-mixed"), short_type(workload)
    # Autocast leaves the residual stream in fp32; FSDP computes it in the short type.
    stream = short if short is not None and (not is_mixed or parallelism.is_sharded) else torch.float32
    length = training.sequence_length // parallelism.context_parallel_size
    batch, tensor = training.micro_batch_size, parallelism.tensor_parallel_size

    def made(*shape: int, dtype: torch.dtype, is_followed: bool = True) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device="meta", requires_grad=is_followed)

    hidden = made(length // tensor, model.hidden_size, dtype=stream)
    ids = made(length, dtype=torch.long, is_followed=False)
    is_last = number == parallelism.pipeline_parallel_size - 1
    return (
        ids if number == 0 else hidden,
        made(length, model.vocab_size // tensor, dtype=short or torch.float32) if is_last else hidden,
    )
