"""Steps that are run beside others: in processes of their own, begun before they are asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memplan.estimators import beside
from memplan.estimators.beside import Begun, Beside, Job
from memplan.execution.program_process import wait_for
from memplan.execution.program_runs import OnProgress, ProgramProgress
from memplan.execution.rehearsal import ProgramFailure, Rehearsal
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryRange

ENOUGH_SECONDS = 30


def rehearsal_of(num_bytes: int) -> Rehearsal:
    """Return a rehearsal that took so many bytes."""
    return Rehearsal(
        method="rehearsed",
        breakdown=MemoryBreakdown(activations_bytes=num_bytes),
        peak_allocated_bytes=num_bytes,
        peak_reserved_bytes=num_bytes,
        device_used=MemoryRange(low_bytes=num_bytes, expected_bytes=num_bytes, high_bytes=num_bytes),
        peak_phase="forward of step 1",
        gpu_name="gpu",
        torch="2.13.0",
        num_alloc_retries=0,
        steps=(),
    )


def takes(num_bytes: int, folder: Path) -> Rehearsal:
    """Do a job that writes down when it began; it prints, and asks for input, as programs do."""
    (folder / f"{num_bytes}.began").write_text(str(os.getpid()))
    print(num_bytes)
    os.write(1, b"more")
    assert os.read(0, 10) == b""
    return rehearsal_of(num_bytes)


def waits(num_bytes: int, folder: Path) -> Rehearsal:
    """Do a job that ends when it is told to."""
    (folder / f"{num_bytes}.began").write_text(str(os.getpid()))
    eventually((folder / f"{num_bytes}.may_end").exists)
    return rehearsal_of(num_bytes)


def fails(num_bytes: int, folder: Path) -> Rehearsal:
    """Do a job that fails, ends its process, or closes its streams, as a process does that is about to end."""
    (folder / f"{num_bytes}.began").write_text(str(os.getpid()))
    if num_bytes == 2:
        os._exit(1)
    if num_bytes == 3:
        os.closerange(3, 64)
        time.sleep(ENOUGH_SECONDS)
    raise RuntimeError("the port is taken")


def eventually(happens: Callable[[], bool]) -> None:
    """Wait until it *happens*."""
    until = time.monotonic() + ENOUGH_SECONDS
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    """Jobs with room for one process beside this one, however few processors there are."""
    monkeypatch.setattr(beside, "num_processors", lambda: 2)
    started = Beside()
    yield started
    started.end()


def test_a_job_that_was_begun_is_there_when_it_is_asked_for_and_once(jobs: Beside, tmp_path: Path) -> None:
    """What it prints goes nowhere, and what it reads has ended."""
    before_ns = time.time_ns()
    jobs.begin("one", Job(takes, (1, tmp_path)))
    eventually((tmp_path / "1.began").exists)

    begun = jobs.take("one")

    assert begun is not None
    assert begun.rehearsal == rehearsal_of(1)
    assert before_ns <= begun.begin_ns <= time.time_ns()
    assert int((tmp_path / "1.began").read_text()) != os.getpid()
    assert jobs.take("one") is None


def tells(num_bytes: int, folder: Path, *, on_progress: OnProgress) -> Rehearsal:
    """Do a job that tells how far it is, and ends when it is told to."""
    on_progress(ProgramProgress(1, 2, num_bytes, where="train.py:12"))
    return waits(num_bytes, folder)


def test_who_waits_for_a_job_hears_how_far_it_is(jobs: Beside, tmp_path: Path) -> None:
    """Also what it told before anybody waited."""
    jobs.begin("one", Job(tells, (1, tmp_path), tells_progress=True))
    eventually((tmp_path / "1.began").exists)
    heard: list[ProgramProgress] = []

    def hear(progress: ProgramProgress) -> None:
        heard.append(progress)
        (tmp_path / "1.may_end").touch()

    begun = jobs.take("one", on_progress=hear)

    assert begun is not None
    assert begun.rehearsal == rehearsal_of(1)
    assert set(heard) == {ProgramProgress(1, 2, 1, where="train.py:12")}


def test_one_process_does_one_job_after_the_other_the_last_first(jobs: Beside, tmp_path: Path) -> None:
    """What was said last is asked for soonest. One that is asked for before it has begun is not begun any more."""
    jobs.begin("one", Job(waits, (1, tmp_path)))
    eventually((tmp_path / "1.began").exists)
    for number, name in enumerate(["two", "three", "four"], start=2):
        jobs.begin(name, Job(takes, (number, tmp_path)))

    taken_early = jobs.take("four")
    (tmp_path / "1.may_end").touch()
    eventually((tmp_path / "2.began").exists)

    assert taken_early is None
    assert (tmp_path / "3.began").stat().st_mtime_ns < (tmp_path / "2.began").stat().st_mtime_ns
    assert not (tmp_path / "4.began").exists()
    assert len({(tmp_path / f"{number}.began").read_text() for number in (1, 2, 3)}) == 1
    assert [begun and begun.rehearsal for begun in map(jobs.take, ["one", "two", "three"])] == [*map(rehearsal_of, (1, 2, 3))]


def test_a_job_is_not_done_twice(jobs: Beside, tmp_path: Path) -> None:
    """Whoever says again that it will be asked for, while it is done or after."""
    for _ in range(3):
        jobs.begin("one", Job(takes, (1, tmp_path)))
        eventually((tmp_path / "1.began").exists)
    (tmp_path / "1.began").unlink()
    jobs.begin("two", Job(takes, (2, tmp_path)))
    eventually((tmp_path / "2.began").exists)

    assert jobs.take("one") is not None
    assert not (tmp_path / "1.began").exists()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_job_that_fails_tells_nothing_and_the_next_is_done(jobs: Beside, tmp_path: Path, number: int) -> None:
    """An error, or the end of its process: it may have been in another's way, and is run again alone."""
    jobs.begin("failing", Job(fails, (number, tmp_path)))
    eventually((tmp_path / f"{number}.began").exists)

    assert jobs.take("failing") is None

    jobs.begin("next", Job(takes, (5, tmp_path)))
    eventually((tmp_path / "5.began").exists)
    assert isinstance(jobs.take("next"), Begun)


