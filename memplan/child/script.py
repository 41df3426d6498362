"""
Recording a whole script: every process of it that uses CUDA writes what it saw when it exits, `os._exit` and SIGTERM included.

MEMPLAN_RESULTS is the folder for the results (PROCESS.json), MEMPLAN_STEPS the steps after which the script is ended (0: when it ends
itself), MEMPLAN_LATE_STEPS those where the last of them reserves more than the one before (0: the same), MEMPLAN_ANSWERS the answers to
reads of device values, as JSON, MEMPLAN_VALUES_FILE a file of values, to be read or (with MEMPLAN_VALUES_VARIANT) written, MEMPLAN_TIMES
what compilers are told of times ("inverse", or nothing), MEMPLAN_NUMBERS what is read of numbers that nothing computes ("zero" where the
program compares them, "falling", or nothing: one), MEMPLAN_TORCH the version that the device was built for.

MEMPLAN_UNTIL names a file where the script is measured, on a GPU of this machine: each process waits for it at its end. There every value
is the program's own, and so is who trains with it.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memplan.child.collectives import hand_objects_on, seen
from memplan.child.deepspeed_optimizers import skip_optimizer_kernels
from memplan.child.device_reads import counted_bytes
from memplan.child.failures import answered_by, failure_of
from memplan.child.fewer_workers import use_fewer_workers
from memplan.child.held_back import hold_back
from memplan.child.held_memory import wait_for
from memplan.child.installed_modules import installed_modules
from memplan.child.live_objects import objects_of
from memplan.child.not_compiled import not_compiled
from memplan.child.one_rank import world
from memplan.child.ordinary_answers import answer_with_numbers
from memplan.child.own_updates import OwnUpdates
from memplan.child.recorder import NOT_COMPILED, Recorder
from memplan.child.redraws import end_redraws
from memplan.child.set_variables import set_by_packages
from memplan.child.skipped_loading import skipped
from memplan.child.skipped_weights import lacks_weights, skip_weights
from memplan.traces.trace import BUILD

SETTLE_SECONDS = 0.1
"""A thread of autograd that still lets go of its last backward when Python has ended would abort the process; where kernels take no time,
a program that ends with a backward gets there before it."""

GRACE_SECONDS = 2.0
"""What other threads get to end in, when one has run the steps that were asked for."""

END_SECONDS = 20.0
"""What a program gets to end in after the steps that were asked for: a handler at its exit may wait for the network, and for ever."""

OVER = ".over"
"""Of the file that says of a process that its program did not get from it what it wants (`execution/left_waiting.py`)."""

_TOLD_EVERY_SECONDS = 1.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STACK_SIGNAL = signal.SIGRTMAX - 1
"""The same as in `execution/stacks.py`. Not SIGUSR2, which submitit and Slurm's users have for themselves."""

MOST_EXTRA_STEPS = 100
"""How many steps more than asked for are run to see an optimizer step that has not yet: WGAN's generator steps every hundredth time first
(Arjovsky et al. 2017, section 4 and their code)."""


