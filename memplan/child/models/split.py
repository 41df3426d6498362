"""
How GPUs work on one batch together: they split each layer's matrices (tensor parallel), the sequence (context parallel), or the layers.

All are PyTorch's own, put in as torchtitan does for its Llama (`parallelize_llama`, December 2024): between the matrices the sequence is
split too (sequence parallel), and so is the loss over the words. What passes layers from stage to stage is in `pipeline.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memplan.child.models.transformer import TransformerWithHead
from memplan.workload.parallelism import Parallelism


def mesh_of(parallelism: Parallelism) -> DeviceMesh:
    """Return the ranks by what they have: "stages" of the model, "copies" of a stage, "shards" of a copy, "tensor", parts of matrices."""
    copies = parallelism.num_copies // parallelism.shards
    sizes = (parallelism.pipeline_parallel_size, copies, parallelism.shards, parallelism.tensor_parallel_size)
    return _mesh(sizes, ("stages", "copies", "shards", "tensor"))


@functools.cache
def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cuda", sizes, mesh_dim_names=names)


def number_of_stage(parallelism: Parallelism) -> int:
    """Return which stage this rank has: the outermost of what ranks differ by."""
    return dist.get_rank() * parallelism.pipeline_parallel_size // parallelism.num_gpus


def cut(root: nn.Module, parallelism: Parallelism) -> None:
    """Leave of *root*, made without memory, this rank's stage."""
    assert isinstance(root, TransformerWithHead)
    number, count = number_of_stage(parallelism), parallelism.pipeline_parallel_size
    transformer = root.transformer
    num_blocks = len(transformer.blocks) // count
    transformer.blocks = transformer.blocks[number * num_blocks : (number + 1) * num_blocks]
    if number > 0:
        transformer.tokens = transformer.dropout = nn.Identity()  # hidden states come in
        transformer.types = transformer.places = None
        transformer.length_of_input = parallelism.tensor_parallel_size
    if number < count - 1:
        transformer.norm = root.logits = nn.Identity()  # hidden states go out


def split_matrices(root: nn.Module, mesh: DeviceMesh, *, is_stage: bool) -> None:
    """Split the matrices of *root*, made without memory, over the ranks of *mesh*; of a stage, what it gives out is a plain tensor."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    assert isinstance(root, TransformerWithHead)
    norm = SequenceParallel(use_local_output=True)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    around = {
        **dict.fromkeys((f"transformer.{name}" for name in ("tokens", "types", "places")), embedding),
        "transformer.norm": norm,
        "logits": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=is_stage),
    }
    of_block = {
        "attention_norm": norm,
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": norm,
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for module, plan in ((root, around), *((block, of_block) for block in root.transformer.blocks)):
        there = {name for name, part in module.named_modules() if not isinstance(part, nn.Identity)}
        parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in there})
    root.tie()


@contextlib.contextmanager
def split_batch(inputs: Mapping[str, Tensor], parallelism: Parallelism) -> Iterator[None]:
    """Return the context in which *inputs* (batch, sequence) are trained on: each rank has its part of the sequence, and of the loss."""
    with contextlib.ExitStack() as contexts:
        if parallelism.tensor_parallel_size > 1:
            from torch.distributed.tensor.parallel import loss_parallel  # noqa: PLC0415

            contexts.enter_context(loss_parallel())
        if parallelism.context_parallel_size > 1:
            contexts.enter_context(_split_sequence(inputs, parallelism))
        yield


def _split_sequence(inputs: Mapping[str, Tensor], parallelism: Parallelism) -> contextlib.AbstractContextManager[None]:
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415

    batches, parts = parallelism.data_parallel_size, parallelism.context_parallel_size
    sizes = (parallelism.pipeline_parallel_size, batches, parts, parallelism.tensor_parallel_size)
    mesh = _mesh(sizes, ("stages", "batches", "sequence", "tensor"))
    buffers = list({id(tensor): tensor for tensor in inputs.values()}.values())
    found: contextlib.AbstractContextManager[None] = context_parallel(
        mesh["sequence"], buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    )
    return found
