"""The plan in plain words: why these values, and what to know before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memplan.analysis.levers import in_training_mode
from memplan.errors import SizeRefusedError
from memplan.estimators.analytic.activations import attention_kernel
from memplan.estimators.base import Estimator
from memplan.execution.rehearsal import Rehearsal
from memplan.memory.estimate import MemoryEstimate
from memplan.planner.decision import LARGEST_MICRO_BATCH, Decision, decide, probable_choice
from memplan.planner.fitting import heaviest_stage, is_tight, stages_of
from memplan.planner.pins import Pins
from memplan.planner.plan import Plan, StagePlan
from memplan.programs.user_program import UserProgram
from memplan.units import format_bytes
from memplan.workload.model import HuggingFaceModel, encoder_of
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.training import MOST_STEPS, Training
from memplan.workload.workload import Workload


def explain_plan(plan: Plan, decision: Decision, pins: Pins, estimator: Estimator) -> tuple[str, ...]:
    """Return why *plan*, which fits, is as *decision* has it."""
    assert decision.largest is not None
    return tuple(_reasons(plan, decision, decision.largest, pins, estimator))


def _reasons(plan: Plan, decision: Decision, largest: int, pins: Pins, estimator: Estimator) -> Iterator[str]:
    training = plan.after.training
    micro, steps = training.micro_batch_size, training.gradient_accumulation_steps
    if pins.pins("micro_batch_size"):
        yield f"micro-batch {micro}: {plan.rule}. {_cost_of_pin(plan, estimator)}"
    else:
        yield f"micro-batch {micro}: {plan.rule}; {_why_not_more(plan, decision, largest, estimator)}"
    yield from _costs_of_pins(plan, pins, estimator)
    if steps > 1:
        ranks = plan.after.parallelism.data_parallel_size
        product = f"{micro} × {steps}" + (f" × {_batches_at_once(plan.after)}" if ranks > 1 else "")
        yield f"accumulation {steps}: {product} = {plan.effective_batch_size} samples per optimizer step{_offered(plan)}"
    yield from _negatives(plan, pins)


def _batches_at_once(program: Program) -> str:
    """Return how many batches there are at once, in words: one for each GPU, or for each group of them."""
    parallelism = program.parallelism
    groups = f"groups of {parallelism.model_parallel_size} GPUs" if parallelism.model_parallel_size > 1 else "GPUs"
    return f"{parallelism.data_parallel_size} {groups}"


def _offered(plan: Plan) -> str:
    """Return the alternative to the batch that was chosen, with the option that asks for it, as the end of a sentence."""
    offered = plan.alternative
    if offered is None:
        return ""
    ranks = plan.after.parallelism.data_parallel_size
    product = f"{offered.micro_batch_size} × {offered.gradient_accumulation_steps}" + (f" × {ranks}" if ranks > 1 else "")
    before, after = plan.after.training.gradient_accumulation_steps, offered.gradient_accumulation_steps
    if after > before:
        return f"; {product} = {offered.effective_batch_size} would meet the target exactly, in {after} steps: `{offered.argument}`"
    fewer = f"{_share(1 - after / before)} fewer steps"
    return f"; {product} = {offered.effective_batch_size} would take {fewer} ({after} instead of {before}): `{offered.argument}`"


_SHARES = {1 / 4: "a quarter", 1 / 3: "a third", 1 / 2: "half", 2 / 3: "two thirds", 3 / 4: "three quarters"}


def _share(part: float) -> str:
    """Return *part* of something in words where it is near a simple fraction, in percent otherwise."""
    nearest = min(_SHARES, key=lambda share: abs(share - part))
    return _SHARES[nearest] if abs(nearest - part) < 0.02 else f"{part:.0%}"


def _negatives(plan: Plan, pins: Pins) -> Iterator[str]:
    """Say what was done with the negatives, or how more of them can be had."""
    grown: dict[tuple[int, int], list[str]] = {}
    for stage in plan.stages:
        before, after = stage.present.n_negatives, stage.planned.n_negatives
        if before is not None and after is not None and after > before and not pins.pins("n_negatives", stage.name):
            grown.setdefault((before, after), []).append(stage.name)
    for (before, after), names in grown.items():
        yield (
            f"{after} negatives instead of {before} in {', '.join(names)}, as requested: that changes the loss, and a step encodes more "
            f"items"
        )
    if not grown and any(_has_room(stage) for stage in plan.stages):
        yield (
            "n_negatives stay as they are: more would fit, but change the loss and the time of a step (`grow_negatives=True` adds them, "
            '`pins={"STAGE.n_negatives": 16}` sets some)'
        )


def _has_room(stage: StagePlan) -> bool:
    """Say whether more negatives would fit in *stage*."""
    room, planned = stage.room, stage.planned.n_negatives
    return room is not None and room.n_negatives is not None and planned is not None and room.n_negatives > planned


def _costs_of_pins(plan: Plan, pins: Pins, estimator: Estimator) -> Iterator[str]:
    """Say of every other pin what it takes beside the value that is configured, everything else as planned."""
    for name, value in pins.values.items():
        stage_name, _, field = name.rpartition(".")
        if field in ("micro_batch_size", "gradient_accumulation_steps", "target_effective_batch_size", "max_n_negatives"):
            continue
        if isinstance(plan.before, UserProgram) and plan.before.values.get(field, value) == value:
            continue  # what it would be otherwise is not known
        if str(getattr(plan.before.training, field, None)) == value:
            continue
        reverted = _reverted(plan.after, plan.before, stage_name, field)
        costs = [
            estimator(plan.after, plan.gpu, new).device_used.high_bytes - estimator(reverted, plan.gpu, old).device_used.high_bytes
            for new, old in zip(stages_of(plan.after), stages_of(reverted), strict=True)
            if stage_name in ("", new.name if new else "")
        ]
        cost_bytes = max(costs, key=abs, default=0)
        verdict = f"{format_bytes(abs(cost_bytes))} {'more' if cost_bytes > 0 else 'less'} than" if cost_bytes else "as much memory as"
        yield f"{name}={value} is pinned: it takes {verdict} what is configured"


def _reverted(after: Program, before: Program, stage_name: str, field: str) -> Program:
    """Return *after* with *field* as it is in *before*: in the stage of that name, or wherever the field stands."""
    if field in Stage.model_fields:
        stages = (
            new.model_copy(update={field: getattr(old, field), "max_n_negatives": None}) if stage_name in ("", new.name) else new
            for new, old in zip(after.stages, before.stages, strict=True)
        )
        return after.model_copy(update={"stages": tuple(stages)})
    if isinstance(before, UserProgram) and field in before.values:
        return after.model_copy(update={"values": before.values})
    if field in Training.model_fields:
        return after.with_training(**{field: getattr(before.training, field)})
    part = {"optimizer": "optimizer", "is_in_eval_mode": "model"}.get(field, "parallelism")
    return after.model_copy(update={part: getattr(before, part)})


def _cost_of_pin(plan: Plan, estimator: Estimator) -> str:
    """Say what a pinned micro-batch leaves, and what a sample takes, so that a pin has a price."""
    tightest = _tightest(plan)
    more = plan.after.with_training(micro_batch_size=plan.after.training.micro_batch_size + 1)
    left_bytes = plan.budget_bytes - tightest.estimate.device_used.high_bytes
    try:
        used = estimator(more, plan.gpu, _stage_of(plan.after, tightest)).device_used
    except SizeRefusedError:
        return f"It leaves {format_bytes(left_bytes)} of the budget"
    cost_bytes = used.high_bytes - tightest.estimate.device_used.high_bytes
    return f"It leaves {format_bytes(left_bytes)} of the budget; a further sample would take up to {format_bytes(cost_bytes)}"


def _why_not_more(plan: Plan, decision: Decision, largest: int, estimator: Estimator) -> str:
    pinned = decision.pinned
    most = -(-plan.target_effective_batch_size // plan.after.parallelism.data_parallel_size)
    if largest >= most and not decision.fills_gpu:
        whole = f"the whole target of {plan.target_effective_batch_size} fits at once"
        return f'{whole}; `target_effective_batch_size="max"` finds the largest batch that does'
    if decision.fills_gpu and largest >= LARGEST_MICRO_BATCH:
        return f"a larger one may fit, which `target_effective_batch_size={2 * largest}` finds"
    next_size = largest + decision.unit
    if next_size > MOST_STEPS:
        return f"{largest} would fit, and no larger one was tried"
    steps = 2 if pinned.varies("gradient_accumulation_steps") else pinned.training.gradient_accumulation_steps
    if decision.fills_gpu:
        steps = 1
    over = pinned.with_training(micro_batch_size=next_size, gradient_accumulation_steps=steps)
    worst = heaviest_stage(over, plan.gpu, estimator)
    try:
        with estimator.searching():
            used = estimator(over, plan.gpu, worst).device_used
            excess_bytes = plan.budget.missing_bytes(used)
            is_over_and_tight = bool(excess_bytes) and is_tight(over, plan.gpu, worst, estimator, plan.budget)
    except SizeRefusedError as error:
        return error.message if error.is_limit else f"{next_size} is refused: {error.message}"
    if not excess_bytes:
        return f"{largest} would fit, and no larger one was tried"
    is_over_at_most = used.expected_bytes <= plan.budget_bytes  # by the upper bound, which decides
    over_by = f"{'may be up to' if is_over_at_most else 'would be'} {format_bytes(excess_bytes)} over the budget"
    where = f" in {worst.name}" if worst is not None else ""
    if is_over_and_tight:
        where += f", and would {'then ' if is_over_at_most else ''}stay within it only by releasing cached memory (tight)"
    fitting = "" if largest == plan.after.training.micro_batch_size else f"{largest} would fit, "
    multiples = f"; the program takes multiples of {decision.unit}" if decision.unit > 1 else ""
    return f"{fitting}{next_size} {over_by}{where}{multiples}"


def _tightest(plan: Plan) -> StagePlan:
    """The stage that takes most."""
    return max(plan.stages, key=lambda stage: stage.estimate.device_used.high_bytes)


def _stage_of(program: Program, stage: StagePlan) -> Stage | None:
    return next((candidate for candidate in program.stages if candidate.name == stage.name), None)


def explain_misfit(plan: Plan) -> tuple[str, ...]:
    """Return what the smallest try takes and what the budget is."""
    worst = _tightest(plan)
    where = f" in {worst.name}" if plan.before.stages else ""
    used = worst.estimate.device_used
    return (
        f"a micro-batch of {worst.planned.micro_batch_size}{where} takes {format_bytes(used.expected_bytes)}, "
        f"up to {format_bytes(used.high_bytes)}; the budget is {format_bytes(plan.budget_bytes)}: "
        f"{format_bytes(plan.missing_bytes)} short",
    )


def explain_guide(stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """Return what the guide's numbers are."""
    missed = sorted({stage.planned.effective_batch_size for stage in stages if stage.planned.effective_batch_size != 256})
    reasons = [
        "a rule of thumb, kept to compare with: by memplan's estimate it is 2 to 16 times too low for its own model; it is never written"
    ]
    if missed:
        reasons.append(f"it rounds accumulation down and so reaches {', '.join(map(str, missed))} instead of 256")
    if not all(stage.fits for stage in stages):
        reasons.append("where nothing fits it recommends a batch of 1 all the same")
    return tuple(reasons)


