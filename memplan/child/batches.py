"""The batches that a program takes from its DataLoaders: their shapes, by step; and on request the largest of an epoch among the first."""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

MOST_BATCHES = 10_000
"""Batches whose shapes are kept."""


class Batches:
    """Notes the shapes of each batch."""

    def __init__(self, now: Callable[[], tuple[int, int]]) -> None:
        self._now = now
        self.seen: list[tuple[int, tuple[tuple[int, ...], ...], int, int]] = []
        """The step that each batch was taken in, its shapes, how many backwards had begun by then, and in which epoch."""
        self.whole_epochs: set[int] = set()
        """Those of which all batches were taken."""
        self.num_walked = 0
        """Batches of all DataLoaders that were looked at to find the largest."""
        self._is_walking = False
        self._epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_epochs = 0
        self._led: WeakKeyDictionary[Any, _Largest] = WeakKeyDictionary()
        self._last: _Largest | None = None

    def attach(self) -> None:
        """Note the batches of every DataLoader from here on."""
        take = _BaseDataLoaderIter.__next__

        @functools.wraps(take)
        def noted(iterator: Any) -> Any:
            try:
                batch = take(iterator)
            except StopIteration:
                if not self._is_walking:
                    self.whole_epochs.add(self._epoch_of(iterator))
                raise
            if not self._is_walking:
                self._note(batch, epoch=self._epoch_of(iterator))
            return batch

        setattr(_BaseDataLoaderIter, "__next__", noted)  # noqa: B010  (a method, as mypy sees it)

    def _epoch_of(self, iterator: Any) -> int:
        """Return a number that no other iterator of a DataLoader has."""
        if iterator not in self._epochs:
            self._num_epochs += 1
            self._epochs[iterator] = self._num_epochs
        return self._epochs[iterator]

    def _note(self, batch: Any, *, epoch: int) -> None:
        shapes = tuple(shapes_in(batch))
        if shapes and len(self.seen) < MOST_BATCHES:
            step, num_backwards = self._now()
            self.seen.append((step, shapes, num_backwards, epoch))

    def lead_with_largest(self, most: int, *, after: int) -> None:
        """
        Have every DataLoader give its largest batches early: it is walked through once before, *most* batches of it.

        They are those with the most elements, all together and each tensor or array by itself: where the input is longest, and where the
        target is. *after*: how many of the program's own come before them, as in an epoch, which hardly begins with the largest: what
        PyTorch has cached for a smaller batch mostly does not serve a larger one. Where a program takes no more than one batch of a
        DataLoader, the next that it takes of it, or of another, is the largest.
        """
        make = DataLoader.__iter__

        @functools.wraps(make)
        def led(loader: Any) -> Any:
            if _only_loads():
                return make(loader)
            if loader not in self._led:
                own = after if self._last is None or self._last.was_given else 0
                self._led[loader] = self._last = _Largest(self._largest(make(loader), most, after=own), num_before=own)
            rest, largest = make(loader), self._led[loader]
            note = functools.partial(self._note, epoch=self._epoch_of(rest))
            return rest if largest.is_done else _Led(largest, rest, note, lambda: self._now()[0] > 1)

        setattr(DataLoader, "__iter__", led)  # noqa: B010

    def _largest(self, iterator: Any, most: int, *, after: int) -> list[Any]:
        best: dict[int, tuple[int, Any]] = {}
        number = 0
        self._is_walking = True
        try:
            for number, batch in enumerate(iterator, start=1):
                sizes = [*map(math.prod, shapes_in(batch))]
                for at, size in enumerate([sum(sizes), *sizes]):
                    if size > best.get(at, (0, None))[0]:
                        best[at] = (size, batch)
                if number >= most:
                    break
        finally:
            self._is_walking = False
            self.num_walked += number
        largest = sorted({id(batch): (size, batch) for size, batch in best.values()}.values(), key=lambda found: -found[0])
        when = "first" if not after else "after the first one" if after == 1 else f"after the first {after}"
        print(f"memplan: of {number} batches the largest come {when}", file=sys.stderr)
        return [batch for _, batch in largest]

    @property
    def last_size(self) -> int | None:
        """Return how many samples the last batch has, by the first dimension of its first tensor that has one."""
        shapes = self.seen[-1][1] if self.seen else ()
        return next((shape[0] for shape in shapes if shape), None)


class _Largest:
    """The largest batches of a DataLoader that are still to come; again when a step has ended: the optimizer's state is there then."""

    def __init__(self, batches: list[Any], *, num_before: int) -> None:
        self.num_before = num_before
        """How many of the program's own come before them still."""
        self.was_given = False
        self._left, self._again = list(batches), list(map(_copy_of, batches))

    def next(self, *, has_stepped: bool) -> Any | None:
        """Return the next of them, None where there is none left; *has_stepped*: the optimizer's state is there."""
        if has_stepped:
            self._left, self._again = self._again or self._left, []
        return self._given()

    def rest(self) -> Any | None:
        """Return the next where the program's own have ended, whether a step has ended or not."""
        if not self._left:
            self._left, self._again = self._again, []
        return self._given()

    @property
    def is_done(self) -> bool:
        """Say whether all were given."""
        return not (self._left or self._again)

    def _given(self) -> Any | None:
        self.was_given = self.was_given or bool(self._left)
        return self._left.pop(0) if self._left else None


class _Led:
    """An iterator of a DataLoader, with its largest batches among the first."""

    def __init__(self, largest: _Largest, rest: Any, note: Callable[[Any], None], has_stepped: Callable[[], bool]) -> None:
        self._largest, self._rest, self._note, self._has_stepped = largest, rest, note, has_stepped

    def __iter__(self) -> _Led:
        return self

    def __next__(self) -> Any:
        if self._largest.num_before:
            self._largest.num_before -= 1
            with suppress(StopIteration):  # it has fewer
                return next(self._rest)
        batch = self._largest.next(has_stepped=self._has_stepped())
        if batch is None:
            try:
                return next(self._rest)
            except StopIteration:
                batch = self._largest.rest()
                if batch is None:
                    raise
        self._note(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name)


def _only_loads() -> bool:
    """Say whether this process was begun by another one and uses no GPU: what it takes is no batch, but what the other makes batches of."""
    return multiprocessing.parent_process() is not None and not torch.cuda.is_initialized()


def _copy_of(batch: Any) -> Any:
    """Return a copy of *batch*, which the program may change in place; itself where it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # whatever the classes of its parts raise
        return batch


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
