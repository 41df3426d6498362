"""Model states worked by hand for a model of one 1000 x 1000 weight and a bias of 1000."""

from __future__ import annotations

import pytest

from memplan.estimators.analytic.optimizer_state import gradient_bytes, optimizer_state_bytes, optimizer_temporary_bytes, parameter_bytes
from memplan.estimators.analytic.parameters import ParameterGroup
from memplan.workload.optimizer import Optimizer, OptimizerName

WEIGHT = ParameterGroup("linear", (1000, 1024), 1, True)
BIAS = ParameterGroup("vector", (1024,), 1, True)
FROZEN = ParameterGroup("embedding", (5120, 1024), 1, False)
MODEL = (WEIGHT, BIAS, FROZEN)
TRAINABLE_BYTES = 4 * (1000 * 1024 + 1024)


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    """Weights count whole, gradients and moments only where something is trained."""
    assert parameter_bytes(MODEL, dtype="float32") == TRAINABLE_BYTES + 4 * 5120 * 1024
    assert gradient_bytes(MODEL, dtype="float32") == TRAINABLE_BYTES
    assert optimizer_state_bytes((FROZEN,), Optimizer(name="adamw"), dtype="float32") == 0


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [
        *(("sgd", 0), ("sgd_momentum", 4), ("rmsprop", 4), ("adagrad", 4), ("lion", 4)),
        *(("adam", 8), ("adamw", 8), ("nadam", 8), ("radam", 8), ("adadelta", 8)),
    ],
)
def test_state_for_each_trainable_parameter(name: OptimizerName, bytes_each: int) -> None:
    """Bytes of fp32 state a parameter, as torch.optim keeps them."""
    assert optimizer_state_bytes(MODEL, Optimizer(name=name), dtype="float32") == bytes_each * TRAINABLE_BYTES // 4


def test_state_is_in_the_parameters_type() -> None:
    """In pure bf16 Adam's two moments take 4 bytes a parameter, not 8."""
    assert optimizer_state_bytes((WEIGHT,), Optimizer(name="adam"), dtype="bfloat16") == 4 * 1000 * 1024


def test_8_bit_adam_keeps_two_bytes_and_a_maximum_for_each_block() -> None:
    """Two moments of one byte, an fp32 maximum for 256 elements each; small tensors stay fp32."""
    assert optimizer_state_bytes((WEIGHT,), Optimizer(name="adam8bit"), dtype="float32") == 2 * (1000 * 1024 + 4 * 4000 + 384)
    assert optimizer_state_bytes((BIAS,), Optimizer(name="adam8bit"), dtype="float32") == 8 * 1024


def test_embeddings_may_keep_fp32_moments_beside_8_bit_ones() -> None:
    """As transformers' Trainer has it: 8 bytes for each of their elements."""
    table = FROZEN._replace(is_trainable=True)
    optimizer = Optimizer(name="adam8bit", quantizes_embeddings=False)

    assert optimizer_state_bytes((table,), optimizer, dtype="bfloat16") == 8 * 5120 * 1024
    assert optimizer_state_bytes((WEIGHT,), optimizer, dtype="bfloat16") == 2 * (1000 * 1024 + 4 * 4000 + 384)


def test_32_bit_adam_keeps_fp32_moments_of_bf16_weights() -> None:
    """8 bytes a parameter, where torch's keeps 4; its kernel takes nothing else."""
    optimizer = Optimizer(name="adam32bit")

    assert optimizer_state_bytes((WEIGHT, BIAS), optimizer, dtype="bfloat16") == 8 * (1000 * 1024 + 1024)
    assert optimizer_temporary_bytes((WEIGHT,), optimizer, dtype="bfloat16") == 0


def test_a_paged_optimizer_has_its_large_moments_in_managed_memory() -> None:
    """From 100,000 elements on: they move to the host where the GPU is full. The maxima of 8 bits stay."""
    eight, thirty_two = Optimizer(name="adam8bit", is_paged=True), Optimizer(name="adam32bit", is_paged=True)

    assert optimizer_state_bytes((WEIGHT, BIAS), thirty_two, dtype="bfloat16") == 8 * 1024
    assert optimizer_state_bytes((WEIGHT,), eight, dtype="bfloat16") == 2 * (4 * 4000 + 384)


def test_adafactor_keeps_a_row_and_a_column() -> None:
    """The second moments of a matrix are factored: 4 bytes for each row and each column."""
    assert optimizer_state_bytes((WEIGHT,), Optimizer(name="adafactor"), dtype="float32") == 4 * (1000 + 1024)
    assert optimizer_state_bytes((BIAS,), Optimizer(name="adafactor"), dtype="float32") == 4 * 1024


@pytest.mark.parametrize(
    ("optimizer", "sets"),
    [
        (Optimizer(name="sgd"), 0),
        (Optimizer(name="adamw"), 1),
        (Optimizer(name="adamw", implementation="fused"), 0),
        (Optimizer(name="adadelta"), 2),
        (Optimizer(name="adam8bit"), 0),
    ],
    ids=lambda value: f"{value.name}-{value.implementation}" if isinstance(value, Optimizer) else str(value),
)
def test_temporaries_of_a_step(optimizer: Optimizer, sets: int) -> None:
    """Sets of all trainable parameters that an optimizer step needs on top."""
    assert optimizer_temporary_bytes(MODEL, optimizer, dtype="float32") == sets * TRAINABLE_BYTES


@pytest.mark.parametrize(
    "optimizer", [Optimizer(name="adam", implementation="for_loop"), Optimizer(name="lion"), Optimizer(name="adafactor")]
)
def test_what_goes_tensor_by_tensor_needs_twice_the_largest(optimizer: Optimizer) -> None:
    """Without foreach the temporaries are those of one tensor at a time."""
    assert optimizer_temporary_bytes(MODEL, optimizer, dtype="float32") == 2 * 4 * 1000 * 1024
