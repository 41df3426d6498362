"""What comes of a plan: its report or its JSON, drawings, and the files that it is written into."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memplan.cli.typed_options import in_options
from memplan.errors import MissingError, UsageError, reason_of

if TYPE_CHECKING:
    from memplan.analysis.curves import Curve, Variable
    from memplan.analysis.profile import Profile
    from memplan.api.configuration import Configuration
    from memplan.api.plans import Plan
    from memplan.edits.apply import FileChange
    from memplan.estimators.base import Estimator
    from memplan.programs.plan_file import PlanSettings


class Output(NamedTuple):
    """What is to come of a plan."""

    writes: bool
    shows_diff: bool
    as_json: bool
    is_verbose: bool
    """The whole report."""
    curves: Sequence[Variable] | None
    """Along which variables; none of them: the usual ones."""
    report: Path | None
    snapshot: Path | None
    remembers: PlanSettings | None = None
    """What is written into `.memplan/plan.yaml` with the plan; None: nothing."""


class Made(NamedTuple):
    """The plan for each GPU, that for the smallest first; what was drawn of it, and what the GPU itself said to it."""

    plans: list[Plan]
    curves: Sequence[Curve] = ()
    profile: Profile | None = None

    def profiled(self, profile: Profile) -> Made:
        """Return a copy with what the GPU said: a plan that it contradicts does not fit."""
        first, *others = self.plans
        fits = first.fits and profile.contradiction is None
        return self._replace(plans=[first.model_copy(update={"fits": fits}), *others], profile=profile)


def draw(configuration: Configuration, plan: Plan, estimator: Estimator, output: Output) -> Sequence[Curve]:
    """Write the files that *output* wants of *plan*; return its curves where they are wanted, in a file or on the terminal."""
    from memplan.analysis.curves import curves_of, heaviest_step
    from memplan.estimators.base import ReplayingEstimator

    if output.snapshot is not None:
        from memplan.traces.snapshot import write_snapshot

        if not isinstance(estimator, ReplayingEstimator):
            raise MissingError("only a rehearsed step has a snapshot, and this plan is analytic", hint="use `--method rehearsed`")
        write_snapshot(output.snapshot, estimator.trace(*heaviest_step(plan, estimator)), settings=plan.after.training.allocator_settings)
    curves = curves_of(plan, estimator, output.curves or ()) if output.curves is not None or output.report else ()
    if output.report is not None:
        _write_report(configuration, plan, estimator, curves, output.report)
    return curves


def _write_report(configuration: Configuration, plan: Plan, estimator: Estimator, curves: Sequence[Curve], path: Path) -> None:
    from memplan.analysis.curves import heaviest_step
    from memplan.estimators.base import ReplayingEstimator
    from memplan.reports.html import plan_as_html
    from memplan.traces.timeline import timeline

    workload, gpu, stage = heaviest_step(plan, estimator)
    page = plan_as_html(
        plan,
        source=configuration.source,
        remembered=configuration.remembered,
        notes=configuration.notes,
        curves=curves,
        timeline=timeline(estimator.trace(workload, gpu, stage)) if isinstance(estimator, ReplayingEstimator) else None,
        stage=stage.name if stage else "",
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}", hint="name a file that can be written") from error


def show(configuration: Configuration, made: Made, output: Output) -> None:
    """Print what was made, and write the plan where that is wanted: a person sees the report and its diff first."""
    from memplan.api.plans import changes_of, write_changes

    plan = made.plans[0]
    changes = changes_of(plan, configuration) if output.shows_diff and plan.fits else []
    if output.as_json:  # says what was done, and so comes after it
        from memplan.reports.json import plan_as_json

        written = write_changes(changes, configuration) if output.writes and changes else ()
        _remember(plan, output)
        click.echo(plan_as_json(_typed(plan), _extra(configuration, made, changes, applied=bool(written))))
        return
    _report(configuration, made, changes, output)
    if output.writes and changes:
        written = write_changes(changes, configuration)
        count = f"{len(written)} file" + ("s" if len(written) > 1 else "")
        undo = _undo_command(written)
        click.echo(f"\nWrote {count}; the originals are beside them (*.backup). `{undo}` puts them back.", err=True)
    _remember(plan, output)


def _undo_command(written: Sequence[Path]) -> str:
    """Return what puts *written* back when it is typed here: the journal may lie in a folder below."""
    from memplan.api.journals import journal_root

    root = journal_root(written[0].parent, written)
    if root.resolve() == journal_root(Path()).resolve():
        return "memplan undo"
    return f"memplan undo {shlex.quote(os.path.relpath(root))}"


def _remember(plan: Plan, output: Output) -> None:
    """Keep what was asked for with a plan that fits, and say so; a plan that is written counts also where that cannot be kept."""
    if output.remembers is None or not plan.fits:
        return
    from memplan.errors import ConfigError
    from memplan.programs.plan_file import write_plan_file

    try:
        file = write_plan_file(Path(), output.remembers)
    except ConfigError as error:
        click.echo(f"Warning: what was asked for is not remembered: {error.message}", err=True)
        return
    if file is not None:
        click.echo(f"Wrote {file}: here, `memplan --apply` alone plans the same again.", err=True)


def _report(configuration: Configuration, made: Made, changes: Sequence[FileChange], output: Output) -> None:
    from memplan.reports.terminal import print_curves, print_plan, print_profile

    plan = made.plans[0]
    notes = in_options(configuration.notes)
    print_plan(
        _typed(plan.with_first_warnings(_alone(made.plans))),
        source=configuration.source,
        remembered=configuration.remembered,
        notes=notes,
        is_short=not output.is_verbose,
        more=" with --verbose",
    )
    if made.profile is not None:
        print_profile(made.profile)
    if output.curves is not None:
        print_curves(made.curves)
    for path in filter(None, (output.report, output.snapshot)):
        click.echo(f"\nWrote {path}.", err=True)
    if output.shows_diff and plan.fits:
        is_typed = configuration.is_own_program and plan.before.training != plan.after.training
        _show_changes(changes, writes=output.writes, is_typed=is_typed)
    elif output.shows_diff:
        reason = "the plan does not fit" if plan.missing_bytes else "the profile contradicts the plan"
        click.echo(f"\nNothing was written, since {reason}.", err=True)


def _typed(plan: Plan) -> Plan:
    """Return *plan* with its texts as they are typed at a prompt."""
    return plan.model_copy(update={"reasons": in_options(plan.reasons), "warnings": in_options(plan.warnings)})


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


def _show_changes(changes: Sequence[FileChange], *, writes: bool, is_typed: bool) -> None:
    """Show *changes*, and say where there are none; *is_typed*: what changes is in the command's own words, which nobody else writes."""
    from memplan.reports.diff import diff_lines
    from memplan.reports.terminal import print_diff

    if not changes:
        typed = " What changes is in the command: type it as it is planned above." if is_typed else ""
        click.echo(f"\nThe configuration has these values already; nothing to write.{typed}", err=True)
        return
    click.echo()
    print_diff(diff_lines(changes))
    if not writes:
        click.echo("\nNothing was written (--dry-run).", err=True)


def _extra(configuration: Configuration, made: Made, changes: Sequence[FileChange], *, applied: bool) -> dict[str, Any]:
    """Return what the JSON has besides the plan."""
    return {
        "source": configuration.source,
        "remembered": configuration.remembered or None,
        "notes": list(in_options(configuration.notes)),
        "applied": applied,
        "curves": [curve.model_dump(mode="json") for curve in made.curves],
        "changes": [
            {"file": str(change.path), "edits": [{"key": edit.dotted, "value": edit.value} for edit in change.edits]} for change in changes
        ],
        "other_gpus": [
            {"name": plan.gpu.name, "fits": plan.fits, "micro_batch_size": plan.after.training.micro_batch_size} for plan in made.plans[1:]
        ],
        "profile": _profile_as_json(made.profile),
    }


def _profile_as_json(profile: Profile | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    from memplan.execution.measurement import compare

    answer = profile.model_dump(mode="json") | {"contradiction": profile.contradiction}
    for stage, told in zip(profile.stages, answer["stages"], strict=True):
        told["comparison"] = [
            {**row._asdict(), "difference_bytes": row.difference_bytes, "percent": row.percent}
            for row in compare(stage.estimate, stage.measured)
        ]
    return answer
