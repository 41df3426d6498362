"""The batches that a program takes from its DataLoaders: their shapes, by step; and on request the largest of an epoch among the first."""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

MOST_BATCHES = 10_000
"""Batches whose shapes are kept."""


class Batches:
    """Notes the shapes of each batch."""

    def __init__(self, now: Callable[[], tuple[int, int]]) -> None:
        self._now = now
        self.seen: list[tuple[int, tuple[tuple[int, ...], ...], int, int, int | None]] = []
        """
        The step that each batch was taken in, its shapes, how many backwards had begun by then, in which epoch, and how many samples it
        has: None where nobody knows.
        """
        self.whole_epochs: set[int] = set()
        """Those of which all batches were taken."""
        self.num_walked = 0
        """Batches of all DataLoaders that were looked at to find the largest."""
        self._is_walking = False
        self._asked = _AskedSamples()
        self._epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_epochs = 0
        self._led: WeakKeyDictionary[Any, _Largest] = WeakKeyDictionary()
        self._last: _Largest | None = None

    def attach(self) -> None:
        """Note the batches of every DataLoader from here on."""
        self._asked.attach()
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
                self._note(_Batch(batch, self._asked.take(iterator)), epoch=self._epoch_of(iterator))
            return batch

        setattr(_BaseDataLoaderIter, "__next__", noted)  # noqa: B010  (a method, as mypy sees it)

    def _epoch_of(self, iterator: Any) -> int:
        """Return a number that no other iterator of a DataLoader has."""
        if iterator not in self._epochs:
            self._num_epochs += 1
            self._epochs[iterator] = self._num_epochs
        return self._epochs[iterator]

    def _note(self, given: _Batch, *, epoch: int) -> None:
        shapes = tuple(shapes_in(given.batch))
        if shapes and len(self.seen) < MOST_BATCHES:
            step, num_backwards = self._now()
            self.seen.append((step, shapes, num_backwards, epoch, given.num_samples))

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

    def _largest(self, iterator: Any, most: int, *, after: int) -> list[_Batch]:
        best: dict[int, tuple[int, _Batch]] = {}
        number = 0
        self._is_walking = True
        try:
            for number, batch in enumerate(iterator, start=1):
                given = _Batch(batch, self._asked.take(iterator))
                sizes = [*map(math.prod, shapes_in(batch))]
                for at, size in enumerate([sum(sizes), *sizes]):
                    if size > best.get(at, (0, None))[0]:
                        best[at] = (size, given)
                if number >= most:
                    break
        finally:
            self._is_walking = False
            self.num_walked += number
        largest = sorted({id(given): (size, given) for size, given in best.values()}.values(), key=lambda found: -found[0])
        when = "first" if not after else "after the first one" if after == 1 else f"after the first {after}"
        print(f"memplan: of {number} batches the largest come {when}", file=sys.stderr)
        return [given for _, given in largest]

    @property
    def last_size(self) -> int | None:
        """Return how many samples the last batch has, where nobody knows by the first dimension of its first tensor that has one."""
        if not self.seen:
            return None
        _, shapes, _, _, num_samples = self.seen[-1]
        return next((shape[0] for shape in shapes if shape), None) if num_samples is None else num_samples


class _Batch(NamedTuple):
    """A batch of a DataLoader."""

    batch: Any
    num_samples: int | None
    """Those that it was made of; None where nobody knows."""

    def copied(self) -> _Batch:
        """Return it with a copy of what the program may change in place; with the same where that cannot be copied."""
        try:
            return self._replace(batch=copy.deepcopy(self.batch))
        except Exception:  # whatever the classes of its parts raise
            return self


class _AskedSamples:
    """
    How many samples DataLoaders have asked their datasets for, by batch, of those batches that they have not given yet.

    A batch of graphs, or of boxes, has another first dimension. What an iterable dataset gives may be fewer than it is asked for.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, deque[int]] = WeakKeyDictionary()

    def attach(self) -> None:
        """Count from here on; workers are asked some batches ahead, and persistent ones anew in each epoch."""
        next_index, reset = _BaseDataLoaderIter._next_index, _BaseDataLoaderIter._reset

        @functools.wraps(next_index)
        def counted(iterator: Any) -> Any:
            asked = next_index(iterator)
            if iterator._dataset_kind == _DatasetKind.Map and isinstance(asked, (list, tuple)):
                self._counts.setdefault(iterator, deque()).append(len(asked))
            return asked

        @functools.wraps(reset)
        def begun(iterator: Any, *arguments: Any, **keywords: Any) -> Any:
            self._counts.pop(iterator, None)
            return reset(iterator, *arguments, **keywords)

        setattr(_BaseDataLoaderIter, "_next_index", counted)  # noqa: B010  (a method, as mypy sees it)
        setattr(_BaseDataLoaderIter, "_reset", begun)  # noqa: B010

    def take(self, iterator: Any) -> int | None:
        """Return how many samples the batch has that *iterator* has just given; None where nobody knows."""
        counts = self._counts.get(iterator)
        return counts.popleft() if counts else None


class _Largest:
    """The largest batches of a DataLoader that are still to come; again when a step has ended: the optimizer's state is there then."""

    def __init__(self, batches: list[_Batch], *, num_before: int) -> None:
        self.num_before = num_before
        """How many of the program's own come before them still."""
        self.was_given = False
        self._left, self._again = list(batches), [batch.copied() for batch in batches]

    def next(self, *, has_stepped: bool) -> _Batch | None:
        """Return the next of them, None where there is none left; *has_stepped*: the optimizer's state is there."""
        if has_stepped:
            self._left, self._again = self._again or self._left, []
        return self._given()

    def rest(self) -> _Batch | None:
        """Return the next where the program's own have ended, whether a step has ended or not."""
        if not self._left:
            self._left, self._again = self._again, []
        return self._given()

    @property
    def is_done(self) -> bool:
        """Say whether all were given."""
        return not (self._left or self._again)

    def _given(self) -> _Batch | None:
        self.was_given = self.was_given or bool(self._left)
        return self._left.pop(0) if self._left else None


class _Led:
    """An iterator of a DataLoader, with its largest batches among the first."""

    def __init__(self, largest: _Largest, rest: Any, note: Callable[[_Batch], None], has_stepped: Callable[[], bool]) -> None:
        self._largest, self._rest, self._note, self._has_stepped = largest, rest, note, has_stepped

    def __iter__(self) -> _Led:
        return self

    def __next__(self) -> Any:
        if self._largest.num_before:
            self._largest.num_before -= 1
            with suppress(StopIteration):  # it has fewer
                return next(self._rest)
        given = self._largest.next(has_stepped=self._has_stepped())
        if given is None:
            try:
                return next(self._rest)
            except StopIteration:
                given = self._largest.rest()
                if given is None:
                    raise
        self._note(given)
        return given.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name)


def _only_loads() -> bool:
    """Say whether this process was begun by another one and uses no GPU: what it takes is no batch, but what the other makes batches of."""
    return multiprocessing.parent_process() is not None and not torch.cuda.is_initialized()


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