def warn(plan: Plan, estimator: Estimator) -> tuple[str, ...]:
    """Return what the user should know before training, the costliest first."""
    return (
        *_busy_gpu(plan),
        *_seen_in_the_program(plan),
        *_balanced_experts(plan),
        *_checkpointing_without_effect(plan, estimator),
        *_present_does_not_fit(plan),
        *_target_nearly_met(plan),
        *_positives_cost_nothing(plan),
        *_accumulation_adds_no_negatives(plan),
        *_slow_types(plan),
        *_ddp(plan),
    )


_TOLD_OF_PROGRAMS = (
    "peak_before_steps",
    "peak_before_state",
    "dropped_gradients",
    "growth",
    "varying_steps",
    "batch_shapes",
    "cached_shapes",
    "nothing_walked",
    "device_values",
    "chosen_by_time",
    "drawn_values",
    "not_served",
    "uncounted_workspaces",
    "managed_memory",
    "library_workspaces",
)
"""What a rehearsal of the user's own program found that a plan rests on."""


def _seen_in_the_program(plan: Plan) -> Iterator[str]:
    if isinstance(plan.after, UserProgram):
        findings = (finding for stage in plan.stages if isinstance(stage.estimate, Rehearsal) for finding in stage.estimate.findings)
        yield from dict.fromkeys(finding.message for finding in findings if finding.kind in _TOLD_OF_PROGRAMS)


