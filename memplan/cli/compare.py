"""`memplan compare`: the settings to use on each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from memplan.cli.options import (
    config_path_option,
    grow_negatives_option,
    margin_option,
    method_option,
    pin_option,
    target_option,
    tolerance_option,
)

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
  memplan compare --format markdown > settings.md   a table for a README
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", metavar="[GPU]...", nargs=-1)
@config_path_option
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
def compare(
    *,
    names: Sequence[str],
    config_path: Path | None,
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
    from memplan.api.configuration import read_configuration
    from memplan.api.plans import PlanRequest
    from memplan.memory.budget import DEFAULT_MARGIN
    from memplan.planner.pins import read_pins

    configuration = read_configuration(config_path).with_pins(read_pins(pins).values)
    request = PlanRequest(
        target=target,
        tolerance=tolerance,
        margin=DEFAULT_MARGIN if margin is None else margin,
        pins=read_pins(pins),
        grows_negatives=grows_negatives,
    )
    found = _compare(configuration, _gpus(names, with_mig=with_mig), request, method)
    _show(configuration, found, output_format)
    return 0 if any(card.fits for card in found.answer.gpus) else 1


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

    def ask(estimator: Estimator) -> _Compared:
        found = compare_gpus(configuration.program, gpus, estimator, pins=request.pins, **request.options(configuration))
        return _Compared(list(found), estimator.method)

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
    click.echo("\n" + "\n".join((f"{compared.method}, planned: {configuration.source}", *found.notes)), err=True)
