"""`memplan find-batch`: the largest batch by real trial on this machine's GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.asked import WithProgram, asked_configuration, asked_for, program_of, program_options, typed_settings
from memplan.cli.options import FiniteRange, config_path_option, format_option, margin_option, pin_option
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.batch_finder.trials import FoundBatch, Trial
    from memplan.programs.plan_file import PlanSettings

EXAMPLES = """
\b
Examples:
  memplan find-batch train_step.py:build                     the largest `batch` with which build("cuda", batch=…) runs
  memplan find-batch train_step.py:build --set seq=1024      with another value
  memplan find-batch                                         the micro-batch of this folder's configuration, or of the program that was
                                                             planned last
  memplan find-batch -- python train.py --batch-size {micro_batch_size}
  memplan find-batch train_step.py:build --start 64 --tries 4
"""


@click.command("find-batch", cls=WithProgram, epilog=EXAMPLES)
@click.argument("target", metavar="[FILE.py:FUNCTION | -- COMMAND …]", required=False)
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A keyword argument for FUNCTION: seq=1024. May be repeated."
)
@click.option(
    "--value",
    "name",
    metavar="NAME",
    help="The argument that is the batch.  [default: the one with a usual name: batch_size, batch, bs, n, …]",
)
@click.option("--start", type=click.IntRange(min=1), metavar="N", help="First size to try.  [default: the limit that a rehearsal finds]")
@click.option("--tries", type=click.IntRange(min=1), metavar="N", default=16, show_default=True, help="Maximum trials.")
@click.option(
    "--time",
    "seconds",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    default=900.0,
    show_default=True,
    help="Time limit for starting trials.",
)
@config_path_option
@program_options
@pin_option
@margin_option
@format_option
@click.pass_context
def find_batch(
    context: click.Context,
    *,
    target: str | None,
    assignments: Sequence[str],
    name: str | None,
    start: int | None,
    tries: int,
    seconds: float,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    pins: Sequence[str],
    margin: float | None,
    output_format: str,
) -> int:
    """
    Find the largest batch that this machine's GPU takes (of several, the one with least free), by running the step.

    FILE.py:FUNCTION is called with the device and the values, and returns a function that runs one whole training step, as for `memplan
    rehearse`. A command is run as it is for three optimizer steps, with other values in its words and its files; what it writes is held
    back. Without both the workload of the configuration is run. Each trial starts in a process of its own with a fresh CUDA context; the
    search starts from the rehearsed limit. Exit code 0: found; 1: no size fits; 3: this machine lacks something, for example a GPU.
    """
    from memplan.cli.rehearse import values_from
    from memplan.memory.budget import DEFAULT_MARGIN

    margin = DEFAULT_MARGIN if margin is None else margin
    if target is None:
        if assignments or name:
            raise UsageError("--set and --value need a function", hint="name it: `memplan find-batch train_step.py:build`")
        typed = typed_settings(program_of(context, None), config_path, pins, **of_program)
        found = _of_configuration(typed, start=start, margin=margin, tries=tries, seconds=seconds)
    elif program_of(context, target) != target or pins or config_path or any(of_program.values()):
        raise UsageError("a function takes its values by --set", hint="`memplan find-batch train_step.py:build --set seq=1024`")
    else:
        from memplan.batch_finder.find_batch import find_batch as find

        found = find(
            target,
            values=values_from(assignments),
            name=name,
            start=start,
            margin=margin,
            most_tries=tries,
            most_seconds=seconds,
            on_trial=_show_trial,
        )
    if output_format == "json":
        click.echo(found.model_dump_json(indent=2))
    else:
        _show(found)
    return 0 if found.size is not None else 1


def _of_configuration(typed: PlanSettings, *, start: int | None, margin: float, tries: int, seconds: float) -> FoundBatch:
    from memplan.api.gpus import gpus_of_this_machine
    from memplan.api.methods import Method, by_method
    from memplan.batch_finder.find_batch import begin_by, find_micro_batch
    from memplan.cli.progress import rehearsal_progress
    from memplan.planner.pins import Pins, pin

    asked = asked_for(typed, with_gpu=False)
    configuration = asked_configuration(asked)
    configuration.refuse_unknown()
    what = "program" if configuration.is_own_program else "workload"
    click.echo(f"memplan: the {what} is {configuration.source}{asked.remembered and f' ({asked.remembered})'}", err=True)
    gpu, program = gpus_of_this_machine()[0], pin(configuration.program, Pins(asked.settings.pins))
    named = os.environ.get("MEMPLAN_METHOD", "auto")
    methods: tuple[Method, ...] = ("analytic", "rehearsed")
    method: Method = "auto" if configuration.is_own_program else next((method for method in methods if method == named), "auto")
    with rehearsal_progress() as on_rehearsal:
        begin = by_method(
            method,
            lambda estimator: begin_by(estimator, program, gpu, start=start, margin=margin),
            on_rehearsal,
            is_slow=configuration.is_own_program,
        ).answer
    return find_micro_batch(program, gpu, begin, margin=margin, most_tries=tries, most_seconds=seconds, on_trial=_show_trial)


def _show_trial(trial: Trial) -> None:
    """Say how a trial went, while more are to come."""
    from memplan.units import format_bytes

    took = f", {format_bytes(trial.device_used_bytes)}" if trial.device_used_bytes is not None and trial.fits else ""
    sys.stderr.write(f"  {trial.size}: {trial.problem or 'runs'}{took} ({trial.seconds:.1f} s)\n")
    sys.stderr.flush()


def _given_by(origin: str) -> str:
    return "given with --start" if origin == "you" else f"from {origin}"


def _show(found: FoundBatch) -> None:
    from memplan.units import format_bytes

    used = next((trial.device_used_bytes for trial in found.trials if trial.size == found.size), None)
    if not found.trials:
        click.echo(f"No {found.name} was tried: the time limit was over before the first trial")
    elif found.size is None:
        click.echo(f"No {found.name} fits on {found.gpu_name}: not even {min(trial.size for trial in found.trials)}")
    else:
        of_budget = f"{format_bytes(used or 0)} of a budget of {format_bytes(found.budget_bytes)}"
        click.echo(f"{found.name} {found.size} on {found.gpu_name}: {of_budget}")
    if found.ended in ("tries", "time"):
        more = f"Continue with `--start`, or allow more with `--{found.ended}`."
        click.echo(f"The search ran out of {found.ended}: a larger one may fit. {more}", err=True)
    elif found.ended == "refused":
        click.echo(f"The program refused every larger {found.name} that was tried.", err=True)
    trials = f"{len(found.trials)} trial{'' if len(found.trials) == 1 else 's'}"
    click.echo(f"Started at {found.start} ({_given_by(found.start_is_from)}); {trials}.", err=True)
