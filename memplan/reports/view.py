"""What a plan report shows, as plain text in plain structures: the one source of every output for people."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.analysis.comparison import ComparedCard
from memplan.analysis.curves import Curve, CurvePoint
from memplan.analysis.profile import StageProfile
from memplan.analysis.would_fit import WouldFit
from memplan.execution.measurement import Compared, compare
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.planner.plan import Lever, Plan, StagePlan
from memplan.units import GIB, format_bytes

_CATEGORIES = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_state_bytes": "optimizer state",
    "activations_bytes": "activations",
    "batch_data_bytes": "batch data",
    "workspaces_bytes": "workspaces",
    "allocator_slack_bytes": "allocator slack",
    "cuda_context_bytes": "CUDA context",
}

METHOD_NOTES = {
    "analytic": "closed formulas; a plan fits when the high end of the range does",
    "rehearsed": "the real PyTorch ran the step on a stand-in card: exact, but for the CUDA context, whose high end has to fit",
    "measured": "the step was run on the card itself, at each size that was tried",
    "guide": "the guide's rule of thumb, to compare with",
}


class Breakdown(NamedTuple):
    """What the memory of some stages is made of."""

    title: str
    """The stages and where in the step the peak is."""
    rows: tuple[tuple[str, str, float], ...]
    """Category, bytes, share of the card; the total comes last."""


class PlanView(NamedTuple):
    """The parts of a plan report."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    """Name and value: workload, card, budget, method, effective batch."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """One row a stage; a value that changes reads "4 → 2"."""
    breakdowns: tuple[Breakdown, ...]
    """One for each group of stages that take the same."""
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    levers: tuple[str, ...]


def view_plan(plan: Plan, *, source: str) -> PlanView:
    """Return what a report of *plan* shows; *source* is where its workload was read."""
    return PlanView(
        headline=_headline(plan),
        facts=tuple(_facts(plan, source)),
        columns=_columns(plan),
        rows=tuple(_row(plan, stage) for stage in plan.stages),
        breakdowns=tuple(_breakdowns(plan)),
        reasons=plan.reasons,
        warnings=plan.warnings,
        levers=tuple(_levers(plan)),
    )


def _headline(plan: Plan) -> str:
    if not plan.fits and not plan.missing_bytes:
        return f"Does not fit on {plan.gpu.name}, whatever the plan says: the card itself contradicts it"
    if not plan.fits:
        return f"Does not fit on {plan.gpu.name}: {format_bytes(plan.missing_bytes)} are missing"
    batches = {(stage.planned.micro_batch_size, stage.planned.gradient_accumulation_steps) for stage in plan.stages}
    if len(batches) > 1:
        return f"The guide's batches for {plan.gpu.name}"
    micro, steps = next(iter(batches))
    return f"Fits on {plan.gpu.name}: micro-batch {micro}, accumulation {steps}, effective batch {plan.effective_batch_size}"


def _facts(plan: Plan, source: str) -> list[tuple[str, str]]:
    budget = f"{format_bytes(plan.budget_bytes)} of {format_bytes(plan.budget.total_bytes)}"
    if plan.budget.others_used_bytes:
        budget += f", less {format_bytes(plan.budget.others_used_bytes)} that others hold"
    if plan.budget.margin:
        budget += f", {plan.budget.margin:.0%} left free"
    training = plan.after.training
    facts = [
        ("planned", source),
        (
            "effective batch",
            f"{_change(plan.before.effective_batch_size, plan.effective_batch_size if plan.fits else plan.before.effective_batch_size)}, "
            f"target {plan.target_effective_batch_size}",
        ),
        ("workload", f"{plan.after.name} ({training.precision}, sequence {training.sequence_length}, {plan.after.optimizer.name})"),
        ("card", f"{plan.gpu.name}: {plan.gpu.origin}"),
        ("budget", budget),
        *([("CUDA context", f"{format_bytes(plan.gpu.context_bytes)}, as --profile measured it here")] if plan.gpu.context_bytes else []),
        ("method", f"{plan.method}: {METHOD_NOTES[plan.method]}"),
    ]
    if plan.after.parallelism.data_parallel_size > 1:
        facts.append(("GPUs", f"{plan.after.parallelism.data_parallel_size}, data parallel; the table is for each"))
    return facts


def _columns(plan: Plan) -> tuple[str, ...]:
    return ("stage", "micro-batch", "accumulation", *_item_columns(plan), "memory" if plan.fits else "minimum", "range", "% of GPU")


def _item_columns(plan: Plan) -> tuple[str, ...]:
    """Return the columns of contrastive training: what an anchor has, sees, and could have at the planned micro-batch."""
    if plan.before.contrastive is None:
        return ()
    rooms = [stage.room for stage in plan.stages if stage.room is not None]
    room = ["n_positives that fit"] if any(room.n_positives is not None for room in rooms) else []
    room += ["n_negatives that fit"] if any(room.n_negatives is not None for room in rooms) else []
    return ("n_positives", "n_negatives", "negatives per anchor", *room)


def _row(plan: Plan, stage: StagePlan) -> tuple[str, ...]:
    # where nothing fits nothing is planned: the memory is that of the smallest try
    old, new = stage.present, stage.planned if plan.fits or plan.method == "guide" else stage.present
    values = [
        stage.name,
        _change(old.micro_batch_size, new.micro_batch_size),
        _change(old.gradient_accumulation_steps, new.gradient_accumulation_steps),
    ]
    if plan.before.contrastive is not None:
        values += [_change(old.n_positives, new.n_positives), _change(old.n_negatives, new.n_negatives)]
        values.append(_change(old.negatives_per_anchor, new.negatives_per_anchor))
        values += _room_values(plan, stage)
    used = stage.estimate.device_used
    values.append(format_bytes(used.expected_bytes))
    values.append(f"{used.low_bytes / GIB:.1f} to {used.high_bytes / GIB:.1f} GiB" if used.low_bytes != used.high_bytes else "")
    values.append(f"{used.expected_bytes / plan.gpu.total_memory_bytes:.0%}")
    return tuple(values)


def _room_values(plan: Plan, stage: StagePlan) -> Iterator[str]:
    """Yield what a stage could have, for the columns that the plan shows."""
    room, planned = stage.room, stage.planned
    if room is None:
        return
    if any(other.room is not None and other.room.n_positives is not None for other in plan.stages):
        yield _that_fit(planned.n_positives, room.n_positives, room.items_per_anchor_with_positives, room.items_per_anchor)
    if any(other.room is not None and other.room.n_negatives is not None for other in plan.stages):
        yield _that_fit(planned.n_negatives, room.n_negatives, room.items_per_anchor_with_negatives, room.items_per_anchor)


def _that_fit(planned: int | None, most: int | None, items: int | None, now: int) -> str:
    """Return how many would fit, and how many times the items a step would then encode: "31 (3.3× items)"."""
    if most is None or items is None:
        return ""
    return str(most) if most == planned else f"{most} ({items / now:.1f}× items)"


def _change(old: int | None, new: int | None) -> str:
    return f"{new}" if old == new else f"{old} → {new}"


def _breakdowns(plan: Plan) -> list[Breakdown]:
    """Return a breakdown for each group of stages that take the same, in their order."""
    groups: dict[MemoryBreakdown, list[StagePlan]] = {}
    for stage in plan.stages:
        groups.setdefault(stage.estimate.breakdown, []).append(stage)
    titles = [f"{_joined([stage.name for stage in stages])}, at the peak ({stages[0].estimate.peak_phase})" for stages in groups.values()]
    total_bytes = plan.gpu.total_memory_bytes
    return [Breakdown(title, tuple(_shares(breakdown, total_bytes))) for title, breakdown in zip(titles, groups, strict=True)]


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _shares(breakdown: MemoryBreakdown, total_bytes: int) -> list[tuple[str, str, float]]:
    rows = [(_CATEGORIES[name], format_bytes(value), value / total_bytes) for name, value in breakdown if value]
    return [*rows, ("total", format_bytes(breakdown.total_bytes), breakdown.total_bytes / total_bytes)]


def _levers(plan: Plan) -> list[str]:
    return [f"{lever.change}: {', '.join(_lever_parts(plan, lever))}" for lever in plan.levers]


def _lever_parts(plan: Plan, lever: Lever) -> Iterator[str]:
    if lever.saving_bytes:
        verb = "saves" if lever.saving_bytes > 0 else "takes"
        more = "" if lever.saving_bytes > 0 else " more"
        yield f"{verb} {format_bytes(abs(lever.saving_bytes))}{more} ({format_bytes(lever.device_used_bytes)} then)"
    if not plan.fits:
        yield "fits then" if lever.fits else "not enough alone"
    elif not lever.fits:
        yield "does not fit then"
    if lever.micro_batch_size is not None:
        yield f"up to micro-batch {lever.micro_batch_size}"
    if lever.method != plan.method:
        yield f"{lever.method}, since it could not be rehearsed here"


class RehearsalView(NamedTuple):
    """The parts of a rehearsal's report."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    breakdown: Breakdown
    warnings: tuple[str, ...]
    would_fit: tuple[str, ...]


