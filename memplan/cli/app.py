"""The `memplan` command, and the one place where an error becomes text and an exit code.

Exit codes: 0 fits or done; 1 does not fit; 2 usage or configuration error; 3 the machine lacks something.
"""

from __future__ import annotations

import sys

import click

from memplan import __version__
from memplan.cli.gpus import gpus
from memplan.cli.plan import plan_command
from memplan.cli.rehearse import rehearse
from memplan.cli.undo import undo
from memplan.errors import MemplanError

cli = plan_command
cli.add_command(gpus)
cli.add_command(rehearse)
cli.add_command(undo)
click.version_option(__version__, prog_name="memplan")(cli)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; errors that are the user's to solve are printed, not raised."""
    try:
        result = cli.main(args=arguments, prog_name="memplan", standalone_mode=False)
    except MemplanError as error:
        click.echo(f"Error: {error.message}", err=True)
        if error.hint:
            click.echo(f"\nhint: {error.hint}", err=True)
        return error.exit_code
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Aborted", err=True)
        return 130
    return result if isinstance(result, int) else 0
