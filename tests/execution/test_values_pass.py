"""How often a program is run to settle what data decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.execution.rehearsal import DeviceRead, StepPeaks
from memplan.execution.run_record import RunRecord
from memplan.execution.summary import Run
from memplan.execution.values_pass import ValuesFile, settle
from memplan.traces.trace import EventColumns


def record(basis: str, sizes: list[int], *, held: int = 0) -> RunRecord:
    """A run that read one number, and asked for *sizes* in one step that left *held* bytes."""
    events = EventColumns("a" * len(sizes), range(len(sizes)), sizes, [0] * len(sizes))
    read = DeviceRead.model_validate({"place": "a.py:1", "text": "", "count": 1, "answer": "0", "reason": "", "basis": basis})
    step = StepPeaks(peak_allocated_bytes=sum(sizes), peak_reserved_bytes=sum(sizes), allocated_bytes=held, reserved_bytes=held)
    return RunRecord(torch="2.13", gpu_name="A100", events=events, reads=(read,), steps=(step,))


@pytest.mark.parametrize(
    ("sought", "num_runs"),
    [
        (record("data", [512, 1024]), 2),
        (record("data", [512, 2048]), 3),
        (record("data", [512, 1024], held=512), 3),
        (record("assumed", [512, 1024]), 3),
        (record("assumed", [512, 2048]), 5),
    ],
)
def test_what_asks_for_the_same_memory_whatever_it_reads_is_not_run_again(tmp_path: Path, sought: RunRecord, num_runs: int) -> None:
    """The first run was undisturbed; the pass that sought the values says what they were, and with an assumption both of its ends do."""
    first = record("zero", [512, 1024])
    runs: list[ValuesFile | None] = []

    def run(file: ValuesFile | None) -> Run:
        runs.append(file)
        if file is not None and file.variant is not None and file.path is not None:
            file.path.touch()
        return Run(first if file is None else sought)

    settled = settle(run, folder=tmp_path, answers=None)

    assert len(runs) == num_runs
    assert settled.run.record.reads == sought.reads
