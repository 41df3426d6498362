"""
Which sizes fit, before they are tried: rehearsals see where memory ends, without the GPU.

What a rehearsal cannot know is how much CUDA itself takes on this machine. The first trial shows it, and the end is foreseen anew.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from memplan.batch_finder.trials import MOST_BATCH
from memplan.errors import MissingError, UsageError
from memplan.estimators.interpolation import PeakLine
from memplan.execution.measurement import Measurement
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.runner import Closing
from memplan.execution.step_source import StepSource, batch_name, count_of
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import GpuSpec
from memplan.memory.budget import MemoryBudget
from memplan.memory.cuda_context import context_of
from memplan.planner.search import Largest, Outcome, largest_accepted
from memplan.units import format_bytes


class Foresight(Closing):
    """Says of a size whether it fits, as far as is known, and learns from trials. To be closed, or used in a `with`."""

    name: str
    """The value of the program that is the batch."""
    start: int
    """Where the search begins."""
    origin: str
    """Who said so."""
    unit: int = 1
    """What sizes are multiples of: a program may take no others."""
    refused: frozenset[int] = frozenset()
    """Sizes that the program was seen to refuse."""
    is_nearly_sure: bool = False
    """It is from rehearsals: a trial may go where it puts the end, however far that is."""

    @abstractmethod
    def __call__(self, size: int) -> bool:
        """Say whether *size* fits, as far as is known."""

    @abstractmethod
    def learn(self, size: int, measured: Measurement) -> None:
        """Take in what a trial showed that ran to its end: its own peak, and what CUDA takes beside PyTorch."""


class ByPeaks(Foresight):
    """From the peaks of the sizes that were tried: until two are known, *start* is where it puts the end."""

    def __init__(self, name: str, start: int, origin: str, budget: MemoryBudget, context_bytes: int) -> None:
        self.name, self.start, self.origin = name, start, origin
        self._budget_bytes, self._outside_bytes = budget.budget_bytes, context_bytes
        self._line = PeakLine()

    def learn(self, size: int, measured: Measurement) -> None:
        """Take in the peak of *size*."""
        self._line.learn(size, measured.peak_reserved_bytes)
        self._outside_bytes = measured.device_used.expected_bytes - measured.peak_reserved_bytes

    def __call__(self, size: int) -> bool:
        """Say whether *size* fits, as far as is known."""
        peak_bytes = self._line.at(size)
        return size <= self.start if peak_bytes is None else peak_bytes + self._outside_bytes <= self._budget_bytes

    def close(self) -> None:
        """Nothing was started."""


class ByRehearsals(Foresight):
    """
    From rehearsals on a GPU like that of the trials, with unlimited memory.

    *start*: None begins where the end is foreseen. Raises MissingError where nothing can be rehearsed here, UsageError where no value of
    the program is called like a batch, and the program's own error where it refuses every size.
    """

    is_nearly_sure = True

    def __init__(
        self, target: StepSource, card: GpuSpec, budget: MemoryBudget, values: Mapping[str, Any], *, name: str | None, start: int | None
    ) -> None:
        self._card = of_some_kind(card).endless()
        self._values = dict(values)
        self._budget_bytes = budget.budget_bytes
        self._peaks: dict[int, int] = {}
        self._refusals: dict[int, UsageError] = {}
        self._rehearser = Rehearser(target)
        try:
            self.name, self._present = self._batch(name)
            found = self._foreseen(context_of(card).expected_bytes) if start is None else self._nearest(start)
        except BaseException:
            self.close()
            raise
        self.unit, self.refused = found.unit, frozenset(self._refusals)
        self.start = self._end = found.size or min(self._peaks)
        self.origin = ("you" if self.start == start else "the program") if start is not None else self._told(is_over=found.size is None)

    def close(self) -> None:
        """End the process that rehearses."""
        self._rehearser.close()

    def __call__(self, size: int) -> bool:
        """Say whether *size* is up to where the end was foreseen."""
        return size <= self._end

    def learn(self, size: int, measured: Measurement) -> None:
        """Foresee the end anew, with what CUDA takes here."""
        outside_bytes = measured.device_used.expected_bytes - measured.peak_reserved_bytes
        self._end = max(size, self._foreseen(outside_bytes).size or size)

    def _rehearse(self, values: Mapping[str, Any]) -> Rehearsal:
        return self._rehearser.rehearse(gpu=self._card, values=values)

    def _batch(self, name: str | None) -> tuple[str, int | None]:
        """Return which value of the program is the batch, and what the program has it at where it does."""
        try:
            present = self._rehearse(self._values).values
        except UsageError as error:
            if name is not None:
                return name, count_of(self._values.get(name))
            required = re.search(r"missing a required argument: '(\w+)'", error.message)  # as inspect says it, of the first
            if required is None or batch_name({required[1]: 1}) is None:
                raise
            return required[1], None
        name = name or batch_name(present)
        if name is None:
            called = ", ".join(present) or "none"
            raise UsageError(f"no value of the program is called batch (its values: {called})", hint='name it: `name="NAME"`')
        return name, count_of(present.get(name))

    def _ask(self, size: int, outside_bytes: int) -> Outcome:
        """Say whether the reserved peak of *size* and what CUDA takes beside it are within the budget."""
        if size not in self._peaks and size not in self._refusals:
            try:
                self._peaks[size] = self._rehearse({**self._values, self.name: size}).peak_reserved_bytes
            except UsageError as error:
                self._refusals[size] = error
        if size in self._refusals:
            return Outcome.REFUSED
        return Outcome.FITS if self._peaks[size] + outside_bytes <= self._budget_bytes else Outcome.TOO_LARGE

    def _foreseen(self, outside_bytes: int) -> Largest:
        """Return the largest size that fits. Raises the program's error where it refuses every size."""

        def guess(size: int) -> bool:
            peak_bytes = PeakLine(self._peaks).at(size)
            return size <= (self._present or 1) if peak_bytes is None else peak_bytes + outside_bytes <= self._budget_bytes

        found = largest_accepted(lambda size: self._ask(size, outside_bytes), high=MOST_BATCH, guess=guess)
        self._check_taken()
        return found

    def _nearest(self, start: int) -> Largest:
        """Return *start*, or the largest size below it that the program takes, whatever it needs."""

        def takes(size: int) -> Outcome:
            return Outcome.REFUSED if self._ask(size, 0) is Outcome.REFUSED else Outcome.FITS

        found = largest_accepted(takes, high=start, guess=lambda size: size <= start)
        self._check_taken()
        return found

    def _check_taken(self) -> None:
        if not self._peaks:
            raise next(iter(self._refusals.values()))

    def _told(self, *, is_over: bool) -> str:
        return f"a rehearsal, {'though even that takes' if is_over else 'with'} {format_bytes(self._peaks[self.start])}"


def foresight_of(
    target: StepSource, card: GpuSpec, budget: MemoryBudget, values: Mapping[str, Any], *, name: str | None, start: int | None
) -> Foresight:
    """
    Return what is known of the sizes of *target* on *card* before any is tried: by rehearsals, where they can be.

    *name*: the value that is the batch; None takes the one that is called so. *start*: where to begin, if the user said so. Raises
    UsageError where no value is called like a batch, and for a program that fails for another reason than memory at every size.
    """
    try:
        return ByRehearsals(target, card, budget, values, name=name, start=start)
    except MissingError as error:
        name = name or batch_name(values)
        if name is None:
            raise UsageError(
                "nobody knows which value is the batch, since the program cannot be rehearsed here: " + error.message,
                hint='name it, `name="NAME"`, and its value, `values={"NAME": 8}`',
            ) from error
        begin = start or count_of(values.get(name)) or 1
        return ByPeaks(name, begin, f"the program, since {error.message}", budget, context_of(card).expected_bytes)
