"""The tensors of a batch, and their shapes, whatever its class."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of *batch*: itself, or what is in lists, tuples, mappings and objects, some levels deep."""
    return (value for value in _values_in(batch) if isinstance(value, torch.Tensor))


def shapes_in(batch: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the tensors of *batch*, and of its NumPy arrays of numbers: those a program moves to the GPU itself."""
    numpy = sys.modules.get("numpy")
    arrays = () if numpy is None else (numpy.ndarray,)
    for value in _values_in(batch):
        if isinstance(value, torch.Tensor) or (isinstance(value, arrays) and value.dtype.kind in "biufc"):
            yield tuple(value.shape)


def _values_in(batch: Any, depth: int = 4) -> Iterator[Any]:
    """
    Yield what *batch* consists of, itself first.

    Of a class of which nobody knows anything here no method is called: `values` may be an array, or a function that takes arguments.
    """
    yield batch
    if depth and not isinstance(batch, (torch.Tensor, str, bytes, int, float, type(None), type)):
        inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
        for value in list(inner) or list(getattr(batch, "__dict__", {}).values()):
            yield from _values_in(value, depth - 1)