def _balanced_experts(plan: Plan) -> Iterator[str]:
    if isinstance(plan.after, Workload) and isinstance(plan.after.model, HuggingFaceModel) and plan.after.model.is_mixture_of_experts:
        yield (
            "the experts are taken to be balanced, each with its share of the tokens: where a router sends most tokens to a few of them, a "
            "step takes more for a moment"
        )


def expect_for_warnings(plan: Plan, estimator: Estimator) -> None:
    """Have begun what `warn` will ask about."""
    repaired = _with_effective_checkpointing(plan)
    if repaired is not None:
        estimator.expect(repaired, plan.gpu, [_stage_of(plan.after, _tightest(plan))])


def _with_effective_checkpointing(plan: Plan) -> Workload | None:
    """Return what is planned with activation checkpointing that has an effect; None where it has one, or is not asked for."""
    if not isinstance(plan.after, Workload):
        return None
    encoder = encoder_of(plan.after.model)
    if encoder is None or not encoder.is_in_eval_mode or not plan.after.training.activation_checkpointing:
        return None
    return in_training_mode(plan.after.with_training(micro_batch_size=_tightest(plan).planned.micro_batch_size))


def _checkpointing_without_effect(plan: Plan, estimator: Estimator) -> Iterator[str]:
    repaired = _with_effective_checkpointing(plan)
    if repaired is None:
        return
    worst = _tightest(plan)
    stage = _stage_of(plan.after, worst)
    with_effect: MemoryEstimate = estimator(repaired, plan.gpu, stage)
    yield (
        "activation checkpointing has no effect while the encoder is in eval mode, as from_pretrained returns it: after `.train()` this "
        f"step takes {format_bytes(with_effect.device_used_bytes)} instead of "
        f"{format_bytes(worst.estimate.device_used_bytes)}{_would_allow(plan, repaired, estimator)} "
        '(`pins={"is_in_eval_mode": False}`)'
    )


