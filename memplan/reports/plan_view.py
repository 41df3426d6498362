"""What the report of a plan shows, as plain text in plain structures: the source of a terminal's report and of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.estimators.analytic.fragmentation import HELD_OUT_COVERAGE
from memplan.execution.rehearsal import Rehearsal
from memplan.memory.breakdown import MemoryBreakdown
from memplan.planner.plan import Lever, Plan, StagePlan
from memplan.reports.breakdown_view import Breakdown, breakdown_rows, joined
from memplan.reports.rehearsal_view import CHOSEN_ON_THE_GPU, how_it_ended
from memplan.units import GIB, format_bytes
from memplan.workload.parallelism import Strategy
from memplan.workload.program import Program
from memplan.workload.workload import Workload

METHOD_NOTES = {
    "analytic": f"formulas; checked against their upper bound, which held for {HELD_OUT_COVERAGE:.0%} of test rehearsals",
    "rehearsed": "real PyTorch on a simulated GPU: exact except the CUDA context; checked against its upper bound",
    "rehearsed with allowances": "real PyTorch on a simulated GPU: exact except the CUDA context and workspaces that libraries choose; "
    "checked against its upper bound",
    "modelled": "memplan's own model of it in real PyTorch on a simulated GPU: near what the program takes, not exact",
    "measured": "the step was run on the GPU itself, at each size that was tried",
    "guide": "the guide's rule of thumb, for comparison",
}

MOST_NOTES = 4
"""Reasons and warnings in a short report."""

MOST_REASONS = 2
"""Of them reasons, where there are warnings enough."""

MOST_LEVERS = 4
"""Levers in a short report."""


class PlanView(NamedTuple):
    """The parts of a plan report."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    """Name and value: what was planned, effective batch, GPU, method."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """One row a stage; a value that changes reads "4 → 2"."""
    breakdowns: tuple[Breakdown, ...]
    """One for each group of stages that take the same; in a short report that of the stage that takes most."""
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    levers: tuple[str, ...]
    num_left_out: int = 0
    """Lines that a short report leaves out: breakdowns, reasons, warnings and levers."""


def view_plan(plan: Plan, *, source: str, remembered: str = "", notes: Sequence[str] = (), is_short: bool = False) -> PlanView:
    """
    Return what a report of *plan* shows; *source* is where its workload was read, *notes* what was noticed on the way, *remembered* where
    what was not typed was found.

    A short one has the breakdown of the stage that takes most, and of the reasons and warnings those that cost most.
    """
    warnings = (*plan.warnings, *notes)
    view = PlanView(
        headline=_headline(plan),
        facts=tuple(_facts(plan, source, remembered, is_short=is_short)),
        columns=_columns(plan),
        rows=tuple(_row(plan, stage) for stage in plan.stages),
        breakdowns=tuple(_breakdowns(plan, is_short=is_short)),
        reasons=plan.reasons,
        warnings=warnings,
        levers=tuple(_levers(plan)),
    )
    return _shortened(view) if is_short else view


def _shortened(view: PlanView) -> PlanView:
    """Return the costliest of the reasons and warnings, which come in that order, and what is left out."""
    num_warnings = min(len(view.warnings), MOST_NOTES - min(len(view.reasons), MOST_REASONS))
    num_reasons = min(len(view.reasons), MOST_NOTES - num_warnings)
    short = view._replace(
        breakdowns=view.breakdowns[:1],
        reasons=view.reasons[:num_reasons],
        warnings=view.warnings[:num_warnings],
        levers=view.levers[:MOST_LEVERS],
    )
    return short._replace(num_left_out=_num_notes(view) - _num_notes(short))


def _num_notes(view: PlanView) -> int:
    return len(view.breakdowns) + len(view.reasons) + len(view.warnings) + len(view.levers)


def _headline(plan: Plan) -> str:
    if not plan.fits and not plan.missing_bytes:
        return f"Does not fit on {plan.gpu.name}: the GPU itself contradicts the plan"
    if not plan.fits:
        return f"Does not fit on {plan.gpu.name}: {format_bytes(plan.missing_bytes)} short"
    batches = {(stage.planned.micro_batch_size, stage.planned.gradient_accumulation_steps) for stage in plan.stages}
    if len(batches) > 1:
        return f"The guide's batches for {plan.gpu.name}"
    micro, steps = next(iter(batches))
    return f"Fits on {plan.gpu.name}: micro-batch {micro}, accumulation {steps}, effective batch {plan.effective_batch_size}"


def _facts(plan: Plan, source: str, remembered: str, *, is_short: bool) -> Iterator[tuple[str, str]]:
    yield "planned", _planned(plan, source)
    if remembered:
        yield "remembered", remembered
    reached = plan.effective_batch_size if plan.fits else plan.before.effective_batch_size
    if not (is_short and reached == plan.target_effective_batch_size):
        yield "effective batch", f"{_change(plan.before.effective_batch_size, reached)}, target {plan.target_effective_batch_size}"
    yield "GPU", plan.gpu.origin if is_short else f"{plan.gpu.name}: {plan.gpu.origin}"
    yield "budget", _budget(plan)
    if plan.gpu.context_bytes:
        yield "CUDA context", f"{format_bytes(plan.gpu.context_bytes)}, as a profile measured it here"
    yield "method", f"{plan.method}: {METHOD_NOTES[_note_of(plan)]}"
    yield from _steps(plan)
    if plan.after.parallelism.num_gpus > 1:
        yield "GPUs", f"{_gpus(plan.after)}; the table is for each"


def _steps(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield how many steps were run of a program that was ended behind them: the plan is of these, and of nothing that comes later."""
    rehearsals = [stage.estimate for stage in plan.stages if isinstance(stage.estimate, Rehearsal)]
    if any(rehearsal.was_cut for rehearsal in rehearsals):
        largest = max(rehearsals, key=lambda rehearsal: rehearsal.device_used.high_bytes)
        yield "steps", f"{len(largest.steps)} of the program{how_it_ended(largest)}"


