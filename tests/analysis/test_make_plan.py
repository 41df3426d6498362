"""The plan, with an estimator whose answers can be worked out by hand: 100 bytes an item and 1000 for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.analysis.explain import _target_nearly_met, warn_of_other_stages
from memplan.analysis.make_plan import make_guide_plan, make_plan
from memplan.errors import UsageError
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.estimators.base import Estimator
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.planner.pins import Pins, read_pins
from memplan.planner.plan import Plan
from memplan.workload.contrastive import Contrastive
from memplan.workload.huggingface import ConfigJson, model_from_config
from memplan.workload.model import ContrastiveEncoderModel, ParametersModel
from memplan.workload.optimizer import Optimizer
from memplan.workload.parallelism import Parallelism
from memplan.workload.stage import Stage
from memplan.workload.training import Training
from memplan.workload.workload import Workload
from memplan.workload.workload_file import workload_from

BASE_BYTES, ITEM_BYTES = 1000, 100


def hand_estimate(workload: Workload, stage: Stage | None) -> MemoryEstimate:
    """100 bytes an item, 1000 for the rest, exactly."""
    items = workload.training.micro_batch_size
    if workload.contrastive is not None and stage is not None:
        items = sum(workload.contrastive.encode_calls(stage, micro_batch_size=items))
    total = BASE_BYTES + ITEM_BYTES * items
    return MemoryEstimate(
        method="analytic",
        breakdown=MemoryBreakdown(parameters_bytes=BASE_BYTES, activations_bytes=ITEM_BYTES * items),
        peak_allocated_bytes=total,
        peak_reserved_bytes=total,
        device_used=MemoryRange(low_bytes=total, expected_bytes=total, high_bytes=total),
        peak_phase="loss",
    )


class ByHand(Estimator):
    """The estimator that can be worked out."""

    method = "analytic"

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        return hand_estimate(workload, stage)


class Measured(ByHand):
    """One that says that it measures."""

    method = "measured"

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        return hand_estimate(workload, stage).model_copy(update={"method": "measured"})


class Uncertain(ByHand):
    """One whose estimate may be up to 50 bytes too low."""

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        found = hand_estimate(workload, stage)
        used = found.device_used
        return found.model_copy(update={"device_used": used.model_copy(update={"high_bytes": used.high_bytes + 50})})


COUNTED = ParametersModel(num_parameters=1, activation_bytes_per_sample=1)
PLAIN = Workload(model=COUNTED, training=Training(micro_batch_size=4, gradient_accumulation_steps=4))
STAGED = Workload(
    model=COUNTED,
    training=Training(micro_batch_size=4, gradient_accumulation_steps=4),
    contrastive=Contrastive(),
    stages=(Stage(name="hard", n_negatives=24), Stage(name="easy", n_positives=16, n_negatives=8)),
)


def plan_of(
    workload: Workload,
    memory_bytes: int,
    *,
    target: int | None = None,
    tolerance: float | None = None,
    pins: Pins | None = None,
    margin: float = 0.0,
    grows_negatives: bool = False,
) -> Plan:
    gpu = GpuSpec(name="card", total_memory_bytes=memory_bytes, origin="test")
    return make_plan(
        workload,
        gpu,
        ByHand(),
        target=target,
        tolerance=tolerance,
        margin=margin,
        pins=pins or Pins(),
        grows_negatives=grows_negatives,
    )


def test_the_present_effective_batch_is_the_target() -> None:
    """A GPU with room for 8 samples keeps 16 = 8 x 2."""
    plan = plan_of(PLAIN, BASE_BYTES + 8 * ITEM_BYTES)

    assert plan.fits
    assert (plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps) == (8, 2)
    assert plan.target_effective_batch_size == plan.effective_batch_size == 16
    assert plan.stages[0].present_fits


@pytest.mark.parametrize(
    ("memory_bytes", "said"),
    [(1895, "9 would be 55 B over the budget"), (1920, "9 may be up to 30 B over the budget")],
)
def test_what_only_its_upper_bound_puts_over_the_budget_may_be_over_it(memory_bytes: int, said: str) -> None:
    """9 samples take 1900 bytes, up to 1950."""
    gpu = GpuSpec(name="card", total_memory_bytes=memory_bytes, origin="test")

    plan = make_plan(PLAIN, gpu, Uncertain(), target=64, margin=0.0)

    assert said in plan.reasons[0]


def test_a_micro_batch_is_never_larger_than_the_target() -> None:
    """Room for a thousand samples does not change what the optimizer sees."""
    plan = plan_of(PLAIN, BASE_BYTES + 1000 * ITEM_BYTES)

    assert (plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps) == (16, 1)
    assert "the whole target of 16 fits at once" in plan.reasons[0]


def test_the_margin_and_what_others_hold_come_off() -> None:
    """Of 4000 bytes 1000 are taken and a tenth of the rest stays free: 2700 are the budget, 17 samples."""
    gpu = GpuSpec(name="card", total_memory_bytes=4000, others_used_bytes=1000, origin="test")

    plan = make_plan(PLAIN, gpu, ByHand(), target=64, margin=0.1)

    assert plan.budget_bytes == 2700
    assert plan.after.training.micro_batch_size == 16
    assert any("other processes hold 1000 B" in warning for warning in plan.warnings)


def test_one_micro_batch_serves_all_stages_and_negatives_are_the_users() -> None:
    """26 items an anchor decide: 2 anchors fit. The other stage keeps its 8 negatives; that 28 would fit is said, with what they cost."""
    plan = plan_of(STAGED, BASE_BYTES + 60 * ITEM_BYTES)

    assert [stage.planned.micro_batch_size for stage in plan.stages] == [2, 2]
    assert [stage.planned.n_negatives for stage in plan.stages] == [24, 8]
    rooms = [stage.room for stage in plan.stages if stage.room is not None]
    assert [(room.n_negatives, room.items_per_anchor, room.items_per_anchor_with_negatives) for room in rooms] == [
        (28, 26, 30),
        (28, 10, 30),
    ]
    assert any("n_negatives stay as they are" in reason and "`grow_negatives=True`" in reason for reason in plan.reasons)


def test_negatives_grow_into_what_is_left_where_that_is_asked_for() -> None:
    """60 items are 2 anchors with 28 negatives each, in every stage; the reason says that it changes the training."""
    plan = plan_of(STAGED, BASE_BYTES + 60 * ITEM_BYTES, grows_negatives=True)

    assert [stage.planned.n_negatives for stage in plan.stages] == [28, 28]
    assert [stage.present.n_negatives for stage in plan.stages] == [24, 8]
    assert any("28 negatives instead of 8 in easy" in reason for reason in plan.reasons)


def test_negatives_grow_up_to_the_stage_limit() -> None:
    """A limit of its own, below what fits and above it."""
    limited = STAGED.model_copy(update={"stages": (STAGED.stages[0], Stage(name="easy", n_negatives=8, max_n_negatives=10))})
    wide = STAGED.model_copy(update={"stages": (STAGED.stages[0], Stage(name="easy", n_negatives=8, max_n_negatives=500))})

    assert plan_of(limited, BASE_BYTES + 60 * ITEM_BYTES, grows_negatives=True).stages[1].planned.n_negatives == 10
    assert plan_of(wide, BASE_BYTES + 60 * ITEM_BYTES, grows_negatives=True).stages[1].planned.n_negatives == 28


def test_positives_that_cost_memory_have_room_too_and_those_that_do_not_have_none() -> None:
    """With `group` sampling 2 anchors of 30 items may have 5 positives beside 24 negatives; with pairs a step encodes one of them."""
    grouped = STAGED.model_copy(update={"contrastive": Contrastive(sampling="group")})

    rooms = [plan_of(workload, BASE_BYTES + 60 * ITEM_BYTES).stages[0].room for workload in (grouped, STAGED)]

    assert rooms[0] is not None
    assert rooms[1] is not None
    assert (rooms[0].n_positives, rooms[0].items_per_anchor_with_positives) == (5, 30)
    assert (rooms[1].n_positives, rooms[1].items_per_anchor_with_positives) == (None, None)


def test_pinned_negatives_stay() -> None:
    """The user's explicit choice is never overridden."""
    plan = plan_of(STAGED, BASE_BYTES + 60 * ITEM_BYTES, pins=read_pins(["easy.n_negatives=8"]))

    assert [stage.planned.n_negatives for stage in plan.stages] == [24, 8]