def _would_allow(plan: Plan, repaired: Program, estimator: Estimator) -> str:
    """Say which micro-batch the repaired program would allow, where that is a larger one."""
    target = plan.target_effective_batch_size
    choice = probable_choice(repaired, plan.gpu, estimator, plan.budget, target=target)
    if choice is None:
        choice = decide(repaired, plan.gpu, estimator, target=target, margin=plan.budget.margin).choice
    if choice is None or choice.micro_batch_size <= plan.after.training.micro_batch_size:
        return ""
    return f", and micro-batch {choice.micro_batch_size} with accumulation {choice.gradient_accumulation_steps} would fit"


def _present_does_not_fit(plan: Plan) -> Iterator[str]:
    misfits = [stage for stage in plan.stages if not stage.present_fits]
    if misfits and plan.fits:
        worst = max(misfits, key=lambda stage: stage.present_estimate.device_used.high_bytes)
        used = worst.present_estimate.device_used
        yield (
            f"the present values do not fit safely: {worst.name} takes {format_bytes(used.expected_bytes)}, up to "
            f"{format_bytes(used.high_bytes)}, of a budget of {format_bytes(plan.budget_bytes)}"
        )


def _target_nearly_met(plan: Plan) -> Iterator[str]:
    target, reached = plan.target_effective_batch_size, plan.effective_batch_size
    if plan.fits and reached < target:
        why = plan.rule.partition(";")[0]
        yield f"the target of {target} is missed, since {why}: {reached} is {target - reached} below it"
    elif plan.fits and reached > target:
        configured = plan.before.training.target_effective_batch_size == target
        what = f"the effective batch of {target} that is configured" if configured else f"the target of {target}"
        yield f"{what} is not met exactly: {reached} is {reached - target} ({(reached - target) / target:.1%}) above it"


