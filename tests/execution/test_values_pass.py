"""How often a program is run to settle what data decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.errors import NothingSeenError
from memplan.execution.device_log import NO_LOG
from memplan.execution.findings import lower_bound_reasons
from memplan.execution.run_record import Failure, RecordedRead, RunRecord
from memplan.execution.summary import Run
from memplan.execution.values_pass import ValuesFile, settle
from memplan.traces.trace import CountedMark, EventColumns


def record(basis: str, forward: list[int], backward: list[int], *, freed: int = 0) -> RunRecord:
    """A run that read one number, and asked for so many bytes in the phases of a step, of which it gave so many tensors back."""
    sizes = [*forward, *backward, *[0] * freed]
    addresses = [*range(len(forward) + len(backward)), *range(freed)]
    events = EventColumns("a" * (len(sizes) - freed) + "f" * freed, addresses, sizes, [0] * len(sizes))
    known = {"place": "a.py:1", "text": "", "count": 1, "answer": "0", "reason": "", "basis": basis, "positions": [1]}
    read = RecordedRead.model_validate(known)
    marks = (CountedMark(0, 0, 1, "forward"), CountedMark(len(forward), 0, 1, "backward"))
    return RunRecord(torch="2.13", gpu_name="A100", events=events, reads=(read,), marks=marks)


def failed(message: str) -> RunRecord:
    """A run that came to an error before its first read."""
    failure = Failure(kind="error", message=message, place=None, phase="step 1")
    return record("data", [512], []).model_copy(update={"failure": failure, "reads": ()})


FIRST = record("zero", [512, 1024], [2048])


@pytest.mark.parametrize(
    ("sought", "num_runs"),
    [
        (record("data", [512, 1024], [2048]), 2),
        (record("data", [512, 1024], [512, 2048], freed=1), 2),  # a gradient that was added up
        (record("data", [512, 4096], [2048]), 3),
        (record("data", [512, 1024, 512], [2048], freed=1), 3),
        (record("data", [512, 1024], [4096]), 3),
        (record("data", [512, 1024], [2048], freed=1), 3),
        (record("assumed", [512, 1024], [2048]), 3),
        (record("assumed", [512, 4096], [2048]), 5),
    ],
)
def test_what_asks_for_the_same_memory_whatever_it_reads_is_not_run_again(tmp_path: Path, sought: RunRecord, num_runs: int) -> None:
    """The first run was undisturbed; the pass that sought the values says what they were, and with an assumption both of its ends do."""
    runs: list[ValuesFile | None] = []

    def run(file: ValuesFile | None) -> Run:
        runs.append(file)
        if file is not None and file.variant is not None and file.path is not None:
            file.path.touch()
        return Run(FIRST if file is None else sought)

    settled = settle(run, folder=tmp_path, answers=None)

    assert len(runs) == num_runs
    (read,) = settled.run.record.reads
    assert read.basis == sought.reads[0].basis
    is_first = settled.run.record.events == FIRST.events
    assert read.positions == (() if is_first else (1,))  # what decides nothing has no bytes behind it


def test_a_pass_that_fails_is_told(tmp_path: Path) -> None:
    """The first run is told, with what the one that was to find the values failed with; or that a signal ended it."""

    def fails(file: ValuesFile | None) -> Run:
        return Run(FIRST if file is None else failed("TypeError: no\nsuch thing"))

    def is_ended(file: ValuesFile | None) -> Run:
        if file is not None:
            raise NothingSeenError("the program was ended by SIGKILL", program_exit_code=-9)
        return Run(FIRST)

    told = [settle(run, folder=tmp_path, answers=None) for run in (fails, is_ended)]

    assert [settled.run.record for settled in told] == [FIRST, FIRST]
    assert [settled.failure for settled in told] == ["TypeError: no", "the program was ended by SIGKILL"]
    (reason, *_) = lower_bound_reasons(FIRST.reads, NO_LOG, values_failure=told[0].failure)
    assert reason == "the run that was to find what its data decide failed: TypeError: no"
