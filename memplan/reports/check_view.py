"""
What a check says: a line for a log, and the forms that continuous integration reads.

GitHub takes workflow commands from a job's output ("::error file=conf/config.yaml,line=3::…") and shows them beside the line of the file.
Most other systems read JUnit's XML: here a test case for each stage, and one for each value that has drifted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from memplan.analysis.checking import Check, CheckedStage
from memplan.edits.drift import Drifted
from memplan.edits.edit import Location
from memplan.units import format_bytes

_EVIDENCE = {"formulas": "by formulas", "kept rehearsal": "by a kept rehearsal", "rehearsed now": "rehearsed now"}
_VERDICTS = {"fits": "fits", "tight": "tight", "does_not_fit": "does not fit"}
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Finding(NamedTuple):
    """One thing that was checked."""

    name: str
    is_good: bool
    text: str
    at: Location | None


def stage_findings(check: Check, *, source: str, at: Location | None) -> list[Finding]:
    """Return one finding for each stage of *check*, that which decides first; *at*: where its micro-batch is written."""
    stages = sorted(check.stages, key=lambda stage: stage is not check.worst)
    return [Finding(stage.name, stage.verdict == "fits", _stage_text(check, stage, source), at) for stage in stages]


def _stage_text(check: Check, stage: CheckedStage, source: str) -> str:
    """Return a line as "fits: 19.8 GiB of 22.3 GiB on Tesla T4, rehearsed now, conf"; the size is the upper bound, which decides."""
    size = f"{format_bytes(stage.device_used.high_bytes)} of {format_bytes(check.budget_bytes)}"
    over = f", {format_bytes(stage.missing_bytes)} over the budget" if stage.missing_bytes else ""
    if stage.verdict == "tight":
        over += ", which it stays within only by releasing cached memory"
    named = f", stage {stage.name}" if len(check.stages) > 1 else ""
    gpu = check.gpu.name.removeprefix("NVIDIA ")
    return f"{_VERDICTS[stage.verdict]}: {size} on {gpu}{over}{named}, {_EVIDENCE[check.evidence]}, {source}"


def drift_findings(drifted: Drifted, *, root: Path) -> list[Finding]:
    """Return one finding for each value that has left the plan, or one that says that none has; paths as seen from *root*."""
    if not drifted.drifts:
        kept = f"{drifted.num_values} values are as planned" if drifted.num_values else "no plan has been applied here"
        return [Finding("drift", True, f"no drift: {kept}", None)]
    found = []
    for drift in drifted.drifts:
        file = drift.file.relative_to(root) if drift.file.is_relative_to(root) else drift.file
        where = f"{file}:{drift.line}" if drift.line else str(file)
        present = "is not there any more" if drift.present is None else f"is {drift.present}"
        text = f"drift: {where}: `{drift.key}` {present}, planned {drift.planned}"
        found.append(Finding(f"{file}: {drift.key}", False, text, Location(file, drift.line)))
    return found


def as_github(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a workflow command for each of *findings*."""
    for finding in findings:
        yield workflow_command("notice" if finding.is_good else "error", finding.text, finding.at)


def workflow_command(kind: str, text: str, at: Location | None = None) -> str:
    """Return GitHub's workflow command that shows *text* beside a line of a file."""
    place = {} if at is None else {"file": str(at.file)} | ({"line": str(at.line)} if at.line else {})
    properties = ",".join(f"{name}={_escaped(value, also=':,')}" for name, value in place.items())
    return f"::{kind}{' ' * bool(properties)}{properties}::{_escaped(text)}"


def _escaped(text: str, *, also: str = "") -> str:
    return "".join(f"%{ord(character):02X}" if character in f"%\r\n{also}" else character for character in text)


def as_junit(findings: Iterable[Finding], *, error: str | None = None) -> str:
    """Return *findings* as JUnit's XML; *error*: why nothing could be checked."""
    cases = list(findings)
    num_failed = sum(not case.is_good for case in cases)
    counts = {"tests": str(len(cases) + (error is not None)), "failures": str(num_failed), "errors": str(int(error is not None))}
    suite = ET.Element("testsuite", {"name": "memplan check", **counts})
    for case in cases:
        element = _case(suite, case.name, case.at)
        if case.is_good:
            ET.SubElement(element, "system-out").text = _clean(case.text)
        else:
            ET.SubElement(element, "failure", {"message": _clean(case.text)})
    if error is not None:
        ET.SubElement(_case(suite, "check", None), "error", {"message": _clean(error)})
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode")


def _case(suite: ET.Element, name: str, at: Location | None) -> ET.Element:
    place = {} if at is None else {"file": _clean(str(at.file))} | ({"line": str(at.line)} if at.line else {})
    return ET.SubElement(suite, "testcase", {"classname": "memplan", "name": _clean(name), **place})


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