def view_rehearsal(rehearsal: Rehearsal, gpu: GpuSpec, would_fit: WouldFit | None = None) -> RehearsalView:
    """Return what a report of *rehearsal* on *gpu* shows; *would_fit* is what would, where it does not fit."""
    used = rehearsal.device_used
    facts = [
        ("card", f"{gpu.name}, {format_bytes(gpu.total_memory_bytes)} for programs"),
        ("PyTorch", f"{rehearsal.torch}, {_count(len(rehearsal.steps), 'step')}"),
        ("peak allocated", f"{format_bytes(rehearsal.peak_allocated_bytes)}, in {rehearsal.peak_phase}"),
        ("peak reserved", f"{format_bytes(rehearsal.peak_reserved_bytes)}, of which {rehearsal.fragmentation:.1%} fragmentation"),
        (
            "peak of the device",
            f"{format_bytes(used.expected_bytes)}, with the CUDA context, which varies: "
            f"{format_bytes(used.low_bytes)} to {format_bytes(used.high_bytes)}",
        ),
        ("retries", str(rehearsal.num_alloc_retries)),
    ]
    breakdown = Breakdown("the step at its peak", tuple(_shares(rehearsal.breakdown, gpu.total_memory_bytes)))
    fits = tuple(_would_fit(would_fit)) if would_fit else ()
    return RehearsalView(_rehearsal_headline(rehearsal, gpu), tuple(facts), breakdown, tuple(_rehearsal_warnings(rehearsal, gpu)), fits)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _rehearsal_headline(rehearsal: Rehearsal, gpu: GpuSpec) -> str:
    missing = rehearsal.out_of_memory
    if missing is None:
        steps = f"the peak of {_count(len(rehearsal.steps), 'step')}" if rehearsal.steps else "the peak"
        return f"Fits on {gpu.name}: {format_bytes(rehearsal.device_used_bytes)} at {steps}"
    where = f" at {missing.place}" if missing.place else ""
    when = f"in step {missing.step}, {missing.phase}," if missing.step else "while the model was built,"
    return f"Does not fit on {gpu.name}: out of memory {when.rstrip(',') if not where else when}{where}"


