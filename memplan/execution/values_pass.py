"""
Programs whose memory hangs on what only a real GPU says: run again to find it, or with both ends of an assumption.

The first run answers what it is asked with zero, and shows whether anything that may decide a size was asked at all. Only then is the
program run with the integers computed on the host (`child/host_values.py`), and after that again, undisturbed, with what that found.

Most programs only count what they log (hits, tokens). Then the run with the values asks for the same memory as the first one did, which was
undisturbed: that one is told, and none need follow. Of a program that was seen to need its values with another batch, they are found
at once.

Some things have no value, and there both ends of an assumption are run and the larger one is told: numbers that a model computes and that
decide sizes, those that are drawn at random on the device, those that the program compares and branches by, and times by which a compiler
chooses (`child/compilers.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from memplan.errors import NothingSeenError
from memplan.execution.guessed_values import Cause, decides
from memplan.execution.rehearsal import DeviceRead, ValuesEffect
from memplan.execution.run_record import RunRecord
from memplan.execution.summary import Run
from memplan.hardware.gpu import GpuSpec
from memplan.traces.read_basis import Basis
from memplan.traces.trace import BUILD, Phase

_OF_NO_VALUE = re.compile(
    r"AttributeError: (?!'(NoneType|bool|int|float|list|tuple|dict)' object)|(NameError|ImportError|\w+NotFoundError): "
)
"""Errors that no value read from the GPU brings about; what is empty, or was never found, may be None or a plain number instead."""


_OUT_OF_BOUNDS = re.compile(r"^IndexError\b|\bout of (bounds|range)\b")
"""Errors of a place that is not there: where a program puts a number beyond all places for those that pass, and some never do."""


class ValuesFile(NamedTuple):
    """A file of values, as child/recorded_values.py has it."""

    path: Path | None
    variant: Literal["all", "most", "none", "redrawn"] | None = None
    """What to assume while it is written; None: it is read."""
    times: Literal["", "inverse"] = ""
    """What compilers are told of times: what the work would take, or the inverse of it, so that they choose the other way."""
    numbers: Literal["", "zero", "falling"] = ""
    """What is read of numbers that nothing computes: one; where the program compares them zero; or less and less."""

    @property
    def is_told(self) -> bool:
        """Say whether the program is told values that an earlier run has found."""
        return self.path is not None and self.variant is None

    def request(self) -> dict[str, str]:
        """Return it as the child takes it."""
        return {"values_file": str(self.path or ""), "values_variant": self.variant or "", "times": self.times, "numbers": self.numbers}

    def __str__(self) -> str:
        """Return with what a program runs that is told this, as the end of a sentence."""
        if self.times:
            return "the other choices, where a compiler chooses by what takes less time"
        if self.numbers == "falling":
            return "falling numbers, since a check of numbers that stay the same ended it"
        if self.numbers:
            return "the other way of a branch, where it compares a number whose value is not known"
        if self.variant is None:
            return "the values that were found"
        then = {
            "all": "everything passing where the model decides",
            "most": "all but one of each row passing where the model decides",
            "none": "nothing passing where the model decides",
            "redrawn": "other numbers where they are drawn at random",
        }
        return f"integers and masks computed on the host, and {then[self.variant]}"


NO_VALUES = ValuesFile(None)
OTHER_TIMES = ValuesFile(None, times="inverse")


class Settled(NamedTuple):
    """What was found of a program."""

    run: Run
    """The run that is told of."""
    others: Mapping[Cause, Run] = MappingProxyType({})
    """Those with the other end of an assumption, where something was assumed; none of them takes more."""
    values: ValuesFile | None = None
    """What *run* was told, where it was told anything."""
    failure: str | None = None
    """Why the values were not all found, where a run that was to find or to read them failed and the first one did not."""
    sought: RunRecord | None = None
    """What the run showed that found the values, where *run* was told them."""
    effect: ValuesEffect = "unread"
    """What they decide."""
    deciding: tuple[str, ...] = ()
    """The lines that read them, where they decide nothing."""

    @property
    def _size(self) -> tuple[bool, int]:
        return self.run.record.out_of_memory is not None, self.run.record.peak_reserved_bytes

    def beside(self, cause: Cause, other: Settled) -> Settled:
        """Return the larger of two ends, with the other one beside it: one that ran out of memory is larger than one that did not."""
        smaller, larger = sorted((other, self), key=lambda settled: settled._size)
        return larger._replace(others={**self.others, **other.others, cause: smaller.run})


_Runs = Callable[[ValuesFile | None], Run]
"""Runs a program with a file of values, or without one."""


def settle(
    run: _Runs,
    *,
    folder: Path,
    answers: Mapping[str, Any] | None,
    has_padding: bool = False,
    expects_values: bool = False,
    harmless: Collection[str] = (),
) -> Settled:
    """
    Return what *run*, called once or several times, shows of a program; files of values go to *folder*.

    *answers* are the user's: a share or a number is the content of a mask, which only a values pass can keep for the backward.
    *has_padding*: the batch is one with padding, so that to ask a mask for it is no reason to follow values. *expects_values*: data
    decided its memory with another batch, and nothing had to be assumed. *harmless*: lines that read values which decided nothing with
    another batch: where no others read any, one run tells.
    """
    told: list[Run] = []

    def first_run(file: ValuesFile | None) -> Run:
        told[:] = [run(file)]
        return told[0]

    try:
        known = _with_values_at_once(run, first_run, folder) if expects_values else None
        if known is not None:
            return known
        first = first_run(None)
        if first.record.needed_rank is not None:
            return Settled(first)  # it is to be run again
        places = _deciding_places(first.record)
        if places and places <= set(harmless) and not _has_failed(first.record):
            return Settled(_as_ordinary(first, decides), effect="taken_for_nothing", deciding=tuple(sorted(places)))
        found = _with_data(run, first, folder=folder, answers=answers, has_padding=has_padding)
        found = _past_its_checks(run, found)
        found = _with_both_times(run, _with_both_numbers(run, found, folder=folder))
        if not places:
            return found
        effect = _effect(first, found)
        return found._replace(effect=effect, deciding=tuple(sorted(places)) if effect == "nothing" else ())
    except StoppedError as error:
        return Settled(told[0], failure=str(error))


def _deciding_places(record: RunRecord) -> set[str]:
    """Return the lines that read what may decide a size or a branch."""
    return {read.place for read in record.reads if decides(read)}


def _effect(first: Run, found: Settled) -> ValuesEffect:
    """Say whether what was *found* with values, at each end of what was assumed, asks for the same memory as the first run without."""
    runs = [found.run, *found.others.values()]
    is_known = found.failure is None and found.values is not None
    asks_alike = all(run.record is first.record or _allocate_alike(first.record, run.record, are_both_followed=True) for run in runs)
    return "nothing" if is_known and asks_alike else "sizes"


def _with_values_at_once(run: _Runs, first_run: _Runs, folder: Path) -> Settled | None:
    """Return the program as it runs with its values; None where they are not all there is to it, so that it is run without first."""
    file = _file_of_all(folder)
    try:
        sought = first_run(file)
        if _has_failed(sought.record) or file.path is None or not file.path.exists():
            return None
        told = ValuesFile(file.path)
        found = run(told)
    except (NothingSeenError, EndlessError):
        return None
    if _has_failed(found.record) or found.record.chosen_by_time:
        return None
    settled = Settled(found, values=told, sought=sought.record, effect="sizes")
    return _with_both_numbers(run, _with_both_ends(run, settled, first=found, folder=folder), folder=folder)


def _file_of_all(folder: Path) -> ValuesFile:
    return ValuesFile(folder / "values-all", "all")


class StoppedError(Exception):
    """The user has had enough: no further run is begun."""


def _with_data(run: _Runs, first: Run, *, folder: Path, answers: Mapping[str, Any] | None, has_padding: bool) -> Settled:
    is_refused = _has_failed(first.record) and any(read.basis == "ordinary" for read in first.record.reads)  # a number was not that good
    if not (needs_values(first.record, has_padding=has_padding) or _has_sizes(answers) or is_refused) or _lacks_something(first.record):
        return Settled(first)
    found = _with_values(run, _file_of_all(folder), first)
    if not _has_failed(first.record) and _OUT_OF_BOUNDS.search(found.failure or _failure_of(found.run.record) or ""):
        most = _with_values(run, ValuesFile(folder / "values-most", "most"), first)
        found = found if _has_failed(most.run.record) or most.failure is not None else most
    if _has_failed(found.run.record) and not _has_failed(first.record):
        return Settled(first, failure=found.failure or _failure_of(found.run.record))
    return _with_both_ends(run, found, first=first, folder=folder)


def _past_its_checks(run: _Runs, found: Settled) -> Settled:
    """Return a program that ended itself by a check of its numbers as it runs with a loss that falls, where it goes on then."""
    failure, reads = found.run.record.failure, found.run.record.reads
    if failure is None or not failure.is_chosen or not any(read.basis in ("ordinary", "compared") for read in reads):
        return found
    told = (found.values or NO_VALUES)._replace(numbers="falling")
    other = _other_end(run, told)
    return found if other is None else Settled(other, values=told)


def _with_both_ends(run: _Runs, found: Settled, *, first: Run, folder: Path) -> Settled:
    """Run the program again with the other end of what was assumed, or drawn, in *found*; *first* is a run that no mode followed."""
    ends: tuple[tuple[Basis, Cause, Literal["none", "redrawn"]], ...] = (("drawn", "draws", "redrawn"), ("assumed", "values", "none"))
    for basis, cause, variant in ends:
        if any(read.basis == basis for read in found.run.record.reads):
            other = _with_values(run, ValuesFile(folder / f"values-{variant}", variant), first, beside=found)
            if other.values is not None and not _has_failed(other.run.record):
                found = found.beside(cause, other)
            elif cause == "values" and _has_failed(other.run.record) and _takes_more(other.run, found.run):
                found = found._replace(others={**found.others, cause: other.run})
    return found


def _takes_more(failed: Run, than: Run) -> bool:
    """Say whether a run had taken more than the other one takes when it failed."""
    return failed.record.peak_reserved_bytes > than.record.peak_reserved_bytes


def _with_both_numbers(run: _Runs, found: Settled, *, folder: Path) -> Settled:
    """
    Run the program again with another number, where it compares one that nothing computes: with it, it may go another way.

    There it may ask for sizes that it never asked for before: then these are found as well.
    """
    record = found.run.record
    if not any(read.basis == "compared" for read in record.reads) or record.failure is not None or record.out_of_memory is not None:
        return found  # what ran out of memory is told whatever the other way takes
    told = (found.values or NO_VALUES)._replace(numbers="zero")
    try:
        other = Settled(run(told), values=told)
        if not _has_failed(other.run.record) and needs_values(other.run.record) and not needs_values(record):
            other = _with_values(run, ValuesFile(folder / "values-numbers", "all", numbers="zero"), other.run)
    except (NothingSeenError, EndlessError):
        return found
    failure = other.run.record.failure
    if failure is not None and _has_failed(other.run.record):
        leaves_open = not failure.is_chosen or _takes_more(other.run, found.run)
        return found._replace(others={**found.others, "numbers": other.run}) if leaves_open else found
    settled = found.beside("numbers", other)
    return settled if settled.run is other.run else found._replace(run=_as_ordinary(found.run, _is_compared))


def _is_compared(read: DeviceRead) -> bool:
    return read.basis == "compared"


def _as_ordinary(run: Run, are_meant: Callable[[DeviceRead], bool]) -> Run:
    """Return *run*, in which those reads that *are_meant* decide nothing that takes more: as they were answered is as good as any."""
    reads = tuple(read.model_copy(update={"basis": "ordinary"}) if are_meant(read) else read for read in run.record.reads)
    return run._replace(record=run.record.model_copy(update={"reads": reads}))


def _with_both_times(run: _Runs, found: Settled) -> Settled:
    """Run the program again with the other choices, where a compiler chose by time."""
    if not found.run.record.chosen_by_time or found.run.record.failure is not None:
        return found
    told = (found.values or NO_VALUES)._replace(times="inverse")
    other = _other_end(run, told)
    return found if other is None else found.beside("times", Settled(other, values=told))


def _other_end(run: _Runs, told: ValuesFile) -> Run | None:
    """Return the program as it runs with the other end of an assumption; None where it fails there, or comes to no end."""
    try:
        other = run(told)
    except (NothingSeenError, EndlessError):
        return None
    return None if _has_failed(other.record) else other


class EndlessError(Exception):
    """A run with values takes so much longer than the first that it may never end: a loop waits for a number that nobody computes."""


MOST_SECONDS_UNKNOWN = 900.0
"""What a run with values may take where nothing says how long the program takes."""


def most_seconds(first: float | None) -> float:
    """
    Return what a run with values may take, of a program whose first run took *first* seconds: the host computes much of it.

    None: the first failed, as one may whose lengths are taken for zero; with its values the program goes on, however long.
    """
    return MOST_SECONDS_UNKNOWN if first is None else 60 + 5 * first


def _with_values(run: _Runs, file: ValuesFile, first: Run, *, beside: Settled | None = None) -> Settled:
    """
    Return the program as it runs with the values that a pass over it finds; as it ran first where that found none, or no end.

    *beside*: as it ran with other values. Where finding both asked for the same memory, both take the same, and one of them was run.
    """
    try:
        return _as_found(run, run(file), file, first, beside)
    except (NothingSeenError, EndlessError) as error:  # a signal may have ended it: it takes more memory of the host than the first
        return Settled(first, failure=str(error))


def _as_found(run: _Runs, sought: Run, file: ValuesFile, first: Run, beside: Settled | None) -> Settled:
    failure = _failure_of(sought.record) if not _has_failed(first.record) else None
    if file.path is None or not file.path.exists():
        return Settled(first, failure=failure or "it left no values")
    known = file._replace(variant=None)
    if _allocate_alike(first.record, sought.record):
        reads = tuple(read.model_copy(update={"positions": ()}) for read in sought.record.reads)  # none of them decided anything
        return Settled(first._replace(record=first.record.model_copy(update={"reads": reads})), values=known)
    if beside is not None and beside.sought is not None and _allocate_alike(beside.sought, sought.record, are_both_followed=True):
        return Settled(beside.run, values=known)
    return Settled(run(known), values=known, failure=failure, sought=sought.record)


def _failure_of(record: RunRecord) -> str | None:
    return record.failure.message.strip().splitlines()[0] if record.failure is not None and _has_failed(record) else None


def _allocate_alike(first: RunRecord, second: RunRecord, *, are_both_followed: bool = False) -> bool:
    """
    Say whether two runs ask for the same memory in the same order, and hold the same at the end of each step.

    Where a mode follows the second alone, autograd adds gradients up in new tensors (InputBuffer::accumulate, isTensorSubclassLike), and
    frees come a little later: a backward may ask for more in between, which says nothing unless it read what may be a size, in a hook or a
    function of the program's own. Of a long program, whose later events are not
    kept, and of one that failed or came to the end of its memory, nothing is known.
    """
    for record in (first, second):
        if record.failure is not None or record.was_stopped or record.out_of_memory is not None or record.num_alloc_retries:
            return False
    ours, theirs = first.trace().phases(), second.trace().phases()
    is_strict = are_both_followed or _reads_in_a_backward(second, theirs)
    alike = (_is_alike(own, their, is_strict=is_strict) for own, their in zip(ours, theirs, strict=False))
    return 0 < len(ours) == len(theirs) and all(alike) and _held_by_steps(ours) == _held_by_steps(theirs)


def _reads_in_a_backward(record: RunRecord, phases: list[Phase]) -> bool:
    """Say whether what was read in one of the backwards among *phases* may be a size."""
    read_at = {position for read in record.reads for position in read.positions}
    num_before = 0
    for phase in phases:
        num_after = num_before + len(phase.sizes)
        if phase.phase == "backward" and any(num_before <= position < num_after for position in read_at):
            return True
        num_before = num_after
    return False


def _is_alike(first: Phase, second: Phase, *, is_strict: bool) -> bool:
    if (first.step, first.phase) != (second.step, second.phase):
        return False
    if is_strict or first.phase != "backward":
        return first.sizes == second.sizes
    left = iter(second.sizes)
    return all(size in left for size in first.sizes)  # in the same order, perhaps with others between


def _held_by_steps(phases: list[Phase]) -> dict[int, int]:
    """Return the bytes at the end of each step."""
    return {phase.step: phase.held_bytes for phase in phases}


def with_ample_memory(gpu: GpuSpec) -> GpuSpec:
    """Return *gpu* for a values pass, which keeps tensors for longer and is not to run out for that."""
    return gpu.model_copy(update={"total_memory_bytes": gpu.total_memory_bytes * 8})


def needs_values(record: RunRecord, *, has_padding: bool = False) -> bool:
    """Say whether the program read anything that may decide a size or a branch, and that nobody knew."""
    return any(decides(read) and not (has_padding and read.basis == "padding") for read in record.reads)


def _has_sizes(answers: Mapping[str, Any] | None) -> bool:
    given = [value[0] if isinstance(value, (list, tuple)) else value for value in (answers or {}).values()]
    return any(str(value) not in ("true", "false") for value in given)


def _lacks_something(record: RunRecord) -> bool:
    """Say whether the program failed in its build for want of what no value would bring: a file, a package, an attribute of a class."""
    return record.failure is not None and record.failure.phase == BUILD and _OF_NO_VALUE.match(record.failure.message) is not None


def _has_failed(record: RunRecord) -> bool:
    return record.failure is not None and record.failure.kind != "out_of_memory"
