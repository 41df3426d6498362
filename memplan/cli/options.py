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
    help="text, or one JSON object on standard output.",
)

config_path_option = click.option(
    "--config-path",
    type=click.Path(path_type=Path),
    help="A recipe of a framework (axolotl, TRL, LLaMA-Factory …), a configuration tree (its folder, the project's, or its main file), a "
    "workload.yaml, or a Hugging Face config.json. Default: the configuration in this folder; where there is none, the built-in workload.",
)


class Target(click.IntRange):
    """How many samples an optimizer step should see: a number, or "max"."""

    name = "number of samples, nor max"

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or "max". Fails for another text."""
        return value if value == "max" else super().convert(value, param, ctx)


target_option = click.option(
    "--target-effective-batch",
    "target",
    type=Target(),
    metavar="N",
    help="Samples per optimizer step; max: the largest batch that fits, without accumulation. Default: the target in the configuration, "
    "else its present effective batch.",
)


class FiniteRange(click.FloatRange):
    """A range of numbers; "nan" and "inf" are none, though they compare as if they were."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Fails for what is none."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a valid number", param, ctx)
        return number


class Share(FiniteRange):
    """A share of something: "5%", or 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the share as a fraction. Fails for what is not one from 0 to 1."""
        if isinstance(value, str) and value.strip().endswith("%"):
            value = str(FiniteRange(0, 100).convert(value.strip()[:-1], param, ctx) / 100)
        return super().convert(value, param, ctx)


tolerance_option = click.option(
    "--target-tolerance",
    "tolerance",
    type=Share(0, 1),
    metavar="SHARE",
    help="Take the fewest accumulation steps whose effective batch is at most this share above the target, for example 5%. Default: meet "
    "the target exactly if that costs at most half of the micro-batch, else 5%.",
)

grow_negatives_option = click.option(
    "--grow-negatives",
    "grows_negatives",
    is_flag=True,
    help="Give each stage as many negatives as fit. This changes the loss and the time of a step.",
)


margin_option = click.option(
    "--margin", type=Share(0, 1, max_open=True), metavar="SHARE", help="Share of the free memory to leave free.  [default: 5%]"
)

pin_option = click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Fix a value: micro_batch_size=8, 01_stage.n_negatives=16. May be repeated.",
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
        help="How memory is determined. rehearsed: run the workload's real step on a simulated GPU, seconds for each size; results are "
        "cached. analytic: formulas, immediate. auto: rehearsed where this machine can, else analytic.",
    )
