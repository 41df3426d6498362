"""`memplan`: the plan, and with --apply the plan written into the configuration."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memplan.cli.asked import (
    PROGRAM,
    asked_configuration,
    asked_for,
    asked_gpus,
    behind_dashes,
    gpu_options,
    is_typed,
    method_for,
    program_options,
    typed_settings,
    with_each_stage,
)
from memplan.cli.options import (
    config_path_option,
    format_option,
    grow_negatives_option,
    margin_option,
    method_option,
    pin_option,
    target_option,
    tolerance_option,
)
from memplan.cli.plan_output import Output
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.analysis.curves import Variable
    from memplan.api.configuration import Configuration
    from memplan.api.methods import Method
    from memplan.api.plans import Plan, PlanRequest
    from memplan.cli.plan_output import Made
    from memplan.estimators.base import Estimator
    from memplan.hardware.gpu import GpuSpec
    from memplan.workload.training import TargetBatch

EXAMPLES = """
\b
Examples:
  memplan --gpu-memory 24                        plan for GPUs sold with 24 GB
  memplan --gpu "RTX 4090" --config-path conf    plan a configuration tree for one GPU
  memplan --auto --apply                         plan for this machine's GPU and write the plan
  memplan --profile --target-effective-batch 512 plan for this machine's GPU, run the planned step on it, compare
  memplan --gpu t4 --pin micro_batch_size=8      fix a value and see what it costs
  memplan --gpu a100-80 --dry-run                show what --apply would change
  memplan --gpu a100-80 --method rehearsed       run the workload's real step on a simulated GPU
  memplan --gpu-memory 24 --method guide         the rule of thumb that memplan replaces, for comparison
  memplan --gpu t4 train_step.py:build           plan a function: its arguments are its variables
  memplan --gpu-memory 24 -- python train.py --batch-size {micro_batch_size} --accumulate {gradient_accumulation_steps}
                                                 plan a program: its words with variables are changed and rehearsed
  memplan --gpu t4 --stages 'conf/*_stage.yaml' -- python train.py stage={stage} --batch-size {micro_batch_size}
                                                 plan a program that trains in stages: its command is run for each
  memplan --gpu a100-80 --apply                  in a folder with a .memplan/plan.yaml: plan for another GPU what was planned last
  memplan undo                                   put back what the last --apply changed
"""


class _WithProgram(click.Group):
    """Takes what follows `--` as the command of a program to plan, and a first word like FILE.py:build as a function to plan."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        args = [*with_each_stage(args[:end]), *args[end:]]
        end = args.index("--") if "--" in args else len(args)
        _, words, _ = self.make_parser(ctx).parse_args(list(args[:end]))
        if not words and end < len(args):
            ctx.meta[PROGRAM] = args[end + 1 :]
            args = args[:end]
        elif words and words[0] not in self.commands and ":" in words[0]:
            ctx.meta[PROGRAM] = words[0]
            at = end - len(words)
            args = [*args[:at], *args[at + 1 :]]
        elif words and words[0] not in self.commands and os.path.exists(words[0]):
            as_program = f"python {words[0]}" if words[0].endswith(".py") else f"python train.py {words[0]}"
            raise UsageError(
                f"{words[0]} is not a command of memplan",
                hint=f"a configuration is named with `--config-path {words[0]}`, a program given behind two dashes: `-- {as_program}`",
            )
        elif len(words) > 1 and words[0] not in self.commands and shutil.which(words[0]) is not None:
            raise UsageError(f"{words[0]} is not a command of memplan", hint=behind_dashes(words))
        return super().parse_args(ctx, args)


