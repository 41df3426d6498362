"""What the report of `memplan doctor` shows, as plain text in plain structures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.analysis.doctor_checks import Diagnosed
from memplan.execution.wording import shown_place
from memplan.hardware.gpu import GpuSpec
from memplan.units import format_bytes


class FindingView(NamedTuple):
    """One finding: a title, and what was seen and can be done."""

    title: str
    facts: tuple[tuple[str, str], ...]


class DiagnosisView(NamedTuple):
    """A headline, and the findings."""

    headline: str
    findings: tuple[FindingView, ...]


def view_diagnosis(findings: Sequence[Diagnosed], gpu: GpuSpec, *, source: str, num_steps: int | None) -> DiagnosisView:
    """Return the report of *findings* of *source* on *gpu*; *num_steps* of a program were run."""
    count = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}" if findings else "No findings"
    ran = "" if num_steps is None else f", {num_steps} step{'' if num_steps == 1 else 's'} rehearsed"
    headline = f"{count}: {source} on {gpu.name}{ran}"
    return DiagnosisView(headline, tuple(map(_view, findings)))


def _view(finding: Diagnosed) -> FindingView:
    where = f"  {shown_place(finding.place)}" if finding.place else ""
    return FindingView(f"{finding.check}{where}", tuple(_facts(finding)))


def _facts(finding: Diagnosed) -> Iterator[tuple[str, str]]:
    yield "seen", finding.evidence
    yield "change", finding.change + (" (a value of the configuration)" if finding.is_written_by_apply else "")
    if finding.saving_bytes is not None:
        yield "memory", f"{_effect(finding.saving_bytes)}, {finding.saving_method}"


def _effect(saving_bytes: int) -> str:
    if saving_bytes == 0:
        return "no difference"
    return f"saves {format_bytes(saving_bytes)}" if saving_bytes > 0 else f"takes {format_bytes(-saving_bytes)} more"
