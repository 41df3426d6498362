"""
Collectives of Python objects, on the simulated GPU.

PyTorch sends an object as bytes through the GPU and reads back how many there are. What a kernel may have overwritten reads zero there, and
of no bytes there is no object. The collective runs as ever, for what it allocates; what comes back is the object that was sent, for each
rank: those that are missing behave as copies of this one.
"""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist

from memplan.child.one_rank import NeedsOtherRankError

Answering = Callable[[Callable[[int], bytes]], AbstractContextManager[None]]
"""Has what is read from the GPU answered by a function, for a while."""


def hand_objects_on(answering: Answering) -> None:
    """Have the collectives of objects return what copies of this process send, where PyTorch has them."""
    if not dist.is_available():
        return
    module: Any = dist.distributed_c10d
    given: dict[str, Callable[..., None]] = {
        "all_gather_object": _gathered,
        "gather_object": _gathered_at_one,
        "scatter_object_list": _scattered,
        "broadcast_object_list": _broadcast,
        "recv_object_list": _received,
    }
    for name, give in given.items():
        if hasattr(module, name):
            changed = _completed(getattr(module, name), give, answering)
            setattr(module, name, changed)
            setattr(dist, name, changed)


def _completed(collective: Callable[..., Any], give: Callable[..., None], answering: Answering) -> Callable[..., Any]:
    """Return *collective* with what it gives put right by *give*, which gets the same arguments."""

    @functools.wraps(collective)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if give is _received:
            return give(*arguments, **keywords)
        lists = [each for each in (*arguments, *keywords.values()) if isinstance(each, list)]
        before = [list(each) for each in lists]
        with _sizes_known() as size_of, answering(size_of):
            done = collective(*arguments, **keywords)
        for changed, kept in zip(lists, before, strict=True):
            changed[:] = kept
        if dist.get_rank(keywords.get("group")) >= 0:
            give(*arguments, **keywords)
        return done

    return call


@contextmanager
def _sizes_known() -> Iterator[Callable[[int], bytes]]:
    """Give what answers questions for the sizes of objects: all are as large as this rank's own. Nothing is made of their bytes."""
    module: Any = dist.distributed_c10d
    to_tensor, to_object = module._object_to_tensor, module._tensor_to_object
    sizes = [0]

    @functools.wraps(to_tensor)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        found = to_tensor(*arguments, **keywords)
        sizes.append(found[0].numel())
        return found

    module._object_to_tensor, module._tensor_to_object = noted, lambda *_: None
    try:
        yield lambda size: struct.pack("<q", max(sizes)) * (size // 8) if size % 8 == 0 else bytes(size)
    finally:
        module._object_to_tensor, module._tensor_to_object = to_tensor, to_object


def _gathered(object_list: list[Any], obj: Any, *rest: Any, **keywords: Any) -> None:
    del rest, keywords
    object_list[:] = [_sent(obj) for _ in object_list]


def _gathered_at_one(obj: Any, object_gather_list: list[Any] | None = None, *rest: Any, **keywords: Any) -> None:
    del rest, keywords
    if object_gather_list is not None:
        object_gather_list[:] = [_sent(obj) for _ in object_gather_list]


def _scattered(output: list[Any], inputs: list[Any] | None = None, src: int | None = 0, group: Any = None, **keywords: Any) -> None:
    given = inputs if inputs is not None else keywords.get("scatter_object_input_list")
    if given and _is_sender(src, group, keywords):
        output[0] = _sent(given[dist.get_rank(group)])
    elif not _is_sender(src, group, keywords):
        _refuse("scatter_object_list", src)


def _broadcast(objects: list[Any], src: int | None = None, group: Any = None, *rest: Any, **keywords: Any) -> None:
    del rest
    if not _is_sender(src, group, keywords):
        if any(each is None for each in objects):
            _refuse("broadcast_object_list", src)
        return  # what it has in its place is taken to be what the other one sends
    objects[:] = [_sent(each) for each in objects]


def _received(objects: list[Any], src: int | None = None, *rest: Any, **keywords: Any) -> None:
    del objects, rest, keywords
    _refuse("recv_object_list", src)


def _is_sender(src: int | None, group: Any, keywords: dict[str, Any]) -> bool:
    at = keywords.get("group_src")
    if at is not None:
        return bool(at == dist.get_rank(group))
    return (src or 0) == dist.get_rank()


def _refuse(name: str, source: int | None) -> None:
    raise NeedsOtherRankError(f"{name} waits for an object of rank {source}, which is not run")


def _sent(value: Any) -> Any:
    """Return *value* as it comes out of a collective: another object of the same content."""
    return pickle.loads(pickle.dumps(value))
