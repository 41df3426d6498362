"""`memplan compare`: the settings to use on each GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memplan.cli.asked import (
    PROGRAM,
    Asked,
    WithProgram,
    asked_configuration,
    asked_for,
    gathered_program_options,
    method_for,
    typed_settings,
)
from memplan.cli.options import (
    config_path_option,
    grow_negatives_option,
    margin_option,
    method_option,
    pin_option,
    target_option,
    tolerance_option,
)
from memplan.errors import UsageError, WorldSizeError

if TYPE_CHECKING:
    from memplan.analysis.comparison import ComparedGpu
    from memplan.api.configuration import Configuration
    from memplan.api.methods import Answered, Method
    from memplan.api.plans import PlanRequest
    from memplan.estimators.base import Estimator
    from memplan.execution.executors.installed import ExecutorName
    from memplan.hardware.gpu import GpuSpec
    from memplan.workload.training import TargetBatch

GPUS_OF_MACHINE = 8
"""GPUs of one machine, where more are asked for and nobody says how many there are."""

EXAMPLES = """
\b
Examples:
  memplan compare                                   the workload of this folder on every GPU that memplan knows
  memplan compare t4 a100-40 h100                   on three of them
  memplan compare --method analytic                 by formulas, at once
  memplan compare --gpus t4,a100-80 train_step.py:build
                                                    a function
  memplan compare --gpus t4,a100-80 -- python train.py --batch-size {micro_batch_size}
                                                    a program
  memplan compare a100-80 h100 --num-gpus 1,2,4,8,64 --strategy fsdp
                                                    on how many of them it fits, on machines of 8
  memplan compare --num-gpus 1,8,64 --method rehearsed --executor ray
                                                    the same, rehearsed by the workers of a Ray cluster
  memplan compare --format markdown > settings.md   a table for a README
"""


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
"""Those of Parallelism, written out: `--help` loads no pydantic."""


EXECUTORS = ("ray", "dask", "slurm")
"""Those of ExecutorName."""


def _counts(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the numbers of GPUs that *text* lists, each once, as in 1,2,4,8."""
    del context, option
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"{text!r} is no list of numbers of GPUs, like 1,2,4,8")
    return tuple(dict.fromkeys(map(int, words)))


def of_counted_program(command: Callable[..., int]) -> Callable[..., int]:
    """Give *command* the options of programs, with several numbers of GPUs."""
    counts = click.option(
        "--num-gpus", callback=_counts, default="", metavar="N,N",
        help=f"On how many GPUs in all: 1,2,4,8,64; above {GPUS_OF_MACHINE} on machines of {GPUS_OF_MACHINE}. With --num-nodes: of each.",
    )  # fmt: skip
    return gathered_program_options(command, counts)