class Script:
    """
    The steps of a script are those of its optimizer; of several optimizers, those of the one that steps most.

    A step is over when each of them has stepped, or one begins its next. One that steps alone later in the program goes on where the others
    ended. Without any, each backward begins a step.
    """

    def __init__(
        self, results: Path, most_steps: int, late_steps: int, answers: dict[str, tuple[str, str | None]], given: dict[str, str]
    ) -> None:
        self._given = given
        self._recorder = Recorder(answers, on_backward=self._backward_begins)
        self._most_steps, self._late_steps = most_steps, late_steps
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._last: weakref.ref[Optimizer] | None = None
        """The optimizer that stepped last."""
        self._updated: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
        """What each has updated since the last backward: parameters, by their identity."""
        self._prepared: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
        """What each has updated before any backward: parameters, by their identity."""
        self._num_ended = self._num_backwards = self._num_optimizers = self._backwards_at_end = 0
        self._has_optimizer = False
        self._updates = OwnUpdates()
        """Where there is no optimizer."""
        self._told_at = self._told_end_at = 0.0
        """When it was told how far the program is; at the end of a step, which is told even where a backward was right before."""
        self._path = results
        self._process = os.getpid()
        self._is_written = self._is_done = self._is_at_exit = self._has_exited = False
        self._writing = threading.RLock()
        self._leave = os._exit
        self._error: BaseException | None = None
        self._trained_in: int | None = None
        """The thread that ran the last backward."""
        self.is_left_out = False
        """There is nothing to tell of this process."""

    def begin(self) -> None:
        """Record from here on."""
        # Before the recorder's own hook, which says that the next step's optimizer begins.
        register_optimizer_step_pre_hook(not_compiled(self._will_step))
        self._recorder.use_values(os.environ["MEMPLAN_VALUES_FILE"], os.environ["MEMPLAN_VALUES_VARIANT"])
        if not _is_measured():
            hand_objects_on(self._recorder.reads.answering)
        self._recorder.compilers.are_times_inverse = os.environ["MEMPLAN_TIMES"] == "inverse"
        answer_with_numbers(os.environ["MEMPLAN_NUMBERS"])
        self._recorder.compilers.on_first_choice = (self._path / "chooses").touch  # another run with the other choices may begin
        self._recorder.attach()
        self._watch_for_an_optimizer()
        register_optimizer_step_post_hook(not_compiled(self._stepped))
        for _ in range(2):  # a signal may come as the first begins
            atexit.register(self._exit)
        os.register_at_fork(after_in_child=self._forked)
        os._exit = self._writing_first(os._exit)  # forked children of multiprocessing leave by it, and scripts whose threads hang
        sys.exit = self._noting_error(sys.exit)
        threading.excepthook = self._noting_end_of_thread(threading.excepthook)
        self._watch_children()
        self._report_before_signals()  # where hook/sitecustomize.py was not loaded
        self._recorder.begin_step(1)
        self._recorder.mark(BUILD)

    # steps

    def _watch_for_an_optimizer(self) -> None:
        """Note that what is built before the first step is mostly there when the first optimizer is made."""
        make = Optimizer.__init__

        @functools.wraps(make)
        def made(*arguments: Any, **keywords: Any) -> None:
            self._num_optimizers += 1
            self._recorder.end_building()
            make(*arguments, **keywords)

        Optimizer.__init__ = made  # type: ignore[method-assign]

    def _will_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """End the step that some optimizer did not take part in, where this one begins its next."""
        del arguments, keywords
        if self._steps_on(optimizer):
            return
        self._leave_if_done()
        if self._counts.get(optimizer, 0) < self._num_ended and self._trains_alone(optimizer):
            self._counts[optimizer] = self._num_ended + int(optimizer in self._counts)  # its first step has not been told as one
        if self._counts.get(optimizer, 0) > self._num_ended:
            self._end_step()

    def _steps_on(self, optimizer: Optimizer) -> bool:
        """Say whether *optimizer* goes on with its last step, with other parameters: DeepSpeed has it step group by group."""
        return optimizer in self._updated and self._updated[optimizer].isdisjoint(_parameters(optimizer))

    def _prepares(self, optimizer: Optimizer) -> bool:
        """Say whether *optimizer* has only made its state, by a first step with parameters before any backward, as DeepSpeed has it do."""
        if self._trained_in is not None:
            return False
        own, prepared = _parameters(optimizer), self._prepared.setdefault(optimizer, set())
        is_first = prepared.isdisjoint(own)
        prepared |= own
        return is_first

    def _trains_alone(self, optimizer: Optimizer) -> bool:
        """Say whether no other optimizer has stepped since the last step of *optimizer*; before its first, whether no other is there."""
        return self._last is not None and self._last() is optimizer if optimizer in self._counts else not self._counts

    def _stepped(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        del arguments, keywords
        if self._prepares(optimizer):
            return
        if self._steps_on(optimizer):
            self._updated[optimizer] |= _parameters(optimizer)
            return
        self._updated[optimizer] = _parameters(optimizer)
        self._counts[optimizer] = number = self._counts.get(optimizer, 0) + 1
        self._last = weakref.ref(optimizer)
        if number > self._num_ended and not self._is_one_to_come():
            self._end_step()

    def _backward_begins(self) -> None:
        """Begin a step, in a program without optimizers: one that updates its parameters itself, or measures only."""
        self._updated.clear()
        self._trained_in = threading.get_ident()
        self._leave_if_done()
        if time.monotonic() >= self._told_at + _TOLD_EVERY_SECONDS:
            self._tell()
        self._recorder.end_building(was_none=True)
        if self._has_optimizer or self._counts:
            return
        number = self._num_backwards + 1
        if number & (number - 1) == 0:  # a look at every object: not at each of a thousand backwards
            self._has_optimizer = bool(objects_of(Optimizer)[0])
        if self._has_optimizer:
            return
        if number > 1:
            self._updates.look(self._num_backwards)
            self._end_step()
        else:
            self._updates.begin()
        self._num_backwards = number

    def _is_one_to_come(self) -> bool:
        """Say whether an optimizer is behind that kept up so far. One that wraps another has its parameters, and has stepped with it."""
        number = self._num_ended + 1
        known = objects_of(Optimizer)[0] if number == 1 else list(self._counts)
        done: set[int] = set().union(*(_parameters(one) for one in known if self._counts.get(one, 0) >= number))
        return any(self._counts.get(one, 0) == number - 1 and not _parameters(one) <= done for one in known)

    def _waiting(self) -> list[Optimizer]:
        """Return the optimizers that have not stepped yet, though they have parameters to train that no other one has."""
        known = sorted(objects_of(Optimizer)[0], key=_wraps_another)  # in no order of their own
        done: set[int] = set().union(*(_parameters(one) for one in known if one in self._counts))
        waiting = []
        for one in known:
            if one not in self._counts and not _parameters(one) <= done:
                waiting.append(one)
                done |= _parameters(one)  # one that wraps it, as accelerate's, is no other
        return waiting

    def _end_step(self) -> None:
        self._recorder.end_step()
        self._num_ended += 1
        self._backwards_at_end = self._recorder.num_backwards
        if time.monotonic() >= self._told_end_at + _TOLD_EVERY_SECONDS:
            self._told_end_at = time.monotonic()
            self._tell()
        if self._late_steps and self._num_ended == self._most_steps and not self._is_settled():
            self._most_steps = self._late_steps
        if self._most_steps and self._num_ended >= self._most_steps and self._is_enough():
            self._is_done = True
            self.write()
            self._leave_soon()
            raise SystemExit(0)  # as `sys.exit` does; a thread ends by it in silence, which it would not by a class of our own
        self._recorder.begin_step(self._num_ended + 1)

    def _tell(self) -> None:
        """Say how far the program is, for a person who waits."""
        self._told_at = time.monotonic()
        steps = self._recorder.steps
        peak_bytes = steps[-1]["peak_reserved_bytes"] if steps else 0
        text = f"{self._num_ended} {peak_bytes} {self._recorder.num_backwards - self._backwards_at_end}"
        (self._path / "progress").write_text(text, encoding="ascii")

    def _is_settled(self) -> bool:
        """Say whether the last step reserved no more than the one before; none of a program that trains on the host did."""
        peaks = [step["peak_reserved_bytes"] for step in self._recorder.steps[-2:]]
        return not peaks or peaks[-1] <= peaks[0]

    def _is_enough(self) -> bool:
        if self._updates_itself:
            return not self._updates.lack_one(self._num_ended, asked=self._most_steps)
        return self._num_ended >= self._most_steps + MOST_EXTRA_STEPS or not self._waiting()

    @property
    def _updates_itself(self) -> bool:
        """Say whether the program has backward passes, and no optimizer of PyTorch's."""
        return self._num_backwards > 0 and not (self._has_optimizer or self._counts)

    def _leave_if_done(self) -> None:
        """End a program that caught the end of its steps, by an `except` for everything, and goes on."""
        if self._is_done and os.getpid() == self._process:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._leave(0)

    def _leave_soon(self) -> None:
        """
        End the process where it would not: the end of its steps ends one thread, and others may wait for more of them.

        Where no other thread is left, it may still be in what it does at its exit.
        """
        own = threading.current_thread()

        def leave() -> None:
            if own is threading.main_thread():
                own.join(END_SECONDS)
            time.sleep(GRACE_SECONDS)
            if not any(not thread.daemon and thread.is_alive() for thread in threading.enumerate()):
                time.sleep(END_SECONDS)
            self._leave_if_done()

        threading.Thread(target=leave, daemon=True).start()

    # the end

    def _exit(self) -> None:
        with _signals_put_off():
            if not self._has_exited:
                self._is_at_exit = True
                self.write()
                if not self._is_written and lacks_weights(self._last_error):
                    (self._path / "lacks_weights").touch()
                time.sleep(SETTLE_SECONDS)
                self._has_exited = True

    def _report_before_signals(self) -> None:
        """Have what was seen written before a signal ends this process."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._terminated)

    def _terminated(self, number: int, frame: Any) -> None:
        """Write, and end as the signal would have ended the program."""
        del frame
        with _signals_put_off():
            self.write()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _forked(self) -> None:
        """
        In a child that was forked before CUDA began: what it does with CUDA is its own.

        Until then a signal ends it as it would: a handler of Python's that is called just before a worker of `multiprocessing.Pool` waits
        for its next task runs behind that wait, which has no end, and the pool waits for the worker.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == self._terminated:
                signal.signal(number, signal.SIG_DFL)
        if not self._recorder.is_on:
            self._process = os.getpid()
            torch.cuda._lazy_call(self._report_before_signals)

    def _writing_first(self, leave: Callable[[int], Any]) -> Any:
        def write_and_leave(status: int) -> None:
            try:
                self.write()
            finally:
                leave(status)

        return write_and_leave

    def _noting_error(self, leave: Callable[..., Any]) -> Any:
        """Keep the error that a program is handling when it calls `sys.exit`: Hydra prints it and leaves so."""

        def note_and_leave(status: Any = None, /) -> None:
            if status not in (None, 0):
                self._error = sys.exc_info()[1] or self._error
            leave(status)

        return note_and_leave

    def _noting_end_of_thread(self, tell: Callable[[Any], Any]) -> Callable[[Any], None]:
        """Keep the error that ends the thread that trains, of which Python only tells: the program goes on to its end."""

        def note_and_tell(ended: Any, /) -> None:
            if ended.thread is not None and ended.thread.ident == self._trained_in:
                self._error = ended.exc_value or self._error
            tell(ended)

        return note_and_tell

    def _watch_children(self) -> None:
        """
        Keep the error that ends a process of multiprocessing's, which prints it and tells its parent of an exit code.

        It goes by while the process's `_bootstrap` calls the function below: that is looked up then, so that a process is watched too that
        was begun before PyTorch was imported.
        """
        end = multiprocessing.util._exit_function  # type: ignore[attr-defined]  # in no stub

        @functools.wraps(end)
        def noting(*arguments: Any, **keywords: Any) -> Any:
            error = sys.exc_info()[1]
            if isinstance(error, Exception):
                self._error = error
            return end(*arguments, **keywords)

        multiprocessing.util._exit_function = noting  # type: ignore[attr-defined]

    def write(self) -> None:
        """Write what was seen, once, where CUDA was used: a worker that only loads data has nothing to say."""
        with _signals_put_off():
            if os.getpid() == self._process and self._recorder.is_on and not self.is_left_out:
                with self._writing:  # another thread may be at it, and is not to be ended before it is done
                    if not self._is_written:
                        self._is_written = True
                        self._write()

    @property
    def _last_error(self) -> BaseException | None:
        return self._error or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)

    def _write(self) -> None:
        if self._trained_in is None and not self._counts:  # there is no backward in this program: that was its step
            self._counts.update(dict.fromkeys(self._prepared, 1))
        never_stepped = [f"{type(one).__name__} with {_number_of(_parameters(one))}" for one in self._waiting()]
        if max(self._counts.values(), default=self._num_backwards) > self._num_ended:
            self._recorder.end_step()
        error = self._last_error
        failure = None
        if error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
            self._recorder.note_failure(error)
            failure = failure_of(answered_by(error), has_run_out=self._recorder.out_of_memory is not None)
        record = self._recorder.result(failure) | {
            "pid": self._process,
            "others_bytes": 0 if _is_measured() else counted_bytes("memplan_most_of_others"),
            "shared_bytes": 0 if _is_measured() else counted_bytes("memplan_most_shared"),
            "command": _command(),
            "python": sys.executable,
            "given_variables": {name: value for name, value in self._given.items() if not name.startswith("MEMPLAN_")},
            "modules": list(installed_modules()),
            "set_variables": _set_by_program(self._given),
            "was_cut": self._is_done,
            "was_interrupted": isinstance(error, KeyboardInterrupt),
            "was_at_exit": self._is_at_exit and error is None,
            "peers": sorted(seen.peers),
            "needed_rank": seen.needed[0] if seen.needed else None,
            "num_optimizers": self._num_optimizers,
            "never_stepped": never_stepped,
            "lacks_update": self._is_done and self._updates_itself and self._updates.is_none,
            "skipped_weights": skipped,
            "lacks_weights": lacks_weights(error),
        }
        path = self._path / f"{self._process}.json"
        path.with_suffix(".partial").write_text(json.dumps(record), encoding="utf-8")
        path.with_suffix(".partial").replace(path)
        if self._is_done or failure is not None:
            path.with_suffix(OVER).touch()
        wait_for(os.environ.get("MEMPLAN_UNTIL", ""))


