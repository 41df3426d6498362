"""`memplan explain-config`: every value that a plan counts on, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.asked import WithProgram, asked_configuration, asked_for, program_of, program_options, typed_settings
from memplan.cli.options import config_path_option, format_option, pin_option

if TYPE_CHECKING:
    from memplan.api.explanations import ExplainedField

EXAMPLES = """
\b
Examples:
  memplan explain-config                                this folder's configuration
  memplan explain-config --config-path recipe.yaml      a recipe: key, line, defaults, the model's sizes
  memplan explain-config -- axolotl train recipe.yaml   the variables of a program, and where they are written
"""


@click.command("explain-config", cls=WithProgram, epilog=EXAMPLES)
@click.argument("function", metavar="[FILE.py:build | -- COMMAND …]", required=False)
@config_path_option
@program_options
@pin_option
@format_option
@click.pass_context
def explain_config(
    context: click.Context,
    *,
    function: str | None,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    pins: Sequence[str],
    output_format: str,
) -> int:
    """
    Show every value that a plan counts on: the file and line that say it, or why it is what it is.

    Nothing is run and nothing is written.
    """
    from memplan.api.explanations import explain

    typed = typed_settings(program_of(context, function), config_path, pins, **of_program)
    configuration = asked_configuration(asked_for(typed))
    explained = explain(configuration)
    if output_format == "json":
        told = [each.model_dump(mode="json") for each in explained]
        click.echo(json.dumps({"schema_version": 1, "source": configuration.source, "fields": told}, indent=2))
        return 0
    show_fields(explained)
    for note in configuration.notes:
        click.echo(f"- {note}", err=True)
    return 0


def show_fields(explained: Sequence[ExplainedField]) -> None:
    """Print the fields as a table."""
    from memplan.reports.terminal import print_table

    rows = [
        (each.field, each.value, ":".join(str(part) for part in (each.file, each.line) if part is not None), each.why) for each in explained
    ]
    print_table(("field", "value", "file", "why"), rows, has_numbers=False)