_STRATEGIES: dict[Strategy, str] = {
    "ddp": "data parallel (DDP)",
    "zero1": "optimizer state sharded (DeepSpeed ZeRO-1)",
    "zero2": "optimizer state and gradients sharded (DeepSpeed ZeRO-2)",
    "zero3": "fully sharded (DeepSpeed ZeRO-3)",
    "fsdp": "fully sharded (FSDP2)",
}


def _note_of(plan: Plan) -> str:
    """Return which of METHOD_NOTES is true of *plan*."""
    if plan.method != "rehearsed":
        return plan.method
    if plan.budget.model_error:
        return "modelled"
    estimates = (stage.estimate for stage in plan.stages)
    kinds = {finding.kind for estimate in estimates if isinstance(estimate, Rehearsal) for finding in estimate.findings}
    return "rehearsed with allowances" if kinds & CHOSEN_ON_THE_GPU else plan.method


def _gpus(program: Program) -> str:
    """Return how many GPUs train *program*, and how they share it. What a program of the user's shares, only its code knows."""
    parallelism = program.parallelism
    split = [f"{name.removesuffix('_size').replace('_', ' ')} {getattr(parallelism, name)}" for name in parallelism.split_by]
    if not isinstance(program, Workload):
        together = f"data parallel {parallelism.data_parallel_size}" if split else "data parallel"
        return f"{parallelism.num_gpus}, {' × '.join([*split, together])}"
    groups = f" in groups of {parallelism.sharding_degree}" if parallelism.sharding_degree else ""
    over = f" over {parallelism.num_copies}" if split else ""
    kept = [f"{_STRATEGIES[parallelism.strategy]}{over}{groups}"] if parallelism.num_copies > 1 else []
    return f"{parallelism.num_gpus}, {', '.join([*split, *kept])}"


def _planned(plan: Plan, source: str) -> str:
    program = plan.after
    if not isinstance(program, Workload):
        return program.typed
    training = program.training
    return f"{source}: {program.name}, {training.precision}, sequence {training.sequence_length}, {program.optimizer.name}"


def _budget(plan: Plan) -> str:
    budget = f"{format_bytes(plan.budget_bytes)} of {format_bytes(plan.budget.total_bytes)}"
    if plan.budget.others_used_bytes:
        budget += f", less {format_bytes(plan.budget.others_used_bytes)} that other processes hold"
    if plan.budget.margin:
        budget += f", {plan.budget.margin:.0%} left free"
    if plan.budget.model_error:
        budget += f", and {plan.budget.model_error:.0%} for what the program itself may take more"
    return budget


def _columns(plan: Plan) -> tuple[str, ...]:
    return ("stage", "micro-batch", "accumulation", *_item_columns(plan), "memory" if plan.fits else "minimum", "range", "% of GPU")


def _item_columns(plan: Plan) -> Iterator[str]:
    """Yield the columns of contrastive training: what an anchor has, could have at the planned micro-batch, and is compared with."""
    if _shows(plan, "n_positives"):
        yield "n_positives"
    if _has_room_for_positives(plan):
        yield "would fit"
    if _shows(plan, "n_negatives"):
        yield "n_negatives"
    if _has_room_for_negatives(plan):
        yield "would fit"
    if _shows_all_negatives(plan):
        yield "negatives per anchor"


