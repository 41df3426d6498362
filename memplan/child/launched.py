"""
What a launcher starts, where a warm process has its imports already: the program runs in a fork of that, and this process stands for it.

MEMPLAN_WARM names the folder of the warm process, MEMPLAN_WARM_PROGRAM the Python and the words with which the program begins. Its own
arguments and environment are those that the launcher gives it. Loaded at the start of a Python, so with as few imports as can be.
"""

import importlib.util
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_CONNECTION = Path(__file__).resolve().parents[1] / "execution" / "warm_connection.py"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_LOST = 1


def run_in_fork() -> None:
    """Have this process's program run in a fork, and end as that does; return where it is another program, or nobody answers."""
    folder = os.environ.pop("MEMPLAN_WARM")
    python, *beginning = json.loads(os.environ.pop("MEMPLAN_WARM_PROGRAM"))
    words = sys.orig_argv[1:]
    if sys.executable != python or words[: len(beginning)] != beginning:
        os.environ["MEMPLAN_WARM"], os.environ["MEMPLAN_WARM_PROGRAM"] = folder, json.dumps([python, *beginning])  # a launcher
        return
    spec: Any = importlib.util.spec_from_file_location("memplan_warm_connection", _CONNECTION)
    warm: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(warm)
    is_module = "-m" in beginning
    request = warm.request_for(
        script="" if is_module else beginning[-1],
        module=beginning[-1] if is_module else "",
        arguments=words[len(beginning) :],
        command=sys.orig_argv,
        environment=os.environ,
        ignored=[number for number in _ENDING if signal.getsignal(number) is signal.SIG_IGN],
    )
    connection = warm.ask(folder, request, (0, 1, 2))
    begun = None if connection is None else warm.next_answer(connection)
    if begun is not None:
        _stand_for(begun["pid"], warm, connection)


def _stand_for(program: int, warm: Any, connection: Any) -> NoReturn:
    """Wait for the end of *program*, pass signals on to it, and end as it did."""
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: _send(program, number))
    connection.settimeout(None)
    answer = warm.next_answer(connection)
    status = _LOST if answer is None else answer["status"]
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _send(program: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(program, number)
