"""What is planned, checked or compared, and for which GPUs: from the options and words of a command line, in every command alike."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.api.configuration import Configuration
    from memplan.hardware.gpu import GpuSpec
    from memplan.programs.plan_file import PlanSettings

Command = TypeVar("Command", bound=Callable[..., Any])

PROGRAM = "memplan.program"
"""Where a command keeps the words of a program, in click's context."""

_AFTER_OPTIONS = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.ENVIRONMENT)

_GPU_OPTIONS = (
    click.option(
        "--auto", is_flag=True, help="For the free memory of this machine's GPU; of several GPUs, for that of the one with least."
    ),
    click.option("--gpu", "gpu_name", metavar="NAME", help='For a GPU: t4, a100-80, "RTX 4090". `memplan gpus` lists them.'),
    click.option(
        "--gpu-memory",
        metavar="SIZE",
        help="For a memory size: 24 is the size that a GPU is sold with, 23.5GiB is exact. With --gpu: that kind of GPU in another size.",
    ),
)

_PROGRAM_OPTIONS = (
    click.option(
        "--field",
        "fields",
        multiple=True,
        metavar="NAME=PLACE",
        help="Where a variable is written: micro_batch_size=conf/config.yaml:data.batch_size, a key of YAML, JSON or TOML; "
        "micro_batch_size=train.py:BATCH_SIZE, a value in Python or a shell script; micro_batch_size=data.batch_size, a key of a file "
        "that the command names; micro_batch_size=BATCH_SIZE, a variable of the environment; of a function, "
        "micro_batch_size=ARGUMENT. May be repeated.",
    ),
    click.option(
        "--short",
        "short",
        multiple=True,
        metavar="PLACE=VALUE",
        help="Make a program's rehearsal short: conf/config.yaml:trainer.limit_val_batches=0, or without the file where the command "
        "names it. May be repeated.",
    ),
    click.option(
        "--stages",
        multiple=True,
        metavar="FILES",
        help="Run a program's command once for each of these files, 'conf/*_stage.yaml': {stage} in the command is the file's name without "
        "its ending, {stage_file} its path, and STAGE stands for it in --field n_negatives=STAGE:KEY.",
    ),
    click.option(
        "--skip-weights",
        is_flag=True,
        help="Build a program's pretrained models without reading their weights, which need not be there: the configuration has their "
        "sizes.",
    ),
    click.option(
        "--launch-config",
        metavar="FILE",
        help="The file of `accelerate launch --config_file` beside a recipe: on how many GPUs it trains, and how these share the model.",
    ),
    click.option("--num-nodes", type=click.IntRange(min=1), metavar="N", help="Machines on which it trains."),
)

_NUM_GPUS = click.option("--num-gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of each machine on which it trains.")

_OF_COMMAND = ("fields", "short", "stages", "num_gpus", "num_nodes")
"""What those options are called as arguments that a command has, and in PlanSettings."""

_OF_PROGRAM = (*_OF_COMMAND, "skip_weights", "launch_config")
"""The same of all of them."""


def gpu_options(command: Command) -> Command:
    """Give *command* the options that say for which GPU."""
    return _with(command, _GPU_OPTIONS)


def program_options(command: Callable[..., int]) -> Callable[..., int]:
    """
    Give *command* the options that say where a program's variables are, and how it trains.

    It takes them together, as `of_program`: they are for `typed_settings`, whatever there are.
    """
    return gathered_program_options(command, _NUM_GPUS)


def gathered_program_options(
    command: Callable[..., int], num_gpus: Callable[[Callable[..., int]], Callable[..., int]]
) -> Callable[..., int]:
    """Give *command* the same with another option *num_gpus*."""

    @wraps(command)
    def gathered(*arguments: Any, **options: Any) -> int:
        of_program = {name: options.pop(name) for name in _OF_PROGRAM}
        return command(*arguments, of_program=of_program, **options)

    return _with(gathered, (*_PROGRAM_OPTIONS[:-1], num_gpus, _PROGRAM_OPTIONS[-1]))


def program_of(context: click.Context, function: str | None) -> str | list[str] | None:
    """Return the program that is named: the words behind `--`, or a *function*. Raises UsageError where both are."""
    words: list[str] | None = context.meta.get(PROGRAM)
    if function is not None and words is not None:
        raise UsageError("a function and a command exclude each other", hint="leave one of them out")
    return function if words is None else words


