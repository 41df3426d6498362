"""`memplan`: the plan, and with --apply the plan written into the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memplan.cli.options import config_path_option, format_option, margin_option, method_option, pin_option, target_option
from memplan.cli.planning import Asked, by_method
from memplan.errors import MissingError, UsageError

if TYPE_CHECKING:
    from memplan.cli.configuration import Configuration
    from memplan.edits.apply import FileChange
    from memplan.estimators.base import Estimator
    from memplan.hardware.spec import GpuSpec
    from memplan.planner.curves import Curve, Variable
    from memplan.planner.plan import Plan
    from memplan.planner.profile import Profile

EXAMPLES = """
\b
Examples:
  memplan --gpu-memory 24                        plan for the cards that are sold with 24 GB
  memplan --gpu "RTX 4090" --config-path conf    plan a configuration tree for one card
  memplan --auto --apply                         plan for this machine's GPU and write the plan
  memplan --profile --target-effective-batch 512 plan for this machine's GPU, run the planned step on it, compare
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
@method_option(["auto", "analytic", "rehearsed", "measured", "guide"])
@click.option(
    "--profile",
    "profiles",
    is_flag=True,
    help="Run the planned step on this machine's GPU and compare; a plan that it contradicts is not applied. For a card that was named the "
    "step is rehearsed.",
)
@click.option("--levers", "with_levers", is_flag=True, help="Say also of a plan that fits what changes would do: each is tried.")
@click.option(
    "--curves",
    metavar="[NAMES]",
    is_flag=False,
    flag_value="usual",
    callback=lambda _context, _option, text: _read_curves(text),
    help="Show memory against the micro-batch, the negatives, and the positives where they cost any; or against the fields named, as "
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
    profiles: bool,
    with_levers: bool,
    curves: Sequence[Variable] | None,
    report: Path | None,
    snapshot: Path | None,
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
    if apply_plan and dry_run:
        raise UsageError("--apply and --dry-run exclude each other", hint="--dry-run shows what --apply would write")
    names_card = gpu_name is not None or gpu_memory is not None
    if profiles and names_card and context.get_parameter_source("method") == click.core.ParameterSource.ENVIRONMENT:
        method = "auto"  # what is typed goes before what is set
    if profiles and method not in (("auto", "rehearsed") if names_card else ("auto", "analytic", "rehearsed")):
        raise UsageError(f"--profile runs the step, and does not go with --method {method}", hint="leave one of them out")
    if method == "measured" and names_card:
        raise UsageError("--method measured runs steps on this machine's GPU, not on one that is named", hint="use `--auto`")
    if (apply_plan or dry_run) and method == "guide":
        raise UsageError("the guide's numbers are never written", hint="leave `--method guide` out to apply a plan that fits")
    for path in filter(None, (report, snapshot)):
        if not path.absolute().parent.is_dir():  # before minutes of rehearsals
            raise UsageError(f"{path}: there is no such folder", hint="name a file in a folder that is there")
    wanted = _Wanted(
        writes=apply_plan,
        shows_diff=apply_plan or dry_run,
        as_json=output_format == "json",
        curves=curves,
        report=report,
        snapshot=snapshot,
        profile=profiles and not names_card,
    )
    asked = Asked("rehearsed" if profiles and names_card else method, target, margin, pins, with_levers)
    from memplan.cli.configuration import read_configuration

    configuration = read_configuration(config_path)
    if profiles and names_card:
        said = "--profile: the card was named, so the step was rehearsed on a stand-in of it, with the real PyTorch"
        configuration = configuration.with_note(f"{said}; `memplan --auto --profile` runs it on this machine's GPU")
    cards = cards_for(auto=auto, name=gpu_name, memory=gpu_memory)
    return _plan(cards, gpu_memory, configuration, asked, wanted)


def _read_curves(text: str | None) -> Sequence[Variable] | None:
    """Return the variables that --curves names; none for the usual ones, None where it was not given."""
    if text is None or text == "usual":
        return None if text is None else ()
    from memplan.planner.curves import VARIABLES

    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in VARIABLES]
    if unknown:
        raise UsageError(f"--curves={text}: there is no curve of {unknown[0]!r}", hint=f"name some of {', '.join(VARIABLES)}")
    return [variable for variable in VARIABLES if variable in names]


class _Wanted(NamedTuple):
    """What is to come of a plan."""

    writes: bool
    shows_diff: bool
    as_json: bool
    curves: Sequence[Variable] | None
    """Along which variables; none of them: the usual ones."""
    report: Path | None
    snapshot: Path | None
    profile: bool
    """On this machine's GPU."""


