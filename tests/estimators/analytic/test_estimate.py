"""The analytic estimate's parts; `tests/accuracy` compares its sums with recordings."""

from __future__ import annotations

import math

import pytest

from memplan.errors import NotEstimatedError
from memplan.estimators.analytic.estimate import HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES, estimate
from memplan.hardware.gpu import GpuSpec
from memplan.memory.cuda_context import context_of
from memplan.memory.estimate import MemoryEstimate
from memplan.workload.contrastive import Contrastive
from memplan.workload.model import ContrastiveEncoderModel, ParametersModel, TransformerModel
from memplan.workload.optimizer import Optimizer
from memplan.workload.parallelism import Parallelism
from memplan.workload.training import Training
from memplan.workload.workload import Workload

PLAIN = Workload(
    model=ParametersModel(
        num_parameters=1_000_000, activation_bytes_per_sample=50_000_000, batch_data_bytes_per_sample=1000, overhead_bytes=7
    ),
    optimizer=Optimizer(name="adamw", implementation="fused"),
    training=Training(micro_batch_size=4),
)


def test_the_categories_add_up_to_the_device(built_in: Workload, a100: GpuSpec) -> None:
    """Allocated, slack and context are all there is."""
    answer = estimate(built_in, a100, built_in.stages[0])

    assert answer.breakdown.total_bytes == answer.device_used.expected_bytes == answer.peak_reserved_bytes + context_of(a100).expected_bytes
    assert answer.breakdown.allocated_bytes == answer.peak_allocated_bytes
    assert answer.peak_reserved_bytes - answer.peak_allocated_bytes == answer.breakdown.allocator_slack_bytes


def test_plain_counts_are_summed_as_given(a100: GpuSpec) -> None:
    """4 bytes of weights and 8 of state a parameter, the activations of four samples, inputs, overhead and two workspaces."""
    breakdown = estimate(PLAIN, a100, None).breakdown

    assert breakdown.parameters_bytes == 4_000_256  # a multiple of 512
    assert breakdown.optimizer_state_bytes == 2 * 4_000_256
    assert breakdown.activations_bytes == 200_000_000
    assert breakdown.batch_data_bytes == 4000
    assert breakdown.workspaces_bytes == 2 * WORKSPACE_BYTES + 7
    assert breakdown.gradients_bytes == 0


def test_accumulation_keeps_gradients_through_the_forward(a100: GpuSpec) -> None:
    """From the second micro-batch on the gradients of the first are there at the peak."""
    accumulating = PLAIN.with_training(gradient_accumulation_steps=2)

    more = estimate(accumulating, a100, None).peak_allocated_bytes - estimate(PLAIN, a100, None).peak_allocated_bytes

    assert more == 4_000_256


def test_the_optimizer_step_is_the_peak_of_a_small_batch(a100: GpuSpec) -> None:
    """With hardly any activations, gradients and the optimizer's temporaries decide."""
    small = PLAIN.model_copy(update={"model": PLAIN.model.model_copy(update={"activation_bytes_per_sample": 1}), "optimizer": Optimizer()})

    answer = estimate(small, a100, None)

    assert answer.peak_phase == "optimizer step"
    assert answer.breakdown.gradients_bytes == 4_000_256
    assert answer.breakdown.workspaces_bytes == 2 * WORKSPACE_BYTES + 7 + 4_000_256


def test_hopper_has_larger_workspaces(a100: GpuSpec) -> None:
    """32 MiB each on capability 9.0."""
    hopper = a100.model_copy(update={"compute_capability": (9, 0)})

    assert estimate(PLAIN, hopper, None).breakdown.workspaces_bytes == 2 * HOPPER_WORKSPACE_BYTES + 7


def test_several_gpus_add_ddp_buckets(a100: GpuSpec) -> None:
    """DDP keeps a second set of gradients."""
    parallel = PLAIN.model_copy(update={"parallelism": Parallelism(devices=4)})

    more = estimate(parallel, a100, None).breakdown.workspaces_bytes - estimate(PLAIN, a100, None).breakdown.workspaces_bytes

    assert more == 4_000_256


def test_checkpointing_has_no_effect_in_eval_mode(built_in: Workload, a100: GpuSpec) -> None:
    """The flag saves nothing on an encoder left in eval mode, and most of the memory on one in training mode."""
    model = built_in.model
    assert isinstance(model, ContrastiveEncoderModel)
    stage = built_in.stages[0]
    without = built_in.with_training(activation_checkpointing=False)
    repaired = built_in.model_copy(
        update={"model": model.model_copy(update={"encoder": model.encoder.model_copy(update={"is_in_eval_mode": False})})}
    )

    assert estimate(built_in, a100, stage) == estimate(without, a100, stage)
    assert estimate(repaired, a100, stage).peak_allocated_bytes < estimate(built_in, a100, stage).peak_allocated_bytes / 4