def _wraps_another(optimizer: Optimizer) -> bool:
    return any(isinstance(value, Optimizer) for value in vars(optimizer).values())


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """
    Have signals that end the program do so afterwards, or Ctrl-C not at all: it is ending.

    One Ctrl-C may come twice, from the terminal and from memplan, which passes on what it gets. What ends a group of processes ends the
    workers of a DataLoader too, which raises an error for that wherever the program is then: in the midst of this.
    """
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (*_ENDING, signal.SIGCHLD) if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) not in ((None, signal.SIG_IGN) if number in _ENDING else (None, signal.SIG_IGN, signal.SIG_DFL)):
                before[number] = signal.signal(number, lambda came_now, _: came.append(came_now))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in set(came) - {signal.SIGINT, signal.SIGCHLD}:
            os.kill(os.getpid(), late)


def _is_measured() -> bool:
    """Say whether the script runs on a GPU of this machine, and not on a simulated one."""
    return "MEMPLAN_UNTIL" in os.environ


def _write_stack_when_asked(path: Path) -> None:
    """
    Have `STACK_SIGNAL` write this process's stack to *path*, even in the midst of a call into C, where the program does not use it itself.

    `execution/stacks.py` asks, of a program that does not end. One that is asked while Python ends would be ended by that: there is no
    stack to write any more, then no handler. So the handler is taken away before, and beneath it the signal is ignored; in C, where a
    program that asks Python sees none of this.
    """
    if signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
        _ignore_in_c(STACK_SIGNAL)
        faulthandler.register(STACK_SIGNAL, file=path.open("w", encoding="utf-8"), all_threads=False)
        atexit.register(faulthandler.unregister, STACK_SIGNAL)


