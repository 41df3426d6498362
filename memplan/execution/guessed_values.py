"""
What the figures of a run rest on that nobody computes: sizes guessed as zero, assumptions with two ends, numbers drawn at random.

Each is a finding, or a reason why the program may take more than is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from memplan.execution.device_log import DeviceLog
from memplan.execution.rehearsal import DeviceRead, Finding
from memplan.execution.run_record import RecordedRead, RunRecord
from memplan.execution.wording import SHOWN, listed, shown_place
from memplan.traces.read_basis import ALL_BUT_ONE, ONE_DRAW, Basis

Read = TypeVar("Read", bound=DeviceRead)

Cause = Literal["values", "draws", "numbers", "times"]
"""
Of what two ends are run: sizes that a model computes, numbers that are drawn at random on the device, numbers that a program compares, or
times by which a compiler chooses.
"""


def guesses(record: RunRecord, others: Mapping[Cause, RunRecord]) -> Iterator[Finding]:
    """Yield the findings about values; *others*: the runs with the other end of an assumption, by what was assumed."""
    yield from _assumptions(record, others.get("values"))
    yield from _draws(record, others.get("draws"))
    yield from _comparisons(record, others.get("numbers"))
    yield from _choices(record, others.get("times"))
    yield from _reads(record.reads)


def decides(read: DeviceRead) -> bool:
    """Say whether a read that nobody knew the answer to may decide a size or a branch."""
    return read.basis in ("zero", "padding", "rounded")


def takes_as_much(record: RunRecord, other: RunRecord) -> bool:
    """Say whether two runs of a program have the same peaks: what was assumed decides what it prints, or chooses, and no size."""
    return (record.peak_allocated_bytes, record.peak_reserved_bytes) == (other.peak_allocated_bytes, other.peak_reserved_bytes)


def _assumptions(record: RunRecord, other: RunRecord | None) -> Iterator[Finding]:
    assumed = [read for read in record.reads if read.basis == "assumed"]
    if not assumed or (other is not None and takes_as_much(record, other)):
        return
    is_most = any(read.reason == ALL_BUT_ONE for seen in (record, other) if seen is not None for read in seen.reads)
    passing = f"{ALL_BUT_ONE}, since the program fails where all do," if is_most else "everything passes"
    one = f"{passing} and equal shares"
    ends = (
        f"one end was run ({one}), and it failed there"
        if record.failure is not None
        else f"one end was run ({one}), and the program failed at the other (nothing passes and one gets all)"
        if other is None or other.failure is not None
        else f"two ends were run ({one}; nothing passes and one gets all), and the larger is reported"
    )
    yield Finding(
        kind="device_values",
        message=f"numbers that the model computes decide sizes at {_places(assumed)}: {ends}; if you know better: {_advice(assumed)}",
    )


def open_draws(record: RunRecord, other: RunRecord | None) -> list[RecordedRead]:
    """Return the reads of random numbers of the device with which the program may take more than it did in any run."""
    drawn = [read for read in record.reads if read.basis == "drawn"]
    if other is None:
        return drawn
    return [] if takes_as_much(record, other) else [read for read in drawn if read.reason == ONE_DRAW]


def _draws(record: RunRecord, other: RunRecord | None) -> Iterator[Finding]:
    drawn = [read for read in record.reads if read.basis == "drawn"]
    if not drawn or record.failure is not None or (other is not None and takes_as_much(record, other)):
        return
    if other is None:
        ends = "one draw was run, and the program failed with another, or did not end"
    elif open_draws(record, other):
        ends = "two draws were run, and the larger is reported; another may take more"
    else:
        ends = "the highest and the lowest that can be drawn were run, and the larger is reported"
    yield Finding(
        kind="drawn_values",
        message=f"numbers that are drawn at random on the GPU decide sizes at {_places(drawn)}: {ends}; "
        f"if you know better: {_advice(drawn)}",
    )


def _comparisons(record: RunRecord, other: RunRecord | None) -> Iterator[Finding]:
    compared = [read for read in record.reads if read.basis == "compared"]
    if not compared or record.failure is not None or (other is not None and other.failure is None and takes_as_much(record, other)):
        return
    ends = (
        "the program failed where it goes the other way, or did not end"
        if other is None or other.failure is not None
        else "it was run both ways, and the larger is reported"
    )
    yield Finding(
        kind="device_values",
        message=f"numbers that the model computes are compared, and the program goes another way by them: {_places(compared)}; {ends}",
    )


def _choices(record: RunRecord, other: RunRecord | None) -> Iterator[Finding]:
    if not record.chosen_by_time or record.failure is not None or (other is not None and takes_as_much(record, other)):
        return
    files = listed(sorted({f"{choice.by} at {shown_place(choice.place)}" for choice in record.chosen_by_time}))
    ends = (
        "one end was run (as a GPU of this kind would mostly choose), and the program failed at the other, or did not end"
        if other is None
        else "two ends were run (as a GPU of this kind would mostly choose, and the other way round), and the larger is reported"
    )
    yield Finding(kind="chosen_by_time", message=f"torch.compile chooses by what takes less time, and that decides memory: {files}; {ends}")


def _reads(reads: Sequence[DeviceRead]) -> Iterator[Finding]:
    for read in [read for read in reads if decides(read) and read.answer in ("true", "false")][:SHOWN]:
        other = "false" if read.answer == "true" else "true"
        yield Finding(
            kind="device_values",
            message=f"{shown_place(read.place)} asks the GPU for a yes or no and got {read.answer} ({read.reason}); if yours differs: "
            f'`answers={{"{read.place.rsplit("/", 1)[-1]}": "{other}"}}`',
        )
    rounded = _places([read for read in reads if read.basis == "rounded"])
    if rounded:
        yield Finding(
            kind="device_values",
            message=f"a number that the model computes is made whole, and may be a size: {rounded}; 1.0 was read, as of "
            'a share that is all; if it is another: `answers={"FILE.py:LINE": "0.5"}`',
        )
    zeros = guessed_places(reads)
    if zeros:
        yield Finding(
            kind="guessed_sizes",
            message=f"read from the GPU and got zero, since nothing is computed: {zeros}; where that decides a size (nonzero, x[mask], "
            "repeat_interleave, counts of tokens) the step takes more than is said here; say what it would be: "
            f"{_advice(list(filter(decides, reads)))}",
        )


def _advice(reads: Sequence[DeviceRead]) -> str:
    """Return how to say what the first of *reads* gets: a mask has a share of its elements, a size or a place is a number."""
    place = reads[0].place.rsplit("/", 1)[-1] if reads else "FILE.py:LINE"
    return f'`answers={{"{place}": "1/8"}}` (a share of a mask, or a number)'


def sizes_hint(reads: Sequence[DeviceRead]) -> str | None:
    """Return what may be the cause where a program fails that reads sizes from the device: they were zero."""
    zeros = guessed_places(reads)
    if not zeros:
        return None
    read = f"it read from the GPU, where nothing is computed, and got zero: {zeros}"
    return f"{read}; if that is why, say what it would be: {_advice(list(filter(decides, reads)))}"


def guessed_loops(reads: Sequence[Read]) -> list[Read]:
    """Return the reads by which a loop was guessed to end at once."""
    return [read for read in reads if decides(read) and read.answer == "false" and read.text.startswith("while ")]


def guessed_places(reads: Sequence[DeviceRead]) -> str | None:
    """Return where zeros were read that may decide sizes, each with how often, as the end of a sentence; None where none were."""
    return _places([read for read in reads if read.basis == "zero" and read.answer not in ("true", "false")]) or None


def _places(reads: Sequence[DeviceRead]) -> str:
    counts: Counter[str] = Counter()
    for read in reads:
        counts[shown_place(read.place)] += read.count
    return listed([f"{place} ({count}×)" for place, count in counts.most_common()])


NEVER_STEPPED = "never stepped, so its state is not counted, nor what leads to its step"
"""The end of the reason where a program trains something later than its rehearsal goes."""


def lower_bound_reasons(
    record: RunRecord, log: DeviceLog, *, others: Mapping[Cause, RunRecord], values_failure: str | None = None
) -> Iterator[str]:
    """
    Yield why the program may take more than *record* says.

    *others*: the runs with the other end of an assumption; *values_failure*: why its values were not found, where a run for that failed.
    """
    reads, drawn = record.reads, open_draws(record, others.get("draws"))
    guessed = guessed_places(reads)
    if values_failure is not None and any(read.basis in ("zero", "rounded") for read in reads):
        yield f"the run that was to find what its data decide did not succeed: {values_failure}"
    if guessed is not None:
        yield f"sizes were guessed as zero at {guessed}"
    if record.failed_beside:
        yield f"another process of the program failed while it trained: {record.failed_beside}"
    if record.never_stepped:
        yield f"{listed(record.never_stepped)} {NEVER_STEPPED}"
    elif record.num_optimizers and not record.steps:
        yield f"an optimizer was made and {NEVER_STEPPED}"
    elif record.lacks_update:
        passes = f"{record.num_backwards} backward passes"
        yield f"it has no optimizer of PyTorch's, and updated nothing in {passes}: what its own optimizer would hold is not counted"
    if drawn:
        yield f"numbers that are drawn at random on the GPU decide sizes at {_places(drawn)}"
    yield from _failed_ends(record, others)
    loops = guessed_loops(reads)
    if loops:
        yield f"loops were guessed to end at once at {_places(loops)}"
    if log.not_served:
        yield f"the simulated GPU does not serve {', '.join(log.not_served)}, and the program went on without"


def _failed_ends(record: RunRecord, others: Mapping[Cause, RunRecord]) -> Iterator[str]:
    """Yield what came of the other ends that failed, where those leave open what the program takes there; the rest of them are not kept."""
    ends: tuple[tuple[Cause, Basis, str], ...] = (
        ("values", "assumed", "at the other end of what is assumed"),
        ("numbers", "compared", "where it goes another way by a number that the model computes"),
    )
    for cause, basis, end in ends:
        failure = others[cause].failure if cause in others else None
        if failure is not None:
            places = _places([read for read in record.reads if read.basis == basis])
            yield f"it failed {end} ({places}), and what it takes there is not known: {failure.message.strip().splitlines()[0]}"
