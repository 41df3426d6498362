"""
The largest batches of a DataLoader: it is walked through to find them, and they come early.

Each run of one program looks at as many batches as the first did that looked for them, so that all of them have the same. The random
numbers of the host that a walk draws are put back; what else it changes, as a generator in a dataset, it changes in each of them alike.
"""

from __future__ import annotations

import copy
import hashlib
import json
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

from memplan.child.batch_shapes import shapes_in


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
    """Where the runs of one program keep how far they went."""


class Walk(NamedTuple):
    """What was found of a DataLoader."""

    num_batches: int
    was_cut: bool
    """It has more."""
    largest: list[GivenBatch]
    """Those with the most elements."""


class _Length(NamedTuple):
    """How far a walk went."""

    num_batches: int
    was_cut: bool


class Walker:
    """Walks through DataLoaders. *samples_of*: how many samples the batch has that an iterator has just given."""

    def __init__(self, limits: WalkLimits, *, samples_of: Callable[[Any], int | None]) -> None:
        self._limits, self._samples_of = limits, samples_of
        self._num_loaders = 0

    def walk(self, loader: Any, iterate: Callable[[], Any]) -> Walk:
        """Return what a walk through *loader* finds, as far as that of an earlier run went; *iterate* makes an iterator of it."""
        self._num_loaders += 1
        place = self._place_of(loader)
        known = None if place is None else _kept_at(place)
        with _same_random_numbers(loader):
            found = self._walk(iterate(), _length_of(loader), known)
        if place is not None and known is None:
            _keep(_Length(found.num_batches, found.was_cut), place)
        return found

    def _place_of(self, loader: Any) -> Path | None:
        """Return the file for how far a walk through *loader* goes: that of the same number, of as many samples, in another run."""
        if self._limits.folder is None:
            return None
        likeness = (self._num_loaders, type(loader.dataset).__name__, _length_of(loader.dataset), _length_of(loader), loader.batch_size)
        return self._limits.folder / hashlib.sha256(repr(likeness).encode()).hexdigest()

    def _walk(self, iterator: Any, length: int | None, known: _Length | None) -> Walk:
        """
        Return the largest of the batches that *iterator* gives; of as many as an earlier run is *known* to have looked at.

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
        return Walk(number, was_cut if known is None else known.was_cut, [given for _, given in largest])


def _length_of(counted: Any) -> int | None:
    """Return what `len` says, of a dataset or a DataLoader; None where it says nothing: such a class may be the program's own."""
    try:
        return len(counted)
    except Exception:
        return None


def _kept_at(place: Path) -> _Length | None:
    """Return how far another run went; None where none has kept it."""
    try:
        return _Length(*json.loads(place.read_text(encoding="ascii")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(length: _Length, place: Path) -> None:
    """Keep how far a run went for others, where that can be done: the program is the user's, and goes on."""
    partial = place.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        partial.write_text(json.dumps(length), encoding="ascii")
        partial.replace(place)


@contextmanager
def _same_random_numbers(loader: Any) -> Iterator[None]:
    """Have the program draw the numbers behind a walk that it would draw without."""
    numpy = sys.modules.get("numpy")
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    own = [loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
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
