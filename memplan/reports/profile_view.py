"""What the report of a profile shows, as plain text in plain structures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.analysis.profile import StageProfile
from memplan.execution.measurement import Compared, compare
from memplan.reports.breakdown_view import count, joined
from memplan.units import format_bytes


class ProfileView(NamedTuple):
    """What a GPU said to the steps of some stages."""

    title: str
    facts: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def view_profile(stage: StageProfile, *, num_ranks: int) -> ProfileView:
    """Return what a report shows of *stage*, run by one of *num_ranks* processes."""
    measured = stage.measured
    until = "" if measured.fits else ", until memory ran out"
    which = f", the largest of {count(num_ranks, 'rank')}: rank {stage.rank}" if num_ranks > 1 else ""
    return ProfileView(
        title=f"{joined(stage.stages)} on the GPU itself, {measured.gpu_name}, and as planned ({stage.estimate.method}){until}{which}",
        facts=tuple(_profile_facts(stage)),
        columns=("", "planned", "measured", "difference", ""),
        rows=tuple(
            (row.name, format_bytes(row.planned_bytes), format_bytes(row.measured_bytes), *_difference(row))
            for row in compare(stage.estimate, measured)
        ),
    )


def _difference(row: Compared) -> tuple[str, str]:
    sign = "+" if row.difference_bytes > 0 else "-" if row.difference_bytes < 0 else ""
    share = "" if row.percent is None else f"{row.percent:+.1f}%" if row.difference_bytes else "equal"
    return f"{sign}{format_bytes(abs(row.difference_bytes))}", share


def _by_step(peaks: Sequence[int]) -> str:
    """Say after which step which peak was reached: "7.06 GiB in step 1, 7.17 GiB in step 2 of 10"."""
    rises = [(number, peak) for number, peak in enumerate(peaks, 1) if number == 1 or peak > peaks[number - 2]]
    return ", ".join(f"{format_bytes(peak)} in step {number}" for number, peak in rises) + f" of {len(peaks)}"


def _profile_facts(stage: StageProfile) -> Iterator[tuple[str, str]]:
    measured = stage.measured
    yield "PyTorch", f"{measured.torch}, driver {measured.driver_version or 'unknown'}"
    if measured.steps:
        yield "peak allocated", _by_step([step.peak_allocated_bytes for step in measured.steps])
        yield "peak reserved", _by_step([step.peak_reserved_bytes for step in measured.steps])
    if measured.device_bytes is not None and measured.context_bytes is not None:
        context, libraries = format_bytes(measured.context_bytes), format_bytes(measured.libraries_bytes)
        yield "the driver's figure", f"{format_bytes(measured.device_bytes)}, of which CUDA's context {context} and libraries {libraries}"
    else:
        yield "the driver's figure", "not available for a process here; the usual CUDA context is assumed"
    yield "verdict", stage.contradiction or "the plan holds"
