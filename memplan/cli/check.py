"""`memplan check`: does the present configuration fit, and has it left the plan that was applied?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from memplan.cli.options import config_path_option, margin_option, method_option, pin_option
from memplan.cli.typed_options import in_options
from memplan.errors import MemplanError, UsageError

if TYPE_CHECKING:
    from memplan.analysis.checking import Check
    from memplan.api.configuration import Configuration
    from memplan.api.methods import Method
    from memplan.cli.asked import Asked
    from memplan.edits.drift import Drifted
    from memplan.hardware.gpu import GpuSpec
    from memplan.reports.check_view import Finding

EXAMPLES = """
\b
Examples:
  memplan check --gpu rtx4090                                this folder's configuration
  memplan check --gpu t4 --config-path conf                  another one's
  memplan check --gpu a100-80 -- python train.py --batch 32  a program, as it is started
  memplan check --gpu t4 --method analytic --format github   at once, by formulas, for a GitHub Action
  memplan check --drift                                      are the values of the applied plan still there?
"""


@click.command(cls=WithProgram, epilog=EXAMPLES)
@click.argument("function", metavar="[FILE.py:build | -- COMMAND …]", required=False)
@gpu_options
@config_path_option
@program_options
@method_option(["auto", "analytic", "rehearsed"])
@margin_option
@pin_option
@click.option(
    "--drift",
    "checks_drift",
    is_flag=True,
    help="Fail where a value that --apply wrote has been changed since. Without a GPU, nothing else is checked.",
)
@click.option("--if-applied", is_flag=True, help="With --drift: pass where no plan has been applied, as in another's clone.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json", "github", "junit"]), default="text", show_default=True,
    help="One line of text, one JSON object, GitHub's workflow commands, or JUnit's XML; on standard output.",
)  # fmt: skip
@click.pass_context
def check(
    context: click.Context,
    *,
    function: str | None,
    auto: bool,
    gpu_name: str | None,
    gpu_memory: str | None,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    method: Method,
    margin: float | None,
    pins: Sequence[str],
    checks_drift: bool,
    if_applied: bool,
    output_format: str,
) -> int:
    """
    Check whether the present configuration fits on a GPU, without a plan.

    Every stage is checked, and the worst decides; nothing is written. Exit code 0: it fits; 1: it does not, or a value has drifted; 2:
    usage or configuration error; 3: it cannot be told on this machine. Seconds: by formulas, or a rehearsal that is kept for the next time;
    the line says which.
    """
    try:
        if if_applied and not checks_drift:
            raise UsageError(
                "--if-applied says of --drift when it passes, which is not asked for", hint="give both: `--drift --if-applied`"
            )
        program = program_of(context, function)
        told = _Told()
        if checks_drift:
            told = told._replace(drifted=_drift_of(config_path, if_applied=if_applied))
        if not checks_drift or auto or gpu_name or gpu_memory:
            typed = typed_settings(program, config_path, pins, gpu=gpu_name, gpu_memory=gpu_memory, margin=margin, **of_program)
            asked = asked_for(typed, with_gpu=not auto)
            method = method_for(context, method, asked.settings.program)  # type: ignore[assignment]
            told = _checked(asked, asked_gpus(asked.settings, auto=auto)[0], method, told)
    except MemplanError as error:
        _show_error(error, output_format)
        raise
    _show(told, output_format)
    return 0 if told.is_good else 1


class _Told(NamedTuple):
    """What was found out."""

    configuration: Configuration | None = None
    check: Check | None = None
    notes: Sequence[str] = ()
    drifted: Drifted | None = None

    @property
    def is_good(self) -> bool:
        return (self.check is None or self.check.fits) and not (self.drifted and self.drifted.drifts)


def _drift_of(path: Path | None, *, if_applied: bool) -> Drifted:
    from memplan.api.checks import drift_of

    return drift_of(path or Path(), if_applied=if_applied)


def _checked(asked: Asked, gpu: GpuSpec, method: Method, told: _Told) -> _Told:
    from memplan.api.checks import check_configuration
    from memplan.cli.progress import rehearsal_progress
    from memplan.memory.budget import DEFAULT_MARGIN
    from memplan.planner.pins import Pins

    configuration, settings = asked_configuration(asked, is_planned=False), asked.settings
    margin = DEFAULT_MARGIN if settings.margin is None else settings.margin
    with rehearsal_progress() as on_rehearsal:
        found = check_configuration(configuration, gpu, pins=Pins(settings.pins), margin=margin, method=method, on_rehearsal=on_rehearsal)
    notes = ([f"remembered in {asked.remembered}"] if asked.remembered else []) + list(found.notes)
    return told._replace(configuration=configuration, check=found.check, notes=notes)


def _show(told: _Told, output_format: str) -> None:
    from memplan.reports.check_view import as_github, as_junit

    if output_format == "json":
        from memplan.reports.json import check_as_json

        source = told.configuration.source if told.configuration else None
        click.echo(check_as_json(told.check, told.drifted, source=source, notes=in_options(tuple(told.notes))))
        return
    stages, drifts = _stages(told), _drifts(told)
    if output_format == "github":
        click.echo("\n".join(as_github([*stages, *drifts])))
    elif output_format == "junit":
        click.echo(as_junit([*stages, *drifts]))
    else:
        click.echo("\n".join(finding.text for finding in [*stages[:1], *drifts]))
        for note in in_options(tuple(told.notes)):
            click.echo(note, err=True)


def _stages(told: _Told) -> list[Finding]:
    """Return what was found of each stage, that which decides first."""
    from memplan.api.checks import written_at
    from memplan.reports.check_view import stage_findings

    if told.check is None or told.configuration is None:
        return []
    return stage_findings(told.check, source=told.configuration.source, at=written_at(told.configuration))


def _drifts(told: _Told) -> list[Finding]:
    from memplan.reports.check_view import drift_findings

    return [] if told.drifted is None else drift_findings(told.drifted, root=Path.cwd())


def _show_error(error: MemplanError, output_format: str) -> None:
    """Say what went wrong also where continuous integration looks; the terminal is told as of any command."""
    from memplan.reports.check_view import as_junit, workflow_command

    message = in_options(error.message)
    if output_format == "github":
        click.echo(workflow_command("error", message))
    elif output_format == "junit":
        click.echo(as_junit((), error=message))