def fails_in_its_second_step(num_bytes: int, folder: Path) -> Rehearsal:
    """Do a job whose program used the GPU before it failed: there is a report, and no answer."""
    (folder / f"{num_bytes}.began").write_text(str(os.getpid()))
    failure = ProgramFailure(phase="step 2", message="the port is taken", place="train.py:3")
    return rehearsal_of(num_bytes).model_copy(update={"failure": failure})


def guesses_sizes(num_bytes: int, folder: Path) -> Rehearsal:
    """Do a job whose values were not found, as where the host has no memory left for that."""
    (folder / f"{num_bytes}.began").write_text(str(os.getpid()))
    return rehearsal_of(num_bytes).model_copy(update={"lower_bound_reasons": ("sizes were guessed",)})


@pytest.mark.parametrize("job", [fails_in_its_second_step, guesses_sizes])
def test_a_report_that_no_plan_can_rest_on_is_no_answer(jobs: Beside, tmp_path: Path, job: Callable[[int, Path], Rehearsal]) -> None:
    """Another run may have been in its way: what it comes to is seen alone."""
    jobs.begin("one", Job(job, (1, tmp_path)))
    eventually((tmp_path / "1.began").exists)

    assert jobs.take("one") is None


@pytest.mark.parametrize(("second", "expected"), [(fails, True), (takes, False)])
def test_whether_all_that_was_beside_fails_is_known_when_it_has_ended(
    jobs: Beside, tmp_path: Path, second: Callable[[int, Path], Rehearsal], *, expected: bool
) -> None:
    """A program that fails each time is broken; one that fails beside another that runs may have been in its way."""
    jobs.begin("one", Job(fails, (1, tmp_path)))
    eventually(lambda: not jobs.doing and (tmp_path / "1.began").exists())
    (tmp_path / "1.began").unlink()
    jobs.begin("two", Job(second, (1, tmp_path)))
    eventually(lambda: bool(jobs.doing) or (tmp_path / "1.began").exists())

    assert jobs.all_fail(["one", "two"]) is expected
    assert jobs.all_fail([])


def test_a_job_that_begins_after_a_run_has_is_in_its_way_too(jobs: Beside, tmp_path: Path) -> None:
    """The run that fails may have begun before it, and have wanted its port after it; what was done before the run is in nobody's way."""
    jobs.begin("before", Job(takes, (1, tmp_path)))
    jobs.take("before")

    in_the_way = jobs.meanwhile()
    jobs.begin("after", Job(takes, (2, tmp_path)))
    eventually((tmp_path / "2.began").exists)

    assert in_the_way() == ["after"]
    assert not jobs.all_fail(in_the_way())


