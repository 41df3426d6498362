"""Which runs a program gets, and which of them is told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memplan.errors import NothingSeenError
from memplan.execution.device_log import NO_LOG
from memplan.execution.guessed_values import lower_bound_reasons
from memplan.execution.run_record import AllocationFailure, ChosenByTime, Failure, RecordedRead, RunRecord
from memplan.execution.summary import Run
from memplan.execution.values_pass import EndlessError, Settled, StoppedError, ValuesFile, most_seconds, settle
from memplan.traces.trace import CountedMark, EventColumns

CHOICE = ChosenByTime(by="_inductor/fx_passes/pad_mm.py", place="train.py:3")
RAN_OUT = AllocationFailure(message="", requested_bytes=1, free_bytes=0, step=1, phase="forward", place=None)


def record(basis: str, forward: list[int], backward: list[int], *, freed: int = 0, read_at: int = 1) -> RunRecord:
    """A run that read one number, and asked for so many bytes in the phases of a step, of which it gave so many tensors back."""
    sizes = [*forward, *backward, *[0] * freed]
    addresses = [*range(len(forward) + len(backward)), *range(freed)]
    events = EventColumns("a" * (len(sizes) - freed) + "f" * freed, addresses, sizes, [0] * len(sizes))
    known = {"place": "a.py:1", "text": "", "count": 1, "answer": "0", "reason": "", "basis": basis, "positions": [read_at]}
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
        (record("data", [512, 1024], [512, 2048], freed=1, read_at=2), 3),  # what it read there is a size, perhaps
        (record("data", [512, 4096], [2048]), 3),
        (record("data", [512, 1024, 512], [2048], freed=1), 3),
        (record("data", [512, 1024], [4096]), 3),
        (record("data", [512, 1024], [2048], freed=1), 3),
        (record("assumed", [512, 1024], [2048]), 3),
        (record("assumed", [512, 4096], [2048]), 4),
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
    assert read.positions == (() if is_first else sought.reads[0].positions)  # what decides nothing has no bytes behind it


@pytest.mark.parametrize(
    ("sought", "effect"),
    [
        (record("data", [512, 1024], [2048]), "nothing"),
        (record("assumed", [512, 1024], [2048]), "nothing"),
        (record("data", [512, 1024, 512], [2048]), "sizes"),
        (failed("TypeError: no"), "sizes"),  # nobody knows
    ],
)
def test_what_values_decide_is_told(tmp_path: Path, sought: RunRecord, effect: str) -> None:
    """Nothing, where the program asks for the same memory with them, at both ends of what is assumed."""

    def run(file: ValuesFile | None) -> Run:
        if file is not None and file.variant is not None and file.path is not None:
            file.path.touch()
        return Run(FIRST if file is None else sought)

    assert settle(run, folder=tmp_path, answers=None).effect == effect


@pytest.mark.parametrize(("harmless", "effect"), [(("a.py:1", "a.py:9"), "taken_for_nothing"), (("a.py:9",), "nothing")])
def test_lines_whose_values_decided_nothing_are_taken_to_do_so_again(tmp_path: Path, harmless: tuple[str, ...], effect: str) -> None:
    """One run tells then; where another line reads something, its values are found."""
    runs: list[ValuesFile | None] = []

    def run(file: ValuesFile | None) -> Run:
        runs.append(file)
        if file is not None and file.path is not None:
            file.path.touch()
        return Run(FIRST if file is None else record("data", [512, 1024], [2048]))

    settled = settle(run, folder=tmp_path, answers=None, harmless=harmless)

    assert settled.effect == effect
    assert len(runs) == (1 if effect == "taken_for_nothing" else 2)
    assert settled.run.record.events == FIRST.events


@pytest.mark.parametrize(
    ("sought", "runs"),
    [
        (record("data", [512, 4096], [2048]), ["all", "found"]),
        (record("assumed", [512, 4096], [2048]), ["all", "found", "none", "found"]),
        (record("compared", [512, 4096], [2048]), ["all", "found", "zero"]),
        (failed("TypeError: no"), ["all", "plain", "all", "found"]),
    ],
)
def test_values_that_decided_before_are_found_at_once(tmp_path: Path, sought: RunRecord, runs: list[str]) -> None:
    """Without a first run to see whether they do, and with the other end of what is assumed; where that fails, everything is looked at."""
    asked: list[str] = []

    def run(file: ValuesFile | None) -> Run:
        asked.append("plain" if file is None else file.variant or file.numbers or "found")
        if asked[2:] in (["none"], ["none", "found"]):
            assert file is not None
            assert file.path is not None
            file.path.touch()
            return Run(FIRST)
        if file is not None and file.variant is not None and file.path is not None:
            file.path.touch()
        return Run(FIRST if file is None else sought)

    found = settle(run, folder=tmp_path, answers=None, expects_values=True)

    assert asked == runs
    assert found.run.record.events == (FIRST if sought.failure else sought).events


@pytest.mark.parametrize(("is_chosen", "passes", "num_falling"), [(True, True, 1), (True, False, 1), (False, True, 0)])
def test_a_check_that_ended_the_program_is_met_with_falling_numbers(
    tmp_path: Path, *, is_chosen: bool, passes: bool, num_falling: int
) -> None:
    """Where it goes on then, that run is told; an error of another kind is one whatever is read."""
    failure = Failure(kind="error", message="AssertionError", place=None, phase="step 1", is_chosen=is_chosen)
    ended = record("ordinary", [512], []).model_copy(update={"failure": failure})
    asked: list[str] = []

    def run(file: ValuesFile | None) -> Run:
        asked.append(file.numbers if file is not None else "")
        return Run(record("ordinary", [512, 1024], [2048]) if passes and asked[-1] == "falling" else ended)

    found = settle(run, folder=tmp_path, answers=None)

    assert asked.count("falling") == num_falling
    assert (found.run.record.failure is None) == (passes and is_chosen)


@pytest.mark.parametrize(
    ("message", "phase", "num_runs"),
    [
        ("AttributeError: LlamaTokenizer has no attribute _pad_token", "build", 1),
        ("ModuleNotFoundError: No module named 'flash_attn'", "build", 1),
        ("AttributeError: 'NoneType' object has no attribute 'shape'", "build", 3),  # nothing passed a threshold
        ("AttributeError: 'Model' object has no attribute 'best'", "step 1", 3),
        ("ValueError: no boxes", "build", 3),
    ],
)
def test_what_no_value_would_bring_is_not_run_again(tmp_path: Path, message: str, phase: str, num_runs: int) -> None:
    """A program that lacks a package or an attribute fails whatever is read from the GPU."""
    failure = Failure(kind="error", message=message, place=None, phase=phase)
    ended = record("zero", [512], []).model_copy(update={"failure": failure})
    runs: list[ValuesFile | None] = []

    def run(file: ValuesFile | None) -> Run:
        runs.append(file)
        if file is not None and file.variant is not None and file.path is not None:
            file.path.write_text("{}")
        return Run(ended)

    settle(run, folder=tmp_path, answers=None)

    assert len(runs) == num_runs


def test_what_was_seen_before_a_signal_is_told_of_values_that_are_expected_too(tmp_path: Path) -> None:
    """The run that found them is all there is."""

    def run(file: ValuesFile | None) -> Run:
        assert file is not None
        assert file.path is not None
        if file.variant is None:
            raise StoppedError("SIGINT ended it")
        file.path.touch()
        return Run(record("data", [512], [512]))

    assert settle(run, folder=tmp_path, answers=None, expects_values=True).failure == "SIGINT ended it"


def test_a_run_with_expected_values_that_a_signal_ended_is_told(tmp_path: Path) -> None:
    """It left no values, so that the program would be run without: there is no further run."""
    ended = record("data", [512], [512])

    def run(file: ValuesFile | None) -> Run:
        if file is None:
            raise StoppedError("SIGINT ended it")
        return Run(ended)

    found = settle(run, folder=tmp_path, answers=None, expects_values=True)

    assert (found.run.record, found.failure) == (ended, "SIGINT ended it")


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
    (reason, *_) = lower_bound_reasons(FIRST, NO_LOG, others={}, values_failure=told[0].failure)
    assert reason == "the run that was to find what its data decide did not succeed: TypeError: no"


def run_of(reserved: int, **fields: Any) -> Run:
    """A run that reserved so much."""
    return Run(RunRecord(torch="2.13", gpu_name="a GPU", peak_reserved_bytes=reserved, **fields))


def settled(usual: Run, inverse: Run, folder: Path) -> tuple[Settled, list[str]]:
    """What is told of a program that is *usual*, and *inverse* where compilers choose the other way; and the times of each run."""
    asked: list[str] = []

    def run(told: ValuesFile | None) -> Run:
        asked.append(told.times if told else "")
        return inverse if told and told.times else usual

    return settle(run, folder=folder, answers=None), asked


def test_a_program_that_chooses_nothing_is_run_once(tmp_path: Path) -> None:
    """There is nothing beside it."""
    found, asked = settled(run_of(100), run_of(200), tmp_path)

    assert asked == [""]
    assert found.run.record.peak_reserved_bytes == 100
    assert not found.others


def test_where_a_compiler_chooses_by_time_the_larger_end_is_told(tmp_path: Path) -> None:
    """Whichever that is; what it was told is known, so that it can be run again."""
    usual, inverse = run_of(100, chosen_by_time=(CHOICE,)), run_of(200, chosen_by_time=(CHOICE,))

    up, asked = settled(usual, inverse, tmp_path)
    down, _ = settled(inverse, usual, tmp_path)

    assert asked == ["", "inverse"]
    assert (up.run, up.others["times"]) == (inverse, usual)
    assert (down.run, down.others["times"]) == (inverse, usual)
    assert up.values is not None
    assert up.values.times == "inverse"
    assert down.values is None


def test_an_end_that_runs_out_of_memory_is_the_larger(tmp_path: Path) -> None:
    """It reserved less by then, and needs more."""
    usual, inverse = run_of(100, chosen_by_time=(CHOICE,)), run_of(90, out_of_memory=RAN_OUT)

    assert settled(usual, inverse, tmp_path)[0].run == inverse


def test_an_end_at_which_the_program_fails_is_not_told(tmp_path: Path) -> None:
    """The other one stands alone."""
    failure = {"kind": "error", "message": "", "place": None, "phase": "step 1"}
    found, _ = settled(run_of(100, chosen_by_time=(CHOICE,)), run_of(200, failure=failure), tmp_path)

    assert found.run.record.peak_reserved_bytes == 100
    assert not found.others


@pytest.mark.parametrize(
    "error", [EndlessError("it took more than 60 seconds"), NothingSeenError("SIGKILL ended it", program_exit_code=-9)]
)
def test_an_end_that_is_not_reached_costs_no_report(tmp_path: Path, error: Exception) -> None:
    """The other one stands alone, whatever keeps the program from its end with other times, or other numbers."""
    compared = RecordedRead.model_validate({"place": "a.py:1", "text": "", "count": 1, "answer": "1.0", "reason": "", "basis": "compared"})

    def run(told: ValuesFile | None) -> Run:
        if told is not None:
            raise error
        return run_of(100, chosen_by_time=(CHOICE,), reads=(compared,))

    found = settle(run, folder=tmp_path, answers=None)

    assert found.run.record.peak_reserved_bytes == 100
    assert not found.others


def test_both_assumptions_have_their_two_ends(tmp_path: Path) -> None:
    """Numbers of a model first, then times with the larger of these."""
    read = {"place": "train.py:1", "text": "", "count": 1, "answer": "0", "reason": ""}
    sizes = {"all": 300, "none": 200}

    def run(told: ValuesFile | None) -> Run:
        if told is not None and told.variant is not None and told.path is not None:
            told.path.write_text(told.variant)
        variant = told.path.read_text() if told is not None and told.path is not None else ""
        basis = "assumed" if variant else "zero"
        more = 50 if told is not None and told.times else 0
        return run_of(
            sizes.get(variant, 100) + more, chosen_by_time=(CHOICE,), reads=(RecordedRead.model_validate(read | {"basis": basis}),)
        )

    found = settle(run, folder=tmp_path, answers=None)

    assert found.run.record.peak_reserved_bytes == 350
    assert {cause: other.record.peak_reserved_bytes for cause, other in found.others.items()} == {"values": 200, "times": 300}


def test_a_first_run_that_failed_says_nothing_of_how_long_the_next_one_takes() -> None:
    """It read a length as zero and failed at once; with the length it decodes for minutes."""
    assert most_seconds(None) > 10 * most_seconds(1)
    assert most_seconds(1000) > 5 * 1000
