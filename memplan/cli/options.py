"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="For a person, or for a program: one JSON object on standard output.",
)

config_path_option = click.option(
    "--config-path",
    type=click.Path(path_type=Path),
    help="A configuration tree (its folder, the project's, or its main file), a workload.yaml, or a Hugging Face config.json. Default: the "
    "tree in this folder, else the built-in workload.",
)

target_option = click.option(
    "--target-effective-batch",
    "target",
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples an optimizer step should see. Default: the workload's own target, else as many as now.",
)


class FiniteRange(click.FloatRange):
    """A range of numbers; "nan" and "inf" are none, though they compare as if they were."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Fails for what is none."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number to use here", param, ctx)
        return number


class Share(FiniteRange):
    """A share of something: "5%", or 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the share as a fraction. Fails for what is not one from 0 to 1."""
        if isinstance(value, str) and value.strip().endswith("%"):
            return FiniteRange(0, 100).convert(value.strip()[:-1], param, ctx) / 100
        return super().convert(value, param, ctx)


tolerance_option = click.option(
    "--target-tolerance",
    "tolerance",
    type=Share(0, 1),
    metavar="SHARE",
    help="Always take the fewest accumulation steps whose effective batch is at most this share above the target, as 5%. Default: meet the "
    "target exactly where that costs at most half of the micro-batch, else 5%.",
)

grow_negatives_option = click.option(
    "--grow-negatives",
    "grows_negatives",
    is_flag=True,
    help="Give each stage as many negatives as fit. That changes the loss and the time of a step; without it they stay as they are.",
)


margin_option = click.option(
    "--margin", type=FiniteRange(0, 1, max_open=True), metavar="F", help="Share of the free memory that stays free.  [default: 0.05]"
)

pin_option = click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Keep a value whatever the plan: micro_batch_size=8, 01_stage.n_negatives=16.",
)


def method_option(methods: Sequence[str]) -> Callable[[Command], Command]:
    """Return the option that says how memory is found out, of *methods*."""
    return click.option(
        "--method",
        type=click.Choice(methods),
        default="auto",
        show_default=True,
        envvar="MEMPLAN_METHOD",
        show_envvar=True,
        help="How the memory is found out. auto: rehearsed where this machine can, else analytic. rehearsed: the workload's real step is "
        "run on a card that is not there, in seconds a size, and kept. analytic: closed formulas, at once.",
    )
