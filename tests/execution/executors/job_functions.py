"""What jobs of tests do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from memplan.errors import MissingError


def tell(request: str) -> str:
    """Tell what it was asked, where it runs, and one variable of its environment."""
    return f"{request} in {Path.cwd().name} with {os.environ.get('TORCH_TOLD')}"


def miss(request: str) -> str:
    """Raise what a user can solve."""
    raise MissingError(f"there is no {request}", hint="get one")


def end_early(request: str) -> str:
    """End the job itself as long as its file, which counts how often it was run, says fewer than a number."""
    file, number = request.split(":")
    count = len(Path(file).read_text()) if Path(file).exists() else 0
    Path(file).write_text("x" * (count + 1))
    if count < int(number):
        print("about to end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return f"run {count + 1} times"


def end_worker_once(request: str) -> str:
    """End the worker that started this job, the first time."""
    if not Path(request).exists():
        Path(request).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return "done by another"


def wait(request: str) -> str:
    """Tell its number in a file, and wait."""
    Path(request).write_text(str(os.getpid()))
    time.sleep(600)
    return ""