class _Planned(NamedTuple):
    """A plan, what was drawn of it, and what the card said to it."""

    plan: Plan
    curves: Sequence[Curve] = ()
    profile: Profile | None = None

    def profiled(self, profile: Profile) -> _Planned:
        """Return a copy with what the card said: a plan that it contradicts does not fit."""
        fits = self.plan.fits and profile.contradiction is None
        return self._replace(plan=self.plan.model_copy(update={"fits": fits}), profile=profile)


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

    return sorted(map(_calibrated, detect_gpus()), key=lambda card: card.free_memory_bytes)


def _calibrated(card: GpuSpec) -> GpuSpec:
    """Return *card* with what a profile has measured of it with the PyTorch that is here."""
    from memplan.estimators.calibration import calibrated
    from memplan.standin.build import find_torch

    try:
        return calibrated(card, find_torch().version)
    except MissingError:  # no PyTorch for CUDA: a plan by formulas, which nothing was measured for
        return card


def _plan(cards: list[GpuSpec], typed_memory: str | None, configuration: Configuration, asked: Asked, wanted: _Wanted) -> int:
    from memplan.estimators.ranks import rank_of

    if wanted.shows_diff and configuration.reading is None:
        raise UsageError(
            f"there is nothing to apply to: planned was {configuration.source}",
            hint="only configuration trees are written: name one with `--config-path`, or run memplan in its project's folder",
        )
    if rank_of().number != 0:  # under torchrun rank 0 plans, reports and writes
        if wanted.profile:
            _profile(None)
        return 0
    planned = [_make(configuration, card, typed_memory, asked, wanted if card is cards[0] else None) for card in cards]
    if wanted.profile:
        found = _profile(planned[0].plan)
        assert found is not None
        planned[0] = planned[0].profiled(found)
    plan = planned[0].plan
    changes = _changes(configuration, plan) if wanted.shows_diff and plan.fits else []
    if wanted.as_json:  # says what was done, and so comes after it
        from memplan.reports.json import plan_as_json

        applied = wanted.writes and _write(configuration, changes)
        click.echo(plan_as_json(plan, _extra(configuration, planned, changes, applied=applied)))
        return 0 if plan.fits else 1
    # A person sees the report and its diff first: what is written has been shown.
    _report(configuration, planned, changes, wanted)
    if wanted.writes and _write(configuration, changes):
        _say_written(changes)
    return 0 if plan.fits else 1


def _profile(plan: Plan | None) -> Profile | None:
    from memplan.cli.profile import profile

    return profile(plan)


def _changes(configuration: Configuration, plan: Plan) -> list[FileChange]:
    """Return what *plan* would change in the files, checked and not written."""
    from memplan.edits.apply import prepare
    from memplan.layouts.layout import edits_for, unwritable

    assert configuration.reading is not None
    lost = unwritable(configuration.reading, plan.after)
    if lost:
        raise UsageError(
            f"the plan counts on {', '.join(lost)}, which these files have no key for",
            hint="leave the pin out, or change it in the code",
        )
    return prepare(edits_for(configuration.reading, plan.after))


def _write(configuration: Configuration, changes: Sequence[FileChange]) -> bool:
    """Write *changes*; say whether there were any."""
    if not changes or configuration.reading is None:
        return False
    from memplan.edits.apply import apply

    return apply(changes, root=configuration.reading.root, now=datetime.now(timezone.utc)) is not None


def _make(configuration: Configuration, card: GpuSpec, typed_memory: str | None, asked: Asked, wanted: _Wanted | None) -> _Planned:
    """Return the plan for *card*, and the drawings that are *wanted* of it."""
    from memplan.planner.explain import warn_of_other_stages
    from memplan.planner.pins import read_pins
    from memplan.planner.planner import make_plan

    if asked.method == "guide":
        return _Planned(_guide(configuration, card, typed_memory, asked, wanted))

    def find(method: str, estimator: Estimator) -> _Planned:
        plan = make_plan(
            configuration.workload,
            card,
            estimator,
            method=method,
            pins=read_pins(asked.pins),
            with_levers=asked.with_levers,
            **asked.options(configuration),
        )
        others = warn_of_other_stages(plan, configuration.other_stages, estimator=estimator)
        plan = plan.model_copy(update={"warnings": (*plan.warnings, *others)})
        return _Planned(plan, _drawn(configuration, plan, estimator, wanted) if wanted else ())

    if asked.method == "measured":
        from memplan.estimators.workload_measurement import WorkloadMeasurements

        with WorkloadMeasurements(card) as measurements:
            return find("measured", measurements)
    found = by_method(asked.method, find)
    planned: _Planned = found.result
    return planned._replace(plan=planned.plan.model_copy(update={"warnings": (*planned.plan.warnings, *found.notes)}))