def _rehearsal_warnings(rehearsal: Rehearsal, gpu: GpuSpec) -> list[str]:
    warnings = []
    if rehearsal.out_of_memory is not None:
        missing = rehearsal.out_of_memory
        asked, free = format_bytes(missing.requested_bytes), format_bytes(missing.free_bytes)
        then = (
            "the program caught it and went on, with less than it asked for"
            if missing.is_caught
            else "the figures are of what ran before that"
        )
        warnings.append(f"tried to allocate {asked} with {free} of the card free; {then}")
    if rehearsal.exit_code > 0:
        warnings.append(f"the program ended with exit code {rehearsal.exit_code}: the figures are of what ran until then")
    if rehearsal.fits and rehearsal.device_used.high_bytes > gpu.total_memory_bytes:
        most = format_bytes(max(0, gpu.total_memory_bytes - rehearsal.peak_reserved_bytes))
        warnings.append(f"it fits barely: with a CUDA context of more than {most} it does not, and that varies up to 0.62 GiB")
    if rehearsal.num_alloc_retries and rehearsal.fits:
        warnings.append("tight: the allocator had to give cached memory back to go on; a little more and it does not fit")
    return [*warnings, *(finding.message for finding in rehearsal.findings)]


def _would_fit(found: WouldFit) -> Iterator[str]:
    if found.name and found.value:
        yield f"{found.name}={found.value} on this card: the largest that ran to its end"
    elif found.name is None:
        yield "a smaller batch, perhaps: no value of the program is called batch (or batch_size, micro_batch, bs, n), so none was tried"
    else:
        yield f"no {found.name} on this card: not even 1 does"
    if found.device_used_bytes is None:
        yield "memory alone does not help: the step does not run on a card without end either"
    else:
        need = f"the step as it is on a card of this kind with {format_bytes(found.device_used_bytes)}"
        yield (
            f"{need}; so much offer {', '.join(found.cards)} (rehearse on them to be sure)" if found.cards else f"{need}; no card offers it"
        )