@click.command(cls=WithProgram, epilog=EXAMPLES)
@click.argument("names", metavar="[GPU]... [FILE.py:build | -- COMMAND …]", nargs=-1)
@click.option("--gpus", "more_names", metavar="NAME,NAME", default="", help="The GPUs, where a program follows: t4,a100-80.")
@config_path_option
@of_counted_program
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    help="How several GPUs share the model of a workload or recipe; default: as that says.",
)
@target_option
@tolerance_option
@grow_negatives_option
@method_option(["auto", "analytic", "rehearsed"])
@click.option(
    "--executor",
    "executor_name",
    type=click.Choice(EXECUTORS),
    help="Hand the rehearsals to the workers of Ray, Dask or Slurm. Default: processes of this machine, as many as it has room for.",
)
@margin_option
@pin_option
@click.option("--mig", "with_mig", is_flag=True, help="Include MIG instances.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True,
    help="text, one JSON object on standard output, or a Markdown table.",
)  # fmt: skip
@click.pass_context
def compare(
    context: click.Context,
    *,
    names: Sequence[str],
    more_names: str,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    strategy: str | None,
    target: TargetBatch | None,
    tolerance: float | None,
    grows_negatives: bool,
    method: Method,
    executor_name: ExecutorName | None,
    margin: float | None,
    pins: Sequence[str],
    with_mig: bool,
    output_format: str,
) -> int:
    """
    Show the settings to use on each GPU: micro-batch, accumulation, negatives, and what they take.

    GPU is a name that --gpu takes. Without any, every GPU of the catalogue is compared: rehearsing on all of them takes minutes the first
    time; results are cached. With several numbers of GPUs each is looked at, and the smallest machine comes first. Exit code 0: it fits on
    at least one GPU; 1: on none.
    """
    from memplan.api.configuration import is_function
    from memplan.api.plans import PlanRequest
    from memplan.memory.budget import DEFAULT_MARGIN
    from memplan.planner.pins import Pins

    functions = [name for name in names if is_function(name)]
    if len(functions) + (PROGRAM in context.meta) > 1:
        raise UsageError("several programs are named", hint="compare one at a time")
    counts = of_program["num_gpus"]
    asked = asked_for(
        typed_settings(
            context.meta.get(PROGRAM, functions[0] if functions else None),
            config_path,
            [*pins, *([f"strategy={strategy}"] if strategy else [])],
            **{**of_program, "num_gpus": None},
            target_effective_batch_size=target,
            target_tolerance=tolerance,
            margin=margin,
            grow_negatives=grows_negatives,
        ),
        with_gpu=False,
    )
    settings = asked.settings
    request = PlanRequest(
        target=settings.target_effective_batch_size,
        tolerance=settings.target_tolerance,
        margin=DEFAULT_MARGIN if settings.margin is None else settings.margin,
        pins=Pins(settings.pins),
        grows_negatives=settings.grow_negatives,
    )
    method = method_for(context, method, settings.program)  # type: ignore[assignment]
    if executor_name is not None and method == "analytic":
        raise UsageError("formulas are worked out here, and --executor is for rehearsals", hint="add `--method rehearsed`")
    gpu_names = [*(name for name in names if name not in functions), *filter(None, map(str.strip, more_names.split(",")))]
    gpus = _gpus(gpu_names, with_mig=with_mig)
    configurations, not_divided = _configurations(asked, counts or [settings.num_gpus], gpus, request)
    found = _compare(configurations, gpus, request, method, executor_name, not_divided)
    _show(configurations[0], found, output_format)
    return 0 if any(card.fits for card in found.answer.gpus) else 1


def _configurations(
    asked: Asked, counts: Sequence[int | None], gpus: Sequence[GpuSpec], request: PlanRequest
) -> tuple[list[Configuration], list[ComparedGpu]]:
    """
    Return what is planned for each of *counts*, numbers of GPUs, and the rows of those that the training cannot be divided over.

    Raises WorldSizeError where those are all of them.
    """
    from memplan.analysis.comparison import not_planned
    from memplan.planner.pins import pin

    found: list[Configuration] = []
    rows: list[ComparedGpu] = []
    for count in counts:
        machines = _machines(count, asked.settings.num_nodes)
        try:
            configuration = asked_configuration(asked._replace(settings=asked.settings.model_copy(update=machines)))
            configuration.refuse_unknown()
            pin(configuration.program, request.pins)
        except WorldSizeError as error:
            if len(counts) == 1 or (not found and count == counts[-1]):
                raise
            num_gpus = (machines["num_gpus"] or 1) * (machines["num_nodes"] or 1)
            rows += [not_planned(gpu, num_gpus, error.message) for gpu in gpus]
        else:
            found.append(configuration)
    return found, rows