def _guide(configuration: Configuration, card: GpuSpec, typed_memory: str | None, asked: Asked, wanted: _Wanted | None) -> Plan:
    from memplan.planner.planner import make_guide_plan
    from memplan.units import GIB, parse_size

    if asked._replace(method="", pins=()) != Asked("", None, None, ()) or asked.pins:
        raise UsageError("the guide has its own target and margin, pins nothing, and knows no levers", hint="use `--method analytic`")
    if wanted and (wanted.curves is not None or wanted.report or wanted.snapshot):
        raise UsageError("the guide's numbers are not drawn", hint="use `--method analytic` for curves and a report")
    # The guide takes the size on the box for GiB.
    memory_gib = parse_size(typed_memory).size_bytes / GIB if typed_memory else card.total_memory_bytes / GIB
    return make_guide_plan(configuration.workload, card, memory_gib=memory_gib)


def _drawn(configuration: Configuration, plan: Plan, estimator: Estimator, wanted: _Wanted) -> Sequence[Curve]:
    """Write the files that are *wanted* of *plan*; return its curves where they are wanted, in a file or on the terminal."""
    from memplan.estimators.base import rehearsing
    from memplan.planner.curves import curves_of, heaviest_step

    if wanted.snapshot is not None:
        from memplan.memory.snapshot import write_snapshot

        rehearses = rehearsing(estimator)
        if rehearses is None:
            raise MissingError("only a rehearsed step has a snapshot, and this plan is by formulas", hint="use `--method rehearsed`")
        write_snapshot(wanted.snapshot, rehearses.trace(*heaviest_step(plan, estimator)), settings=plan.after.training.allocator_settings)
    curves = curves_of(plan, estimator, wanted.curves or ()) if wanted.curves is not None or wanted.report else ()
    if wanted.report is not None:
        _write_report(configuration, plan, estimator, curves, wanted.report)
    return curves


def _write_report(configuration: Configuration, plan: Plan, estimator: Estimator, curves: Sequence[Curve], path: Path) -> None:
    from memplan.estimators.base import rehearsing
    from memplan.memory.timeline import timeline
    from memplan.planner.curves import heaviest_step
    from memplan.reports.html import plan_as_html

    workload, gpu, stage = heaviest_step(plan, estimator)
    rehearses = rehearsing(estimator)
    page = plan_as_html(
        plan,
        source=configuration.source,
        notes=configuration.notes,
        curves=curves,
        timeline=timeline(rehearses.trace(workload, gpu, stage)) if rehearses else None,
        stage=stage.name if stage else "",
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="name a file that can be written") from error


def _report(configuration: Configuration, planned: Sequence[_Planned], changes: Sequence[FileChange], wanted: _Wanted) -> None:
    from memplan.reports.terminal import print_curves, print_plan, print_profile

    plan = planned[0].plan
    print_plan(plan, source=configuration.source, notes=(*configuration.notes, *_alone([each.plan for each in planned])))
    if planned[0].profile is not None:
        print_profile(planned[0].profile)
    if wanted.curves is not None:
        print_curves(planned[0].curves)
    for path in filter(None, (wanted.report, wanted.snapshot)):
        click.echo(f"\nWrote {path}.", err=True)
    if wanted.shows_diff and plan.fits:
        _show_changes(changes, writes=wanted.writes)
    elif wanted.shows_diff:
        reason = "the plan does not fit" if plan.missing_bytes else "the profile contradicts the plan"
        click.echo(f"\nNothing was written, since {reason}.", err=True)


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


def _extra(configuration: Configuration, planned: Sequence[_Planned], changes: Sequence[FileChange], *, applied: bool) -> dict[str, Any]:
    """Return what the JSON has besides the plan."""
    return {
        "source": configuration.source,
        "notes": list(configuration.notes),
        "applied": applied,
        "curves": [curve.model_dump(mode="json") for curve in planned[0].curves],
        "changes": [
            {"file": str(change.path), "edits": [{"key": edit.dotted, "value": edit.value} for edit in change.edits]} for change in changes
        ],
        "other_gpus": [
            {"name": each.plan.gpu.name, "fits": each.plan.fits, "micro_batch_size": each.plan.after.training.micro_batch_size}
            for each in planned[1:]
        ],
        "profile": _profile_as_json(planned[0].profile),
    }


def _profile_as_json(profile: Profile | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    from memplan.memory.measurement import compare

    answer = profile.model_dump(mode="json") | {"contradiction": profile.contradiction}
    for stage, told in zip(profile.stages, answer["stages"], strict=True):
        told["comparison"] = [
            {**row._asdict(), "difference_bytes": row.difference_bytes, "percent": row.percent}
            for row in compare(stage.estimate, stage.measured)
        ]
    return answer
