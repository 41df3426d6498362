"""`memplan`: the plan, and with --apply the plan written into the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.options import config_path_option, format_option, margin_option, method_option, pin_option, target_option
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.cli.configuration import Configuration
    from memplan.edits.apply import FileChange
    from memplan.estimators.base import Estimator
    from memplan.hardware.spec import GpuSpec
    from memplan.planner.plan import Plan

EXAMPLES = """
\b
Examples:
  memplan --gpu-memory 24                        plan for the cards that are sold with 24 GB
  memplan --gpu "RTX 4090" --config-path conf    plan a configuration tree for one card
  memplan --auto --apply                         plan for this machine's GPU and write the plan
  memplan --gpu t4 --pin micro_batch_size=8      keep a value and see what it costs
  memplan --gpu a100-80 --dry-run                show what --apply would change
  memplan --gpu a100-80 --method rehearsed       the same with the workload's real step, on a card that is not there
  memplan --gpu-memory 24 --method guide         the rule of thumb that memplan replaces
  memplan undo                                   put back what the last --apply changed
"""


@click.group(
    invoke_without_command=True, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option("--auto", is_flag=True, help="Plan for this machine's GPU, as far as it is free; of several, for the smallest.")
@click.option("--gpu", "gpu_name", metavar="NAME", help='Plan for a card: t4, a100-80, "RTX 4090". `memplan gpus` lists them.')
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    help="Plan for a size: 24 is what is on the box, 23.5GiB is exact. With --gpu: that kind of card in another size.",
)
@config_path_option
@target_option
@click.option("--apply", "apply_plan", is_flag=True, help="Write the plan into the configuration: show the diff, back up, write, verify.")
@click.option("--dry-run", is_flag=True, help="Show the diff that --apply would make, and write nothing.")
@method_option(["auto", "analytic", "rehearsed", "guide"])
@click.option("--profile", is_flag=True, help="Run the workload's real step; on a stand-in card (--method rehearsed), as the report says.")
@click.option("--levers", "with_levers", is_flag=True, help="Say also of a plan that fits what changes would do: each is tried.")
@margin_option
@pin_option
@format_option
@click.pass_context
def plan_command(
    context: click.Context,
    *,
    auto: bool,
    gpu_name: str | None,
    gpu_memory: str | None,
    config_path: Path | None,
    target: int | None,
    apply_plan: bool,
    dry_run: bool,
    method: str,
    profile: bool,
    with_levers: bool,
    margin: float | None,
    pins: Sequence[str],
    output_format: str,
) -> int:
    """
    Plan GPU memory before you launch: which batch size, accumulation and negatives fit on which GPU.

    With plan options and no command this is the plan. Exit code 0: it fits; 1: it does not; 2: something is wrong in the options or in a
    file; 3: this machine lacks something, as a GPU for --auto.
    """
    not_typed = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.ENVIRONMENT)
    given = [name for name in context.params if context.get_parameter_source(name) not in not_typed]
    if context.invoked_subcommand is not None:
        if given:
            raise click.UsageError(f"options of the plan do not go with `{context.invoked_subcommand}`; write its own behind its name")
        return 0
    if not given:
        click.echo(context.get_help())
        return 0
    if margin is not None and math.isnan(margin):
        raise click.BadParameter("nan is not a share", param_hint="--margin")
    if apply_plan and dry_run:
        raise UsageError("--apply and --dry-run exclude each other", hint="--dry-run shows what --apply would write")
    if profile and context.get_parameter_source("method") == click.core.ParameterSource.ENVIRONMENT:
        method = "auto"  # what is typed goes before what is set
    if profile and method not in ("auto", "rehearsed"):
        raise UsageError(f"--profile runs the step, and --method {method} does not", hint="leave one of them out")
    if (apply_plan or dry_run) and method == "guide":
        raise UsageError("the guide's numbers are never written", hint="leave `--method guide` out to apply a plan that fits")
    return _plan(
        cards=cards_for(auto=auto, name=gpu_name, memory=gpu_memory),
        typed_memory=gpu_memory,
        config_path=config_path,
        target=target,
        writes=apply_plan,
        shows_diff=apply_plan or dry_run,
        method="rehearsed" if profile else method,
        profiles=profile,
        with_levers=with_levers,
        margin=margin,
        pins=pins,
        output_format=output_format,
    )


def cards_for(*, auto: bool, name: str | None, memory: str | None) -> list[GpuSpec]:
    """Return the cards that the options mean, the smallest first."""
    from memplan.hardware.catalog import card_of_size, find_card
    from memplan.units import parse_size

    if auto and (name is not None or memory is not None):
        raise UsageError("--auto excludes --gpu and --gpu-memory", hint="--auto takes the GPU of this machine")
    sized = card_of_size(parse_size(memory)) if memory is not None else None
    if name is not None:
        card = find_card(name)
        if sized is None:
            return [card]
        resized = {
            "total_memory_bytes": sized.total_memory_bytes,
            "marketing_gb": sized.marketing_gb,
            "origin": f"that kind of card with another size: {sized.origin}",
        }
        return [card.model_copy(update=resized)]
    if sized is not None:
        return [sized]
    from memplan.hardware.detect import detect_gpus

    return sorted(detect_gpus(), key=lambda card: card.free_memory_bytes)


def _plan(
    *,
    cards: list[GpuSpec],
    typed_memory: str | None,
    config_path: Path | None,
    target: int | None,
    writes: bool,
    shows_diff: bool,
    method: str,
    profiles: bool,
    with_levers: bool,
    margin: float | None,
    pins: Sequence[str],
    output_format: str,
) -> int:
    from memplan.cli.configuration import read_configuration

    configuration = read_configuration(config_path)
    if profiles:
        configuration = configuration.with_note(_how_profiled())
    if shows_diff and configuration.reading is None:
        raise UsageError(
            f"there is nothing to apply to: planned was {configuration.source}",
            hint="only configuration trees are written: name one with `--config-path`, or run memplan in its project's folder",
        )
    plans = [
        _make(configuration, card, typed_memory, target=target, method=method, margin=margin, pins=pins, with_levers=with_levers)
        for card in cards
    ]
    plan = plans[0]
    changes: list[FileChange] = []
    if shows_diff and plan.fits and configuration.reading is not None:
        from memplan.edits.apply import prepare
        from memplan.layouts.layout import edits_for, unwritable

        lost = unwritable(configuration.reading, plan.after)
        if lost:
            raise UsageError(
                f"the plan counts on {', '.join(lost)}, which these files have no key for",
                hint="leave the pin out, or change it in the code",
            )
        changes = prepare(edits_for(configuration.reading, plan.after))
    if output_format == "json":  # says what was done, and so comes after it
        from memplan.reports.json import plan_as_json

        applied = writes and _write(configuration, changes)
        click.echo(plan_as_json(plan, _extra(configuration, plans, changes, applied=applied)))
        return 0 if plan.fits else 1
    # A person sees the report and its diff first: what is written has been shown.
    _report(configuration, plans, changes, shows_diff=shows_diff, writes=writes)
    if writes and _write(configuration, changes):
        _say_written(changes)
    return 0 if plan.fits else 1


def _how_profiled() -> str:
    """Say where --profile ran the step."""
    from memplan.errors import MissingError
    from memplan.hardware.detect import detect_gpus

    try:
        detect_gpus()
    except MissingError:
        return "--profile: this machine has no GPU, so the step was rehearsed, on a stand-in card with the real PyTorch"
    return "--profile: the step was rehearsed on a stand-in card with the real PyTorch; it is not run on the GPU of this machine yet"


def _write(configuration: Configuration, changes: Sequence[FileChange]) -> bool:
    """Write *changes*; say whether there were any."""
    if not changes or configuration.reading is None:
        return False
    from memplan.edits.apply import apply

    return apply(changes, root=configuration.reading.root, now=datetime.now(timezone.utc)) is not None


def _make(
    configuration: Configuration,
    card: GpuSpec,
    typed_memory: str | None,
    *,
    target: int | None,
    method: str,
    margin: float | None,
    pins: Sequence[str],
    with_levers: bool,
) -> Plan:
    from memplan.cli.progress import told_of_rehearsals
    from memplan.errors import MissingError, NotRehearsedError
    from memplan.estimators.registry import best_estimator, estimator_by
    from memplan.memory.budget import DEFAULT_MARGIN
    from memplan.planner.explain import warn_of_other_stages
    from memplan.planner.pins import read_pins
    from memplan.planner.planner import make_guide_plan, make_plan
    from memplan.units import GIB, parse_size

    workload = configuration.workload
    if method == "guide":
        if target is not None or margin is not None or pins or with_levers:
            raise UsageError("the guide has its own target and margin, pins nothing, and knows no levers", hint="use `--method analytic`")
        # The guide takes the size on the box for GiB.
        memory_gib = parse_size(typed_memory).size_bytes / GIB if typed_memory else card.total_memory_bytes / GIB
        return make_guide_plan(workload, card, memory_gib=memory_gib)
    chosen, estimator, why_not = best_estimator() if method == "auto" else (method, estimator_by(method), None)

    def planned_by(chosen: str, estimator: Estimator) -> Plan:
        plan = make_plan(
            workload,
            card,
            estimator,
            method=chosen,
            target=target,
            margin=DEFAULT_MARGIN if margin is None else margin,
            pins=read_pins(pins),
            with_levers=with_levers,
            fills_card=target is None and not configuration.has_batch,
        )
        others = warn_of_other_stages(plan, configuration.other_stages, estimator=estimator)
        return plan.model_copy(update={"warnings": (*plan.warnings, *others)})

    if method != "auto":
        with told_of_rehearsals(estimator_by(method)):
            return planned_by(method, estimator_by(method))
    chosen, estimator, why_not = best_estimator()
    try:
        with told_of_rehearsals(estimator):
            plan = planned_by(chosen, estimator)
    except (NotRehearsedError, MissingError) as error:
        plan, why_not = planned_by("analytic", estimator_by("analytic")), error.message
    formulas = (f"by formulas, since nothing was rehearsed: {why_not}",) if why_not else ()
    return plan.model_copy(update={"warnings": (*plan.warnings, *formulas)})


def _report(
    configuration: Configuration,
    plans: Sequence[Plan],
    changes: Sequence[FileChange],
    *,
    shows_diff: bool,
    writes: bool,
) -> None:
    from memplan.reports.terminal import print_plan

    plan = plans[0]
    print_plan(plan, source=configuration.source, notes=(*configuration.notes, *_alone(plans)))
    if shows_diff and plan.fits:
        _show_changes(changes, writes=writes)
    elif shows_diff:
        click.echo("\nNothing was written, since the plan does not fit.", err=True)


def _alone(plans: Sequence[Plan]) -> list[str]:
    """Say what each GPU of a mixed machine could take alone."""
    if len({plan.gpu.free_memory_bytes for plan in plans}) == 1:
        return []
    smallest = f"planned for the smallest of {len(plans)} GPUs, {plans[0].gpu.name}"
    could = [
        f"{plan.gpu.name} alone: " + (f"micro-batch {plan.after.training.micro_batch_size}" if plan.fits else "nothing fits")
        for plan in plans[1:]
    ]
    return [f"{smallest}; {'; '.join(could)}"]


def _show_changes(changes: Sequence[FileChange], *, writes: bool) -> None:
    from memplan.reports.diff import diff_lines
    from memplan.reports.terminal import print_diff

    if not changes:
        click.echo("\nThe configuration has these values already; nothing to write.", err=True)
        return
    click.echo()
    print_diff(diff_lines(changes))
    if not writes:
        click.echo("\nNothing was written (--dry-run).", err=True)


def _say_written(changes: Sequence[FileChange]) -> None:
    count = f"{len(changes)} file" + ("s" if len(changes) > 1 else "")
    click.echo(f"\nWrote {count}; the originals are beside them (*.backup). `memplan undo` puts them back.", err=True)


def _extra(configuration: Configuration, plans: Sequence[Plan], changes: Sequence[FileChange], *, applied: bool) -> dict[str, Any]:
    """Return what the JSON has besides the plan."""
    return {
        "source": configuration.source,
        "notes": list(configuration.notes),
        "applied": applied,
        "changes": [
            {"file": str(change.path), "edits": [{"key": edit.dotted, "value": edit.value} for edit in change.edits]} for change in changes
        ],
        "other_gpus": [
            {"name": plan.gpu.name, "fits": plan.fits, "micro_batch_size": plan.after.training.micro_batch_size} for plan in plans[1:]
        ],
    }