@click.group(
    cls=_WithProgram,
    subcommand_metavar="[FILE.py:build | -- COMMAND …] | COMMAND [ARGS]...",
    invoke_without_command=True,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@gpu_options
@config_path_option
@program_options
@target_option
@tolerance_option
@grow_negatives_option
@click.option("--apply", "apply_plan", is_flag=True, help="Write the plan into the configuration: show the diff, back up, write, verify.")
@click.option("--dry-run", is_flag=True, help="Show the diff that --apply would make, and write nothing.")
@method_option(["auto", "analytic", "rehearsed", "measured", "guide"])
@click.option(
    "--profile",
    "profiles",
    is_flag=True,
    help="Run the planned step on this machine's GPU and compare; a plan that it contradicts is not applied. With --gpu or --gpu-memory "
    "the step is rehearsed.",
)
@click.option(
    "--levers", "with_levers", is_flag=True, help="Also for a plan that fits, try changes that save memory and report what each does."
)
@click.option(
    "--curves",
    metavar="[NAMES]",
    is_flag=False,
    flag_value="usual",
    callback=lambda _context, _option, text: _read_curves(text),
    help="Show memory by micro-batch, by negatives, and by positives where they cost any; or by the fields named, as "
    "--curves=sequence_length,n_negatives.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="Write the plan as one page: breakdown, memory over time of a step, curves.",
)
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.pickle",
    help="Write the rehearsed step of the stage that takes most for PyTorch's memory visualizer (pytorch.org/memory_viz).",
)
@margin_option
@pin_option
@click.option("--verbose", "-v", "is_verbose", is_flag=True, help="The whole report: every stage's breakdown, every reason and warning.")
@format_option
@click.pass_context
def plan_command(
    context: click.Context,
    *,
    auto: bool,
    gpu_name: str | None,
    gpu_memory: str | None,
    config_path: Path | None,
    of_program: Mapping[str, Any],
    target: TargetBatch | None,
    tolerance: float | None,
    grows_negatives: bool,
    apply_plan: bool,
    dry_run: bool,
    method: str,
    profiles: bool,
    with_levers: bool,
    curves: Sequence[Variable] | None,
    report: Path | None,
    snapshot: Path | None,
    margin: float | None,
    pins: Sequence[str],
    is_verbose: bool,
    output_format: str,
) -> int:
    """
    Plan GPU memory before you launch: which batch size, accumulation and negatives fit on which GPU.

    Options without a command make a plan. Exit code 0: it fits; 1: it does not fit; 2: usage or configuration error; 3: this machine
    lacks something, for example a GPU for --auto.
    """
    given = [name for name in context.params if is_typed(context, name)]
    if context.invoked_subcommand is not None:
        if given:
            raise click.UsageError(
                f"options before a command are those of a plan; write options after it: `memplan {context.invoked_subcommand} …`"
            )
        return 0
    program: str | list[str] | None = context.meta.get(PROGRAM)
    if not given and program is None:
        click.echo(context.get_help())
        return 0
    typed = typed_settings(
        program,
        config_path,
        pins,
        **of_program,
        gpu=gpu_name,
        gpu_memory=gpu_memory,
        target_effective_batch_size=target,
        target_tolerance=tolerance,
        margin=margin,
        grow_negatives=grows_negatives,
    )
    wished = asked_for(typed, with_gpu=not (auto or profiles or method == "measured"))
    settings = wished.settings
    method = method_for(context, method, settings.program)
    if apply_plan and dry_run:
        raise UsageError("--apply and --dry-run exclude each other", hint="--dry-run shows what --apply would write")
    names_card = settings.names_gpu
    if profiles and names_card and not is_typed(context, "method"):
        method = "auto"  # what is typed goes before what is set
    if profiles and method not in (("auto", "rehearsed") if names_card else ("auto", "analytic", "rehearsed")):
        raise UsageError(f"--profile runs the step, and does not go with --method {method}", hint="leave one of them out")
    if method == "measured" and names_card:
        raise UsageError("--method measured runs steps on this machine's GPU, not on one that is named", hint="use `--auto`")
    if (apply_plan or dry_run) and method == "guide":
        raise UsageError("the guide's numbers are never written", hint="leave `--method guide` out to apply a plan that fits")
    for path in filter(None, (report, snapshot)):
        if not path.absolute().parent.is_dir():  # before minutes of rehearsals
            raise UsageError(f"{path}: no such folder", hint="name a file in an existing folder")
    output = Output(
        writes=apply_plan,
        shows_diff=apply_plan or dry_run,
        as_json=output_format == "json",
        is_verbose=is_verbose,
        curves=curves,
        report=report,
        snapshot=snapshot,
    )
    asked = _Asked(
        method="rehearsed" if profiles and names_card else method,
        profiles=profiles and not names_card,
        typed_memory=settings.gpu_memory,
        given={
            "target": settings.target_effective_batch_size,
            "tolerance": settings.target_tolerance,
            "margin": settings.margin,
            "pins": settings.pins,
            "grow_negatives": settings.grow_negatives,
            "levers": with_levers,
        },
    )
    from memplan.api.plans import PlanRequest, check_writable
    from memplan.memory.budget import DEFAULT_MARGIN
    from memplan.planner.pins import Pins

    request = PlanRequest(
        target=settings.target_effective_batch_size,
        tolerance=settings.target_tolerance,
        margin=DEFAULT_MARGIN if settings.margin is None else settings.margin,
        pins=Pins(settings.pins),
        grows_negatives=settings.grow_negatives,
        with_levers=with_levers,
    )
    configuration = asked_configuration(wished).with_target(request.target)
    if output.shows_diff:
        check_writable(configuration, request.pins)
    if profiles and names_card:
        said = "--profile: the step was rehearsed on a simulated GPU, since one was named"
        configuration = configuration.with_note(f"{said}; `memplan --auto --profile` runs it on this machine's GPU")
    output = output._replace(remembers=settings if apply_plan and configuration.is_own_program else None)
    return _plan(configuration, asked_gpus(settings, auto=auto), asked, request, output)