def test_a_job_is_done_where_the_caller_is_now(jobs: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has another working folder serves no more."""
    jobs.begin("one", Job(takes, (1, tmp_path)))
    eventually((tmp_path / "1.began").exists)
    jobs.take("one")
    monkeypatch.chdir(tmp_path)

    jobs.begin("two", Job(takes, (2, Path())))

    eventually((tmp_path / "2.began").exists)


def test_without_room_nothing_is_begun(jobs: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one processor, or too little memory: then each is run in its turn."""
    monkeypatch.setattr(beside, "num_processors", lambda: 1)
    jobs.begin("one", Job(takes, (1, tmp_path)))
    monkeypatch.setattr(beside, "num_processors", lambda: 2)
    monkeypatch.setattr(beside, "available_bytes", lambda: 2**30)
    jobs.begin("two", Job(takes, (2, tmp_path)))

    assert jobs.take("one") is None
    assert jobs.take("two") is None
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_a_job_that_is_waited_for(jobs: Beside, tmp_path: Path) -> None:
    """Ctrl-C is not for the job alone: whoever waits for it ends too, and no process is left."""
    jobs.begin("one", Job(waits, (1, tmp_path)))
    eventually((tmp_path / "1.began").exists)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        jobs.take("one")

    process = int((tmp_path / "1.began").read_text())
    eventually(lambda: has_ended(process))


def is_deaf(num_bytes: int, folder: Path) -> Rehearsal:
    """Do a job that Ctrl-C does not end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return waits(num_bytes, folder)


def test_ctrl_c_while_a_process_imports_is_not_for_it(jobs: Beside, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It comes to the whole group of the terminal; whoever began the job ends it, and no traceback of memplan's own is printed."""
    jobs.begin(7, Job(takes, (7, tmp_path)))
    (process,) = jobs._processes
    status = Path(f"/proc/{process._process.pid}/status")
    eventually(lambda: int(next(line for line in status.read_text().splitlines() if line.startswith("SigIgn")).split()[1], 16) & 2 > 0)

    os.kill(process._process.pid, signal.SIGINT)

    eventually((tmp_path / "7.began").exists)
    begun = jobs.take(7)
    assert begun is not None
    assert begun.rehearsal == rehearsal_of(7)
    assert capfd.readouterr().err == ""


def test_a_second_signal_ends_what_waits_for_a_job_that_does_not_hear_it(jobs: Beside, tmp_path: Path) -> None:
    """Nor is that an answer: a plan would go on as if the size were refused."""
    jobs.begin("one", Job(is_deaf, (1, tmp_path)))
    eventually((tmp_path / "1.began").exists)
    for seconds in (0.2, 0.5):
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        jobs.take("one")


def test_what_was_begun_comes_to_nothing_where_all_is_ended(jobs: Beside, tmp_path: Path) -> None:
    """Also what was done already. What is begun then is done by another process."""
    jobs.begin("done", Job(takes, (1, tmp_path)))
    jobs.begin("waiting", Job(waits, (2, tmp_path)))
    eventually((tmp_path / "2.began").exists)

    jobs.end()

    assert [jobs.take(name) for name in ("done", "waiting")] == [None, None]
    jobs.begin("next", Job(takes, (3, tmp_path)))
    eventually((tmp_path / "3.began").exists)
    assert jobs.take("next") is not None


def runs_a_program(num_bytes: int, folder: Path) -> Rehearsal:
    """Do a job that waits for a program, as rehearsals do: signals are passed on to that."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"{num_bytes}.began").write_text(str(program.pid))
    wait_for(program, None)
    return rehearsal_of(num_bytes)


def test_the_end_comes_at_once_while_a_program_runs(jobs: Beside, tmp_path: Path) -> None:
    """The program is ended, and so is the process that waited for it."""
    jobs.begin("one", Job(runs_a_program, (1, tmp_path)))
    eventually((tmp_path / "1.began").exists)
    eventually(lambda: (tmp_path / "1.began").read_text() != "")
    time.sleep(0.2)  # it waits
    begin = time.monotonic()

    jobs.end()

    assert time.monotonic() - begin < beside.IDLE_SECONDS / 6
    assert has_ended(int((tmp_path / "1.began").read_text()))


def has_ended(process: int) -> bool:
    """Say whether *process* runs no more; nobody may have asked how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
