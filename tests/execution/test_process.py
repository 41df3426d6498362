"""The process that takes requests: what it answers and says, how it ends, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memplan.execution.process import LAST_WORDS, Process, TookTooLongError

SERVER = """
import json, os, signal, subprocess, sys, time
requests, answers = map(int, sys.argv[1:])
with os.fdopen(requests) as lines, os.fdopen(answers, "w") as replies:
    for line in lines:
        request = json.loads(line)
        exec(request["code"])
        print(json.dumps({"status": request.get("status", 0)}), file=replies, flush=True)
"""
"""Runs the code that it is asked to, and answers."""

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server; all are ended with the test."""
    started: list[Process] = []

    def begin(code: str = SERVER) -> Process:
        started.append(Process(["-c", code], dict(os.environ)))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def ask(process: Process, code: str, *, timeout_seconds: float = 20, **more: object) -> int:
    return process.ask({"code": code, **more}, timeout_seconds=timeout_seconds)


def test_one_process_answers_many_requests(start: Start) -> None:
    """Each with its own status."""
    process = start()

    assert [ask(process, "pass", status=status) for status in (0, 7, -9)] == [0, 7, -9]
    assert process.is_running


def test_a_request_may_be_longer_than_a_pipe(start: Start) -> None:
    """A pipe holds 64 KiB; the other side reads."""
    assert ask(start(), "pass", much="x" * 2**20) == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(3)", 3),
        ("os._exit(0)", 0),
        ("raise ValueError", 1),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_process_that_ends_without_an_answer_tells_how(start: Start, code: str, status: int) -> None:
    """Its exit code, or minus the signal; asked again, the same."""
    process = start()

    assert ask(process, code) == status
    assert not process.is_running
    assert ask(process, "pass") == status


def test_a_process_that_is_gone_before_it_is_asked(start: Start) -> None:
    """As Python is with a wrong option."""
    process = start("raise SystemExit(5)")
    while process.is_running:
        time.sleep(0.01)

    assert ask(process, "pass") == 5


def test_last_words_are_those_of_the_last_request(start: Start) -> None:
    """Of both outputs, the end; what a broken program writes need not be text."""
    process = start()

    ask(process, "print('first', flush=True)")
    assert process.last_words() == "first"
    ask(process, "[print(number, flush=True) for number in range(100_000)]; print('to stderr', file=sys.stderr)")
    assert process.last_words().splitlines() == [*map(str, range(100_001 - LAST_WORDS, 100_000)), "to stderr"]
    ask(process, "os.write(1, b'\\xff\\xfe')")
    assert process.last_words() == "\ufffd\ufffd"
    ask(process, "pass")
    assert process.last_words() == ""


def test_a_flood_without_end_takes_no_memory_and_no_longer_than_it_may(start: Start) -> None:
    """Its output is read all the while; only the end is kept."""
    process = start()

    with pytest.raises(TookTooLongError):
        ask(process, "while True: print('again' * 1000)", timeout_seconds=1)

    assert not process.is_running
    assert 0 < len(process.last_words()) <= 16_384


@pytest.mark.parametrize("way", ["deaf", "child", "half an answer"])
def test_after_its_time_everything_is_ended(start: Start, tmp_path: Path, way: str) -> None:
    """What does not listen, what it started, and what answers too slowly."""
    pid = tmp_path / "pid"
    code = {
        "deaf": "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)]\n"
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)",
        "child": f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\ntime.sleep(600)",
        "half an answer": f"open({str(pid)!r}, 'w').write(str(os.getpid()))\nreplies.write('{{')\nreplies.flush()\ntime.sleep(600)",
    }[way]

    began = time.monotonic()
    with pytest.raises(TookTooLongError):
        ask(start(), code, timeout_seconds=1)

    assert time.monotonic() - began < 10
    for _ in range(50):
        if not is_alive(int(pid.read_text())):
            break
        time.sleep(0.1)
    else:
        pytest.fail("it still runs")


def is_alive(process_id: int) -> bool:
    """Say whether a process runs; one whose exit code nobody took does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


def test_ending_twice_is_ending_once(start: Start) -> None:
    """Also when it has ended by itself."""
    process = start()
    ask(process, "sys.exit(3)")

    process.end()
    process.end()

    assert not process.is_running


def test_its_addresses_are_the_same_each_time(start: Start) -> None:
    """Without randomness the order of frees is that of the program."""
    said = []
    for _ in range(2):
        process = start()
        ask(process, "print(open('/proc/self/personality').read().strip(), hex(id(object)), flush=True)")
        said.append(process.last_words())

    assert said[0] == said[1] != ""
