"""Programs that wait for a process which has ended are over; those that still do something are not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memplan.execution import left_waiting
from memplan.execution.left_waiting import OVER, LeftWaiting

WAITS = "import time\ntime.sleep(600)"
WORKS = "while True: pass"
LOOKS = "import time\nwhile True: time.sleep(0.1)"

Started = Callable[[str], int]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second instead of five."""
    monkeypatch.setattr(left_waiting, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(left_waiting, "_LOOKS_EVERY_SECONDS", 0.05)


@pytest.fixture
def started() -> Iterator[Started]:
    """Start a process that runs a text, and is past its start; it is ended behind the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(text: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{text}"], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ended_process() -> int:
    """A process that is no more."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


def comes_to_an_end(watch: LeftWaiting, seconds: float) -> bool:
    """Look for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if watch.is_idle():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("text", [WAITS, LOOKS])
def test_what_waits_for_a_process_that_is_over_is_idle(tmp_path: Path, started: Started, text: str) -> None:
    """For a result that does not come, or by looking from time to time."""
    watch = LeftWaiting(tmp_path, lambda: [waiting])
    waiting = started(text)
    (tmp_path / f"{ended_process()}{OVER}").touch()

    assert comes_to_an_end(watch, 10)
    assert watch.was_idle


def test_what_was_not_waited_for_has_ended_too(tmp_path: Path, started: Started) -> None:
    """A launcher that waits at a queue does not ask how its process ended, which is a zombie then."""
    watch = LeftWaiting(tmp_path, lambda: [waiting])
    waiting = started(WAITS)
    with subprocess.Popen(["true"]) as zombie:
        (tmp_path / f"{zombie.pid}{OVER}").touch()

        assert comes_to_an_end(watch, 10)


@pytest.mark.parametrize("case", ["works", "runs", "nothing is over"])
def test_what_goes_on_is_not(tmp_path: Path, started: Started, case: str) -> None:
    """A next stage that works; the process itself, which is at its exit; a program that sleeps, and of which nothing has ended."""
    process = started(WORKS if case == "works" else WAITS)
    if case != "nothing is over":
        (tmp_path / f"{process if case == 'runs' else ended_process()}{OVER}").touch()
    watch = LeftWaiting(tmp_path, lambda: [process])

    assert not comes_to_an_end(watch, 1.5)
    assert not watch.was_idle