def test_a_pinned_micro_batch_stays_and_has_a_price() -> None:
    """3 anchors are kept, and the report says what one more would take."""
    plan = plan_of(STAGED, BASE_BYTES + 100 * ITEM_BYTES, pins=read_pins(["micro_batch_size=3"]))

    assert plan.after.training.micro_batch_size == 3
    assert "pinned" in plan.reasons[0]
    assert "a further sample would take up to 2.5 KiB" in plan.reasons[0]


def test_every_other_pin_has_its_price_too() -> None:
    """8 negatives are configured, 16 pinned: with 3 anchors that is 24 items more; what costs nothing is said as well."""
    pins = read_pins(["micro_batch_size=3", "easy.n_negatives=16", "easy.n_positives=4"])
    reasons = plan_of(STAGED, BASE_BYTES + 100 * ITEM_BYTES, pins=pins).reasons

    assert "easy.n_negatives=16 is pinned: it takes 2.3 KiB more than what is configured" in reasons
    assert "easy.n_positives=4 is pinned: it takes as much memory as what is configured" in reasons


def test_nothing_fits_is_said_with_what_is_missing_and_never_with_a_batch_of_one() -> None:
    """One anchor with 24 negatives needs 3600 bytes; 3000 are there."""
    plan = plan_of(STAGED, 3000)

    assert not plan.fits
    assert plan.missing_bytes == 600
    assert plan.after == STAGED
    assert "600 B short" in plan.reasons[0]
    assert any(lever.fits and lever.change == "at most 18 negatives in every stage instead of 24" for lever in plan.levers)


