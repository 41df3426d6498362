"""Measuring a user's own program as its variables say, on a GPU of this machine: a command with changed files, or a function."""

from __future__ import annotations

import tempfile
from pathlib import Path

from memplan.errors import NothingSeenError, NotRehearsedError, SizeRefusedError, UsageError
from memplan.estimators.program_steps import NUM_STEPS, WALKED, files_shown
from memplan.estimators.rehearse_program import last_lines, words_of
from memplan.estimators.workload_steps import allocator_environment
from memplan.execution.measure import Measurer
from memplan.execution.measure_script import measure_script
from memplan.execution.measurement import Measurement
from memplan.execution.step_source import TypedText, step_source_from
from memplan.hardware.gpu import GpuSpec
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram
from memplan.programs.user_program import UserProgram


def measure_program(program: UserProgram, gpu: GpuSpec) -> Measurement:
    """
    Return what *program*, of one stage, takes of *gpu*, of this machine, with its present values.

    Raises NotRehearsedError for a program that uses no GPU or takes no step, or trains on several; SizeRefusedError for one that fails.
    """
    if program.parallelism.num_gpus > 1:
        raise NotRehearsedError(
            f"training on {program.parallelism.num_gpus} GPUs cannot be measured on one", hint="use a rehearsal: `gpu=`"
        )
    if isinstance(program, FunctionProgram):
        return _measure_function(program, gpu)
    assert isinstance(program, CommandProgram)
    with tempfile.TemporaryDirectory(prefix="memplan-measurement-") as folder:
        said = Path(folder, "said")
        found = _measure_command(program, gpu, said)
        failure = found.failure
        if failure is not None:
            where = f" at {failure.place}" if failure.place else ""
            message = f"the program failed in its {failure.phase}{where}: {failure.first_line}"
            raise SizeRefusedError(message, hint=f"its last output:{last_lines(said)}")
    if found.fits and not found.steps:
        raise NotRehearsedError("the program ended without an optimizer step", hint="give a command that trains, for three optimizer steps")
    return found


def _measure_command(program: CommandProgram, gpu: GpuSpec, said: Path) -> Measurement:
    try:
        return measure_script(
            words_of(program),
            gpu=gpu,
            steps=NUM_STEPS,
            shown=files_shown(program),
            said=said,
            walks_where_they_differ=WALKED,
            skip_weights=program.skips_weights,
        )
    except NothingSeenError as error:
        raise SizeRefusedError(error.message, hint=f"its last output:{last_lines(said)}") from error


def _measure_function(program: FunctionProgram, gpu: GpuSpec) -> Measurement:
    settings = program.training.allocator_settings
    with Measurer(step_source_from(program.source), gpu) as measurer:
        try:
            return measurer.measure(
                {name: TypedText(value) for name, value in program.arguments_with_values.items()},
                environment=allocator_environment(settings) if settings else {},
            )
        except UsageError as error:
            raise SizeRefusedError(error.message, hint=error.hint) from error
