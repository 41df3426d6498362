"""The batches that a program takes from its DataLoaders: their shapes, by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

MOST_BATCHES = 10_000
"""Batches whose shapes are kept."""


class Batches:
    """Notes the shapes of each batch."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self.seen: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
        """The step that each batch was taken in, and the shapes of its tensors."""

    def attach(self) -> None:
        """Note the batches of every DataLoader from here on."""
        take = _BaseDataLoaderIter.__next__

        @functools.wraps(take)
        def noted(iterator: Any) -> Any:
            batch = take(iterator)
            if len(self.seen) < MOST_BATCHES:
                shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(batch))
                if shapes:
                    self.seen.append((self._step(), shapes))
            return batch

        setattr(_BaseDataLoaderIter, "__next__", noted)  # noqa: B010  (a method, as mypy sees it)

    @property
    def last_size(self) -> int | None:
        """Return how many samples the last batch has, by the first dimension of its first tensor that has one."""
        shapes = self.seen[-1][1] if self.seen else ()
        return next((shape[0] for shape in shapes if shape), None)


def tensors_in(batch: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors of *batch*: itself, or what is in lists, tuples, mappings and objects, some levels deep."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth and not isinstance(batch, (str, bytes, int, float, type(None))):
        values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else ()
        inner = values if not callable(values) else ()
        for value in inner or getattr(batch, "__dict__", {}).values():
            yield from tensors_in(value, depth - 1)
