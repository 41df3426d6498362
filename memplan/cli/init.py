"""`memplan init`: recognise what trains in this folder, and remember it for `memplan --apply` and `memplan check`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.asked import Asked, WithProgram, asked_configuration, program_of, program_options, typed_settings
from memplan.cli.explain_config import show_fields
from memplan.cli.options import config_path_option, format_option, pin_option, target_option
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.workload.training import TargetBatch

EXAMPLES = """
\b
Examples:
  memplan init --gpu rtx4090                              what this folder trains from, and the GPU to plan for
  memplan init --config-path recipe.yaml --gpu a100-80    one recipe of several
  memplan init --gpu t4 -- python train.py --batch-size {micro_batch_size}
                                                          a program
  memplan init --dry-run                                  show the file, and write nothing
"""


@click.command(cls=WithProgram, epilog=EXAMPLES)
@click.argument("function", metavar="[FILE.py:build | -- COMMAND …]", required=False)
@click.option("--gpu", "gpu_name", metavar="NAME", help="The GPU to plan for where none is typed later.")
@click.option("--gpu-memory", metavar="SIZE", help="Its memory size.")
@config_path_option
@program_options
@target_option
@pin_option
@click.option("--force", is_flag=True, help="Write anew what another plan or init has remembered.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@format_option
@click.pass_context
def init(
    context: click.Context,
    *,
    function: str | None,
    gpu_name: str | None,
    gpu_memory: str | None,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    target: TargetBatch | None,
    pins: Sequence[str],
    force: bool,
    dry_run: bool,
    output_format: str,
) -> int:
    """
    Write .memplan/plan.yaml: what trains in this folder, where its batch is written, and for which GPU to plan.

    It asks nothing, and runs nothing: it shows what it read and from where. `memplan --apply` and `memplan check` then need no options.
    """
    from memplan.api.explanations import explain
    from memplan.api.recognised_training import found_in
    from memplan.programs.plan_file import PLAN_FILE, as_yaml, read_plan_file, write_plan_file

    wanted = {"gpu": gpu_name, "gpu_memory": gpu_memory, "target_effective_batch_size": target}
    settings = found_in(Path(), typed_settings(program_of(context, function), config_path, pins, **of_program, **wanted))
    configuration = asked_configuration(Asked(settings))
    kept = None if force else read_plan_file(Path())
    if kept is not None and kept != settings and not dry_run:
        raise UsageError(f"{PLAN_FILE} is there already, and says something else", hint="edit it, or write it anew with `--force`")
    explained = explain(configuration)
    written = None if dry_run else write_plan_file(Path(), settings)
    if output_format == "json":
        told = [each.model_dump(mode="json") for each in explained]
        answer = {
            "schema_version": 1,
            "file": PLAN_FILE,
            "written": written is not None,
            "plan": settings.model_dump(mode="json"),
            "fields": told,
        }
        click.echo(json.dumps(answer, indent=2))
        return 0
    show_fields(explained)
    click.echo(f"\n{as_yaml(settings)}" if dry_run else f"\n{PLAN_FILE} {'was written' if written else 'says so already'}")
    for note in configuration.notes:
        click.echo(f"- {note}", err=True)
    return 0
