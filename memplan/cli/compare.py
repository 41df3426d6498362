"""`memplan compare`: the settings to use, for every card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memplan.cli.options import config_path_option, margin_option, method_option, pin_option, target_option
from memplan.cli.planning import Asked, Found, by_method

if TYPE_CHECKING:
    from memplan.cli.configuration import Configuration
    from memplan.estimators.base import Estimator
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

    configuration = read_configuration(config_path)
    cards = _cards(names, with_mig=with_mig)
    found = _compare(configuration, cards, Asked(method, target, margin, pins))
    _show(configuration, found, output_format)
    return 0 if any(card.fits for card in found.result) else 1


def _cards(names: Sequence[str], *, with_mig: bool) -> list[GpuSpec]:
    """Return the cards that were named, in that order and each once; else all, the smallest first."""
    from memplan.hardware.catalog import cards, find_card

    if names:
        return list(dict.fromkeys(find_card(name) for name in names))
    known = [card.spec for card in cards() if with_mig or not card.is_mig]
    return sorted(known, key=lambda card: (card.total_memory_bytes, card.name))


def _compare(configuration: Configuration, cards: Sequence[GpuSpec], asked: Asked) -> Found:
    from memplan.planner.comparison import compare as compare_cards
    from memplan.planner.pins import read_pins

    def find(_: str, estimator: Estimator) -> list[ComparedCard]:
        return list(compare_cards(configuration.workload, cards, estimator, pins=read_pins(asked.pins), **asked.options(configuration)))

    return by_method(asked.method, find)


def _show(configuration: Configuration, found: Found, output_format: str) -> None:
    from memplan.reports.view import view_comparison

    if output_format == "json":
        from memplan.reports.json import comparison_as_json

        click.echo(comparison_as_json(found.result, method=found.method, source=configuration.source))
        return
    view = view_comparison(found.result)
    if output_format == "markdown":
        from memplan.reports.markdown import markdown_table

        click.echo(markdown_table(view.columns, view.rows))
    else:
        from memplan.reports.terminal import print_table

        print_table(view.columns, view.rows)
    click.echo("\n" + "\n".join((f"{found.method}, planned: {configuration.source}", *found.notes)), err=True)
