"""
The steps of the user's own programs: a command or a function, run with other values on the simulated GPU.

Four optimizer steps of a command are run, with no more than two micro-batches each, and eight where the fourth takes more or each takes
other than all; three of a function, and up to ten where its third takes more. Where the batches of its DataLoaders differ in shape, they
are walked through first, and the largest come second. What is known of the sizes that were run (`known_sizes.py`) says which are not run
any more.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memplan.errors import NothingSeenError, NotRehearsedError, UsageError
from memplan.estimators.batch_shares import BatchShares, shows_its_batch
from memplan.estimators.beside import Job
from memplan.estimators.known_sizes import CLEARLY_MORE, KnownSizes, surroundings_of, where_of
from memplan.estimators.read_files import source_of
from memplan.estimators.rehearsal_cache import family_of
from memplan.estimators.rehearse_program import error_in, last_lines, rehearse_command, rehearse_function
from memplan.estimators.steps import Step, StepRunner, is_answer, with_fewest_micro_batches
from memplan.execution.findings import MISSING_WEIGHTS
from memplan.execution.guessed_values import NEVER_STEPPED
from memplan.execution.program_process import USERS_SIGNALS, EndedTwiceError
from memplan.execution.program_runs import OnProgress, ProgramProgress
from memplan.execution.recorded_run import WalkedBatches
from memplan.execution.rehearsal import Finding, Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.runner import DEFAULT_STEPS, KILLED, MOST_STEPS
from memplan.execution.step_source import step_source_from
from memplan.execution.warm import Kept
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryRange
from memplan.programs.command_line import changed_files
from memplan.programs.command_program import CommandProgram, CommandStage
from memplan.programs.function_program import FunctionProgram
from memplan.programs.overlay import tells_reads_of
from memplan.programs.prepared_data import PreparedData
from memplan.programs.user_program import UserProgram
from memplan.traces.trace import BUILD
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.training import MOST_STEPS as MOST_SAMPLES

NUM_STEPS = DEFAULT_STEPS
"""Of a measurement."""

FEW_STEPS, MORE_STEPS = 4, 8
"""
Steps of a rehearsed command, and of one whose last of these few reserves more: what PyTorch has cached need not serve the next step, though
that allocates the same. SRGAN's fourth step at 13 images reserves 6.7 GiB where three reserve 6.3, and so do sixteen.
"""

WALKED = WalkedBatches(most=1000, own_first=3, steps=MORE_STEPS, seconds=15.0)
"""
Where batches differ in shape: what PyTorch has cached for a few of different sizes does not serve the next, and counts beside the largest.
The three batches that a KTO training of TRL begins with reserve 14.0 GiB, its largest one after the first alone 10.7. DETR at 12 images
takes 20.2 GiB in five steps, 22.0 in six, and 23.3 in twenty, which the margin is for.
"""

FEW_SAMPLES, MORE_SAMPLES = 2, 16
"""Micro-batches that are run to see whether the program reads what it is given: the second for one that has no more than the first."""

MANY_MICRO_BATCHES = 16
"""In an optimizer step: perhaps the program makes them of a number in its command."""

_WHOLE_BATCH = " (where the command gives the batch of an optimizer step as a number, `{effective_batch_size}` belongs in its place)"

_WARM = "warm"
"""The file that says where a warm process is."""

_OF_NO_SIZE = re.compile(
    r"^(\w+\.)*(ModuleNotFoundError|ImportError|SyntaxError|IndentationError|URLError|gaierror|LocalEntryNotFoundError)\b"
    r"|^(\w+\.)*(ConnectionError|ConnectError|ConnectTimeout|ReadTimeout)\b|^OSError: We couldn't connect to "
    r"|: can't open file '[^']+': \[Errno 2\]"
    r"|: error: (unrecognized arguments|the following arguments are required):"
    r"|^Error: No such option"
)
"""
Errors that a program ends with whatever its batch, Python's own, argparse's and click's, and of a network that is not there: no other size
has to be tried to see that, and none is refused for it.
"""


class ProgramSteps(StepRunner):
    """Runs steps of the user's own programs."""

    def __init__(self, cache: Path | None) -> None:
        super().__init__()
        self._sizes = KnownSizes(cache)
        self._shares = BatchShares()
        self._walked: set[tuple[str, ...]] = set()  # commands whose batches differ in shape
        self._decided_by_data: set[tuple[str, ...]] = set()  # commands whose memory hangs on values that they read from the GPU
        self._harmless: dict[tuple[str, ...], set[str]] = {}  # lines of commands that read values which decided nothing
        self._decided_somewhere: set[tuple[str, ...]] = set()  # commands for which values decided sizes with some batch
        self._needs_more: set[tuple[str, ...]] = set()  # commands of which four steps tell too little
        self._varying: set[str] = set()  # programs whose steps differ, and whose batches nobody can look through
        self._begin_ns = 0  # of the run that is made now
        self._has_run = False
        self._where = ""  # that was told last
        self._early: list[Step] = []  # what was to be begun before the first run
        self._functions: dict[str, Rehearser] = {}
        self._folder: Path | None = None
        self._prepared: PreparedData | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        """End what was started for more than one run."""
        self.end()
        for rehearser in self._functions.values():
            rehearser.close()
        if self._folder is not None:
            for warm in Kept(self._folder / _WARM).started():
                warm.end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _own_folder(self) -> Path:
        """Return the folder for what serves more than one run."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="memplan-plan-"))
        return self._folder

    def _warm_file(self, program: CommandProgram) -> Path | None:
        """Return the file that says where a process is that has made the program's imports; None where each run needs one of its own."""
        if any(place.is_of_environment for place in (*program.places, *program.shortened)):
            return None
        return self._own_folder() / _WARM

    def _prepared_data(self) -> PreparedData:
        """Return where data that programs prepare are kept."""
        if self._prepared is None:
            self._prepared = PreparedData(self._own_folder() / "datasets", os.environ)
        return self._prepared

    def step_of(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Step:
        """Return the step: what the program is, and its values."""
        assert isinstance(program, CommandProgram | FunctionProgram)
        reduced = with_fewest_micro_batches(program, stage)
        card = of_some_kind(gpu).endless()
        likeness = reduced.with_training(micro_batch_size=1).model_dump_json()
        kind = {name: getattr(card, name) for name in ("compute_capability", "multiprocessors")}
        family = family_of({"step": likeness, "card": kind, "surroundings": surroundings_of(program)})
        return Step(family, program.training.micro_batch_size, likeness, reduced, card)

    def check(self, step: Step) -> None:
        """Raise SizeRefusedError for a size that the program is known to refuse."""
        self._sizes.check(step)

    def kept_as(self, step: Step) -> str | None:
        """Return the family with what the program reads as it is now; None for a program that nothing is known of, or that has changed."""
        return self._sizes.kept_as(step)

    def rehearse(self, step: Step) -> Rehearsal:
        """
        Return what *step* does.

        Raises SizeRefusedError where the program does not run with that size, NotRehearsedError where it does not run at all, or sizes in
        it were guessed; UsageError where it does not heed its batch, or takes it for another one than a micro-batch.
        """
        self._begin_ns = time.time_ns()
        try:
            found = self._rehearsed(step)
            self._sizes.check_likeness(step, found)
            self._shares.check(step, found, without_accumulation=lambda: self._otherwise(step, gradient_accumulation_steps=1))
            limit = self._shares.limit_of(step, found, of_size=lambda size: self._otherwise(step, micro_batch_size=size))
            if limit is not None:
                self._sizes.limit_to(step, limit)
            if shows_its_batch(found, step.micro_batch_size):
                self._sizes.note_took(step)
        finally:
            self._sizes.has_run(step, begin_ns=self._begin_ns)
        if not self._has_run:
            self._has_run = True
            self._begin_early(step)
        return found

    def sizes_to_confirm(self, step: Step) -> Iterator[int]:
        """Yield a small size; where the program asks for as much memory with that, one that is very much larger."""
        size = step.micro_batch_size
        for other in (FEW_SAMPLES if size > FEW_SAMPLES else MORE_SAMPLES, min(CLEARLY_MORE * size, MOST_SAMPLES)):
            is_comparable = step.program.varies("micro_batch_size") and self._sizes.has_run_with_same_files(step)
            if not is_comparable or self._sizes.reads_its_batch(step):
                return
            yield other

    def _otherwise(self, step: Step, **training: int) -> Rehearsal:
        """Return what *step* does with other values of its *training*."""
        stages = step.program.stages
        program = step.program.with_training(**training)
        return self._rehearsed(self.step_of(program, step.gpu, stages[0] if stages else None))

    def _rehearsed(self, step: Step) -> Rehearsal:
        program = step.program
        assert isinstance(program, CommandProgram | FunctionProgram)
        with tempfile.TemporaryDirectory(prefix="memplan-plan-") as folder:
            said = Path(folder, "said")
            try:
                found = self._run(program, step, said)
                self._sizes.learn_files(step, found)
                self._check(step, found, said)
                _check_files_are_read(step, found)
            except NothingSeenError as error:
                if error.program_exit_code == 0:
                    output = last_lines(said)
                    hint = f"{error.hint}; its last output:{output}" if output else error.hint
                    raise NotRehearsedError(f"{where_of(step)}{error.message}", hint=hint) from error
                reason = "" if KILLED in error.message else error_in(said)  # what it said before the system ended it is no reason
                message = f"the program failed before it used the GPU: {reason or error.message}"
                advice = f"{MISSING_WEIGHTS}; " if error.hint == MISSING_WEIGHTS else ""
                hint = f"{advice}its last output:{last_lines(said)}"
                if _OF_NO_SIZE.search(reason):
                    raise NotRehearsedError(f"{where_of(step)}{message}", hint=hint) from error
                raise self._refusal(step, message, hint=hint) from error
        return found

    def by_formula(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """Return None: nobody knows a program's model but itself."""
        del program, gpu, stage
        return None

    # one run

    def begin(self, step: Step) -> None:
        """Run *step* beside others, where there is room; from the first run on, which shows what of the host's memory such a run takes."""
        if self._has_run:
            super().begin(step)
        else:
            self._early.append(step)

    def _begin_early(self, run: Step) -> None:
        """Begin what was said before the first *run*, that first which was said first: what came last is asked for right now."""
        early, self._early = self._early, []
        for step in reversed(early):
            if (step.family, step.micro_batch_size) != (run.family, run.micro_batch_size):
                self.begin(step)

    def job_of(self, step: Step) -> Job | None:
        """Return its run; None of a program that is on several GPUs, each of whose ranks is a process already."""
        program = step.program
        if isinstance(program, FunctionProgram):
            return Job(run_function, (program, step.gpu, self._steps_of_function(program)))
        assert isinstance(program, CommandProgram)
        if program.parallelism.num_gpus > 1:
            return None
        known = self._known_of(program)
        if known.warm_file is not None and not known.warm_file.exists():  # it would leave such a process to nobody
            known = known._replace(warm_file=None)
        return Job(run_command, (program, step.gpu, known), tells_progress=True)

    def _run(self, program: UserProgram, step: Step, said: Path) -> Rehearsal:
        begun = self.begun(step)
        if begun is not None and begun.rehearsal.values_effect == "taken_for_nothing" and not self.is_searching:
            begun = None
        if begun is not None:
            self._begin_ns = begun.begin_ns
        run = self._run_function if isinstance(program, FunctionProgram) else self._run_command
        found = run(step, said) if begun is None else begun.rehearsal
        self.learn(step, found)
        if self._has_run_too_few(program, found):
            found = run(step, said)
        return _told_of_variation(found, program) if _key_of(program) in self._varying else found

    def suffices(self, step: Step, found: Rehearsal) -> bool:
        """Say whether *found* has as many steps as its program is known to need by now."""
        assert isinstance(step.program, UserProgram)
        return not self._has_run_too_few(step.program, found)

    def _has_run_too_few(self, program: UserProgram, found: Rehearsal) -> bool:
        """Say whether *found* has fewer steps than *program* is known to need by now: those that were run without that knowledge."""
        varies = _key_of(program) in self._varying
        if isinstance(program, FunctionProgram):
            return varies and len(found.steps) < MOST_STEPS
        assert isinstance(program, CommandProgram)
        return len(found.steps) == FEW_STEPS and found.was_cut and (varies or program.command in self._needs_more)

    def _steps_of_function(self, program: FunctionProgram) -> int | None:
        """Return how many steps of *program* are run; None: as many as it shows to be needed."""
        return MOST_STEPS if _key_of(program) in self._varying else None

    def _run_command(self, step: Step, said: Path) -> Rehearsal:
        program = step.program
        assert isinstance(program, CommandProgram)
        return self.run_apart(lambda: _run_unless_stopped(program, step.gpu, self._known_of(program), said=said, on_progress=self.tell))

    def tell(self, progress: ProgramProgress) -> None:
        """Tell whoever asked for it where the program is that has not ended a step for long."""
        again = f" (run {progress.num_run}, for the values that decide sizes)" if progress.num_run > 1 else ""
        whole = _WHOLE_BATCH if progress.num_backwards > MANY_MICRO_BATCHES else ""
        where = "" if progress.waiting is None else f"{progress.waiting}{again}{whole}"
        if self.on_where is not None and where != self._where:
            self._where = where
            self.on_where(where)

    def learn(self, step: Step, found: Rehearsal) -> None:
        """Take in what its batches and values were like, of a run of this plan or of one that was kept: the next run begins with it."""
        program = step.program
        assert isinstance(program, UserProgram)
        if any(finding.kind == "varying_steps" for finding in found.findings):
            self._varying.add(_key_of(program))
        if not isinstance(program, CommandProgram):
            return
        if found.num_walked_batches:
            self._walked.add(program.command)
        if any(read.basis == "data" and read.following_bytes for read in found.reads):
            self._decided_by_data.add(program.command)
        if found.values_effect == "nothing" and is_answer(found):  # where sizes were guessed, nothing is known of what decides them
            self._harmless.setdefault(program.command, set()).update(found.deciding_reads)
        elif found.values_effect == "sizes":
            self._decided_somewhere.add(program.command)
        if _settles_late(found) or _all_differ(found):
            self._needs_more.add(program.command)

    def _known_of(self, program: CommandProgram) -> Known:
        needs_more = _key_of(program) in self._varying or program.command in self._needs_more | self._walked
        return Known(
            has_several_shapes=program.command in self._walked,
            is_decided_by_data=program.command in self._decided_by_data,
            steps=MORE_STEPS if needs_more else FEW_STEPS,
            harmless=self._harmless_of(program) if self.is_searching else frozenset(),
            warm_file=self._warm_file(program),
            prepared=self._prepared_data(),
        )

    def takes_values_for_nothing(self, step: Step) -> bool:
        """Say so of a command, with another of whose sizes that was found."""
        return isinstance(step.program, CommandProgram) and bool(self._harmless_of(step.program))

    def _harmless_of(self, program: CommandProgram) -> frozenset[str]:
        is_sure = program.command not in self._decided_somewhere
        return frozenset(self._harmless.get(program.command, ())) if is_sure else frozenset()

    def _run_function(self, step: Step, said: Path) -> Rehearsal:
        del said  # what a function says goes to this process's own streams
        program = step.program
        assert isinstance(program, FunctionProgram)
        try:
            return self.run_apart(lambda: run_function(program, step.gpu, self._steps_of_function(program), self._functions))
        except UsageError as error:
            raise self._refusal(step, error.message, hint=error.hint) from error

    # what came of it

    def _refusal(self, step: Step, message: str, *, hint: str | None) -> NotRehearsedError:
        return self._sizes.refusal(step, message, hint=hint, begin_ns=self._begin_ns)

    def _check(self, step: Step, found: Rehearsal, said: Path) -> None:
        """Raise an error where a plan cannot rest on what was *found*."""
        if found.failure is not None:
            where = f" at {found.failure.place}" if found.failure.place else ""
            text = found.failure.first_line if said.exists() else found.failure.message  # where it told the rest itself
            when = "before its first step" if found.failure.phase == BUILD else f"in {found.failure.phase}"
            message = f"the program failed {when}{where}: {text}"
            lacks_weights = any(finding.kind == "missing_weights" for finding in found.findings)
            output = f"its last output:{last_lines(said)}" if said.exists() else None
            hint = MISSING_WEIGHTS if lacks_weights else output
            if found.failure.is_of_one_sample:
                hint = f"its dataset raised that for one sample, which says nothing of a batch; {output or 'try it without memplan'}"
                raise NotRehearsedError(f"{where_of(step)}{message}", hint=hint)
            if _OF_NO_SIZE.search(found.failure.message):
                raise NotRehearsedError(f"{where_of(step)}{message}", hint=hint)
            raise self._refusal(step, message, hint=hint)
        if not found.steps:
            hint = "give a command that trains, for two optimizer steps or more"
            raise self._refusal(step, "the program ended without an optimizer step", hint=hint)
        if found.lower_bound_reasons:
            reasons = "; ".join(found.lower_bound_reasons)
            is_late = all(reason.endswith(NEVER_STEPPED) for reason in found.lower_bound_reasons)
            raise self._refusal(step, f"the memory is not known: {reasons}", hint=_SOONER if is_late else _ANSWERS)


_ANSWERS = 'rehearse the program by itself, and say what it reads: `answers={"FILE.py:LINE": "1"}`'
_SOONER = 'where a setting says when that begins to train, have it begin at once in rehearsals: `short=["KEY=0"]`'


class Known(NamedTuple):
    """What is known of a command when it is run once more."""

    has_several_shapes: bool
    """Its batches have."""
    is_decided_by_data: bool
    """Its memory hangs on values that it reads from the GPU."""
    steps: int
    """That are run: more where its fourth step reserves more than those before, or its steps are of several sizes."""
    harmless: frozenset[str]
    """Lines that read values which decided nothing with another batch; none where that is not to be taken for so."""
    warm_file: Path | None
    """Says where a process is that has made its imports."""
    prepared: PreparedData
    """Data that its runs have prepared."""


def run_command(
    program: CommandProgram, gpu: GpuSpec, known: Known, *, said: Path | None = None, on_progress: OnProgress | None = None
) -> Rehearsal:
    """
    Return what the command does with its present values; what it says goes to the file *said*. *on_progress* is called from time to time.

    Raises as `rehearse_script`.
    """
    with tempfile.TemporaryDirectory(prefix="memplan-plan-") as folder:
        return rehearse_command(
            program,
            gpu=gpu,
            shown=files_shown(program),
            said=said or Path(folder, "said"),
            steps=known.steps,
            most_walked_batches=WALKED.most if known.has_several_shapes else 0,
            own_first=WALKED.own_first,
            most_walk_seconds=WALKED.seconds,
            walks_where_they_differ=WALKED,
            on_progress=on_progress,
            of_one_rank={
                "keep_warm": known.warm_file or False,
                "prepared": known.prepared,
                "expects_values": known.is_decided_by_data,
                "harmless": known.harmless,
                "late_steps": MORE_STEPS,
            },
        )


def _key_of(program: UserProgram) -> str:
    """Return what is equal of one program with all its values."""
    assert isinstance(program, CommandProgram | FunctionProgram)
    return program.source if isinstance(program, FunctionProgram) else shlex.join(program.command)


def _told_of_variation(found: Rehearsal, program: UserProgram) -> Rehearsal:
    """
    Return *found*, of a program whose steps differed with another batch, with word of that.

    Of many texts the longest is as long in most steps, so that a few steps of a large batch are alike where those of a small one are not.
    """
    if any(finding.kind == "varying_steps" for finding in found.findings):
        return found
    message = (
        "with another batch its steps differ, and so do their batches: a later one may take more; let the function make its largest"
        if isinstance(program, FunctionProgram)
        else "with another batch its steps differ, for a reason that the shapes of batches do not show: the largest cannot be looked "
        "for: a later step may take more"
    )
    return found.model_copy(update={"findings": (*found.findings, Finding(kind="varying_steps", message=message))})


def _settles_late(found: Rehearsal) -> bool:
    """Say whether the last of a few steps reserved more than those before, or more steps were run for that."""
    peaks = [step.peak_reserved_bytes for step in found.steps]
    return len(peaks) >= FEW_STEPS and peaks[-1] > peaks[FEW_STEPS - 2]


def _all_differ(found: Rehearsal) -> bool:
    """Say whether each step but the first allocates more or less than any other: they may be draws, of which a few tell little."""
    peaks = [step.peak_allocated_bytes for step in found.steps[1:]]
    return len(peaks) >= FEW_STEPS - 1 and len(set(peaks)) == len(peaks)


def _run_unless_stopped(program: CommandProgram, gpu: GpuSpec, known: Known, *, said: Path, on_progress: OnProgress) -> Rehearsal:
    """Return what `run_command` does. Raises KeyboardInterrupt where a person ended the program: what it did until then is no answer."""
    try:
        found = run_command(program, gpu, known, said=said, on_progress=on_progress)
    except NothingSeenError as error:
        if -error.program_exit_code in USERS_SIGNALS:
            raise KeyboardInterrupt from error
        raise
    except EndedTwiceError as error:
        raise KeyboardInterrupt from error
    if found.was_interrupted:
        raise KeyboardInterrupt
    return found


_run_here: dict[str, Rehearser] = {}
"""What runs functions in this process for another one."""


def run_function(
    program: FunctionProgram, gpu: GpuSpec, steps: int | None = None, rehearsers: dict[str, Rehearser] = _run_here
) -> Rehearsal:
    """
    Return what the function does with its present arguments, in so many *steps*. Raises as `Rehearser.rehearse`.

    *rehearsers*: those that have loaded a program already; what is added lives as long as this process.
    """
    key = f"{program.source} {program.skips_weights}"
    if key not in rehearsers:
        rehearsers[key] = Rehearser(step_source_from(program.source), skip_weights=program.skips_weights)
        atexit.register(rehearsers[key].close)
    return rehearse_function(rehearsers[key], program, gpu=gpu, steps=steps)


def files_shown(program: CommandProgram) -> dict[Path, bytes]:
    """Return the files in which variables of *program* are written, as it has them."""
    return {change.path: change.after for change in changed_files(program)}


def _check_files_are_read(step: Step, found: Rehearsal) -> None:
    """Raise an error where the program has not read the file of its stage, or one with a variable: it ran with other values."""
    program = step.program
    if not isinstance(program, CommandProgram):
        return
    read = {os.path.realpath(source_of(path)) for path in found.read_files}
    for stage in program.stages:
        assert isinstance(stage, CommandStage)
        if os.path.realpath(stage.file) not in read and tells_reads_of(stage.file):
            raise NotRehearsedError(
                f"{where_of(step)}the program does not read {stage.file}: it may have run another stage",
                hint="check the words of the command that say which stage is run",
            )
    for place in program.places:
        for _, file in place.files(program.stages):
            if os.path.realpath(file) not in read and tells_reads_of(file):
                raise NotRehearsedError(
                    f"{where_of(step)}the program does not read {file}, where {place.variable} is to be written",
                    hint="check the field, and which file the command names",
                )
