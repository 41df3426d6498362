"""
The largest batches of a DataLoader: it is walked through to find them, and they come early.

The runs of one program share what a walk has found: the next one takes the same batches, without making all of them again. A walk draws
random numbers, which are put back, so that a program's own batches are those that it has without one.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memplan.child.batch_shapes import shapes_in, tensors_in

MOST_KEPT_BYTES = 2**30
"""Of the tensors of the largest batches of a DataLoader; where they have more, the next run walks again."""


class GivenBatch(NamedTuple):
    """A batch of a DataLoader."""

    batch: Any
    num_samples: int | None
    """Those that it was made of; None where nobody knows."""

    def copied(self) -> GivenBatch:
        """Return it with a copy of what the program may change in place; with the same where that cannot be copied."""
        try:
            return self._replace(batch=copy.deepcopy(self.batch))
        except Exception:  # whatever the classes of its parts raise
            return self


class WalkLimits(NamedTuple):
    """How far DataLoaders are walked through."""

    most: int
    """Batches of each."""
    seconds: float = math.inf
    """After which a walk ends that no other run of the program has made before."""
    folder: Path | None = None
    """Where the runs of one program keep what they found."""


class Walk(NamedTuple):
    """What was found of a DataLoader."""

    num_batches: int
    was_cut: bool
    """It has more."""
    largest: list[GivenBatch]
    """Those with the most elements; none where they could not be kept for another run."""


class Walker:
    """Walks through DataLoaders. *samples_of*: how many samples the batch has that an iterator has just given."""

    def __init__(self, limits: WalkLimits, *, samples_of: Callable[[Any], int | None]) -> None:
        self._limits, self._samples_of = limits, samples_of
        self._num_loaders = 0

    def walk(self, loader: Any, iterate: Callable[[], Any]) -> Walk:
        """Return what a walk through *loader* finds, or has found in an earlier run; *iterate* makes an iterator of it."""
        self._num_loaders += 1
        place = self._place_of(loader)
        known = None if place is None or not place.exists() else _kept_at(place)
        if known is not None and known.largest:
            return known
        with _same_random_numbers(loader):
            found = self._walk(iterate(), _length_of(loader), known)
        if place is not None and known is None:
            _keep(found, place)
        return found

    def _place_of(self, loader: Any) -> Path | None:
        """Return the file for what is found of *loader*: that of the same number, of as many samples, in another run."""
        if self._limits.folder is None:
            return None
        likeness = (self._num_loaders, type(loader.dataset).__name__, _length_of(loader.dataset), _length_of(loader), loader.batch_size)
        return self._limits.folder / hashlib.sha256(repr(likeness).encode()).hexdigest()

    def _walk(self, iterator: Any, length: int | None, known: Walk | None) -> Walk:
        """
        Return the largest of the batches that *iterator* gives; of those that were *known* to be looked at, where there are any.

        *length*: batches of an epoch, where the DataLoader says it: one that begins anew by itself never ends.
        """
        most = min(self._limits.most, math.inf if length is None else length) if known is None else known.num_batches
        end = time.monotonic() + (self._limits.seconds if known is None else math.inf)
        best: dict[int, tuple[int, GivenBatch]] = {}
        number, was_cut = 0, False
        for number, batch in enumerate(iterator, start=1):
            given = GivenBatch(batch, self._samples_of(iterator))
            sizes = [*map(math.prod, shapes_in(batch))]
            for at, size in enumerate([sum(sizes), *sizes]):
                if size > best.get(at, (0, None))[0]:
                    best[at] = (size, given)
            was_cut = number != length and (number >= most or time.monotonic() > end)
            if was_cut or number == length:
                break
        largest = sorted({id(given): (size, given) for size, given in best.values()}.values(), key=lambda found: -found[0])
        return Walk(number, was_cut, [given for _, given in largest])


def _length_of(counted: Any) -> int | None:
    """Return what `len` says, of a dataset or a DataLoader; None where it says nothing: such a class may be the program's own."""
    try:
        return len(counted)
    except Exception:
        return None


def _kept_at(place: Path) -> Walk | None:
    """Return what another run has found; None where that cannot be read here."""
    try:
        return Walk(*torch.load(place, map_location="cpu", weights_only=False))
    except Exception:  # whatever the classes of a batch raise
        return None


def _keep(walk: Walk, place: Path) -> None:
    """Keep what was found for other runs; of batches that cannot be kept, how many were looked at."""
    tensors = [tensor for given in walk.largest for tensor in tensors_in(given.batch)]
    is_small = sum(tensor.nbytes for tensor in tensors) <= MOST_KEPT_BYTES and not any(tensor.is_cuda for tensor in tensors)
    partial = place.with_suffix(f".{os.getpid()}")
    try:
        torch.save(tuple(walk if is_small else walk._replace(largest=[])), partial)
    except Exception:  # as when it is kept, a class of a batch may do anything
        torch.save(tuple(walk._replace(largest=[])), partial)
    partial.replace(place)


@contextmanager
def _same_random_numbers(loader: Any) -> Iterator[None]:
    """Have the program draw the numbers behind a walk that it would draw without."""
    numpy = sys.modules.get("numpy")
    own = {loader.generator, getattr(loader.sampler, "generator", None)}
    generators = [(one, one.get_state()) for one in (torch.default_generator, *own) if isinstance(one, torch.Generator)]
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    yield
    for one, state in generators:
        one.set_state(state)
    random.setstate(of_python)
    if numpy:
        numpy.random.set_state(of_numpy)


class LargestBatches:
    """The largest batches of a DataLoader that are still to come; again when a step has ended: the optimizer's state is there then."""

    def __init__(self, batches: list[GivenBatch], *, num_before: int) -> None:
        self.num_before = num_before
        """How many of the program's own come before them still."""
        self.was_given = False
        self._left, self._again = list(batches), [batch.copied() for batch in batches]

    def next(self, *, has_stepped: bool) -> GivenBatch | None:
        """Return the next of them, None where there is none left; *has_stepped*: the optimizer's state is there."""
        if has_stepped:
            self._left, self._again = self._again or self._left, []
        return self._given()

    def rest(self) -> GivenBatch | None:
        """Return the next where the program's own have ended, whether a step has ended or not."""
        if not self._left:
            self._left, self._again = self._again, []
        return self._given()

    @property
    def is_done(self) -> bool:
        """Say whether all were given."""
        return not (self._left or self._again)

    def _given(self) -> GivenBatch | None:
        self.was_given = self.was_given or bool(self._left)
        return self._left.pop(0) if self._left else None


class LedIterator:
    """An iterator of a DataLoader, with its largest batches among the first."""

    def __init__(self, largest: LargestBatches, rest: Any, note: Callable[[GivenBatch], None], has_stepped: Callable[[], bool]) -> None:
        self._largest, self._rest, self._note, self._has_stepped = largest, rest, note, has_stepped

    def __iter__(self) -> LedIterator:
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
