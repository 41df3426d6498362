"""What the ranks that train together hand to each other, as values that are followed on the host: each sends what this one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d
from torch.utils._pytree import tree_flatten

MAY_BE_SIZES = (torch.int16, torch.int32, torch.int64, torch.bool)
"""Types of numbers that one rank sends all others and that may decide sizes; bytes are the states of generators, and the like."""

Value = Callable[[Any], "torch.Tensor | None"]
"""Returns what a tensor holds, where that is known."""


class Received(NamedTuple):
    """What a tensor holds after a collective; None: nobody knows."""

    target: Any
    value: torch.Tensor | None
    source: Any


def received(name: str, args: Any, value: Value) -> Iterator[Received]:
    """Yield what the collective *name* of `torch.ops.c10d` leaves in each tensor that it changes."""
    group = next(ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject) and _is_group(each))
    size, rank = group.size(), group.rank()
    gathered = name in ("allgather_", "gather_", "allgather_coalesced_")
    if name in ("allreduce_", "allreduce_coalesced_", "reduce_"):
        for tensor in _tensors(args[0]):
            yield Received(tensor, _reduced(value(tensor), _operation_in(args), size), tensor)
    elif gathered and name != "allgather_coalesced_":
        for outputs, sent in zip(args[0], args[1], strict=False):
            yield from (Received(output, value(sent), sent) for output in outputs)
    elif gathered:
        for outputs in args[0]:
            yield from (Received(output, value(sent), sent) for output, sent in zip(outputs, args[1], strict=False))
    elif name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        for output, sent in zip(_tensors(args[0]), _tensors(args[1]), strict=True):
            held = value(sent)
            yield Received(output, None if held is None else held.flatten().repeat(size), sent)
    elif name in ("reduce_scatter_", "scatter_"):
        for output, parts in zip(args[0], args[1], strict=False):
            held = value(parts[rank])
            yield Received(output, _reduced(held, _operation_in(args), size) if name == "reduce_scatter_" else held, parts[rank])
    elif name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        for output, sent in zip(_tensors(args[0]), _tensors(args[1]), strict=True):
            held = value(sent)
            yield Received(output, None if held is None else _reduced(held.flatten().chunk(size)[rank], _operation_in(args), size), sent)
    elif name == "alltoall_":
        held = value(args[1][rank])
        yield from (Received(output, _of_shape(held, output), args[1][rank]) for output in args[0])
    elif name == "alltoall_base_":
        yield Received(args[0], _exchanged(value(args[1]), args, rank, size), args[1])
    elif name == "broadcast_":
        root = next(each for each in args if isinstance(each, int))
        yield from (Received(tensor, None, tensor) for tensor in _tensors(args[0]) if root != rank and tensor.dtype in MAY_BE_SIZES)
    else:
        yield from (Received(tensor, None, tensor) for tensor in tree_flatten(args)[0] if isinstance(tensor, torch.Tensor))


def received_functionally(name: str, args: Any, result: Any, value: Value) -> Iterator[Received]:
    """Yield what the collective *name* of `torch.ops._c10d_functional`, as DTensor's are, leaves in each tensor of its *result*."""
    c10d: Any = distributed_c10d
    texts = [each for each in args if isinstance(each, str)]
    group = args[-1] if isinstance(args[-1], ProcessGroup) else c10d._resolve_process_group(texts[-1])
    size, rank = group.size(), group.rank()
    kind = name.removesuffix("_").removesuffix("_coalesced")
    for output, sent in zip(_tensors(result), _tensors(args[0]), strict=True):
        held = value(sent)
        found = None
        if kind == "all_reduce":
            found = _reduced(held, _named(texts[0]), size)
        elif held is not None and kind == "all_gather_into_tensor":
            found = held.flatten().repeat(size)
        elif held is not None and kind == "reduce_scatter_tensor":
            found = _reduced(held.flatten().chunk(size)[rank], _named(texts[0]), size)
        elif kind == "broadcast" and (rank in args[1:2] or sent.dtype not in MAY_BE_SIZES):
            found = held
        yield Received(output, found, sent)


def _is_group(script: Any) -> bool:
    return str(script._type()) == "__torch__.torch.classes.c10d.ProcessGroup"


def _tensors(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _operation_in(args: Any) -> Any:
    """Return by what a collective with *args* reduces."""
    scripts: list[Any] = [each for each in args if isinstance(each, torch.ScriptObject) and not _is_group(each)]
    return scripts[0].op() if scripts else ReduceOp.SUM


def _named(operation: str) -> Any:
    """Return the operation that functional collectives call so; None for one that has no such name."""
    return getattr(ReduceOp, operation.upper(), None)


def _reduced(value: torch.Tensor | None, operation: Any, size: int) -> torch.Tensor | None:
    if value is None or operation in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG, ReduceOp.BAND, ReduceOp.BOR):
        return value
    return value * size if operation == ReduceOp.SUM else None


def _of_shape(value: torch.Tensor | None, output: Any) -> torch.Tensor | None:
    return value if value is not None and value.shape == output.shape else None


def _exchanged(value: torch.Tensor | None, args: Any, rank: int, size: int) -> torch.Tensor | None:
    """Each rank sends here what this one sends to itself."""
    if value is None:
        return None
    output, splits, own_splits = args[0], list(args[3]), list(args[4])
    own = (value.split(own_splits) if own_splits else value.chunk(size))[rank]
    rows = splits or [output.shape[0] // size] * size
    return torch.cat([own] * size) if all(count == own.shape[0] for count in rows) else None
