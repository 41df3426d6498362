"""
`memplan doctor`: the evidence is gathered here, judged by `analysis/doctor_checks.py`, and the effect of each change rehearsed here.

A configuration is read and its step estimated; the user's own program is run once with its habits recorded, and once more for each change
whose effect on memory a rehearsal can show.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.allocator.config import read_settings
from memplan.allocator.replay import replay
from memplan.allocator.simulator import CachingAllocator, Card
from memplan.analysis.doctor_checks import (
    AllocatorChange,
    Diagnosed,
    Evidence,
    ProgramChange,
    Suspicion,
    Trial,
    WorkloadChange,
    Written,
    suspect,
)
from memplan.analysis.levers import LEAST_SHARE
from memplan.api.configuration import Configuration
from memplan.api.methods import Answered, Method, by_method
from memplan.api.plans import write_changes
from memplan.edits.apply import FileChange, prepare
from memplan.edits.config_file import load_config_file
from memplan.edits.edit import Edit
from memplan.errors import EditRefusedError, MemplanError, NothingSeenError, NotRehearsedError, UsageError
from memplan.estimators.base import Estimator, ReplayingEstimator
from memplan.estimators.registry import OnRehearsal
from memplan.estimators.rehearse_program import last_lines, rehearse_command, rehearse_function
from memplan.execution.program_habits import request
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import UNLIMITED_BYTES, GpuSpec
from memplan.layouts.writer import edits_for, unwritable
from memplan.planner.fitting import heaviest_stage
from memplan.programs.command_line import changed_files
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram, place_of_function
from memplan.workload.workload import Workload

DEFAULT_STEPS = 20
"""Steps of a program that are run: enough for a loop to be one."""


class Diagnosis(NamedTuple):
    """What was found."""

    findings: tuple[Diagnosed, ...]
    edits: tuple[Edit, ...]
    """What writes those that are values of the configuration."""
    notes: tuple[str, ...]
    num_steps: int | None = None
    """Of the user's program that were run; None for a configuration."""


class _Effect(NamedTuple):
    """What a change saves of the GPU's memory; below zero: what it costs."""

    saving_bytes: int
    used_bytes: int
    """Without the change."""
    method: str

    @property
    def is_worth_it(self) -> bool:
        return self.saving_bytes > LEAST_SHARE * self.used_bytes


_FindEffect = Callable[[Trial], _Effect | None]