def _positives_cost_nothing(plan: Plan) -> Iterator[str]:
    contrastive = plan.after.contrastive
    if contrastive is not None and contrastive.sampling == "pair" and any(stage.n_positives > 1 for stage in plan.after.stages):
        yield "n_positives costs no memory here: a step encodes one positive of an anchor, whatever their number"


def _accumulation_adds_no_negatives(plan: Plan) -> Iterator[str]:
    if plan.after.contrastive is None or plan.after.training.gradient_accumulation_steps == 1:
        return
    yield (
        f"accumulation adds no negatives: the optimizer sees {plan.effective_batch_size} samples per step, but each anchor is compared "
        f"with {' or '.join(sorted({str(stage.planned.negatives_per_anchor) for stage in plan.stages}, key=int))} negatives only"
    )


def _slow_types(plan: Plan) -> Iterator[str]:
    if not isinstance(plan.after, Workload):
        return
    encoder = encoder_of(plan.after.model)
    precision = plan.after.training.precision
    capability = plan.gpu.compute_capability
    if encoder is not None and capability is None and precision.startswith("bf16"):
        yield "planned for capability 8.0 or later; bf16 takes more on older GPUs (T4, RTX 20, V100): name the GPU"
    if encoder is None or capability is None or not precision.startswith("bf16") or capability >= (8, 0):
        return
    if attention_kernel(encoder, precision, capability) == "math":
        yield f"{plan.gpu.name} has no bf16 kernels for attention: it keeps the matrix of all pairs in fp32; fp16-mixed takes less"


def _busy_gpu(plan: Plan) -> Iterator[str]:
    if plan.budget.others_used_bytes:
        yield f"other processes hold {format_bytes(plan.budget.others_used_bytes)} of the GPU now; the plan uses what they leave"


def _ddp(plan: Plan) -> Iterator[str]:
    ranks = plan.after.parallelism.num_gpus
    if ranks > 1 and isinstance(plan.after, Workload) and plan.method == "measured":
        yield f"{ranks} GPUs: what NCCL takes for them is not in what was measured on one"


def warn_of_other_stages(plan: Plan, others: Sequence[Stage], *, estimator: Estimator) -> tuple[str, ...]:
    """Return warnings of files that have a stage's keys but are no stages: a training started with one of them may not fit."""
    warnings = []
    for stage in others if plan.fits else ():
        used = estimator(plan.after, plan.gpu, stage).device_used
        if not plan.budget.fits(used):
            warnings.append(
                f"{stage.name} is not a stage of the curriculum and is not planned, but with its {stage.n_negatives} negatives "
                f"this micro-batch takes {format_bytes(used.expected_bytes)}, up to {format_bytes(used.high_bytes)}: it would not fit"
            )
    return tuple(warnings)