def _with(command: Command, options: Sequence[Callable[[Any], Any]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def with_each_stage(args: list[str]) -> list[str]:
    """Return *args* with `--stages` before each of the files that a shell has made of one pattern."""
    found: list[str] = []
    is_of_stages = False
    for word in args:
        if is_of_stages and not word.startswith("-") and found[-1] != "--stages":
            found.append("--stages")
        elif word.startswith("-"):
            is_of_stages = word == "--stages"
        found.append(word)
    return found


def behind_dashes(words: Sequence[str]) -> str:
    """Return the hint that says where the command *words* of a program belong."""
    return f"a program's own command follows two dashes: `-- {shlex.join(words)}`"


class WithProgram(click.Command):
    """Takes what follows `--`, or begins with `-m`, as another program's command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what is before it; the program's words are in the context."""
        begins = min((args.index(word) for word in ("--", "-m") if word in args), default=None)
        if begins is not None:
            ctx.meta[PROGRAM] = args[begins + (args[begins] == "--") :]
            args = args[:begins]
        elif (words := self._command_in(ctx, args)) is not None:
            raise UsageError(f"{words[0]} is a program", hint=behind_dashes(words))
        return super().parse_args(ctx, with_each_stage(args))

    def _command_in(self, ctx: click.Context, args: Sequence[str]) -> Sequence[str] | None:
        """Return the words from the first on that names a program of this machine, and is the value of no option; None without one."""
        for at, word in enumerate(args[:-1]):
            if word.startswith("-") or shutil.which(word) is None:
                continue
            try:
                self.make_parser(ctx).parse_args(list(args[:at]))
            except click.UsageError:  # it is the value of the option in front of it
                continue
            return args[at:]
        return None


def is_typed(context: click.Context, name: str) -> bool:
    """Say whether the option *name* was given on the command line; what the environment sets is a default."""
    return context.get_parameter_source(name) not in _AFTER_OPTIONS


def method_for(context: click.Context, method: str, program: str | Sequence[str] | None) -> str:
    """
    Return the *method* that is meant for *program*, the user's own (None: a configuration).

    What the environment sets is for what there are formulas for. Raises UsageError for one that a program does not go with.
    """
    if program is None:
        return method
    if not is_typed(context, "method"):
        return "auto"
    if method in ("analytic", "guide", "measured"):
        raise UsageError(f"a program is run as it is, and --method {method} knows nothing of it", hint="leave `--method` out")
    return method


class Asked(NamedTuple):
    """What is asked for."""

    settings: PlanSettings
    remembered: str = ""
    """Which of it was not typed, and where it was remembered; empty where all was typed."""


def asked_for(typed: PlanSettings, *, with_gpu: bool = True) -> Asked:
    """
    Return what is asked for: as *typed*, or where neither a program nor a configuration is, as remembered in this folder.

    *with_gpu*: the GPU too, where none is typed. Raises ConfigError for a file that makes no sense.
    """
    from memplan.programs.plan_file import PLAN_FILE, merge, read_plan_file

    kept = None if typed.program or typed.config else read_plan_file(Path())
    if kept is None:
        return Asked(typed)
    settings, taken = merge(typed, kept, with_gpu=with_gpu)
    return Asked(settings, f"{PLAN_FILE}: {', '.join(taken)}" if taken else "")


def typed_settings(program: str | Sequence[str] | None, config_path: Path | None, pins: Sequence[str], **others: Any) -> PlanSettings:
    """Return what was typed; *others* are the rest by their names."""
    from memplan.planner.pins import read_pins
    from memplan.programs.plan_file import PlanSettings

    if program is not None and config_path is not None:
        raise UsageError("--config-path and a program exclude each other", hint="name the keys of the program's files with `--field`")
    if program is not None and not program:
        raise UsageError("no command follows `--`", hint="give the words that start the training: `-- python train.py`")
    function, command = (program, None) if isinstance(program, str) else (None, program)
    config = None if config_path is None else str(config_path)
    return PlanSettings(function=function, command=command and tuple(command), config=config, pins=dict(read_pins(pins).values), **others)


def asked_configuration(asked: Asked, *, is_planned: bool = True) -> Configuration:
    """
    Return what is meant: the program of a command or a function, or a configuration.

    *is_planned*: its values are to be changed; else they are looked at as they are, and have to be known.
    """
    from memplan.api.configuration import command_configuration, function_configuration, read_configuration

    settings = asked.settings
    options = {name: getattr(settings, name) for name in _OF_COMMAND}
    if settings.launch_config is not None and settings.program is not None:
        raise UsageError("--launch-config is for a recipe", hint="a command names the launcher's configuration itself")
    if settings.command is not None:
        found = command_configuration(settings.command, **options, pinned=settings.pins.keys(), is_planned=is_planned)
    elif settings.short or settings.stages or (settings.function is not None and (settings.num_gpus or settings.num_nodes)):
        raise UsageError("--num-gpus, --num-nodes, --short and --stages are those of a command", hint="give the command after `--`")
    elif settings.function is not None:
        found = function_configuration(settings.function, fields=settings.fields)
    elif settings.fields:
        raise UsageError("--field is for a program: a command, or a function", hint="give the command after `--`")
    else:
        path = None if settings.config is None else Path(settings.config)
        launch = None if settings.launch_config is None else Path(settings.launch_config)
        found = read_configuration(path, launch_config=launch, or_built_in=is_planned).with_pins(settings.pins)
        found = found.with_gpus(settings.num_gpus, settings.num_nodes)
    if settings.skip_weights:
        found = found.skipping_weights()
    return found._replace(remembered=asked.remembered)


def asked_gpus(settings: PlanSettings, *, auto: bool) -> list[GpuSpec]:
    """Return the GPU that is named, or else those of this machine, that with least free memory first."""
    from memplan.api.gpus import gpus_of_this_machine, named_gpu

    if auto and settings.names_gpu:
        raise UsageError("--auto excludes --gpu and --gpu-memory", hint="--auto takes the GPU of this machine")
    return [named_gpu(settings.gpu, settings.gpu_memory)] if settings.names_gpu else gpus_of_this_machine()