def _read_curves(text: str | None) -> Sequence[Variable] | None:
    """Return the variables that --curves names; none for the usual ones, None where it was not given."""
    if text is None or text == "usual":
        return None if text is None else ()
    from memplan.analysis.curves import VARIABLES

    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in VARIABLES]
    if unknown:
        raise UsageError(f"--curves={text}: there is no curve of {unknown[0]!r}", hint=f"name some of {', '.join(VARIABLES)}")
    return [variable for variable in VARIABLES if variable in names]


class _Asked(NamedTuple):
    """How the plan is to be found out."""

    method: str
    profiles: bool
    """On this machine's GPU."""
    typed_memory: str | None
    given: Mapping[str, object]
    """What was typed that the guide knows nothing of."""


def _plan(configuration: Configuration, gpus: Sequence[GpuSpec], asked: _Asked, request: PlanRequest, output: Output) -> int:
    from memplan.api.profiling import run_profile
    from memplan.cli.plan_output import show
    from memplan.hardware.torchrun import rank_of

    if rank_of().number != 0:  # under torchrun rank 0 plans, reports and writes
        if asked.profiles:
            run_profile(None)
        return 0
    made = _make(configuration, gpus, asked, request, output)
    if asked.profiles:
        found = run_profile(made.plans[0])
        assert found is not None
        made = made.profiled(found)
    show(made.plans[0].configuration, made, output)
    return 0 if made.plans[0].fits else 1


def _make(configuration: Configuration, gpus: Sequence[GpuSpec], asked: _Asked, request: PlanRequest, output: Output) -> Made:
    """Return the plan for each of *gpus*, and what is drawn of the first."""
    from memplan.api.plans import plan_for, planned_by
    from memplan.cli.plan_output import Made, draw
    from memplan.cli.progress import rehearsal_progress

    def ask(meant: Configuration, estimator: Estimator) -> Made:
        plans = [plan_for(meant, gpu, estimator, request) for gpu in gpus]
        return Made(plans, draw(meant, plans[0], estimator, output))

    if asked.method == "guide":
        return Made([_by_guide(configuration, gpus[0], asked, output)])
    if asked.method == "measured":
        from memplan.estimators.measured import MeasuredEstimator

        with MeasuredEstimator(gpus[0]) as measure:
            plans = [plan_for(configuration, gpus[0], measure, request)]
            return Made(plans, draw(configuration, plans[0], measure, output))
    methods: dict[str, Method] = {"auto": "auto", "analytic": "analytic", "rehearsed": "rehearsed"}
    with rehearsal_progress() as on_rehearsal:
        # What runs on this machine's GPU to compare with is memplan's own step.
        meant = configuration._replace(located=None) if asked.profiles else configuration
        found = planned_by(methods[asked.method], meant, ask, request, on_rehearsal)
    return found.answer._replace(plans=[plan.with_first_warnings(found.notes) for plan in found.answer.plans])


def _by_guide(configuration: Configuration, gpu: GpuSpec, asked: _Asked, output: Output) -> Plan:
    from memplan.analysis.make_plan import make_guide_plan
    from memplan.api.plans import of_configuration
    from memplan.units import GIB, parse_size

    if any(asked.given.values()):
        raise UsageError("the guide has its own target and margin, and neither pins nor levers", hint="use `--method analytic`")
    if output.curves is not None or output.report or output.snapshot:
        raise UsageError("there are no curves or reports of the guide's numbers", hint="use `--method analytic` for curves and a report")
    # The guide takes the size on the box for GiB.
    typed = parse_size(asked.typed_memory) if asked.typed_memory else None
    memory_gib = (typed.marketing_gb or typed.size_bytes / GIB) if typed else gpu.total_memory_bytes / GIB
    return of_configuration(make_guide_plan(configuration.workload, gpu, memory_gib=memory_gib), configuration)
