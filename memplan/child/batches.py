"""The batches that a program takes from its DataLoaders: their shapes, by step; and on request the largest of an epoch among the first."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from memplan.child.batch_shapes import shapes_in
from memplan.child.largest_batches import GivenBatch, LargestBatches, LedIterator, Walker, WalkLimits

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
        self.epoch_samples: dict[int, int] = {}
        """How many samples an epoch has, where its sampler is one of PyTorch's."""
        self.num_walked = 0
        """Batches of all DataLoaders that were looked at to find the largest."""
        self.walk_cut_after = 0
        """How many of a DataLoader that has more; 0: none has."""
        self._is_walking = False
        self._asked = _AskedSamples()
        self._epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_epochs = 0
        self._led: WeakKeyDictionary[Any, LargestBatches] = WeakKeyDictionary()
        self._last: LargestBatches | None = None

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
                self._note(GivenBatch(batch, self._asked.take(iterator)), epoch=self._epoch_of(iterator))
            return batch

        setattr(_BaseDataLoaderIter, "__next__", noted)  # noqa: B010  (a method, as mypy sees it)

    def _epoch_of(self, iterator: Any) -> int:
        """Return a number that no other iterator of a DataLoader has."""
        if iterator not in self._epochs:
            self._num_epochs += 1
            self._epochs[iterator] = self._num_epochs
            num_samples = _samples_in_epoch(iterator)
            if num_samples is not None:
                self.epoch_samples[self._num_epochs] = num_samples
        return self._epochs[iterator]

    def _note(self, given: GivenBatch, *, epoch: int) -> None:
        shapes = tuple(shapes_in(given.batch))
        if shapes and len(self.seen) < MOST_BATCHES:
            step, num_backwards = self._now()
            self.seen.append((step, shapes, num_backwards, epoch, given.num_samples))

    def lead_with_largest(self, limits: WalkLimits, *, after: int) -> None:
        """
        Have every DataLoader give its largest batches early: it is walked through once before, as far as *limits* say.

        They are those with the most elements, all together and each tensor or array by itself: where the input is longest, and where the
        target is. *after*: how many of the program's own come before them, as in an epoch, which hardly begins with the largest: what
        PyTorch has cached for a smaller batch mostly does not serve a larger one. Where a program takes no more than one batch of a
        DataLoader, the next that it takes of it, or of another, is the largest.
        """
        make, walker = DataLoader.__iter__, Walker(limits, samples_of=self._asked.take)

        @functools.wraps(make)
        def led(loader: Any) -> Any:
            if _only_loads():
                return make(loader)
            if loader not in self._led:
                own = after if self._last is None or self._last.was_given else 0
                with self._walking():
                    walk = walker.walk(loader, lambda: make(loader))
                self.num_walked += walk.num_batches
                if walk.was_cut:
                    self.walk_cut_after = max(self.walk_cut_after, walk.num_batches)
                when = "first" if not own else "after the first one" if own == 1 else f"after the first {own}"
                print(f"memplan: of {walk.num_batches} batches the largest come {when}", file=sys.stderr)
                self._led[loader] = self._last = LargestBatches(walk.largest, num_before=own)
            rest, largest = make(loader), self._led[loader]
            note = functools.partial(self._note, epoch=self._epoch_of(rest))
            return rest if largest.is_done else LedIterator(largest, rest, note, lambda: self._now()[0] > 1)

        setattr(DataLoader, "__iter__", led)  # noqa: B010

    @contextmanager
    def _walking(self) -> Iterator[None]:
        """Note nothing of the batches that are looked at."""
        self._is_walking = True
        try:
            yield
        finally:
            self._is_walking = False

    @property
    def last_size(self) -> int | None:
        """Return how many samples the last batch has, where nobody knows by the first dimension of its first tensor that has one."""
        if not self.seen:
            return None
        _, shapes, _, _, num_samples = self.seen[-1]
        return next((shape[0] for shape in shapes if shape), None) if num_samples is None else num_samples


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


_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Those that give as many samples as they say; one of a program's own may begin anew for ever."""


def _samples_in_epoch(iterator: Any) -> int | None:
    """Return how many samples *iterator*, of a DataLoader, gives in all; None where nobody knows."""
    batches = iterator._index_sampler
    is_known = iterator._dataset_kind == _DatasetKind.Map and type(batches) is BatchSampler and type(batches.sampler) in _SAMPLERS
    return len(batches.sampler) if is_known else None


def _only_loads() -> bool:
    """Say whether this process was begun by another one and uses no GPU: what it takes is no batch, but what the other makes batches of."""
    return multiprocessing.parent_process() is not None and not torch.cuda.is_initialized()
