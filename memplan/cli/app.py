"""The `memplan` command, and the one place where an error becomes text and an exit code.

Exit codes: 0 fits or done; 1 does not fit; 2 usage or configuration error; 3 the machine lacks something.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import click

from memplan import __version__
from memplan.cli.check import check
from memplan.cli.compare import compare
from memplan.cli.dataset import dataset
from memplan.cli.doctor import doctor
from memplan.cli.explain_config import explain_config
from memplan.cli.find_batch import find_batch
from memplan.cli.gpus import gpus
from memplan.cli.init import init
from memplan.cli.loader import loader
from memplan.cli.monitor import monitor
from memplan.cli.plan import plan_command
from memplan.cli.rehearse import rehearse
from memplan.cli.replay import replay
from memplan.cli.typed_options import in_options
from memplan.cli.undo import undo
from memplan.edits.interrupted import interrupted_in
from memplan.errors import MemplanError, reason_of

cli = plan_command
cli.add_command(check)
cli.add_command(compare)
cli.add_command(dataset)
cli.add_command(doctor)
cli.add_command(explain_config)
cli.add_command(find_batch)
cli.add_command(gpus)
cli.add_command(init)
cli.add_command(loader)
cli.add_command(monitor)
cli.add_command(rehearse)
cli.add_command(replay)
cli.add_command(undo)
click.version_option(__version__, prog_name="memplan")(cli)


CLOSED_PIPE = 141
"""The exit code that a shell shows for a program that a closed pipe ended: no answer, and no error."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code. SIGTERM and SIGHUP end it as Ctrl-C does, so that no file is left."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; errors that are the user's to solve are printed, not raised."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  (a shell's `>&-` leaves none)
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or pipe that knows no arrows gets question marks, not a traceback
    _warn_of_interruption(sys.argv[1:] if arguments is None else arguments)
    try:
        result = cli.main(args=arguments, prog_name="memplan", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        return _output_failed(error)
    except SystemExit:  # how click leaves when the reader of its output has left
        return CLOSED_PIPE
    except MemplanError as error:
        click.echo(f"Error: {in_options(error.message)}", err=True)
        if error.hint:
            click.echo(f"\nhint: {in_options(error.hint)}", err=True)
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


def _warn_of_interruption(arguments: list[str]) -> None:
    """Say, whatever the command, that an apply was interrupted in this folder, or in the configuration that is named."""
    named = [value for option, value in pairwise([*arguments, ""]) if option == "--config-path"]
    named += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config-path=")]
    if "undo" in arguments:  # it says so itself
        return
    found = next(filter(None, map(interrupted_in, map(Path, (*named, ".")))), None)
    if found is not None:
        click.echo(f"Warning: an apply was interrupted in {found}; `memplan undo` puts every file back", err=True)


def _output_failed(error: OSError) -> int:
    """Return the exit code for output that nobody took: a reader that left is no error, a full disk is. An error of a file names it."""
    if error.filename is not None:
        click.echo(f"Error: {error.filename}: {reason_of(error)}", err=True)
        return 2
    if error.errno is None:  # not the system's: a library's, whose text says all
        click.echo(f"Error: {reason_of(error)}", err=True)
        return 2
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still in the buffer must not be tried again at exit
    if error.errno == errno.EPIPE:
        return CLOSED_PIPE
    click.echo(f"Error: the output could not be written: {reason_of(error)}", err=True)
    return 2