def test_a_lever_fits_when_every_stage_does_with_it() -> None:
    """Two stages with 24 negatives: cutting one of them alone would not do."""
    twice = STAGED.model_copy(update={"stages": (STAGED.stages[0], Stage(name="second", n_negatives=24))})
    plan = plan_of(twice, 3000)

    cut = next(lever for lever in plan.levers if "negatives in every stage" in lever.change)

    assert cut.fits
    assert plan_of(twice, 3000, pins=read_pins(["n_negatives=18"])).fits
    assert not plan_of(twice, 3000, pins=read_pins(["n_negatives=19"])).fits


def test_fewer_positives_are_a_lever_where_they_cost_memory() -> None:
    """With `group` sampling every positive is encoded with its anchor; with pairs none is."""
    stages = (Stage(name="hard", n_positives=16, n_negatives=24),)
    paired = STAGED.model_copy(update={"stages": stages})
    grouped = paired.model_copy(update={"contrastive": Contrastive(sampling="group")})

    assert any(lever.change == "at most 8 positives in every stage instead of 16" for lever in plan_of(grouped, 2500).levers)
    assert not any("positives" in lever.change for lever in plan_of(paired, 2500).levers)


def test_a_pinned_micro_batch_raises_a_target_that_nobody_asked_for() -> None:
    """128 is more than the 16 samples of now: the plan is for 128, and what that costs is said."""
    plan = plan_of(PLAIN, BASE_BYTES + 500 * ITEM_BYTES, pins=read_pins(["micro_batch_size=128"]))

    assert plan.fits
    assert plan.effective_batch_size == 128


def test_the_whole_target_at_once_may_fit_where_accumulation_does_not() -> None:
    """Gradients stay between micro-batches: what is saved by a smaller batch can be less than they take."""
    counted = ParametersModel(num_parameters=1_000_000_000, activation_bytes_per_sample=1_500_000_000)
    workload = Workload(
        model=counted, optimizer=Optimizer(name="adamw", implementation="fused"), training=Training(target_effective_batch_size=10)
    )
    gpu = GpuSpec(name="card", total_memory_bytes=35 * 2**30, origin="test")

    plan = make_plan(workload, gpu, AnalyticEstimator())

    assert (plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps) == (10, 1)