def diagnose(
    configuration: Configuration,
    gpu: GpuSpec,
    *,
    method: Method = "auto",
    steps: int = DEFAULT_STEPS,
    with_effects: bool = True,
    on_rehearsal: OnRehearsal | None = None,
    on_run: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """
    Return what costs the training of *configuration* memory or time on *gpu* without need.

    *steps*: how many of a program are run; 0: it ends itself. *with_effects*: rehearse what each change saves; without, changes that only
    memory speaks for are not told. *on_run* is called with what a program is run for, before each run.

    Raises NotRehearsedError for a program that does not run, and as `by_method`.
    """
    card = of_some_kind(gpu)
    configuration.refuse_unknown()
    if isinstance(configuration.program, Workload):
        return _of_workload(configuration, configuration.program, card, method, on_rehearsal, with_effects=with_effects)
    return _of_program(configuration.program, card, steps, on_run, with_effects=with_effects)


def changes_of(diagnosis: Diagnosis) -> list[FileChange]:
    """Return what the findings that are values of the configuration would change in its files, checked and not written."""
    return prepare(diagnosis.edits)


def apply(changes: Sequence[FileChange], configuration: Configuration) -> tuple[Path, ...]:
    """Write *changes*, all of them or none, and return their files; `memplan.undo` puts them back."""
    return write_changes(changes, configuration)


# a configuration


def _of_workload(
    configuration: Configuration, workload: Workload, gpu: GpuSpec, method: Method, on_rehearsal: OnRehearsal | None, *, with_effects: bool
) -> Diagnosis:
    evidence = Evidence(gpu, workload, _written(configuration), has_allocator_settings=bool(workload.training.allocator_settings))
    suspicions = suspect(evidence)

    def ask(estimator: Estimator) -> list[_Kept]:
        return _kept(suspicions, lambda trial: _effect_on_workload(workload, trial, gpu, estimator))

    answered = by_method(method, ask, on_rehearsal) if with_effects else Answered(_kept(suspicions, lambda _: None))
    edits = [_edits(kept.suspicion, configuration) for kept in answered.answer]
    found = tuple(kept.finding(is_written=bool(writing)) for kept, writing in zip(answered.answer, edits, strict=True))
    return Diagnosis(found, tuple(edit for writing in edits for edit in writing), (*answered.notes, *configuration.notes))


def _written(configuration: Configuration) -> dict[str, Written]:
    """Return where the fields of a configuration stand."""
    reading = configuration.reading
    if reading is not None:
        return {
            field: Written(
                f"{source.file}:{source.line}", f"`{source.key}` is {source.value}{' by default' if source.why == 'default' else ''}"
            )
            for field, source in reading.sources.items()
        }
    file = Path(configuration.source)
    if not file.is_file() or isinstance(configuration.program, CommandProgram | FunctionProgram):
        return {}
    parsed, found = load_config_file(file), {}
    for key in ("training.precision", "optimizer.implementation"):
        value = parsed.get(tuple(key.split("."))) if parsed.kind_of(tuple(key.split("."))) == "scalar" else None
        if value is not None:
            found[key] = Written(f"{file}:{value.line}", f"`{key}` is {value.value}")
    return found


def _effect_on_workload(workload: Workload, trial: Trial, gpu: GpuSpec, estimator: Estimator) -> _Effect | None:
    """Return what the heaviest stage takes less; None where neither a rehearsal nor the formulas can tell."""
    by, changed = estimator, workload
    if isinstance(trial, AllocatorChange):
        if not isinstance(estimator, ReplayingEstimator):
            return None
        by = estimator.with_allocator_settings(trial.settings)
    elif isinstance(trial, WorkloadChange):
        changed = trial.workload
    before = estimator(workload, gpu, heaviest_stage(workload, gpu, estimator))
    try:
        after = by(changed, gpu, heaviest_stage(changed, gpu, by))
    except NotRehearsedError:
        return None
    used = before.device_used.expected_bytes
    return _Effect(used - after.device_used.expected_bytes, used, estimator.method)


def _edits(suspicion: Suspicion, configuration: Configuration) -> list[Edit]:
    """Return what writes the change into the configuration; nothing where its layout has no key, or no spelling, for it."""
    trial, reading = suspicion.trial, configuration.reading
    if reading is None or not isinstance(trial, WorkloadChange) or not trial.is_in_files or unwritable(reading, trial.workload):
        return []
    try:
        edits = edits_for(reading, trial.workload)
        prepare(edits)
    except EditRefusedError:  # the framework has no such value, or it stands where nobody can change it for sure: it is told all the same
        return []
    return edits


# the user's own program


def _of_program(
    program: CommandProgram | FunctionProgram, gpu: GpuSpec, steps: int, on_run: Callable[[str], None], *, with_effects: bool
) -> Diagnosis:
    if program.stages:
        raise UsageError("one run is looked at, and the program has stages", hint="give the command of one stage alone")
    runs = _Runs(program, gpu.endless(), steps)
    on_run("what it does in its steps")
    seen = runs.run(None)
    is_known = program.has_present_batch and program.varies("micro_batch_size")
    evidence = Evidence(
        gpu,
        written=_written_by(program),
        rehearsal=seen,
        configured_batch_size=program.training.micro_batch_size if is_known else None,
        has_allocator_settings=bool(program.training.allocator_settings),
    )

    known: dict[ProgramChange, _Effect | None] = {}

    def effect(trial: Trial) -> _Effect | None:
        if isinstance(trial, AllocatorChange):
            return _effect_of_settings(seen, trial.settings)
        if not isinstance(trial, ProgramChange):
            return None
        if trial not in known:  # several lines may have one habit
            on_run(f"what the change would save ({trial.name.replace('_', ' ')})")
            known[trial] = runs.effect(seen, trial)
        return known[trial]

    found = tuple(kept.finding() for kept in _kept(suspect(evidence), effect if with_effects else lambda _: None))
    notes = [f"the program failed: {seen.failure.message}; findings are of what ran until then"] if seen.failure is not None else []
    num_ranks = program.parallelism.devices * program.parallelism.nodes
    if num_ranks > 1:
        notes.append(f"findings are of rank {seen.rank} of {num_ranks}; ranks that do the same have the same ones")
    return Diagnosis(found, (), tuple(notes), len(seen.steps))


def _written_by(program: CommandProgram | FunctionProgram) -> dict[str, Written]:
    """Return where the program's batch size is written, where that is known."""
    size = program.training.micro_batch_size
    if isinstance(program, FunctionProgram):
        file, line = place_of_function(program.source)
        return {"training.micro_batch_size": Written(f"{file}:{line}", f"`{program.arguments.get('micro_batch_size')}` is {size}")}
    for place in program.places:
        if place.variable == "micro_batch_size" and place.file is not None:
            at = load_config_file(place.file).line_of(tuple(place.key.split(".")))
            return {"training.micro_batch_size": Written(f"{place.file}:{at}", f"`{place.key}` is {size}")}
    return {"training.micro_batch_size": Written(None, f"the command says micro_batch_size {size}")}


class _Runs:
    """Runs one program, as it is or with a change."""

    def __init__(self, program: CommandProgram | FunctionProgram, gpu: GpuSpec, steps: int) -> None:
        self._program, self._gpu, self._steps = program, gpu, steps

    def run(self, change: ProgramChange | None) -> Rehearsal:
        """Return the rehearsal. Raises NotRehearsedError where nothing was seen."""
        habits = request({change.name: change.places} if change else {})
        try:
            return self._run_function(habits) if isinstance(self._program, FunctionProgram) else self._run_command(habits)
        except NothingSeenError as error:
            raise NotRehearsedError(error.message, hint=error.hint) from error

    def effect(self, seen: Rehearsal, change: ProgramChange) -> _Effect | None:
        """Return what *change* saves; None where the program does not run with it."""
        try:
            changed = self.run(change)
        except MemplanError:
            return None
        if changed.failure is not None or len(changed.steps) != len(seen.steps):
            return None
        used = seen.device_used.expected_bytes
        return _Effect(used - changed.device_used.expected_bytes, used, "rehearsed")

    def _run_function(self, habits: str) -> Rehearsal:
        program = self._program
        assert isinstance(program, FunctionProgram)
        with Rehearser(step_source_from(program.source), skip_weights=program.skips_weights, habits=habits) as rehearser:
            return rehearse_function(rehearser, program, gpu=self._gpu, steps=self._steps or DEFAULT_STEPS)

    def _run_command(self, habits: str) -> Rehearsal:
        assert isinstance(self._program, CommandProgram)
        shown = {change.path: change.after for change in changed_files(self._program)}
        with tempfile.TemporaryDirectory(prefix="memplan-doctor-") as temporary:
            said = Path(temporary, "said")
            try:
                return rehearse_command(self._program, gpu=self._gpu, shown=shown, said=said, steps=self._steps, habits=habits)
            except NothingSeenError as error:
                lines = last_lines(said)
                raise NotRehearsedError(error.message, hint=f"{error.hint}; its last output:{lines}" if lines else error.hint) from error


def _effect_of_settings(seen: Rehearsal, settings: str) -> _Effect | None:
    """Return what the requests that were seen take less under other allocator settings; None where not all of them were recorded."""

    def reserved(text: str) -> int:
        return replay(seen.requests, CachingAllocator(Card(UNLIMITED_BYTES, UNLIMITED_BYTES), read_settings(text))).peak_reserved_bytes

    usual = reserved("")
    if usual != seen.peak_reserved_bytes:
        return None
    return _Effect(usual - reserved(settings), seen.device_used.expected_bytes, "rehearsed")


# findings


class _Kept(NamedTuple):
    """A suspicion that is told, and what its change does."""

    suspicion: Suspicion
    effect: _Effect | None

    def finding(self, *, is_written: bool = False) -> Diagnosed:
        """Return it as it is told. *is_written*: a key of the configuration has its value."""
        effect = self.effect
        return Diagnosed.model_validate({
            **{name: getattr(self.suspicion, name) for name in ("check", "evidence", "change", "place")},
            "saving_bytes": effect and effect.saving_bytes,
            "saving_method": effect and effect.method,
            "is_written_by_apply": is_written,
        })  # fmt: skip


def _kept(suspicions: Sequence[Suspicion], find_effect: _FindEffect) -> list[_Kept]:
    """Return those that are told, each with what its change does: all but those that only count where it saves something."""
    kept = [_Kept(one, find_effect(one.trial) if one.trial is not None else None) for one in suspicions]
    return [one for one in kept if not one.suspicion.only_if_it_saves or (one.effect is not None and one.effect.is_worth_it)]


def check_applicable(configuration: Configuration) -> None:
    """Raise UsageError for a training whose findings are nothing that can be written."""
    if configuration.reading is None:
        raise UsageError(
            f"there is nothing to apply to: memplan writes no file of it ({configuration.source})",
            hint="the findings say what to change",
        )
