"""From the record of a run to what is told of it."""

from __future__ import annotations

import signal

import pytest

from memplan.execution.rehearsal import StepPeaks
from memplan.execution.run_record import AllocationFailure, RecordedRead, RunRecord
from memplan.execution.summary import Run, reads_by_bytes, rehearsal_of
from memplan.memory.estimate import MemoryRange
from memplan.traces.trace import Block, Note


def read(line: int, *positions: int) -> RecordedRead:
    """A read at a line, each time after so many allocations."""
    return RecordedRead(place=f"train.py:{line}", text="", count=len(positions), answer="1", reason="", basis="data", positions=positions)


def test_what_is_allocated_behind_a_read_counts_for_it_until_the_next() -> None:
    """Blocks are numbered from 1; a read saw those before it. The most bytes come first."""
    blocks = [Block(number, 2**number, "activations") for number in (1, 2, 3, 4, 5, 6)]

    first, second, third = reads_by_bytes([read(10, 1, 5), read(20, 2), read(30)], blocks)

    assert (first.place, first.following_bytes) == ("train.py:10", 2**2 + 2**6)
    assert (second.place, second.following_bytes) == ("train.py:20", 2**3 + 2**4 + 2**5)
    assert (third.place, third.following_bytes) == ("train.py:30", 0)


def test_what_outlives_a_step_hangs_on_no_read() -> None:
    """Parameters, their gradients and the optimizer's state have the sizes of the model."""
    blocks = [Block(2, 100, category) for category in ("parameters", "gradients", "optimizer_state", "workspaces", "batch_data")]

    (only,) = reads_by_bytes([read(1, 1)], blocks)

    assert only.following_bytes == 200


NO_CONTEXT = MemoryRange(low_bytes=0, expected_bytes=0, high_bytes=0)

STEP = StepPeaks(peak_allocated_bytes=100, peak_reserved_bytes=200, allocated_bytes=50, reserved_bytes=200)


@pytest.mark.parametrize(
    ("num_steps", "exit_code", "was_interrupted", "verdict"),
    [
        (0, -2, False, "unknown"),
        (0, 143, False, "unknown"),
        (0, 1, True, "unknown"),
        (1, -15, False, "fits"),
        (2, -2, False, "fits"),
        (2, 1, True, "fits"),
        (0, 0, False, "fits"),
        (1, 0, False, "fits"),
        (2, 1, False, "unknown"),
    ],
)
def test_what_a_signal_ended_early_has_no_verdict(num_steps: int, exit_code: int, was_interrupted: bool, verdict: str) -> None:
    """Before its first step is over, whatever its exit code."""
    record = RunRecord(torch="2.13", gpu_name="a GPU", steps=(STEP,) * num_steps, was_interrupted=was_interrupted)

    found = rehearsal_of(Run(record), context=NO_CONTEXT, exit_code=exit_code)

    assert found.verdict == verdict


@pytest.mark.parametrize(("number", "verdict"), [(signal.SIGABRT, "fits"), (signal.SIGSEGV, "fits"), (signal.SIGKILL, "unknown")])
def test_what_a_signal_ended_while_python_was_exiting_has_its_verdict_and_a_warning(number: signal.Signals, verdict: str) -> None:
    """All of it had run; the system ends by SIGKILL, whenever there is no memory left on the host."""
    record = RunRecord(torch="2.13", gpu_name="a GPU", steps=(STEP, STEP), was_at_exit=True)

    found, before = (
        rehearsal_of(Run(seen), context=NO_CONTEXT, exit_code=-number)
        for seen in (record, record.model_copy(update={"was_at_exit": False}))
    )

    assert found.verdict == verdict
    assert [finding.kind for finding in found.findings] == ["signal_at_exit"] * (verdict == "fits")
    assert before.verdict == "unknown"


@pytest.mark.parametrize(
    ("num_steps", "notes", "verdict"),
    [(1, {"optimizer_state": [(1, 1)]}, "unknown"), (1, {}, "fits"), (2, {"optimizer_state": [(1, 1)]}, "fits")],
)
def test_one_step_of_an_optimizer_with_state_is_a_lower_bound(num_steps: int, notes: dict[str, list[Note]], verdict: str) -> None:
    """Of a program that was asked for one step, or ended by a signal then; one that ends after its only step has shown all."""
    record = RunRecord(torch="2.13", gpu_name="a GPU", steps=(STEP,) * num_steps, notes=notes, was_cut=True)

    cut, whole = (rehearsal_of(Run(seen), context=NO_CONTEXT) for seen in (record, record.model_copy(update={"was_cut": False})))
    ended = rehearsal_of(Run(record.model_copy(update={"was_cut": False})), context=NO_CONTEXT, exit_code=-15)

    assert (cut.verdict, ended.verdict, whole.verdict) == (verdict, verdict, "fits")


@pytest.mark.parametrize(("peaks", "low", "high"), [((300, 200), 200, 300), ((200, 300), 300, 300)])
def test_an_end_that_ran_out_of_memory_is_told_as_no_less_than_the_other(peaks: tuple[int, int], low: int, high: int) -> None:
    """It had not come as far: what it asked for in vain is in no figure of its record."""
    failed = AllocationFailure(message="out of memory", requested_bytes=500, free_bytes=400, step=1, phase="forward", place=None)
    upper, lower = (RunRecord(torch="2.13", gpu_name="a GPU", peak_allocated_bytes=peak, peak_reserved_bytes=peak) for peak in peaks)
    run, other = Run(upper.model_copy(update={"out_of_memory": failed})), Run(lower)

    found = rehearsal_of(run, others={"values": other}, context=NO_CONTEXT)

    assert found.assumed_range is not None
    assert (found.assumed_range.low_bytes, found.assumed_range.high_bytes) == (low, high)
    assert found.verdict == "does_not_fit"


def test_what_a_guessed_loop_would_reach_is_not_said_to_learn_nothing() -> None:
    """A solver's `while` that was guessed to end at once leaves its parameters without a gradient: nothing is to be frozen for that."""
    loop = RecordedRead(place="solver.py:9", text="while t > end:", count=3, answer="false", reason="", basis="zero")
    record = RunRecord(torch="2.13", gpu_name="a GPU", steps=(STEP,), without_gradient=("net.weight",), without_gradient_bytes=400)

    known = rehearsal_of(Run(record), context=NO_CONTEXT)
    guessed = rehearsal_of(Run(record.model_copy(update={"reads": (loop,)})), context=NO_CONTEXT)

    assert [finding.kind for finding in known.findings] == ["parameters_without_gradient"]
    assert "parameters_without_gradient" not in {finding.kind for finding in guessed.findings}
    assert guessed.lower_bound_reasons == ("loops were guessed to end at once at solver.py:9 (3×)",)