def _shows(plan: Plan, name: str) -> bool:
    """Say whether the stages have such a value."""
    return any(getattr(stage.planned, name) is not None for stage in plan.stages)


def _has_room_for_positives(plan: Plan) -> bool:
    return any(stage.room is not None and stage.room.n_positives is not None for stage in plan.stages)


def _has_room_for_negatives(plan: Plan) -> bool:
    return any(stage.room is not None and stage.room.n_negatives is not None for stage in plan.stages)


def _shows_all_negatives(plan: Plan) -> bool:
    """Say whether the loss compares an anchor with others than its explicit negatives: those of the batch."""
    values = [each for stage in plan.stages for each in (stage.present, stage.planned)]
    return any(each.negatives_per_anchor not in (None, each.n_negatives) for each in values)


def _row(plan: Plan, stage: StagePlan) -> tuple[str, ...]:
    # where nothing fits nothing is planned: the values are those of the smallest try, which the memory is of
    old, new = stage.present if plan.fits or plan.method == "guide" else stage.planned, stage.planned
    values = [
        stage.name,
        _change(old.micro_batch_size, new.micro_batch_size),
        _change(old.gradient_accumulation_steps, new.gradient_accumulation_steps),
    ]
    room, planned = stage.room, stage.planned
    if _shows(plan, "n_positives"):
        values.append(_change(old.n_positives, new.n_positives))
    if _has_room_for_positives(plan):
        most, items = (room.n_positives, room.items_per_anchor_with_positives) if room else (None, None)
        values.append(_that_fit(planned.n_positives, most, items, room.items_per_anchor if room else 1))
    if _shows(plan, "n_negatives"):
        values.append(_change(old.n_negatives, new.n_negatives))
    if _has_room_for_negatives(plan):
        most, items = (room.n_negatives, room.items_per_anchor_with_negatives) if room else (None, None)
        values.append(_that_fit(planned.n_negatives, most, items, room.items_per_anchor if room else 1))
    if _shows_all_negatives(plan):
        values.append(_change(old.negatives_per_anchor, new.negatives_per_anchor))
    used = stage.estimate.device_used
    values.append(format_bytes(used.expected_bytes))
    values.append(f"{used.low_bytes / GIB:.1f} to {used.high_bytes / GIB:.1f} GiB" if used.low_bytes != used.high_bytes else "")
    values.append(f"{used.expected_bytes / plan.gpu.total_memory_bytes:.0%}")
    return tuple(values)


def _that_fit(planned: int | None, most: int | None, items: int | None, now: int) -> str:
    """Return how many would fit, and how many times the items a step would then encode: "31 (3.3× items)"."""
    if most is None or items is None:
        return ""
    return str(most) if most == planned else f"{most} ({items / now:.1f}× items)"


def _change(old: int | None, new: int | None) -> str:
    return f"{new}" if old == new else f"{old} → {new}"


def _breakdowns(plan: Plan, *, is_short: bool) -> list[Breakdown]:
    """Return a breakdown for each group of stages that take the same, the largest first."""
    groups: dict[MemoryBreakdown, list[StagePlan]] = {}
    for stage in sorted(plan.stages, key=lambda stage: -stage.estimate.breakdown.total_bytes):
        groups.setdefault(stage.estimate.breakdown, []).append(stage)
    total_bytes = plan.gpu.total_memory_bytes
    return [
        Breakdown(
            f"{joined([stage.name for stage in stages])} at the peak ({stages[0].estimate.peak_phase})",
            breakdown_rows(stages[0].estimate, total_bytes, is_short=is_short),
        )
        for stages in groups.values()
    ]


def _levers(plan: Plan) -> list[str]:
    return [f"{lever.change}: {', '.join(_lever_parts(plan, lever))}" for lever in plan.levers]


def _lever_parts(plan: Plan, lever: Lever) -> Iterator[str]:
    if lever.saving_bytes:
        verb = "saves" if lever.saving_bytes > 0 else "takes"
        more = "" if lever.saving_bytes > 0 else " more"
        yield f"{verb} {format_bytes(abs(lever.saving_bytes))}{more} ({format_bytes(lever.device_used_bytes)} in total)"
    if not plan.fits:
        yield "would fit" if lever.fits else "not sufficient alone"
    elif not lever.fits:
        yield "would not fit"
    if lever.micro_batch_size is not None:
        yield f"up to micro-batch {lever.micro_batch_size}"
    if lever.method != plan.method:
        yield f"{lever.method}, since it could not be rehearsed here"
