"""Runs applies and undos in children that kill themselves: the script behind the tests of a kill at every step.

A request is a line of JSON on stdin: action (apply or undo), root, edits, kill_at. For each, a fork of this process acts, and gets SIGKILL
from itself before step number kill_at. The answer on stdout is `killed` or, where there were fewer steps, `done`. Forking saves the time
that imports take.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from memplan.edits.apply import apply, prepare, undo
from memplan.edits.edit import Edit
from memplan.edits.files import Files
from memplan.edits.yaml_file import YamlFile


class KilledAt(Files):
    """A disk that the process does not survive beyond step *number*."""

    def __init__(self, number: int) -> None:
        self.left = number

    def step(self, what: str, path: Path) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def act(request: dict[str, Any]) -> None:
    """Apply the edits, or undo."""
    root, files = Path(request["root"]), KilledAt(request["kill_at"])
    if request["action"] == "undo":
        undo(root, files=files)
    else:
        edits = [Edit(Path(file), tuple(key), value) for file, key, value in request["edits"]]
        apply(prepare(edits), root=root, now=datetime.now(timezone.utc), files=files)


def answered(request: dict[str, Any]) -> str:
    """Act in a fork and say how it ended."""
    child = os.fork()
    if child == 0:
        try:
            act(request)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "done", -signal.SIGKILL: "killed"}.get(code, f"failed with {code}")


if __name__ == "__main__":
    YamlFile.parse(Path("warm-up.yaml"), b"a: 1")  # what is imported late is imported here, once for all forks
    for line in sys.stdin:
        print(answered(json.loads(line)), flush=True)
