"""Descriptions: what they refuse, and what they count."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from memplan.workload.contrastive import Contrastive
from memplan.workload.model import Experts, ParametersModel, TransformerModel
from memplan.workload.parallelism import Parallelism
from memplan.workload.stage import Stage
from memplan.workload.training import Training
from memplan.workload.workload import Workload

SMALL = {
    "architecture": "decoder",
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 100,
}
COUNTED = ParametersModel(num_parameters=10, activation_bytes_per_sample=1)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"hidden_size": 66}, "not a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"num_layers": 0}, "greater than 0"),
        ({"num_layers": -2}, "greater than 0"),
        ({"dropout": 1.0}, "less than 1"),
        ({"hidden": 64}, "Extra inputs"),
        ({"lora": {"rank": 8, "targets": ["q_proj"]}}, "Input should be"),
    ],
)
def test_a_transformer_refuses_what_cannot_be(values: dict[str, object], problem: str) -> None:
    """Numbers that do not divide, below one, and fields that do not exist."""
    with pytest.raises(ValidationError, match=problem):
        TransformerModel.model_validate(SMALL | values)


def test_grouped_query_attention_narrows_keys_and_values() -> None:
    """Widths follow from heads and their size, which a config may state."""
    model = TransformerModel.model_validate(SMALL | {"num_key_value_heads": 2, "head_dim": 32})

    assert (model.attention_width, model.key_value_width) == (128, 64)


def test_descriptions_are_frozen() -> None:
    """A change is a copy; nothing is edited in place."""
    with pytest.raises(ValidationError, match="frozen"):
        Training().micro_batch_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: Experts(num_experts=2, hidden_size=8, top_k=3), "top_k 3 is more"),
        (
            lambda: ParametersModel(num_parameters=1, num_trainable_parameters=2, activation_bytes_per_sample=0),
            "is more than num_parameters",
        ),
        (lambda: Stage(name="a", n_negatives=8, max_n_negatives=4), "less than n_negatives"),
        (lambda: Workload(model=COUNTED, stages=(Stage(name="a"),)), "stages need `contrastive`"),
        (lambda: Workload(model=COUNTED, contrastive=Contrastive()), "at least one stage"),
        (lambda: Workload(model=COUNTED, contrastive=Contrastive(), stages=(Stage(name="a"), Stage(name="a"))), "same name: a"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(build: object, problem: str) -> None:
    """A limit below the value, more trained than there are, stages without contrastive training."""
    with pytest.raises(ValidationError, match=problem):
        build()  # type: ignore[operator]


def test_a_contrastive_encoder_needs_to_know_its_batches(built_in: Workload) -> None:
    """Without `contrastive` nothing says how many items a step encodes."""
    with pytest.raises(ValidationError, match="needs `contrastive`"):
        Workload.model_validate(built_in.model_dump() | {"contrastive": None, "stages": []})


def test_devices_enter_the_effective_batch() -> None:
    """Micro-batch x accumulation x machines x GPUs."""
    training = Training(micro_batch_size=8, gradient_accumulation_steps=4)
    workload = Workload(model=COUNTED, training=training, parallelism=Parallelism(devices=2, nodes=3))

    assert workload.effective_batch_size == 8 * 4 * 6


@pytest.mark.parametrize(("sampling", "items"), [("pair", 2 + 24), ("group", 1 + 5 + 24), ("per_positive", 1 + 5 * (1 + 24))])
def test_samples_per_anchor(sampling: str, items: int) -> None:
    """The table of DESIGN, section 7: a pair's n_positives cost nothing."""
    contrastive = Contrastive.model_validate({"sampling": sampling})

    assert contrastive.samples_per_anchor(Stage(name="a", n_positives=5, n_negatives=24)) == items


@pytest.mark.parametrize(
    ("in_batch", "gathers", "ranks", "negatives"),
    [
        ("none", False, 1, 24),
        ("positives", False, 2, 24 + 7),
        ("negatives", False, 1, 24 * 8),
        ("all", False, 1, 24 + 7 * 25),
        ("positives", True, 2, 24 + 15),
    ],
)
def test_negatives_that_an_anchor_sees(in_batch: str, gathers: bool, ranks: int, negatives: int) -> None:
    """Its own, and those of the other rows of its GPU; of every GPU only when they are gathered."""
    contrastive = Contrastive.model_validate({"in_batch_negatives": in_batch, "gathers_negatives": gathers})

    assert contrastive.negatives_per_anchor(Stage(name="a", n_negatives=24), micro_batch_size=8, data_parallel_size=ranks) == negatives


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"optimizer": {"is_paged": True}}, "is_paged is for optimizers of bitsandbytes"),
        (
            {"optimizer": {"steps_in_backward": True}, "training": {"gradient_accumulation_steps": 4}},
            "gradient_accumulation_steps is 4, and the optimizer steps in each backward",
        ),
        (
            {"optimizer": {"steps_in_backward": True}, "training": {"precision": "fp16-mixed"}},
            "before the gradients of fp16-mixed are scaled back",
        ),
        (
            {
                "model": {"kind": "torchtune", "huggingface_config": '{"max_position_embeddings": 256}'},
                "training": {"sequence_length": 512},
            },
            "sequence_length 512 is more than the model's 256 positions",
        ),
        ({"model": {"kind": "torchtune", "huggingface_config": "{}", "quantization": "nf4"}}, "adapters are missing"),
    ],
)
def test_what_contradicts_itself_is_no_workload(changes: dict[str, Any], problem: str) -> None:
    """The values are named."""
    model = {"kind": "parameters", "num_parameters": 1000, "activation_bytes_per_sample": 10}

    with pytest.raises(ValidationError, match=problem):
        Workload.model_validate({"model": model} | changes)
