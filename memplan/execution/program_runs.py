"""
The runs of one whole program: the first as it was typed, the others without its imports, in forks of a process that is warm.

The first run is heard by the user; the others (`values_pass.py`) are memplan's own affair. The one with the other times begins beside the
first, as soon as that has chosen something by time: each of them compiles everything, which takes most of its seconds.

Of a program that starts others, the one that trains runs so: a launcher or a shell script runs as ever, since what they prepare for the
training would be missed, and what it starts at last is run in a fork (`child/launched.py`).
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from memplan.errors import UsageError
from memplan.execution.command import Command, PythonProgram, program_of, python_program
from memplan.execution.device_log import read_device_log
from memplan.execution.findings import batches_differ
from memplan.execution.held_back import Writes
from memplan.execution.left_waiting import LeftWaiting
from memplan.execution.program_habits import HABITS
from memplan.execution.program_process import NotEndedError, ProgramProcess, all_of, ended_after, wait_for
from memplan.execution.ranks import ONE_RANK, Ranks
from memplan.execution.recorded_run import WalkedBatches, checked, deciding_record, nothing_seen, recorder_variables, streams
from memplan.execution.run_record import RunRecord
from memplan.execution.runner import SKIP_WEIGHTS, Closing
from memplan.execution.stacks import where_it_is
from memplan.execution.standard_input import StandardInput
from memplan.execution.summary import Run
from memplan.execution.values_pass import (
    NO_VALUES,
    OTHER_TIMES,
    EndlessError,
    StoppedError,
    ValuesFile,
    most_seconds,
    needs_values,
    with_ample_memory,
)
from memplan.execution.warm import IDLE_SECONDS, IMPORT_OURS, Kept, WarmProcess, WarmProgram, kept_file, start_warm
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.host import has_room_for_another
from memplan.hardware.torch_install import TorchBuild
from memplan.programs.prepared_data import PreparedData
from memplan.standin.launch import command_for, environment_for, own_caches

PROGRESS = "progress"
"""The file in which child/script.py says how far it is: steps, and bytes reserved at the peak."""

CHOOSES = "chooses"
"""The file that is there as soon as something was chosen by time."""

LACKS_WEIGHTS = "lacks_weights"
"""The file that is there when a program failed for weights that are not, before it used the GPU."""

_TOLD_EVERY_SECONDS = 1.0

ASKED_EVERY_SECONDS = 30.0
"""How often a program that has not ended a step is asked where it is."""

# What the device runs in a Python that did not load the hook (csrc/python.c): with as few names of its own as can be.
_RECORDER = f"""
import sys
torch = sys.modules.get("torch")
if hasattr(torch, "compile"):  # one of the last names that `import torch` makes
    {IMPORT_OURS}
    from memplan.child.script import begin
    begin()
"""


class ProgramProgress(NamedTuple):
    """How far a program is."""

    num_run: int
    """1 for the first, which the user hears; the later ones find values, and measure with them."""
    num_steps: int
    peak_reserved_bytes: int
    num_backwards: int = 0
    """Backward passes since the last step."""
    where: str | None = None
    """Which line it is at, where it has not ended a step for long."""

    @property
    def waiting(self) -> str | None:
        """Return what is told of a program that has not ended a step for long; None of another one."""
        if self.where is None:
            return None
        passes = f" after {self.num_backwards} backward passes" if self.num_backwards > 1 else ""
        return f"{'between optimizer steps' if self.num_steps else 'no optimizer step yet'}{passes}, at {self.where}"


OnProgress = Callable[[ProgramProgress], None]

OnNextRun = Callable[[str], None]
"""Called when the program is run again, with what."""


class Asked(NamedTuple):
    """What is run, and how."""

    command: Command
    torch: TorchBuild
    """The PyTorch that it will run."""
    libraries: Path
    """The simulated GPU for that."""
    gpu: GpuSpec
    context_bytes: int
    answers: Mapping[str, Any]
    walked: WalkedBatches
    """Batches that are looked at, and how many steps are run."""
    timeout_seconds: float | None
    output_to_stderr: bool
    allow_writes: bool
    skip_weights: bool
    """Whether pretrained models are built without their weights."""
    keep_warm: bool | Path
    """Whether to leave a warm process behind for the next rehearsal; a file: that says where it is."""
    on_progress: OnProgress | None
    on_next_run: OnNextRun | None = None
    ranks: Ranks = ONE_RANK
    """Of which one is run."""
    sent: Path | None = None
    """A folder for what one rank sends another."""
    is_heard: bool = True
    shown: Mapping[Path, bytes] = MappingProxyType({})
    """Other contents of files, which the program finds in their place."""
    said: Path | None = None
    """A file for what the program says; None: it goes where this process's output does."""
    prepared: PreparedData | None = None
    """Where data that it prepares are kept for the next rehearsal."""
    habits: str | None = None
    """What is asked for of the program's habits (`program_habits.py`); None: nothing."""
    nccl_bytes: int = 0
    """What NCCL is expected to take of the GPU for the group of all ranks, which no allocator can have."""

    @property
    def inherited(self) -> dict[str, str]:
        """Return the environment that the command was typed in."""
        return os.environ | dict(self.command.environment)

    @property
    def variables(self) -> dict[str, str]:
        """Return those of a process of the program's, whichever run it is of."""
        return self.prepared.variables() if self.prepared else {}


