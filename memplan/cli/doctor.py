"""`memplan doctor`: what costs a training memory or time without need, with the evidence, the change, and what that saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.asked import (
    WithProgram,
    asked_configuration,
    asked_for,
    asked_gpus,
    gpu_options,
    method_for,
    program_of,
    program_options,
    typed_settings,
)
from memplan.cli.options import config_path_option, format_option, method_option
from memplan.cli.typed_options import in_options
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.api.configuration import Configuration
    from memplan.api.diagnosis import Diagnosis
    from memplan.api.methods import Method
    from memplan.hardware.gpu import GpuSpec

EXAMPLES = """
\b
Examples:
  memplan doctor --gpu a100-80 --config-path conf         a configuration; --apply writes what is a value of it
  memplan doctor --gpu t4 train_step.py:build             a function that returns one step
  memplan doctor --gpu rtx4090 -- train.py --epochs 1     a whole program, its first 20 steps on a simulated GPU
  memplan doctor --auto --no-effects -- train.py          one run: the memory that each change saves is not rehearsed
"""


@click.command(cls=WithProgram, epilog=EXAMPLES)
@click.argument("function", metavar="[FILE.py:FUNCTION | -- COMMAND …]", required=False)
@gpu_options
@config_path_option
@program_options
@method_option(["auto", "analytic", "rehearsed"])
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    metavar="N",
    default=20,
    show_default=True,
    help="Steps of a program to run; 0: until it ends, its evaluations included.",
)
@click.option(
    "--no-effects",
    is_flag=True,
    help="Do not rehearse what each change saves. Findings for which only memory speaks are then left out.",
)
@click.option(
    "--apply", "apply_changes", is_flag=True, help="Write the findings that are values of the configuration; shows the diff first."
)
@click.option("--dry-run", is_flag=True, help="Show the diff, and write nothing.")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 also where there are findings.")
@format_option
@click.pass_context
def doctor(
    context: click.Context,
    *,
    function: str | None,
    auto: bool,
    gpu_name: str | None,
    gpu_memory: str | None,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    method: Method,
    steps: int,
    no_effects: bool,
    apply_changes: bool,
    dry_run: bool,
    exit_zero: bool,
    output_format: str,
) -> int:
    """
    Find what costs a training memory or time without need.

    Each finding has its evidence (a value of the configuration, a line of the program with how often it did something, a property of the
    GPU), the change, and what that saves of the GPU's memory, rehearsed. A program is run on a simulated GPU: its first steps once to see
    what it does, and once more for each change that saves memory. Exit code 0: no finding; 1: findings.
    """
    if apply_changes and dry_run:
        raise UsageError("--apply writes, and --dry-run does not", hint="leave one of them out")
    typed = typed_settings(program_of(context, function), config_path, (), gpu=gpu_name, gpu_memory=gpu_memory, **of_program)
    asked = asked_for(typed, with_gpu=not auto)
    method = method_for(context, method, asked.settings.program)  # type: ignore[assignment]
    gpu = asked_gpus(asked.settings, auto=auto)[0]
    configuration = asked_configuration(asked, is_planned=False)
    writes = apply_changes or dry_run
    if writes:
        from memplan.api.diagnosis import check_applicable

        check_applicable(configuration)
    found = _diagnosed(configuration, gpu, method, steps, with_effects=not no_effects)
    notes = [*([f"remembered in {asked.remembered}"] if asked.remembered else []), *found.notes]
    _show(found, configuration, gpu, in_options(tuple(notes)), output_format, writes=writes, applies=apply_changes)
    return 1 if found.findings and not exit_zero else 0


def _diagnosed(configuration: Configuration, gpu: GpuSpec, method: Method, steps: int, *, with_effects: bool) -> Diagnosis:
    from memplan.api.diagnosis import diagnose
    from memplan.cli.progress import rehearsal_progress

    with rehearsal_progress() as on_rehearsal:
        return diagnose(
            configuration,
            gpu,
            method=method,
            steps=steps,
            with_effects=with_effects,
            on_rehearsal=on_rehearsal,
            on_run=lambda why: click.echo(f"memplan: running the program for {why}", err=True),
        )


def _show(
    found: Diagnosis,
    configuration: Configuration,
    gpu: GpuSpec,
    notes: Sequence[str],
    output_format: str,
    *,
    writes: bool,
    applies: bool,
) -> None:
    """Tell of what was *found*; where it *writes*, show the diff, and where it *applies*, write it."""
    from memplan.api.diagnosis import apply, changes_of
    from memplan.reports.diff import diff_lines

    findings = in_options(found.findings)
    changes = changes_of(found) if writes else []
    lines = list(diff_lines(changes))
    if output_format == "json":
        from memplan.reports.json import diagnosis_as_json

        diff = "\n".join(lines) if writes else None
        click.echo(diagnosis_as_json(findings, gpu, source=configuration.source, num_steps=found.num_steps, diff=diff, notes=notes))
    else:
        from memplan.reports.terminal import print_diagnosis, print_diff

        print_diagnosis(findings, gpu, source=configuration.source, num_steps=found.num_steps)
        if lines:
            click.echo()
            print_diff(lines)
    for note in notes if output_format == "text" else ():
        click.echo(f"\n{note}", err=True)
    if not writes or not changes:
        if writes:
            click.echo("\nnothing to write: no finding is a value of the configuration", err=True)
        return
    if applies:
        files = apply(changes, configuration)
        click.echo(f"\nwrote {', '.join(map(str, files))}; `memplan undo` puts back what was there", err=True)
