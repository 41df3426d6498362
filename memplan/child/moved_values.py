"""
What is known of numbers that are only put together, or picked, where others among them are not known.

A detector puts the box, the score and the class of what it has found into one table, picks rows of it, and reads the column of classes. The
class is known, or assumed, and the rest comes from the model: in what is kept of the table, nan stands for it.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from memplan.child.host_arithmetic import MOST_COPIED
from memplan.child.shadows import HOST, Shadows
from memplan.child.tensor_types import has_memory

MOVED = {"cat", "index", "index_select", "gather", "take", "clone", "_to_copy", "repeat"}
"""Operations that put the numbers of their first argument together, or pick some of them."""


def learn_what_moved(shadows: Shadows, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Keep in *shadows* what is known of *result*, which *func*, one of those, has made of *args* and *kwargs*, where anything is."""
    if not has_memory(result) or not result.is_cuda or not result.is_floating_point() or result.numel() > MOST_COPIED:
        return
    sources = [source for source in tree_flatten(args[0])[0] if has_memory(source)]
    values = {id(source): shadows.known_part(source) for source in sources if source.is_cuda}
    if all(value is None for value in values.values()):
        return
    given = [value for value in tree_flatten((args, kwargs))[0] if has_memory(value) and value.is_cuda]
    places = {id(each): shadows.value(each) for each in given if id(each) not in values}
    if any(value is None for value in places.values()):
        return
    unknown = torch.full((), math.nan, dtype=result.dtype, device=HOST)
    for source in sources:
        if source.is_cuda and values[id(source)] is None:
            values[id(source)] = unknown.expand(source.shape)
    host_args, host_kwargs = tree_map(lambda value: (values | places).get(id(value), value), (args, kwargs))
    if "device" in host_kwargs:
        host_kwargs["device"] = HOST
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
        shadows.learn_part(result, func(*host_args, **host_kwargs), shadows.assumption_of(given))
