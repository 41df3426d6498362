"""
Programs whose sizes come from data: run once more to find the values, and again to measure with them.

The first run answers what it is asked with zero, and shows whether anything that may decide a size was asked at all. Only then is the
program run with the integers computed on the host (`child/host_values.py`), and after that again, undisturbed, with what that found. Where
something hangs on numbers that a model computes, both ends of an assumption are run, and the larger one is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memplan.execution.findings import decides
from memplan.execution.run_record import RunRecord
from memplan.execution.summary import Run
from memplan.hardware.gpu import GpuSpec


class ValuesFile(NamedTuple):
    """A file of values, as child/recorded_values.py has it."""

    path: Path | None
    variant: Literal["all", "none"] | None = None
    """What to assume while it is written; None: it is read."""

    def request(self) -> dict[str, str]:
        """Return it as the child takes it."""
        return {"values_file": str(self.path or ""), "values_variant": self.variant or ""}


NO_VALUES = ValuesFile(None)


class Settled(NamedTuple):
    """What was found of a program."""

    run: Run
    """The run that is told of."""
    other: Run | None = None
    """The one with the other assumption, where something was assumed."""
    values: ValuesFile | None = None
    """What *run* read, where it read values."""


def settle(
    run: Callable[[ValuesFile | None], Run], *, folder: Path, answers: Mapping[str, Any] | None, has_padding: bool = False
) -> Settled:
    """
    Return what *run*, called once or several times, shows of a program; files of values go to *folder*.

    *answers* are the user's: a share or a number is the content of a mask, which only a values pass can keep for the backward.
    *has_padding*: the batch is one with padding, so that to ask a mask for it is no reason to follow values.
    """
    first = run(None)
    if not (needs_values(first.record, has_padding=has_padding) or _has_sizes(answers)):
        return Settled(first)
    found = _with_values(run, ValuesFile(folder / "values-all", "all"))
    if found is None or (_has_failed(found.run.record) and not _has_failed(first.record)):
        return Settled(first)
    if not any(read.basis == "assumed" for read in found.run.record.reads):
        return found
    other = _with_values(run, ValuesFile(folder / "values-none", "none"))
    if other is None or _has_failed(other.run.record):
        return found
    larger, smaller = sorted((found, other), key=lambda settled: settled.run.record.peak_reserved_bytes, reverse=True)
    return larger._replace(other=smaller.run)


class EndlessError(Exception):
    """A run with values takes so much longer than the first that it may never end: a loop waits for a number that nobody computes."""


def most_seconds(first: float) -> float:
    """Return what a run with values may take, of a program whose first run took *first* seconds: the host computes much of it."""
    return 60 + 5 * first


def _with_values(run: Callable[[ValuesFile | None], Run], file: ValuesFile) -> Settled | None:
    """Return the program as it runs with the values that a pass over it finds; None where that found none, or no end."""
    try:
        run(file)
        if file.path is None or not file.path.exists():
            return None
        known = ValuesFile(file.path)
        return Settled(run(known), values=known)
    except EndlessError:
        return None


def with_ample_memory(gpu: GpuSpec) -> GpuSpec:
    """Return *gpu* for a values pass, which keeps tensors for longer and is not to run out for that."""
    return gpu.model_copy(update={"total_memory_bytes": gpu.total_memory_bytes * 8})


def needs_values(record: RunRecord, *, has_padding: bool = False) -> bool:
    """Say whether the program read anything that may decide a size or a branch, and that nobody knew."""
    return any(decides(read) and not (has_padding and read.basis == "padding") for read in record.reads)


def _has_sizes(answers: Mapping[str, Any] | None) -> bool:
    given = [value[0] if isinstance(value, (list, tuple)) else value for value in (answers or {}).values()]
    return any(str(value) not in ("true", "false") for value in given)


def _has_failed(record: RunRecord) -> bool:
    return record.failure is not None and record.failure.kind != "out_of_memory"