def test_a_stage_without_negatives_gets_none_unasked() -> None:
    """Explicit negatives would make another training of it; with a limit of its own they are asked for."""
    none, asked = Stage(name="none", n_negatives=0), Stage(name="asked", n_negatives=0, max_n_negatives=4)
    stages = (STAGED.stages[0], none, asked)
    plan = plan_of(STAGED.model_copy(update={"stages": stages}), BASE_BYTES + 60 * ITEM_BYTES, grows_negatives=True)

    assert [stage.planned.n_negatives for stage in plan.stages] == [28, 0, 4]
    assert [stage.room and stage.room.n_negatives for stage in plan.stages] == [28, None, 4]


def test_a_pinned_accumulation_that_misses_the_target_is_said() -> None:
    """Room for 8 samples, accumulation 1: 8 of 16."""
    plan = plan_of(PLAIN, BASE_BYTES + 8 * ITEM_BYTES, pins=read_pins(["gradient_accumulation_steps=1"]))

    assert plan.effective_batch_size == 8
    assert any("the target of 16 is missed, since accumulation is pinned: 8 is 8 below it" in warning for warning in plan.warnings)


def test_a_program_without_accumulation_that_misses_the_target_is_said_to_have_none() -> None:
    """Nobody pinned it."""
    plan = plan_of(PLAIN, BASE_BYTES + 8 * ITEM_BYTES, pins=read_pins(["gradient_accumulation_steps=1"]))
    rule = "the program has no variable for accumulation; the micro-batch is the largest that fits, below what the target needs"

    (said,) = _target_nearly_met(plan.model_copy(update={"rule": rule}))

    assert said == "the target of 16 is missed, since the program has no variable for accumulation: 8 is 8 below it"


def test_training_mode_can_be_planned(built_in: Workload) -> None:
    """What `.train()` would allow is what the pin plans."""
    broken = make_plan(built_in, find_gpu("rtx4090"), AnalyticEstimator())
    repaired = make_plan(built_in, find_gpu("rtx4090"), AnalyticEstimator(), pins=read_pins(["is_in_eval_mode=false"]))

    micro, steps = repaired.after.training.micro_batch_size, repaired.after.training.gradient_accumulation_steps
    assert any(f"micro-batch {micro} with accumulation {steps} would fit" in warning for warning in broken.warnings)
    assert not any("has no effect" in warning for warning in repaired.warnings)


def test_what_is_pinned_is_part_of_a_plan_that_does_not_fit() -> None:
    """The report shows the workload that was tried, not the one that is configured."""
    plan = plan_of(STAGED, 3000, pins=read_pins(["sequence_length=128"]))

    assert plan.after.training.sequence_length == 128
    assert plan.before == STAGED


def test_a_pinned_micro_batch_that_does_not_fit_is_not_made_smaller() -> None:
    """Ten anchors were asked for; what is missing is for ten, and one of the levers is a micro-batch of 1."""
    plan = plan_of(STAGED, 4000, pins=read_pins(["micro_batch_size=10"]), target=40)

    assert not plan.fits
    assert plan.missing_bytes == BASE_BYTES + 260 * ITEM_BYTES - 4000
    assert any(lever.change == "use a micro-batch of 1" and lever.fits for lever in plan.levers)


@pytest.mark.parametrize(("ranks", "pins", "target"), [(4, [], 3), (1, ["micro_batch_size=8"], 7), (2, ["micro_batch_size=8"], 15)])
def test_a_target_below_one_micro_batch_is_refused(ranks: int, pins: list[str], target: int) -> None:
    """Every rank takes at least one micro-batch in a step."""
    parallel = PLAIN.model_copy(update={"parallelism": Parallelism(devices=ranks)})

    with pytest.raises(UsageError, match=f"a target effective batch of {target} is below one micro-batch"):
        plan_of(parallel, 10_000, target=target, pins=read_pins(pins))


