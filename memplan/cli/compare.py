"""`memplan compare`: the settings to use, for every card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memplan.cli.options import config_path_option, margin_option, method_option, pin_option, target_option
from memplan.errors import MissingError, NotRehearsedError

if TYPE_CHECKING:
    from memplan.cli.configuration import Configuration
    from memplan.hardware.spec import GpuSpec
    from memplan.planner.comparison import ComparedCard

EXAMPLES = """
\b
Examples:
  memplan compare                                   the workload of this folder on every card that memplan knows
  memplan compare t4 a100-40 h100                   on three of them
  memplan compare --method analytic                 by formulas, at once
  memplan compare --format markdown > settings.md   a table for a README
"""


@click.command(epilog=EXAMPLES)
@click.argument("names", metavar="[GPU]...", nargs=-1)
@config_path_option
@target_option
@method_option(["auto", "analytic", "rehearsed"])
@margin_option
@pin_option
@click.option("--mig", "with_mig", is_flag=True, help="MIG instances too.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True,
    help="For a person, for a program, or for a README.",
)  # fmt: skip
def compare(
    *,
    names: Sequence[str],
    config_path: Path | None,
    target: int | None,
    method: str,
    margin: float | None,
    pins: Sequence[str],
    with_mig: bool,
    output_format: str,
) -> int:
    """
    Show the settings to use on each GPU: micro-batch, accumulation, negatives, and what they take.

    GPU is a name that --gpu takes. Without any, every card of the catalogue is compared: rehearsing all of them takes minutes the first
    time, and is kept. Exit code 0: it fits on some card; 1: on none.
    """
    from memplan.cli.configuration import read_configuration

    if margin is not None and math.isnan(margin):
        raise click.BadParameter("nan is not a share", param_hint="--margin")
    configuration = read_configuration(config_path)
    cards = _cards(names, with_mig=with_mig)
    chosen, compared, why_not = _compare(configuration, cards, method=method, target=target, margin=margin, pins=pins)
    _show(configuration, compared, chosen, why_not, output_format)
    return 0 if any(card.fits for card in compared) else 1


def _cards(names: Sequence[str], *, with_mig: bool) -> list[GpuSpec]:
    """Return the cards that were named, in that order; else all, the smallest first."""
    from memplan.hardware.catalog import cards, find_card

    if names:
        return [find_card(name) for name in names]
    known = [card.spec for card in cards() if with_mig or not card.is_mig]
    return sorted(known, key=lambda card: (card.total_memory_bytes, card.name))


def _compare(
    configuration: Configuration, cards: Sequence[GpuSpec], *, method: str, target: int | None, margin: float | None, pins: Sequence[str]
) -> tuple[str, list[ComparedCard], str | None]:
    """Return the method that was used, the rows, and why it was not rehearsals where they were wished for."""
    from memplan.cli.progress import told_of_rehearsals
    from memplan.estimators.registry import best_estimator, estimator_by
    from memplan.memory.budget import DEFAULT_MARGIN
    from memplan.planner.comparison import compare as compare_cards
    from memplan.planner.pins import read_pins

    def compared_by(chosen: str) -> list[ComparedCard]:
        estimator = estimator_by(chosen)
        with told_of_rehearsals(estimator):
            rows = compare_cards(
                configuration.workload,
                cards,
                estimator,
                target=target,
                margin=DEFAULT_MARGIN if margin is None else margin,
                pins=read_pins(pins),
                fills_card=target is None and not configuration.has_batch,
            )
            return list(rows)

    if method != "auto":
        return method, compared_by(method), None
    chosen, _, why_not = best_estimator()
    try:
        return chosen, compared_by(chosen), why_not
    except (NotRehearsedError, MissingError) as error:
        return "analytic", compared_by("analytic"), error.message


def _show(configuration: Configuration, compared: Sequence[ComparedCard], method: str, why_not: str | None, output_format: str) -> None:
    from memplan.reports.view import view_comparison

    if output_format == "json":
        from memplan.reports.json import comparison_as_json

        click.echo(comparison_as_json(compared, method=method, source=configuration.source))
        return
    view = view_comparison(compared)
    if output_format == "markdown":
        from memplan.reports.markdown import markdown_table

        click.echo(markdown_table(view.columns, view.rows))
    else:
        from memplan.reports.terminal import print_table

        print_table(view.columns, view.rows)
    click.echo(f"\n{method}, planned: {configuration.source}", err=True)
    if why_not:
        click.echo(f"by formulas, since nothing was rehearsed: {why_not}", err=True)
