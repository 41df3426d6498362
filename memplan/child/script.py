"""
Recording a whole script: every process of it that uses CUDA writes what it saw when it exits, `os._exit` included.

MEMPLAN_RESULTS is the folder for the results (PROCESS.json), MEMPLAN_STEPS the optimizer steps after which the script is ended (0: when it
ends itself), MEMPLAN_ANSWERS the answers to reads of device values, as JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memplan.child.recorder import Recorder, objects_of

SETTLE_SECONDS = 0.1
"""A thread of autograd that still lets go of its last backward when Python has ended would abort the process; where kernels take no time,
a program that ends with a backward gets there before it."""


class StepsDone(SystemExit):
    """The steps that were asked for are done; the script is left as `sys.exit` leaves it."""


class Script:
    """
    The steps of a script are those of its optimizer; of several optimizers, those of the one that steps most.

    A step is over when each of them has stepped, or one begins its next.
    """

    def __init__(self, results: Path, most_steps: int, answers: dict[str, tuple[str, str | None]]) -> None:
        self._recorder = Recorder(answers)
        self._most_steps = most_steps
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._num_ended = 0
        self._path = results
        self._process = os.getpid()
        self._is_written = False

    def begin(self) -> None:
        """Record from here on."""
        register_optimizer_step_pre_hook(self._will_step)  # before the recorder's own, which says that the next step's optimizer begins
        self._recorder.attach()
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._exit)
        os.register_at_fork(after_in_child=self._forked)
        os._exit = self._writing_first(os._exit)  # forked children of multiprocessing leave by it, and scripts whose threads hang
        self._recorder.begin_step(1)

    def _will_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """End the step that some optimizer did not take part in, where this one begins its next."""
        del arguments, keywords
        if self._counts.get(optimizer, 0) > self._num_ended:
            self._end_step()

    def _stepped(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        del arguments, keywords
        self._counts[optimizer] = number = self._counts.get(optimizer, 0) + 1
        if number > self._num_ended and not self._is_one_to_come():
            self._end_step()

    def _is_one_to_come(self) -> bool:
        """Say whether an optimizer is behind that kept up so far. One that wraps another has its parameters, and has stepped with it."""
        number = self._num_ended + 1
        known = objects_of(Optimizer)[0] if number == 1 else list(self._counts)
        done: set[int] = set().union(*(_parameters(one) for one in known if self._counts.get(one, 0) >= number))
        return any(self._counts.get(one, 0) == number - 1 and not _parameters(one) <= done for one in known)

    def _end_step(self) -> None:
        self._recorder.end_step()
        self._num_ended += 1
        if self._most_steps and self._num_ended >= self._most_steps:
            self.write()
            raise StepsDone(0)
        self._recorder.begin_step(self._num_ended + 1)

    def _exit(self) -> None:
        self.write()
        time.sleep(SETTLE_SECONDS)

    def _forked(self) -> None:
        """In a child that was forked before CUDA began: what it does with CUDA is its own."""
        if not self._recorder.is_on:
            self._process = os.getpid()

    def _writing_first(self, leave: Callable[[int], Any]) -> Any:
        def write_and_leave(status: int) -> None:
            try:
                self.write()
            finally:
                leave(status)

        return write_and_leave

    def write(self) -> None:
        """Write what was seen, once, where CUDA was used: a worker that only loads data has nothing to say."""
        if os.getpid() != self._process or not self._recorder.is_on or self._is_written:
            return
        self._is_written = True
        if max(self._counts.values(), default=0) > self._num_ended:
            self._recorder.end_step()
        text = json.dumps(self._recorder.result())
        (self._path / f"{self._process}.json").write_text(text, encoding="utf-8")


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def begin() -> None:
    """Record this process."""
    results = Path(os.environ["MEMPLAN_RESULTS"])
    Script(results, int(os.environ["MEMPLAN_STEPS"]), json.loads(os.environ["MEMPLAN_ANSWERS"])).begin()
