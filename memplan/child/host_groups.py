"""
Process groups of the host, Gloo's, where the other ranks are not there.

PyTorch's own group for tests stands in for the backend: its collectives return at once. What they give is put right here, for tensors of
the host: each missing rank has what this one has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroupGloo

from memplan.child.collectives import keep, kept
from memplan.child.followed_collectives import MAY_BE_SIZES
from memplan.child.one_rank import NeedsOtherRankError


class _OfFake(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (FakeProcessGroup, ProcessGroupGloo))


class HostGroup(metaclass=_OfFake):
    """Stands where PyTorch makes a ProcessGroupGloo."""

    def __new__(cls, store: Any, rank: int, size: int, *arguments: Any, **keywords: Any) -> Any:
        """Return a group that waits for nobody."""
        del store, arguments, keywords
        make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        return make(rank, size)


def hand_tensors_on() -> None:
    """Have the collectives of tensors of the host give what copies of this rank would send."""
    fake, group = FakeProcessGroup, dist.ProcessGroup
    for name in ("_set_sequence_number_for_group", "_set_default_timeout"):
        setattr(fake, name, _done)
    setattr(group, "monitored_barrier", _done)  # noqa: B010  (of C++, and type checkers know no such name)
    for name, give in _GIVEN.items():
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _giving(getattr(dist.ProcessGroup, name), give))


def _done(group: Any, *arguments: Any, **keywords: Any) -> None:
    """Do what only the other ranks would notice."""
    del group, arguments, keywords


def _giving(collective: Callable[..., Any], give: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(group: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _is_of_host([*arguments, *keywords.values()]):
            return collective(group, *arguments, **keywords)
        given = list(arguments) + list(keywords.values())
        if give is _received:
            give(group, *given)
        work = collective(group, *arguments, **keywords)
        with torch.no_grad():
            give(group, *given)
        return work

    return call


def _is_of_host(values: Any) -> bool:
    """Say whether the first tensor among *values* is the host's."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu"
        if isinstance(value, (list, tuple)) and value:
            return _is_of_host(value)
    return False


def _options(rest: tuple[Any, ...], name: str) -> Any:
    return next((getattr(option, name) for option in rest if hasattr(option, name)), None)


def _tensors(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _reduced(group: Any, tensors: Any, *rest: Any) -> None:
    """Sums are those of as many equal values as there are ranks; the largest, smallest and mean of equal values are each of them."""
    operation = _options(rest, "reduceOp")
    operation = next((one for one in rest if isinstance(one, dist.ReduceOp | dist.ReduceOp.RedOpType)), operation)
    for tensor in _tensors(tensors):
        if operation is None or operation == dist.ReduceOp.SUM:
            tensor.mul_(group.size())
        elif operation == dist.ReduceOp.PRODUCT:
            tensor.pow_(group.size())


def _reduced_at_root(group: Any, tensors: Any, *rest: Any) -> None:
    if (_options(rest, "rootRank") or 0) == group.rank():
        _reduced(group, tensors, *rest)


MOST_SENT = 65_536
"""Elements of a tensor of integers that another rank gets by a file; a larger one is data."""


def _broadcast(group: Any, tensors: Any, *rest: Any) -> None:
    """Numbers that one certain rank sends may be sizes: they are that rank's own."""
    root = _options(rest, "rootRank") or next((one for one in rest if isinstance(one, int)), 0)
    source = dist.get_global_rank(group, root)
    for tensor in _tensors(tensors):
        if tensor.dtype not in MAY_BE_SIZES or tensor.numel() > MOST_SENT:
            continue
        name = f"numbers {group.group_name}"
        if source == dist.get_rank():
            keep(name, [tensor.clone()])
        else:
            tensor.copy_(kept(name, source)[0])


def _gathered(group: Any, outputs: Any, inputs: Any, *rest: Any) -> None:
    del group, rest
    for received, sent in zip(outputs, inputs, strict=False):  # none but at the root
        for tensor in received:
            tensor.copy_(sent)


def _gathered_in_one(group: Any, output: Any, sent: Any, *rest: Any) -> None:
    del rest
    for part in output.chunk(group.size()):
        part.copy_(sent.view_as(part))


def _scattered(group: Any, outputs: Any, inputs: Any, *rest: Any) -> None:
    del rest
    for output, parts in zip(outputs, inputs, strict=False):
        output.copy_(parts[group.rank()])


def _reduced_and_scattered(group: Any, outputs: Any, inputs: Any, *rest: Any) -> None:
    _scattered(group, outputs, inputs)
    _reduced(group, outputs, *rest)


def _reduced_and_scattered_of_one(group: Any, output: Any, sent: Any, *rest: Any) -> None:
    output.copy_(sent.chunk(group.size())[group.rank()].view_as(output))
    _reduced(group, output, *rest)


def _exchanged(group: Any, outputs: Any, inputs: Any, *rest: Any) -> None:
    """A copy of this rank sends here what this one sends to itself, where that has the size that is awaited."""
    del rest
    own = inputs[group.rank()]
    for output in outputs:
        if output.shape == own.shape:
            output.copy_(own)


def _exchanged_in_one(group: Any, output: Any, sent: Any, output_sizes: Any = (), input_sizes: Any = (), *rest: Any) -> None:
    del rest
    outputs = output.split(list(output_sizes)) if output_sizes else output.chunk(group.size())
    inputs = sent.split(list(input_sizes)) if input_sizes else sent.chunk(group.size())
    _exchanged(group, outputs, inputs)


def _received(group: Any, tensors: Any, source: int = -1, *rest: Any) -> None:
    del tensors, rest
    raise NeedsOtherRankError(f"rank {group.rank()} of group {group.group_name} waits for a tensor of rank {source}, on the host")


_GIVEN: dict[str, Callable[..., None]] = {
    "allreduce": _reduced,
    "broadcast": _broadcast,
    "reduce": _reduced_at_root,
    "allgather": _gathered,
    "_allgather_base": _gathered_in_one,
    "gather": _gathered,
    "scatter": _scattered,
    "reduce_scatter": _reduced_and_scattered,
    "_reduce_scatter_base": _reduced_and_scattered_of_one,
    "alltoall": _exchanged,
    "alltoall_base": _exchanged_in_one,
    "all_gather_single": _gathered_in_one,  # names that 2.13 gives them
    "reduce_scatter_single": _reduced_and_scattered_of_one,
    "all_to_all_single": _exchanged_in_one,
    "recv": _received,
    "recv_anysource": _received,
}
