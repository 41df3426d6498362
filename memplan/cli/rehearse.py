"""`memplan rehearse`: run the user's own training step on a card that is not there."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import click

from memplan.cli.options import format_option
from memplan.errors import UsageError

EXAMPLES = """
\b
Examples:
  memplan rehearse --gpu a100-80 train_step.py:build                        the file's build(device) returns one step
  memplan rehearse --gpu t4 train_step.py:build --set batch=8 --set seq=512    build(device, batch=8, seq=512)
  memplan rehearse --gpu h100 --gpu-memory 40GiB my.package:build           that kind of card in another size
  memplan rehearse --gpu rtx4090 train_step.py:build --format json          for a program
"""


@click.command(epilog=EXAMPLES)
@click.argument("target", metavar="FILE.py:FUNCTION")
@click.option("--gpu", "gpu_name", metavar="NAME", required=True, help="The card to stand in for; `memplan gpus` lists them.")
@click.option("--gpu-memory", metavar="SIZE", help="That kind of card in another size: 24GiB.")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A value for the function: batch=8. May be repeated.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to run; the first is hardly ever the peak.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=600, show_default=True, help="Seconds that the program may take."
)
@format_option
def rehearse(
    *,
    target: str,
    gpu_name: str,
    gpu_memory: str | None,
    assignments: Sequence[str],
    steps: int,
    timeout: float,
    output_format: str,
) -> int:
    """
    Run a training step of your own on a card that is not there, with the real PyTorch, and report its exact memory.

    FUNCTION is called with the device and the values that --set gives, and returns a function that runs one whole step (forward, backward,
    optimizer). Needs Linux, a CUDA build of PyTorch (no GPU) and a C compiler. Exit code 1: memory ran out.
    """
    from memplan.cli.plan import cards_for
    from memplan.estimators.rehearsed import rehearse as run_rehearsal

    gpu = cards_for(auto=False, name=gpu_name, memory=gpu_memory)[0]
    rehearsal = run_rehearsal(target, gpu=gpu, values=_values(assignments), steps=steps, timeout_seconds=timeout)
    if output_format == "json":
        click.echo(rehearsal.model_dump_json(indent=2))
    else:
        from memplan.reports.terminal import print_rehearsal

        print_rehearsal(rehearsal, gpu)
    return 0 if rehearsal.fits else 1


def _values(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values that "NAME=VALUE" texts say: Python's literals, and text for everything else."""
    values: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {text!r} does not say NAME=VALUE", hint="write it as `--set batch=8`")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values