class HowEnded(NamedTuple):
    """How a run ended."""

    exit_code: int
    is_first: bool
    """What is told of is the process that was started, not one that it started."""
    writes: Writes


class _Begun(NamedTuple):
    """A run that has begun."""

    number: int
    process: ProgramProcess
    folder: Path
    file: ValuesFile
    writes: Writes
    is_fork: bool
    left_waiting: LeftWaiting
    began_at: float


def _progress_of(begun: _Begun) -> ProgramProgress:
    """Return how far *begun* is. Raises OSError or ValueError where that is being written."""
    path = begun.folder / PROGRESS
    steps, peak, backwards = map(int, path.read_text(encoding="ascii").split()) if path.exists() else (0, 0, 0)
    return ProgramProgress(begun.number, steps, peak, backwards)


class ProgramRuns(Closing):
    """Runs one program, as often as asked. To be closed."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._temporary = tempfile.TemporaryDirectory(prefix="memplan-rehearsal-")
        self.folder = Path(self._temporary.name).resolve()
        """For files of the runs; it goes when this is closed."""
        self._walks = self.folder / "walks"
        self._walks.mkdir()
        self._of_programs = tempfile.TemporaryDirectory(prefix="mp-", ignore_cleanup_errors=True)
        """For temporary files of the program, which go as its run ends. The name is short: paths of sockets end at 107 bytes."""
        self._others: list[Path] = []
        self._forks: list[WarmProgram] = []
        self._has_told_failure = False
        self._standard_input = StandardInput() if asked.is_heard and asked.said is None else None
        self._first: RunRecord | None = None
        self._beside: _Begun | None = None
        self._program = program_of(asked.command)
        """What runs in a fork of a warm process: the program that was typed, or the one that it starts for the training."""
        self._may_run_beside = self._program is not None and not asked.allow_writes  # neither finds what the other one writes
        self._kept = self._where_kept()
        self._warm = self._kept.find() if self._kept else None
        self._is_launched = self._warm is not None and self._warm.launched() is not None
        if self._warm is not None and self._is_launched:
            self._program = self._warm.launched()
        self._ended: dict[int, HowEnded] = {}
        self._num_runs, self._told_at, self._where_at = 0, 0.0, 0.0
        self._last_ended, self._ended_at = (0, 0), 0.0  # which step of which run ended last, and when
        self._stopped_by: signal.Signals | None = None
        self._first_seconds: float | None = None  # that the first run took

    def _where_kept(self) -> Kept | None:
        """Return where a warm process is kept for the next rehearsal, where one is to be."""
        asked, file = self._asked, self._asked.keep_warm
        if isinstance(file, Path):
            return Kept(file)
        if not file or self._program is None:
            return None
        return Kept(kept_file(self._program, asked.inherited, libraries=asked.libraries, writes_are_allowed=asked.allow_writes))

    def close(self) -> None:
        """End what was started for this alone, and leave no file."""
        self._end_beside()
        if self._kept is None:
            self._give_up_warm()
        for folder in self._others:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # there is more in that of a process that has not ended
                folder.parent.rmdir()
        for fork in self._forks:
            fork.close()
        self._temporary.cleanup()
        self._of_programs.cleanup()

    @property
    def was_interrupted(self) -> bool:
        """Say whether a signal was to end the program."""
        return self._stopped_by is not None

    def ended(self, run: Run) -> HowEnded:
        """Return how *run*, one of these, ended."""
        return self._ended[run.record.pid]

    def run_walking(self, values_file: ValuesFile | None, *, batches: WalkedBatches) -> Run:
        """
        Run the program as `run` does; where it shows batches of several shapes, look at *batches* of each DataLoader from then on.

        It may be the run with its values that shows them first: without these a program may fail in its first batch. A first run that is
        followed by others for its values need not be made again for that.
        """
        found = self.run(values_file)
        is_told = self.was_interrupted or found.record.needed_rank is not None
        if is_told or self._asked.walked.most or not batches_differ(found.record):
            return found
        self._asked = self._asked._replace(walked=batches)
        if values_file is None and needs_values(found.record):
            return found
        if values_file is not None and values_file.variant is not None and values_file.path is not None:
            values_file.path.unlink(missing_ok=True)  # they are those of other batches
        with suppress(StoppedError):  # what was seen is told
            found = self.run(values_file)
        return found

    def run(self, values_file: ValuesFile | None) -> Run:
        """
        Run the program with that file of values, the first time with None.

        Raises NothingSeenError for a program that did not use the GPU, UsageError for one that takes longer than it is given, StoppedError
        where a signal was to end the program, in this run or an earlier one; what the first run showed before is returned.
        """
        is_first = self._first is None
        try:
            if values_file is not None and not is_first and self._stopped_by is None:
                self._tell_next(values_file)
            found = self._run_somehow(values_file)
        except KeyboardInterrupt as error:  # while a process imports, or a run is read: SIGTERM and SIGHUP come as it does (`cli/app.py`)
            if is_first:
                raise
            self._stopped_by = signal.SIGINT
            raise StoppedError("a signal ended it") from error
        if self._stopped_by is not None and not is_first:
            raise StoppedError(f"{self._stopped_by.name} ended it")
        walked = self._asked.walked
        if walked.late_steps and len(found.record.steps) > walked.steps:  # so does each further run, to be compared with this one
            self._asked = self._asked._replace(walked=walked._replace(steps=walked.late_steps, late_steps=0))
        return found

    def _tell_next(self, file: ValuesFile) -> None:
        """Tell whoever asked for it with what the program is run again."""
        is_of_first = self._first is not None and self._first.failure is not None and not self._has_told_failure
        self._has_told_failure = True
        if self._asked.on_next_run is not None:
            self._asked.on_next_run(f"{file}{'; the error above is of the run without them' if is_of_first else ''}")

    def _run_somehow(self, values_file: ValuesFile | None) -> Run:
        """Run the program, in a fork of a warm process where that is as good."""
        if self._stopped_by is not None:
            if self._first is None:
                raise nothing_seen(-self._stopped_by)
            raise StoppedError(f"{self._stopped_by.name} ended the program before")
        if values_file == OTHER_TIMES and self._first is not None and (beside := self._run_beside(self._first)) is not None:
            return beside
        if self._first is not None:
            self._end_beside()
        if self._first is not None and self._warm is None and self._program is not None:
            self._warm = self._started_warm(self._first, self.folder / "warm")
        found = self._run(values_file, self._warm) if self._warm is not None else None
        if found is None or (self._warm is not None and not self._is_as_good(found.record, self._warm)):
            self._give_up_warm()
            if self._stopped_by is not None:
                raise nothing_seen(-self._stopped_by)
            found = self._run(values_file, None, is_heard=found is None)
            assert found is not None  # or an error was raised
        if self._first is None:
            self._first = found.record
            self._prepare_next(found)
        return found

    def _run_beside(self, first: RunRecord) -> Run | None:
        """Return what the run showed that has begun beside the *first*; None where there is none, or where it failed and may not alone."""
        begun, self._beside = self._beside, None
        found = None if begun is None else self._end_of(begun, is_with_values=True, is_told=False)
        if self._stopped_by is not None:
            raise StoppedError(f"{self._stopped_by.name} ended it")
        return found if found is None or found.record.failure is None or first.failure is not None else None

    def _end_beside(self) -> None:
        if self._beside is not None:
            with ended_after(self._beside.process, str(self._beside.folder)):
                self._beside = None

    def _give_up_warm(self) -> None:
        """Run the program by itself from now on; where nothing was seen of it yet, another warm process may do."""
        if self._warm is not None:
            self._warm.end()
        self._warm = None
        if self._first is not None:
            self._program = None

    def _is_as_good(self, record: RunRecord, warm: WarmProcess) -> bool:
        """Say whether what a fork of *warm* showed is what the program by itself would."""
        if self._first is None:
            return warm.has_imported_with(record.set_variables)
        return record.failure is None or self._first.failure is not None

    def _prepare_next(self, first: Run) -> None:
        """See to it that what comes after the first run finds its imports made: the runs of this rehearsal, or the next one's."""
        if self._warm is None and not self.ended(first).is_first:
            self._program = _launched(first.record)
            self._is_launched = self._program is not None
        if self._program is None or self._kept is None:
            return
        if self._warm is not None:
            self._warm.import_all(first.record.modules)
        else:
            self._warm = self._started_warm(first.record, self._kept.make_folder(), idle_seconds=IDLE_SECONDS)

    def _started_warm(self, seen: RunRecord, folder: Path, *, idle_seconds: float = 0.0) -> WarmProcess:
        """Start a process that imports what the program was *seen* to."""
        assert self._program is not None
        folder.mkdir(exist_ok=True)
        asked = self._asked
        environment = environment_for(asked.ranks.gpus_with(asked.gpu), asked.libraries, inherited=asked.inherited)
        environment |= own_caches(folder) | asked.variables | self._with_temporary(folder / "temporary")
        environment = self._writes_in(folder).held_in(environment)
        return start_warm(
            self._program,
            {**seen.given_variables, **environment} if self._is_launched else environment,
            folder,
            modules=seen.modules,
            variables=seen.set_variables,
            idle_seconds=idle_seconds,
            is_launched=self._is_launched,
        )

    def _writes_in(self, folder: Path, *, passed: Iterable[Path] = ()) -> Writes:
        asked = self._asked
        return Writes(
            folder,
            script=asked.command.script,
            are_allowed=asked.allow_writes,
            passed=[*passed, self._walks, *([asked.sent] if asked.sent else [])],
            shown=asked.shown,
            prepared=asked.prepared,
        )

    # one run

    def _run(self, values_file: ValuesFile | None, warm: WarmProcess | None, *, is_heard: bool = True) -> Run | None:
        """Run the program, in a fork of *warm* where there is one; return what was seen, None where that is nothing of a fork."""
        begun = self._begin(values_file or NO_VALUES, warm, is_heard=is_heard and values_file is None)
        if begun is None:
            return None
        begin = time.monotonic()
        found = self._end_of(begun, is_with_values=values_file is not None, is_told=not begun.is_fork)
        self._first_seconds = self._first_seconds or time.monotonic() - begin
        if values_file is not None and values_file.path is not None and begun.file.path is not None and begun.file.path.exists():
            begun.file.path.replace(values_file.path)
        return found

    def _begin(self, file: ValuesFile, warm: WarmProcess | None, *, is_heard: bool) -> _Begun | None:
        """Start the program, in a fork of *warm* where there is one; None where that cannot be had any more."""
        try:
            return self._begin_in(file, warm, is_heard=is_heard)
        except FileNotFoundError as error:
            if warm is None or error.filename is None or not Path(error.filename).is_relative_to(warm.folder):
                raise
            return None  # it has ended just now, as it does after a while without a program, and has removed its folder

    def _begin_in(self, file: ValuesFile, warm: WarmProcess | None, *, is_heard: bool) -> _Begun | None:
        """Start the program as `_begin` says. Raises FileNotFoundError for what is not there any more in the folder of *warm*."""
        self._num_runs += 1
        folder = Path(tempfile.mkdtemp(dir=warm.folder if warm else self.folder))
        if warm is not None:
            self._others.append(folder)
        if file.variant is not None:
            file = file._replace(path=folder / "values")  # what a program writes stays in the folder of its own run
        own = self._with_temporary(self._temporary_of(self._num_runs))
        writes = self._writes_in(folder, passed=map(Path, own.values()))
        environment = writes.held_in(self._environment(folder, file) | own)
        process = self._start(environment, warm, is_heard=is_heard and self._asked.is_heard)
        if process is None:
            return None
        left_waiting = LeftWaiting(folder, lambda: all_of(str(folder)))
        return _Begun(
            self._num_runs, process, folder, file, writes, is_fork=warm is not None, left_waiting=left_waiting, began_at=time.monotonic()
        )

    def _with_temporary(self, folder: Path) -> dict[str, str]:
        """Return the variable by which a process makes its temporary files in *folder*, which is made; none where it makes the user's."""
        if self._asked.allow_writes or "TMPDIR" in self._asked.inherited:  # which may hold what a job has put there
            return {}
        folder.mkdir(exist_ok=True)
        return {"TMPDIR": str(folder)}

    def _temporary_of(self, number: int) -> Path:
        """Return where the program makes its temporary files in that run."""
        return Path(self._of_programs.name, str(number))

    def _end_of(self, begun: _Begun, *, is_with_values: bool, is_told: bool) -> Run | None:
        """Wait for the end of a run, and return what was seen; where that is nothing, an error if it *is_told*."""
        try:
            with ended_after(begun.process, str(begun.folder)):
                self._wait(begun, is_with_values=is_with_values)
        finally:
            shutil.rmtree(self._temporary_of(begun.number), ignore_errors=True)
        return self._seen(begun, is_told=is_told)

    def _wait(self, begun: _Begun, *, is_with_values: bool) -> None:
        """
        Wait for its end. Raises EndlessError for a run with values that takes far longer than the first did, or than any is given: what
        was seen before it is told all the same.
        """
        limit = self._asked.timeout_seconds
        has_failed = self._first is not None and self._first.failure is not None
        most = most_seconds(None if has_failed else self._first_seconds) if is_with_values else math.inf
        seconds = min(most, math.inf if limit is None else limit)
        try:
            self._stopped_by = wait_for(begun.process, seconds if math.isfinite(seconds) else None, is_over=lambda: self._look_at(begun))
        except NotEndedError as error:
            self._stopped_by = error.after
            if error.after is not None:
                return  # what it writes when it is ended is told
            if not is_with_values:
                where = where_it_is(begun.folder)
                raise UsageError(f"{error.message}: it is at {where}" if where else error.message, hint=error.hint) from error
            than = "" if self._first_seconds is None else f"; the first run took {self._first_seconds:.0f}"
            raise EndlessError(f"it was ended after {seconds:.0f} seconds{than}") from error

    def _look_at(self, begun: _Begun) -> bool:
        """Tell how far it is, and see whether the run with the other times is to begin; return whether it waits for what has ended."""
        self._tell(begun)
        self._begin_beside(begun)
        return not begun.is_fork and begun.left_waiting.is_idle()

    def _begin_beside(self, begun: _Begun) -> None:
        """Begin the run with the other times, where *begun* is the first, chooses by time, and both have room."""
        if self._first is not None or not self._may_run_beside or not (begun.folder / CHOOSES).exists():
            return
        self._may_run_beside = False
        if has_room_for_another(begun.process.pid):
            with suppress(OSError):  # no process can be had; it can, perhaps, when the first has ended
                self._beside = self._begin(OTHER_TIMES, None, is_heard=False)

    def _tell(self, begun: _Begun) -> None:
        """Tell whoever asked for it how far the program is, once a second."""
        now = time.monotonic()
        if self._asked.on_progress is None or now < self._told_at + _TOLD_EVERY_SECONDS:
            return
        self._told_at = now
        try:
            progress = _progress_of(begun)
        except (OSError, ValueError):  # the line is being written
            return
        ended = (progress.num_run, progress.num_steps)
        if ended != self._last_ended:
            self._last_ended, self._ended_at = ended, now if progress.num_steps else begun.began_at
        if now < self._ended_at + ASKED_EVERY_SECONDS:
            if progress.num_steps:
                self._asked.on_progress(progress)
        elif now >= self._where_at + ASKED_EVERY_SECONDS:
            self._where_at = now
            where = where_it_is(begun.folder)
            if where is not None:
                self._asked.on_progress(progress._replace(where=where))

    def _environment(self, folder: Path, file: ValuesFile) -> dict[str, str]:
        """Return the environment of a run: what the simulated GPU and child/script.py read, and where Python finds the hook."""
        asked = self._asked
        has_run_out = self._first is not None and self._first.out_of_memory is not None
        card = asked.gpu if file.variant is None or has_run_out else with_ample_memory(asked.gpu)
        inherited = asked.inherited
        return {
            **environment_for(
                asked.ranks.gpus_with(card),
                asked.libraries,
                context_bytes=asked.context_bytes + asked.nccl_bytes,
                inherited=inherited,
            ),
            **asked.ranks.variables(),
            **({"MEMPLAN_SENT": str(asked.sent)} if asked.sent else {}),
            **({SKIP_WEIGHTS: str(folder)} if asked.skip_weights else {}),
            **({HABITS: asked.habits} if asked.habits is not None else {}),
            "MEMPLAN_NCCL": asked.torch.nccl_number,
            **own_caches(folder),
            **asked.variables,
            "MEMPLAN_LOG": str(folder / "log"),
            "MEMPLAN_ACCOUNT": str(folder / "account"),  # the processes of one program share the GPU
            "MEMPLAN_WORKSPACES": "1",
            "MEMPLAN_RECORDER": _RECORDER,
            **recorder_variables(
                folder,
                asked.torch,
                walked=asked.walked,
                answers=asked.answers,
                file=file,
                walks=self._walks,
                inherited=inherited,
            ),
        }

    def _start(self, environment: Mapping[str, str], warm: WarmProcess | None, *, is_heard: bool) -> ProgramProcess | None:
        asked = self._asked
        told = streams(is_heard=is_heard, output_to_stderr=asked.output_to_stderr, said=asked.said, found=self._standard_input)
        with told as (standard_input, output, errors):
            if warm is not None and self._program is not None and not self._is_launched:
                fork = warm.start(self._program, environment, streams=(standard_input, output, errors))
                self._forks += [fork] if fork is not None else []
                return fork
            if warm is not None:
                environment = {**environment, **warm.variables()}
            words = command_for(self._asked.command.words)
            return subprocess.Popen(words, env=environment, stdin=standard_input, stdout=output, stderr=errors)

    def _seen(self, begun: _Begun, *, is_told: bool) -> Run | None:
        exit_code = begun.process.wait()
        log, record = read_device_log(begun.folder / "log"), deciding_record(begun.folder)
        if record is None and not is_told:
            return None
        if record is None or record.failure is not None or exit_code:
            log.check()
        if begun.left_waiting.was_idle and record is not None:
            exit_code = 0 if record.was_cut else 1  # not that of the signal that ended what waited
        elif self._stopped_by is not None and exit_code and record is not None and record.failure is None:
            record = record.model_copy(update={"was_interrupted": True})  # a launcher makes a failure of it, as torchrun does of SIGTERM
        record = checked(record, exit_code, lacks_weights=(begun.folder / LACKS_WEIGHTS).exists())
        self._ended[record.pid] = HowEnded(exit_code, record.pid == begun.process.pid, begun.writes)
        return Run(record, log)


def _launched(record: RunRecord) -> PythonProgram | None:
    """Return what the process of *record* runs, which another one has started; None where a fork could not."""
    return python_program(record.python, record.command[1:]) if record.python else None
