"""
Collectives of Python objects, in a world of one process on the simulated GPU.

PyTorch sends an object as bytes through the GPU and reads back how many there are. What a kernel may have overwritten reads zero there, and
of no bytes there is no object. The collective runs as ever, for what it allocates; the object that comes back is the one that was sent.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def hand_objects_on() -> None:
    """Have the collectives of objects return what a world of one gathers, where PyTorch has them."""
    if not dist.is_available():
        return
    module: Any = dist.distributed_c10d
    for name, give in (("all_gather_object", _gathered), ("gather_object", _gathered_at_one), ("scatter_object_list", _scattered)):
        changed = _completed(getattr(module, name), give)
        setattr(module, name, changed)
        setattr(dist, name, changed)


def _completed(collective: Callable[..., Any], give: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any, **keywords: Any) -> Any:
        group = keywords.get("group")
        try:
            return collective(*arguments, **keywords)
        except EOFError:  # no bytes, so they say
            if dist.get_world_size(group) > 1:
                raise
            give(*arguments, **keywords)

    return call


def _gathered(object_list: list[Any], obj: Any, *rest: Any, **keywords: Any) -> None:
    del rest, keywords
    object_list[0] = _sent(obj)


def _gathered_at_one(obj: Any, object_gather_list: list[Any] | None = None, *rest: Any, **keywords: Any) -> None:
    del rest, keywords
    if object_gather_list is not None:
        object_gather_list[0] = _sent(obj)


def _scattered(output: list[Any], inputs: list[Any] | None = None, *rest: Any, **keywords: Any) -> None:
    given = inputs if inputs is not None else keywords.get("scatter_object_input_list")
    del rest
    if given:
        output[0] = _sent(given[0])


def _sent(value: Any) -> Any:
    """Return *value* as it comes out of a collective: another object of the same content."""
    return pickle.loads(pickle.dumps(value))