def _machines(count: int | None, num_nodes: int | None) -> dict[str, int | None]:
    """Return how many GPUs each machine has, and how many machines there are, for *count* in all; as they are where *num_nodes* is said."""
    if count is None or num_nodes is not None or count <= GPUS_OF_MACHINE:
        return {"num_gpus": count, "num_nodes": num_nodes}
    if count % GPUS_OF_MACHINE:
        raise UsageError(
            f"{count} GPUs are no whole machines of {GPUS_OF_MACHINE}", hint="say it for each machine: `--num-gpus 4 --num-nodes 3`"
        )
    return {"num_gpus": GPUS_OF_MACHINE, "num_nodes": count // GPUS_OF_MACHINE}


class _Compared(NamedTuple):
    """Each GPU with its settings, and how they were found out."""

    gpus: list[ComparedGpu]
    method: str


def _gpus(names: Sequence[str], *, with_mig: bool) -> list[GpuSpec]:
    """Return the GPUs that were named, in that order and each once; else all, the smallest first."""
    from memplan.hardware.catalog import catalog_gpus, find_gpu

    if names:
        return list(dict.fromkeys(find_gpu(name) for name in names))
    known = [card.spec for card in catalog_gpus() if with_mig or not card.is_mig]
    return sorted(known, key=lambda gpu: (gpu.total_memory_bytes, gpu.name))


def _compare(
    configurations: Sequence[Configuration],
    gpus: Sequence[GpuSpec],
    request: PlanRequest,
    method: Method,
    executor_name: ExecutorName | None,
    not_divided: Sequence[ComparedGpu],
) -> Answered[_Compared]:
    from memplan.api.methods import by_method
    from memplan.cli.progress import rehearsal_progress

    def ask(estimator: Estimator) -> _Compared:
        if executor_name is not None and estimator.method == "rehearsed":
            rows = _rows_of_executor(configurations, gpus, request, executor_name)
        else:
            rows = _rows(configurations, gpus, request, estimator)
        rows += not_divided
        if len(rows) > len(gpus):
            rows.sort(key=lambda card: (card.machine_bytes, card.num_gpus, card.gpu.name))
        return _Compared(rows, estimator.method)

    with rehearsal_progress() as on_rehearsal:
        return by_method(method, ask, on_rehearsal, is_slow=configurations[0].is_own_program)


def _rows(
    configurations: Sequence[Configuration], gpus: Sequence[GpuSpec], request: PlanRequest, estimator: Estimator
) -> list[ComparedGpu]:
    from memplan.analysis.comparison import compare as compare_gpus
    from memplan.execution.executors.jobs import BYTES_OF_A_JOB
    from memplan.hardware.host import most_processes_of

    # What a program of the user's takes of the host nobody knows: one at a time.
    most_at_once = 1 if configurations[0].is_own_program else most_processes_of(BYTES_OF_A_JOB)
    found = []
    for each in configurations:
        found += compare_gpus(each.program, gpus, estimator, pins=request.pins, most_at_once=most_at_once, **request.options(each))
    return found


def _rows_of_executor(
    configurations: Sequence[Configuration], gpus: Sequence[GpuSpec], request: PlanRequest, name: ExecutorName
) -> list[ComparedGpu]:
    from memplan.analysis.comparison_jobs import Compared, compare_elsewhere
    from memplan.cli.progress import job_progress
    from memplan.execution.executors.installed import executor_by

    programs = [Compared(each.program, request.options(each)) for each in configurations]
    with executor_by(name) as executor, job_progress() as on_job:
        found = compare_elsewhere(programs, gpus, executor, pins=request.pins, on_job=on_job)
    return [row for rows in found for row in rows]


def _show(configuration: Configuration, found: Answered[_Compared], output_format: str) -> None:
    from memplan.reports.comparison_view import smallest_machine, view_comparison

    compared = found.answer
    if output_format == "json":
        from memplan.reports.json import comparison_as_json

        click.echo(comparison_as_json(compared.gpus, method=compared.method, source=configuration.source))
        return
    view = view_comparison(compared.gpus)
    if output_format == "markdown":
        from memplan.reports.markdown import markdown_table

        click.echo(markdown_table(view.columns, view.rows))
    else:
        from memplan.reports.terminal import print_table

        print_table(view.columns, view.rows)
    told = [smallest_machine(compared.gpus)] if any(card.num_gpus > 1 for card in compared.gpus) else []
    remembered = [f"remembered in {configuration.remembered}"] if configuration.remembered else []
    click.echo("\n" + "\n".join((f"{compared.method}, planned: {configuration.source}", *told, *remembered, *found.notes)), err=True)
