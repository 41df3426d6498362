"""
Parts of a batch: some of its samples, in the shape and the types of the whole.

The samples are the first dimension of every tensor of the batch. A part has containers of its own, so that nothing that is done to a
part changes the batch; its tensors are views.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from memplan.errors import UsageError

Batch = TypeVar("Batch")


def batch_size_of(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in *batch*; None if it has none."""
    return next((tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.dim()), None)


def num_samples(batch: Any) -> int:
    """Return the number of samples in *batch*. Raises UsageError if it has none, or if its tensors do not agree on it."""
    sizes = {tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.dim()}
    hint = (
        "pass a tensor, or tuples, lists, mappings and dataclasses of tensors, whose first dimension is the samples; "
        "use other tensors in the loss function without passing them in the batch"
    )
    if len(sizes) > 1:
        counts = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"the tensors of the batch do not agree on the number of samples: their first dimensions are {counts}", hint=hint)
    if not sizes or 0 in sizes:
        raise UsageError("the batch holds no tensor whose first dimension is the samples", hint=hint)
    return sizes.pop()


def named_tensors(batch: Any, name: str = "part") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of *batch*, each with the expression that reads it from a batch called *name*: ``part['labels']``."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, inner in batch.items():
            yield from named_tensors(inner, f"{name}[{key!r}]")
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        for field, inner in zip(batch._fields, batch, strict=True):
            yield from named_tensors(inner, f"{name}.{field}")
    elif isinstance(batch, (tuple, list)):
        for index, inner in enumerate(batch):
            yield from named_tensors(inner, f"{name}[{index}]")
    elif _is_dataclass_instance(batch):
        for field, inner in _fields_of(batch).items():
            yield from named_tensors(inner, f"{name}.{field}")


def part_of(batch: Batch, begin: int, end: int, size: int) -> Batch:
    """
    Return samples *begin* to *end* of *batch*, which has *size* samples. *batch* is not changed.

    Tensors are split along their first dimension; lists and tuples without such tensors are split if they have *size* elements; all else
    stays whole. Dicts, their subclasses, UserDicts, NamedTuples and dataclasses keep their type, and so does another Mapping that its
    class can make from a dict; if it cannot, the part is a dict.
    """
    part: Any = _part_of(batch, begin, end, size)
    return part


def _part_of(batch: Any, begin: int, end: int, size: int) -> Any:
    def part(inner: Any) -> Any:
        return _part_of(inner, begin, end, size)

    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.dim() and end - begin < size else batch
    if isinstance(batch, Mapping):
        return _mapping_of(batch, {key: part(inner) for key, inner in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a NamedTuple: its elements are fields, never samples
        return type(batch)(*map(part, batch))
    if isinstance(batch, (tuple, list)):
        if any(tensor.dim() for _, tensor in named_tensors(batch)):
            return _sequence_of(batch, [part(inner) for inner in batch])
        return batch[begin:end] if len(batch) == size else batch
    if _is_dataclass_instance(batch):
        return _dataclass_of(batch, {name: part(inner) for name, inner in _fields_of(batch).items()})
    return batch


def _sequence_of(whole: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    try:
        return type(whole)(parts)
    except TypeError:  # a subclass that is made in another way
        return tuple(parts) if isinstance(whole, tuple) else parts


def _mapping_of(whole: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Return *parts* as a mapping of the type of *whole*, if that can be made without changing *whole*; else as a dict."""
    if type(whole) is dict:
        return parts
    makers: list[Callable[[Any, dict[Any, Any]], Any]] = [_constructed]
    if isinstance(whole, (dict, UserDict)):
        makers.insert(
            0, _copied
        )  # first, since it keeps what else such an object has: transformers' BatchEncoding, a defaultdict's factory
    before = dict(whole.items())
    for make in makers:
        try:
            made = make(whole, parts)
            if _has_parts(made, parts, before) and _has_items(whole, before):
                return made
        except Exception:  # whatever the code of the user's class raises: a dict will do
            continue
    return parts


def _copied(whole: dict[Any, Any] | UserDict[Any, Any], parts: dict[Any, Any]) -> Any:
    """Return a shallow copy of *whole* that stores *parts*; without its ``__setitem__``, which may write to what both share."""
    made: Any = copy.copy(whole)
    if made is whole:
        raise TypeError(f"{type(whole).__name__} returns itself as its copy")
    if isinstance(made, UserDict):
        made.data = dict(parts)
    else:
        for key, part in parts.items():
            dict.__setitem__(made, key, part)
    return made


def _constructed(whole: Any, parts: dict[Any, Any]) -> Any:
    return type(whole)(dict(parts))


def _has_parts(made: Any, parts: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Return whether *made* has *parts*, and no attribute that still is one of the whole values *before* (a dict with attribute access)."""
    whole_values = {id(before[key]) for key, part in parts.items() if part is not before[key]}
    return _has_items(made, parts) and not any(id(value) in whole_values for value in getattr(made, "__dict__", {}).values())


def _has_items(mapping: Mapping[Any, Any], items: Mapping[Any, Any]) -> bool:
    return set(mapping) == set(items) and all(mapping[key] is item for key, item in items.items())


def _is_dataclass_instance(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _fields_of(batch: Any) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if hasattr(batch, field.name)}


def _dataclass_of(whole: Any, parts: dict[str, Any]) -> Any:
    initialized = {field.name for field in dataclasses.fields(whole) if field.init}
    try:
        made = dataclasses.replace(whole, **{name: part for name, part in parts.items() if name in initialized})
    except Exception:  # an InitVar, whose value is not kept, or an __init__ or checks of its own that take no part
        made = object.__new__(type(whole))
        getattr(made, "__dict__", {}).update(getattr(whole, "__dict__", {}))
    for name, part in parts.items():
        if getattr(made, name, None) is not part:  # a field without init, or one that __post_init__ has converted once more
            object.__setattr__(made, name, part)  # which a frozen dataclass allows
    return made