def _ignore_in_c(number: int) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(number, int(signal.SIG_IGN))


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _number_of(parameters: set[int]) -> str:
    return f"{len(parameters)} parameter{'' if len(parameters) == 1 else 's'}"


def _command() -> list[str]:
    """Return how this process was started; one that multiprocessing started (`python -c "from multiprocessing…"`) by its name."""
    is_spawned = "--multiprocessing-fork" in sys.orig_argv
    if not is_spawned and multiprocessing.parent_process() is None:
        return sys.orig_argv
    return [multiprocessing.current_process().name, "of", *sys.argv]


_begun: list[Script] = []


def write() -> None:
    """Write what was seen of this process so far, where it is recorded."""
    for script in _begun:
        script.write()


def leave_out() -> None:
    """Write nothing of this process: it does what the rank that is rehearsed does."""
    for one in _begun:
        one.is_left_out = True


def _set_by_program(given: dict[str, str]) -> dict[str, str]:
    """Return the variables that were not *given*, and which no package has set."""
    changed = dict(os.environ.items() - given.items() - NOT_COMPILED.items())
    return {name: value for name, value in changed.items() if name not in set_by_packages()}


def first_environment() -> dict[str, str]:
    """Return the environment that this process was started with."""
    entries = (os.fsdecode(entry).partition("=") for entry in Path("/proc/self/environ").read_bytes().split(b"\0"))
    return {name: value for name, _, value in entries if name}


