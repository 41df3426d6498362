"""A program's process, waited for by a real one that is itself stopped and continued."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

WAITS = """
import subprocess
from memplan.execution.program_process import wait_for
program = subprocess.Popen(["sleep", "2"])
print("waits", flush=True)
print(wait_for(program, None), program.returncode)
"""


def test_who_waits_may_be_stopped_and_continued() -> None:
    """With Ctrl-Z and `fg`: that is no signal for the program."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        for _ in range(3):
            time.sleep(0.2)
            waiting.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            waiting.send_signal(signal.SIGCONT)
        said, error = waiting.communicate()

    assert (said, error, waiting.returncode) == ("None 0\n", "", 0)