def test_a_plan_without_a_target_says_where_trying_ended() -> None:
    """A recommender's batch may be larger: what fits is not called the largest, and how to have more tried is said."""
    free = PLAIN.model_copy(update={"model": ParametersModel(num_parameters=1, activation_bytes_per_sample=0)})
    plan = make_plan(free, find_gpu("t4"), AnalyticEstimator(), fills_gpu=True)

    tried = "micro-batch 65536: the largest that is tried without a target"
    assert plan.reasons[0] == f"{tried}; a larger one may fit, which `target_effective_batch_size=131072` finds"


def test_an_endless_target_ends() -> None:
    """Twenty million samples that take nothing: the search stops where nobody trains, and says so."""
    free = PLAIN.model_copy(update={"model": ParametersModel(num_parameters=1, activation_bytes_per_sample=0)})
    plan = make_plan(free, find_gpu("t4"), AnalyticEstimator(), target=20_000_000)

    assert plan.fits
    assert plan.effective_batch_size == 20_000_000
    assert "no larger one was tried" in plan.reasons[0]


def test_a_target_that_can_only_be_met_nearly_is_said() -> None:
    """Three ranks cannot make 16."""
    plan = plan_of(PLAIN.model_copy(update={"parallelism": Parallelism(devices=3)}), 10_000, target=16)

    assert plan.effective_batch_size == 18
    assert any("the target of 16 is not met exactly: 18 is 2 (12.5%) above it" in warning for warning in plan.warnings)


def test_a_prime_target_is_met_nearly_and_what_meets_it_exactly_is_named() -> None:
    """Of 62 that fit only a micro-batch of 1 meets 257: 52 x 5 is 3 above it."""
    plan = plan_of(PLAIN, BASE_BYTES + 62 * ITEM_BYTES, target=257)

    assert (plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps) == (52, 5)
    assert any("1 × 257 = 257 would meet the target exactly, in 257 steps: `target_tolerance=0`" in reason for reason in plan.reasons)
    assert any("257 is not met exactly: 260 is 3 (1.2%) above it" in warning for warning in plan.warnings)


def test_what_would_take_fewer_steps_is_named() -> None:
    """2 x 128 meets 256 exactly where 3 fit; 3 x 86 is 258."""
    plan = plan_of(PLAIN, BASE_BYTES + 3 * ITEM_BYTES, target=256)

    assert (plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps) == (2, 128)
    offered = "3 × 86 = 258 would take a third fewer steps (86 instead of 128): `target_tolerance=0.05`"
    assert any(offered in reason for reason in plan.reasons)
    assert plan_of(PLAIN, BASE_BYTES + 3 * ITEM_BYTES, target=256, tolerance=0.05).effective_batch_size == 258


def test_the_effective_batch_that_a_file_names_is_met_or_the_plan_says_why_not() -> None:
    """As a key of the configuration it may be one that has to be met exactly."""
    configured = PLAIN.with_training(target_effective_batch_size=257)

    plan = plan_of(configured, BASE_BYTES + 62 * ITEM_BYTES)

    assert any("the effective batch of 257 that is configured is not met exactly" in warning for warning in plan.warnings)