def begin(given: dict[str, str] | None = None) -> None:
    """Record this process, from the first time on that this is called. *given*: its first environment, where it is a fork with another."""
    if not _is_measured():
        ctypes.CDLL(None).memplan_recorder_began()
    if _begun:
        return
    results = Path(os.environ["MEMPLAN_RESULTS"])
    expected = os.environ["MEMPLAN_TORCH"]
    if torch.__version__ != expected:
        message = f"the program runs PyTorch {torch.__version__} with {sys.executable}, and the simulated GPU was built for {expected}"
        failure = {"kind": "mistake", "message": message, "place": None, "phase": BUILD}
        record = {"torch": torch.__version__, "gpu_name": None, "failure": failure}
        (results / f"{os.getpid()}.json").write_text(json.dumps(record), encoding="utf-8")
        os._exit(3)
    _write_stack_when_asked(results / f"{os.getpid()}.stack")
    _begun.append(
        Script(
            results,
            int(os.environ["MEMPLAN_STEPS"]),
            int(os.environ["MEMPLAN_LATE_STEPS"]),
            json.loads(os.environ["MEMPLAN_ANSWERS"]),
            given or first_environment(),
        )
    )
    hold_back()
    skip_weights()
    if not _is_measured():
        skip_optimizer_kernels()
        end_redraws()
        use_fewer_workers()
    if torch.distributed.is_available() and not _is_measured():
        from memplan.child.absent_ranks import be_alone, be_one_rank  # noqa: PLC0415  (a PyTorch without it has no such classes)

        ranks = world()
        be_one_rank(ranks) if ranks else be_alone()
    _begun[0].begin()
