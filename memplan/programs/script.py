"""
Recording a whole script: every process of it that uses CUDA writes what it saw when it exits.

MEMPLAN_RESULTS is the folder for the results (PROCESS.json), MEMPLAN_STEPS the optimizer steps after which the script is ended (0: when it
ends itself), MEMPLAN_ANSWERS the answers to reads of device values, as JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from memplan.programs.recorder import Recorder

SETTLE_SECONDS = 0.1
"""A thread of autograd that still lets go of its last backward when Python has ended would abort the process; where kernels take no time,
a program that ends with a backward gets there before it."""


class StepsDone(SystemExit):
    """The steps that were asked for are done; the script is left as `sys.exit` leaves it."""


class Script:
    """The steps of a script are those of its optimizer; of several optimizers, those of the one that steps most."""

    def __init__(self, results: Path, most_steps: int, answers: dict[str, tuple[str, str | None]]) -> None:
        self._recorder = Recorder(answers)
        self._most_steps = most_steps
        self._counts: Counter[int] = Counter()
        self._path = results
        self._process = os.getpid()
        self._is_written = False

    def begin(self) -> None:
        """Record from here on."""
        self._recorder.attach()
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._exit)
        self._recorder.begin_step(1)

    def _stepped(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        del arguments, keywords
        self._counts[id(optimizer)] += 1
        number = self._counts[id(optimizer)]
        if number < max(self._counts.values()) or number <= len(self._recorder.steps):
            return
        self._recorder.end_step()
        if self._most_steps and number >= self._most_steps:
            self.write()
            raise StepsDone(0)
        self._recorder.begin_step(number + 1)

    def _exit(self) -> None:
        self.write()
        time.sleep(SETTLE_SECONDS)

    def write(self) -> None:
        """Write what was seen, once, where CUDA was used: a worker that only loads data has nothing to say."""
        if os.getpid() != self._process or not self._recorder.is_on or self._is_written:
            return
        self._is_written = True
        text = json.dumps(self._recorder.result())
        (self._path / f"{self._process}.json").write_text(text, encoding="utf-8")


def begin() -> None:
    """Record this process."""
    results = Path(os.environ["MEMPLAN_RESULTS"])
    Script(results, int(os.environ["MEMPLAN_STEPS"]), json.loads(os.environ["MEMPLAN_ANSWERS"])).begin()