def test_a_cached_loss_holds_one_mini_batch(built_in: Workload, a100: GpuSpec) -> None:
    """GradCache: the loss may see eight times the batch; besides its ids, masks and embeddings the memory stays that of the mini-batch."""
    cached = built_in.model_copy(update={"contrastive": Contrastive(cached_loss_mini_batch_size=8)})

    small = estimate(cached.with_training(micro_batch_size=8), a100, cached.stages[0])
    large = estimate(cached.with_training(micro_batch_size=64), a100, cached.stages[0])

    items = 26 * (64 - 8)
    data = items * 4 * 512 * 2 * 8
    embeddings_and_gradients = items * 384 * 4 * 2
    losses = 3 * 4 * 25 * (64 - 8)
    assert large.peak_allocated_bytes - small.peak_allocated_bytes == data + embeddings_and_gradients + losses


def test_short_queries_take_less_of_everything_that_is_per_token(built_in: Workload, a100: GpuSpec) -> None:
    """Ids and masks of 8 anchors, four channels: 512 - 128 tokens less, of two int64 each. A cached loss holds passages all the same."""

    def answer(**contrastive: object) -> MemoryEstimate:
        changed = built_in.model_copy(update={"contrastive": Contrastive.model_validate(contrastive)}).with_training(micro_batch_size=8)
        return estimate(changed, a100, changed.stages[0])

    same, short = answer(), answer(query_length=128)
    cached, cached_short = answer(cached_loss_mini_batch_size=8), answer(cached_loss_mini_batch_size=8, query_length=128)
    data = 8 * 4 * (512 - 128) * 2 * 8

    assert same.breakdown.batch_data_bytes - short.breakdown.batch_data_bytes == data
    assert same.breakdown.activations_bytes / 26 * 0.7 < same.breakdown.activations_bytes - short.breakdown.activations_bytes
    assert cached.peak_allocated_bytes - cached_short.peak_allocated_bytes == data


def test_in_batch_negatives_make_a_matrix_of_the_batch_with_itself(built_in: Workload, a100: GpuSpec) -> None:
    """Every anchor against every item of the other rows: three fp32 matrices of batch x candidates, gathered ones included."""

    def peak(**contrastive: object) -> int:
        workload = built_in.model_copy(
            update={"contrastive": Contrastive.model_validate(contrastive), "parallelism": Parallelism(devices=2)}
        ).with_training(micro_batch_size=8)
        return estimate(workload, a100, workload.stages[0]).peak_allocated_bytes

    assert peak(in_batch_negatives="all") - peak() == 3 * 4 * 8 * (7 * 25)
    assert peak(in_batch_negatives="all", gathers_negatives=True) - peak() == 3 * 4 * 8 * (15 * 25)


def test_a_model_by_counts_has_matrices_of_a_usual_size(a100: GpuSpec) -> None:
    """Seven billion parameters with Adafactor: rows and columns, not a second set of weights."""
    counted = ParametersModel(num_parameters=7_000_000_000, activation_bytes_per_sample=0)
    workload = Workload(model=counted, optimizer=Optimizer(name="adafactor"))

    answer = estimate(workload, a100, None)

    assert answer.breakdown.optimizer_state_bytes < 60 * 2**20
    assert answer.breakdown.workspaces_bytes < 200 * 2**20


def test_an_accumulated_gradient_lies_beside_the_new_one(a100: GpuSpec) -> None:
    """A large tied vocabulary: at the end of backward its gradient is there a second and a third time."""
    model = TransformerModel(
        architecture="decoder", num_layers=1, hidden_size=512, num_attention_heads=8, intermediate_size=512, vocab_size=150_000,
        head="language_model",
    )  # fmt: skip
    workload = Workload(model=model, optimizer=Optimizer(name="sgd"), training=Training(sequence_length=64))
    gradient_bytes = 150_000 * 512 * 4

    once = estimate(workload, a100, None).breakdown.gradients_bytes
    again = estimate(workload.with_training(gradient_accumulation_steps=2), a100, None).breakdown.gradients_bytes

    assert again - once == gradient_bytes


def test_rounding_to_power_of_two_divisions_adds_its_mean(a100: GpuSpec) -> None:
    """`roundup_power2_divisions:4` adds 1 / (4 * 4 * ln 2) = 9% to what is allocated, 1 and none add nothing."""
    plain = estimate(PLAIN, a100, None).peak_allocated_bytes
    rounded = estimate(PLAIN.with_training(allocator_settings="roundup_power2_divisions:4"), a100, None).peak_allocated_bytes

    assert math.isclose(rounded / plain, 1 + 1 / (16 * math.log(2)), rel_tol=1e-6)
    assert estimate(PLAIN.with_training(allocator_settings="roundup_power2_divisions:1"), a100, None).peak_allocated_bytes == plain


def test_there_are_no_formulas_for_an_optimizer_that_steps_in_the_backward(built_in: Workload, a100: GpuSpec) -> None:
    """Its gradients are never there at once, and how many are depends on the order of the backward."""
    workload = built_in.model_copy(update={"optimizer": Optimizer(steps_in_backward=True)})

    with pytest.raises(NotEstimatedError, match="there are no formulas for steps_in_backward"):
        estimate(workload, a100, built_in.stages[0])