class ComparisonView(NamedTuple):
    """A table with a row for each card."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def view_comparison(cards: Sequence[ComparedCard]) -> ComparisonView:
    """Return the table of *cards*. Values that are not the same in all stages are listed in their order, "24, 8"."""
    is_contrastive = any(stage.planned.n_negatives is not None for card in cards for stage in card.stages)
    columns = (
        "card",
        "for programs",
        "micro-batch",
        "accumulation",
        "effective",
        *(["n_negatives"] if is_contrastive else []),
        "memory",
        "of card",
    )
    return ComparisonView(columns, tuple(tuple(_compared_row(card, is_contrastive=is_contrastive)) for card in cards))


def _compared_row(card: ComparedCard, *, is_contrastive: bool) -> Iterator[str]:
    yield card.gpu.name.removeprefix("NVIDIA ")
    yield format_bytes(card.gpu.total_memory_bytes)
    planned = card.stages[0].planned
    if card.fits:
        yield from map(str, (planned.micro_batch_size, planned.gradient_accumulation_steps, planned.effective_batch_size))
        if is_contrastive:
            yield ", ".join(dict.fromkeys(str(stage.planned.n_negatives) for stage in card.stages))
    else:
        yield from ("none fits", "", "", *([""] if is_contrastive else []))
    yield format_bytes(card.device_used_bytes) if card.fits else f"{format_bytes(card.missing_bytes)} missing"
    yield f"{card.device_used_bytes / card.gpu.total_memory_bytes:.0%}"


CURVE_WORDS = {
    "micro_batch_size": "micro-batch", "n_negatives": "negatives", "n_positives": "positives", "sequence_length": "sequence length"
}  # fmt: skip
"""What is varied, in words."""


class CurveRow(NamedTuple):
    """A value of a curve."""

    label: str
    share: float
    """Of the card."""
    size: str
    fits: bool
    remark: str


class CurveView(NamedTuple):
    """A curve, as bars."""

    title: str
    budget_share: float
    rows: tuple[CurveRow, ...]


def view_curve(curve: Curve) -> CurveView:
    """Return *curve* as rows, one for each value."""
    variable = CURVE_WORDS[curve.variable]
    return CurveView(
        title=f"memory of {curve.stage} against its {variable}, on the scale of the card (│ is the budget)",
        budget_share=curve.budget_bytes / curve.card_bytes,
        rows=tuple(
            CurveRow(
                label=f"{variable} {point.value}",
                share=point.device_used_bytes / curve.card_bytes,
                size=format_bytes(point.device_used_bytes),
                fits=point.fits,
                remark=", ".join(_curve_remarks(curve, point)),
            )
            for point in curve.points
        ),
    )


def _curve_remarks(curve: Curve, point: CurvePoint) -> Iterator[str]:
    if point.value == curve.planned:
        yield "planned" if point.fits else "the least that was tried"
    if not point.fits:
        yield "over the budget"
    if point.method == "worked out":
        yield point.method


class ProfileView(NamedTuple):
    """What a card said to the steps of some stages."""

    title: str
    facts: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def view_profile(stage: StageProfile, *, num_ranks: int) -> ProfileView:
    """Return what a report shows of *stage*, run by one of *num_ranks* processes."""
    measured = stage.measured
    until = "" if measured.fits else ", until memory ran out"
    which = f", the largest of {_count(num_ranks, 'rank')}: rank {stage.rank}" if num_ranks > 1 else ""
    return ProfileView(
        title=f"{_joined(list(stage.stages))} on the card itself, {measured.card}, beside the plan ({stage.estimate.method}){until}{which}",
        facts=tuple(_profile_facts(stage)),
        columns=("", "planned", "measured", "difference", ""),
        rows=tuple(
            (row.name, format_bytes(row.planned_bytes), format_bytes(row.measured_bytes), *_difference(row))
            for row in compare(stage.estimate, measured)
        ),
    )


def _difference(row: Compared) -> tuple[str, str]:
    sign = "+" if row.difference_bytes > 0 else "-" if row.difference_bytes < 0 else ""
    share = "" if row.percent is None else f"{row.percent:+.1f}%" if row.difference_bytes else "equal"
    return f"{sign}{format_bytes(abs(row.difference_bytes))}", share


def _by_step(peaks: Sequence[int]) -> str:
    """Say after which step which peak was reached: "7.06 GiB in step 1, 7.17 GiB in step 2 of 10"."""
    rises = [(number, peak) for number, peak in enumerate(peaks, 1) if number == 1 or peak > peaks[number - 2]]
    return ", ".join(f"{format_bytes(peak)} in step {number}" for number, peak in rises) + f" of {len(peaks)}"


def _profile_facts(stage: StageProfile) -> Iterator[tuple[str, str]]:
    measured = stage.measured
    yield "PyTorch", f"{measured.torch}, driver {measured.driver_version or 'unknown'}"
    if measured.steps:
        yield "peak allocated", _by_step([step.peak_allocated_bytes for step in measured.steps])
        yield "peak reserved", _by_step([step.peak_reserved_bytes for step in measured.steps])
    if measured.device_bytes is not None and measured.context_bytes is not None:
        context, libraries = format_bytes(measured.context_bytes), format_bytes(measured.libraries_bytes)
        yield "the driver's figure", f"{format_bytes(measured.device_bytes)}, of which CUDA's context {context} and libraries {libraries}"
    else:
        yield "the driver's figure", "the driver does not tell what a process holds here; the context is taken for the usual one"
    yield "verdict", stage.contradiction or "the plan holds"
