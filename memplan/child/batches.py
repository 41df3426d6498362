"""The batches that a program takes from its DataLoaders: their shapes, by step; and on request the largest of an epoch first."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

MOST_BATCHES = 10_000
"""Batches whose shapes are kept."""


class Batches:
    """Notes the shapes of each batch."""

    def __init__(self, now: Callable[[], tuple[int, int]]) -> None:
        self._now = now
        self.seen: list[tuple[int, tuple[tuple[int, ...], ...], int]] = []
        """The step that each batch was taken in, the shapes of its tensors, and how many backwards had begun by then."""
        self.num_walked = 0
        """Batches of all DataLoaders that were looked at to find the largest."""
        self._is_walking = False
        self._walked: WeakSet[Any] = WeakSet()

    def attach(self) -> None:
        """Note the batches of every DataLoader from here on."""
        take = _BaseDataLoaderIter.__next__

        @functools.wraps(take)
        def noted(iterator: Any) -> Any:
            batch = take(iterator)
            if not self._is_walking:
                self._note(batch)
            return batch

        setattr(_BaseDataLoaderIter, "__next__", noted)  # noqa: B010  (a method, as mypy sees it)

    def _note(self, batch: Any) -> None:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(batch))
        if shapes and len(self.seen) < MOST_BATCHES:
            step, num_backwards = self._now()
            self.seen.append((step, shapes, num_backwards))

    def lead_with_largest(self, most: int) -> None:
        """
        Have every DataLoader begin with its largest batches: it is walked through once before, *most* batches of it.

        They are those with the most elements, all tensors together and each by itself: where the input is longest, and where the target is.
        """
        make = DataLoader.__iter__

        @functools.wraps(make)
        def led(loader: Any) -> Any:
            if loader in self._walked:
                return make(loader)
            self._walked.add(loader)
            return _Led(self._largest(make(loader), most), make(loader), self._note, lambda: self._now()[0] > 1)

        setattr(DataLoader, "__iter__", led)  # noqa: B010

    def _largest(self, iterator: Any, most: int) -> list[Any]:
        best: dict[int, tuple[int, Any]] = {}
        number = 0
        self._is_walking = True
        try:
            for number, batch in enumerate(iterator, start=1):
                sizes = [tensor.numel() for tensor in tensors_in(batch)]
                for at, size in enumerate([sum(sizes), *sizes]):
                    if size > best.get(at, (0, None))[0]:
                        best[at] = (size, batch)
                if number >= most:
                    break
        finally:
            self._is_walking = False
            self.num_walked += number
        largest = sorted({id(batch): (size, batch) for size, batch in best.values()}.values(), key=lambda found: -found[0])
        print(f"memplan: of {number} batches the largest come first", file=sys.stderr)
        return [batch for _, batch in largest]

    @property
    def last_size(self) -> int | None:
        """Return how many samples the last batch has, by the first dimension of its first tensor that has one."""
        shapes = self.seen[-1][1] if self.seen else ()
        return next((shape[0] for shape in shapes if shape), None)


class _Led:
    """
    An iterator of a DataLoader, with some batches in front of it, and again when a step has ended: only then is the optimizer's state there
    beside them.
    """

    def __init__(self, first: list[Any], rest: Any, note: Callable[[Any], None], has_stepped: Callable[[], bool]) -> None:
        self._first, self._again, self._rest, self._note, self._has_stepped = list(first), list(first), rest, note, has_stepped

    def __iter__(self) -> _Led:
        return self

    def __next__(self) -> Any:
        if not self._first and self._has_stepped():
            self._first, self._again = self._again, []
        if not self._first:
            try:
                return next(self._rest)
            except StopIteration:
                if not self._again:
                    raise
                self._first, self._again = self._again, []
        self._note(self._first[0])
        return self._first.pop(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name)


def tensors_in(batch: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors of *batch*: itself, or what is in lists, tuples, mappings and objects, some levels deep."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth and not isinstance(batch, (str, bytes, int, float, type(None))):
        values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else ()
        inner = values if not callable(values) else ()
        for value in inner or getattr(batch, "__dict__", {}).values():
            yield from tensors_in(value, depth - 1)
