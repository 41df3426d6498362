"""`memplan compare`: the settings to use on each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memplan.cli.asked import PROGRAM, WithProgram, asked_configuration, asked_for, method_for, program_options, typed_settings
from memplan.cli.options import (
    config_path_option,
    grow_negatives_option,
    margin_option,
    method_option,
    pin_option,
    target_option,
    tolerance_option,
)
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.analysis.comparison import ComparedGpu
    from memplan.api.configuration import Configuration
    from memplan.api.methods import Answered, Method
    from memplan.api.plans import PlanRequest
    from memplan.estimators.base import Estimator
    from memplan.hardware.gpu import GpuSpec

EXAMPLES = """
\b
Examples:
  memplan compare                                   the workload of this folder on every GPU that memplan knows
  memplan compare t4 a100-40 h100                   on three of them
  memplan compare --method analytic                 by formulas, at once
  memplan compare --gpus t4,a100-80 train_step.py:build
                                                    a function
  memplan compare --gpus t4,a100-80 -- python train.py --batch-size {micro_batch_size}
                                                    a program
  memplan compare --format markdown > settings.md   a table for a README
"""


@click.command(cls=WithProgram, epilog=EXAMPLES)
@click.argument("names", metavar="[GPU]... [FILE.py:build | -- COMMAND …]", nargs=-1)
@click.option("--gpus", "more_names", metavar="NAME,NAME", default="", help="The GPUs, where a program follows: t4,a100-80.")
@config_path_option
@program_options
@target_option
@tolerance_option
@grow_negatives_option
@method_option(["auto", "analytic", "rehearsed"])
@margin_option
@pin_option
@click.option("--mig", "with_mig", is_flag=True, help="Include MIG instances.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True,
    help="text, one JSON object on standard output, or a Markdown table.",
)  # fmt: skip
@click.pass_context
def compare(
    context: click.Context,
    *,
    names: Sequence[str],
    more_names: str,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    target: int | None,
    tolerance: float | None,
    grows_negatives: bool,
    method: Method,
    margin: float | None,
    pins: Sequence[str],
    with_mig: bool,
    output_format: str,
) -> int:
    """
    Show the settings to use on each GPU: micro-batch, accumulation, negatives, and what they take.

    GPU is a name that --gpu takes. Without any, every GPU of the catalogue is compared: rehearsing on all of them takes minutes the first
    time; results are cached. Exit code 0: it fits on at least one GPU; 1: on none.
    """
    from memplan.api.configuration import is_function
    from memplan.api.plans import PlanRequest
    from memplan.memory.budget import DEFAULT_MARGIN
    from memplan.planner.pins import Pins

    functions = [name for name in names if is_function(name)]
    if len(functions) + (PROGRAM in context.meta) > 1:
        raise UsageError("several programs are named", hint="compare one at a time")
    asked = asked_for(
        typed_settings(
            context.meta.get(PROGRAM, functions[0] if functions else None),
            config_path,
            pins,
            **of_program,
            target_effective_batch_size=target,
            target_tolerance=tolerance,
            margin=margin,
            grow_negatives=grows_negatives,
        ),
        with_gpu=False,
    )
    settings = asked.settings
    request = PlanRequest(
        target=settings.target_effective_batch_size,
        tolerance=settings.target_tolerance,
        margin=DEFAULT_MARGIN if settings.margin is None else settings.margin,
        pins=Pins(settings.pins),
        grows_negatives=settings.grow_negatives,
    )
    method = method_for(context, method, settings.program)  # type: ignore[assignment]
    gpu_names = [*(name for name in names if name not in functions), *filter(None, map(str.strip, more_names.split(",")))]
    configuration = asked_configuration(asked)
    found = _compare(configuration, _gpus(gpu_names, with_mig=with_mig), request, method)
    _show(configuration, found, output_format)
    return 0 if any(card.fits for card in found.answer.gpus) else 1


_BYTES_OF_A_REHEARSAL = 3 * 2**30
"""What the process takes of the host that rehearses a workload, generously: PyTorch for CUDA, and the trace of a long step."""


class _Compared(NamedTuple):
    """Each GPU with its settings, and how they were found out."""

    gpus: list[ComparedGpu]
    method: str


def _gpus(names: Sequence[str], *, with_mig: bool) -> list[GpuSpec]:
    """Return the GPUs that were named, in that order and each once; else all, the smallest first."""
    from memplan.hardware.catalog import catalog_gpus, find_gpu

    if names:
        return list(dict.fromkeys(find_gpu(name) for name in names))
    known = [card.spec for card in catalog_gpus() if with_mig or not card.is_mig]
    return sorted(known, key=lambda gpu: (gpu.total_memory_bytes, gpu.name))


def _compare(configuration: Configuration, gpus: Sequence[GpuSpec], request: PlanRequest, method: Method) -> Answered[_Compared]:
    from memplan.analysis.comparison import compare as compare_gpus
    from memplan.api.methods import by_method
    from memplan.cli.progress import rehearsal_progress
    from memplan.hardware.host import most_processes_of

    # What a program of the user's takes of the host nobody knows: one at a time.
    most_at_once = 1 if configuration.is_own_program else most_processes_of(_BYTES_OF_A_REHEARSAL)

    def ask(estimator: Estimator) -> _Compared:
        options = request.options(configuration)
        found = compare_gpus(configuration.program, gpus, estimator, pins=request.pins, most_at_once=most_at_once, **options)
        return _Compared(found, estimator.method)

    with rehearsal_progress() as on_rehearsal:
        return by_method(method, ask, on_rehearsal, is_slow=configuration.is_own_program)


def _show(configuration: Configuration, found: Answered[_Compared], output_format: str) -> None:
    from memplan.reports.comparison_view import view_comparison

    compared = found.answer
    if output_format == "json":
        from memplan.reports.json import comparison_as_json

        click.echo(comparison_as_json(compared.gpus, method=compared.method, source=configuration.source))
        return
    view = view_comparison(compared.gpus)
    if output_format == "markdown":
        from memplan.reports.markdown import markdown_table

        click.echo(markdown_table(view.columns, view.rows))
    else:
        from memplan.reports.terminal import print_table

        print_table(view.columns, view.rows)
    remembered = [f"remembered in {configuration.remembered}"] if configuration.remembered else []
    click.echo("\n" + "\n".join((f"{compared.method}, planned: {configuration.source}", *remembered, *found.notes)), err=True)
