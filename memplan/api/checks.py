"""`memplan check`: whether the present configuration fits, and where its values have left an applied plan."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from memplan.analysis.checking import Check, check_program
from memplan.api.configuration import Configuration
from memplan.api.journals import journal_root
from memplan.api.methods import Method, by_method
from memplan.edits.config_file import load_config_file
from memplan.edits.drift import Drifted, drift_in, is_applied
from memplan.edits.edit import Location
from memplan.errors import UsageError
from memplan.estimators.base import Estimator
from memplan.estimators.registry import OnRehearsal
from memplan.estimators.steps import Step
from memplan.hardware.gpu import GpuSpec
from memplan.planner.pins import Pins
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram, place_of_function


class Checked(NamedTuple):
    """A check, and what was noticed on the way."""

    check: Check
    notes: tuple[str, ...]
    """First why it is not by rehearsal, where that was wished for."""


def check_configuration(
    configuration: Configuration, gpu: GpuSpec, *, pins: Pins, margin: float, method: Method, on_rehearsal: OnRehearsal | None = None
) -> Checked:
    """
    Return whether *configuration* fits on *gpu* as it is. *on_rehearsal* is called before each rehearsal.

    Raises UsageError where its batch is not known, and as `by_method`.
    """
    if not configuration.is_own_program and not configuration.has_batch and not pins.pins("micro_batch_size"):
        raise UsageError(
            f"{configuration.source} names no batch size: there is nothing to check", hint='give it: `pins={"micro_batch_size": 8}`'
        )
    configuration.refuse_unknown()
    num_rehearsals = 0

    def count(step: Step) -> None:
        nonlocal num_rehearsals
        num_rehearsals += 1
        if on_rehearsal is not None:
            on_rehearsal(step)

    def ask(estimator: Estimator) -> Check:
        found = check_program(configuration.program, gpu, estimator, pins=pins, margin=margin, evidence="formulas")
        if estimator.method == "analytic":
            return found
        return found.model_copy(update={"evidence": "rehearsed now" if num_rehearsals else "kept rehearsal"})

    answered = by_method(method, ask, count, is_slow=configuration.is_own_program)
    known = configuration._replace(has_batch=True)  # it is pinned, or the program's own
    return Checked(answered.answer, (*answered.notes, *known.notes))


def written_at(configuration: Configuration) -> Location | None:
    """Return where the micro-batch of *configuration* is written, or what has it; None where that is no file."""
    program = configuration.program
    if isinstance(program, CommandProgram):
        places = (place for place in program.places if place.variable == "micro_batch_size" and place.file is not None)
        return next((_location(place.file, place.key) for place in places if place.file is not None), None)
    if isinstance(program, FunctionProgram):
        return Location(*place_of_function(program.source))
    if configuration.reading is not None:
        reading = configuration.reading
        entries = [entry for entry in reading.entries if entry.field == "training.micro_batch_size"]
        return next((_location(reading.file_of(entry.file), entry.key) for entry in entries if entry.key in reading.present), None)
    file = Path(configuration.source)
    return _location(file, "training.micro_batch_size") if file.is_file() else None


def _location(file: Path, key: str) -> Location:
    return Location(file, load_config_file(file).line_of(tuple(key.split("."))))


def drift_of(path: Path, *, if_applied: bool = False) -> Drifted:
    """
    Return which values that plans have written into *path*, a configuration or its folder, are not so any more.

    Raises UsageError where nothing has been applied, but not *if_applied*: git keeps no journal, and others have none.
    """
    root = journal_root(path)
    return Drifted(0, ()) if if_applied and not is_applied(root) else drift_in(root)