class Misjudged(ByHand):
    """With a quick estimate that takes every size for ten times too large."""

    def quick_estimate(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryRange:
        return hand_estimate(workload.with_training(micro_batch_size=10 * workload.training.micro_batch_size), stage).device_used


@pytest.mark.parametrize("target", [37, 8, 4, 256])
def test_a_quick_estimate_never_decides_that_the_whole_target_does_not_fit(target: int) -> None:
    """The whole target fits at once; by the quick estimate nothing like it does."""
    gpu = GpuSpec(name="card", total_memory_bytes=BASE_BYTES + target * ITEM_BYTES, origin="test")

    plan = make_plan(PLAIN, gpu, Misjudged(), target=target, margin=0.0)

    assert (plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps) == (target, 1)
    assert f"the whole target of {target} fits at once" in plan.reasons[0]


@pytest.mark.parametrize("field", ["gradient_accumulation_steps", "micro_batch_size"])
def test_billions_of_steps_are_a_mistake(field: str) -> None:
    """A digit too many: refused where it is read, pinned or asked for."""
    with pytest.raises(UsageError, match="less than or equal to 1000000"):
        plan_of(PLAIN, 10_000, pins=read_pins([f"{field}=3000000000"]))
    with pytest.raises(UsageError, match="accumulation steps of a micro-batch of 1"):
        plan_of(PLAIN, BASE_BYTES + ITEM_BYTES, target=3_000_000_000)


def test_a_pin_is_not_charged_with_what_the_plan_raised() -> None:
    """n_positives costs nothing in pairs, whatever became of the negatives."""
    reasons = plan_of(STAGED, BASE_BYTES + 60 * ITEM_BYTES, pins=read_pins(["n_positives=1"]), grows_negatives=True).reasons

    assert "n_positives=1 is pinned: it takes as much memory as what is configured" in reasons


def test_positives_and_accumulation_are_explained() -> None:
    """n_positives costs no memory in pairs, accumulation adds no negatives."""
    warnings = plan_of(STAGED, BASE_BYTES + 60 * ITEM_BYTES).warnings

    assert any("n_positives costs no memory here" in warning for warning in warnings)
    assert any("accumulation adds no negatives" in warning and "8 or 24 negatives only" in warning for warning in warnings)


def test_present_values_that_do_not_fit_are_said() -> None:
    """Four anchors with 24 negatives are configured; two fit."""
    plan = plan_of(STAGED, BASE_BYTES + 60 * ITEM_BYTES)

    assert [stage.present_fits for stage in plan.stages] == [False, True]
    assert any("the present values do not fit safely: hard takes" in warning for warning in plan.warnings)


def test_a_file_outside_the_curriculum_that_would_not_fit_is_said() -> None:
    """Its negatives are more than any stage's; one that fits is not mentioned."""
    plan = plan_of(STAGED, BASE_BYTES + 60 * ITEM_BYTES)

    warnings = warn_of_other_stages(plan, [Stage(name="default", n_negatives=32), Stage(name="small", n_negatives=1)], estimator=ByHand())

    assert len(warnings) == 1
    assert "default is not a stage of the curriculum" in warnings[0]


def test_checkpointing_without_effect_is_said_with_what_it_costs(built_in: Workload) -> None:
    """The built-in trainer leaves its encoders in eval mode: the flag does nothing, and the report says what it would save."""
    plan = make_plan(built_in, find_gpu("rtx4090"), AnalyticEstimator())

    assert plan.fits
    assert any("has no effect" in warning and "`.train()`" in warning and "would fit" in warning for warning in plan.warnings)


def test_bf16_on_a_card_without_it_is_said(built_in: Workload) -> None:
    """A T4 computes bf16 attention by hand."""
    plan = make_plan(built_in, find_gpu("t4"), AnalyticEstimator(), pins=read_pins(["precision=bf16-mixed"]))

    assert any("no bf16 kernels for attention" in warning for warning in plan.warnings)


def test_levers_of_a_transformer_that_does_not_fit(built_in: Workload) -> None:
    """Checkpointing, precision, optimizer, LoRA, sequence, a larger GPU: each with its saving, the largest first."""
    model = built_in.model
    assert isinstance(model, ContrastiveEncoderModel)
    encoder = model.encoder.model_copy(
        update={"lora": None, "is_in_eval_mode": False, "num_layers": 48, "hidden_size": 1536, "num_positions": 2048}
    )
    workload = Workload(model=encoder, training=Training(sequence_length=2048))

    plan = make_plan(workload, find_gpu("t4"), AnalyticEstimator())

    savings = [lever.saving_bytes for lever in plan.levers[:-1]]
    assert not plan.fits
    assert savings == sorted(savings, reverse=True)
    assert {"turn activation checkpointing on", "use an 8-bit Adam", "halve the sequence length to 1024"} <= {
        lever.change for lever in plan.levers
    }
    assert plan.levers[-1].change.startswith("use a GPU like")


def test_levers_of_a_large_model_whose_optimizer_step_is_the_peak(a100: GpuSpec) -> None:
    """Eight billion parameters in pure bf16: the foreach optimizer's temporaries are a set of all of them."""
    llama = {"model_type": "llama", "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
    workload = workload_from(
        {"model": model_from_config(ConfigJson(llama, Path("config.json"))), "training": {"precision": "bf16"}}, Path("w.yaml")
    )

    plan = make_plan(workload, a100, AnalyticEstimator())

    fused = next(lever for lever in plan.levers if lever.change == "use the fused optimizer (fused=True)")
    assert not plan.fits
    assert plan.stages[0].estimate.peak_phase == "optimizer step"
    assert fused.fits
    assert fused.saving_bytes > 14 * 2**30
    assert not any("halve the sequence" in lever.change for lever in plan.levers)


def test_the_encoder_of_a_misfit_can_be_put_in_training_mode(built_in: Workload) -> None:
    """On 8 GB the built-in workload does not fit; its first lever is what its trainer forgot."""
    plan = make_plan(built_in, find_gpu("rtx4060"), AnalyticEstimator())

    assert not plan.fits
    assert plan.levers[0].change == "put the encoders in training mode with checkpointing"
    assert plan.levers[0].fits


def test_what_nccl_takes_is_counted_or_said_to_be_missing(built_in: Workload, a100: GpuSpec) -> None:
    """Formulas count it for each GPU of several; one GPU that is measured has no other to reach, and the plan says so."""
    workload = built_in.model_copy(update={"parallelism": Parallelism(devices=8)})
    plan = make_plan(workload, a100, AnalyticEstimator())
    measured = make_plan(workload, a100, Measured())

    assert min(stage.estimate.breakdown.nccl_buffers_bytes for stage in plan.stages) > 0
    assert not any("NCCL" in warning for warning in plan.warnings)
    assert "8 GPUs: what NCCL takes for them is not in what was measured on one" in measured.warnings


def test_the_guide_plans_each_stage_for_itself(built_in: Workload, a100: GpuSpec) -> None:
    """46 x 5 for 24 negatives, 120 x 2 for 8, and its missed targets are said."""
    plan = make_guide_plan(built_in, a100, memory_gib=24)

    assert [(stage.planned.micro_batch_size, stage.planned.gradient_accumulation_steps) for stage in plan.stages] == [(46, 5)] + [
        (120, 2)
    ] * 4
    assert any("reaches 230, 240 instead of 256" in reason for reason in plan.reasons)


def test_the_guide_says_where_it_does_not_fit_by_its_own_rule(built_in: Workload, a100: GpuSpec) -> None:
    """On 2 GiB it recommends 1, which is over its own budget."""
    plan = make_guide_plan(built_in, a100, memory_gib=2)

    assert not plan.fits
    assert any("a batch of 1 all the same" in reason for reason in plan.reasons)


def test_a_share_of_the_card_is_all_that_a_plan_may_use(built_in: Workload, a100: GpuSpec) -> None:
    """per_process_memory_fraction; other settings of the allocator leave the whole GPU."""
    whole, half, other = (
        make_plan(built_in.with_training(allocator_settings=settings), a100, AnalyticEstimator())
        for settings in ("", "per_process_memory_fraction:0.5", "max_split_size_mb:128")
    )

    assert half.budget.total_bytes == a100.total_memory_bytes // 2
    assert half.after.training.micro_batch_size < whole.after.training.micro_batch_size
    assert other.budget == whole.budget


def test_settings_that_pytorch_would_refuse_are_refused(built_in: Workload, a100: GpuSpec) -> None:
    with pytest.raises(UsageError, match="max_split_size_mb:1"):
        make_plan(built_in.with_training(allocator_settings="max_split_size_mb:1"), a100, AnalyticEstimator())
