"""
Training on pairs of answers, rehearsed: what a reference takes, and what the probabilities of texts take.

Compared once with the frameworks' own trainers, rehearsed on a simulated A100 (PyTorch 2.11, Accelerate 1.12): docs/frameworks.md has the
table.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from pydantic import ValidationError

from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.workload.workload import Workload
from tests.child.models.test_fine_tuning import HIDDEN, LAYERS, LLAMA, RANK, VOCABULARY
from tests.conftest import RehearserOf, SharedRehearser

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

PAIRS, LENGTH = 3, 128
TEXT_LOGITS = LENGTH * VOCABULARY * 4
"""Bytes of the logits of one text, in fp32."""


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    """One process for all."""
    return rehearser_of("memplan.child.models.built_in:build")


def paired(preference: dict[str, Any], *, training: dict[str, Any] | None = None, **model: Any) -> Workload:
    """A step of DPO with a small Llama in bf16."""
    described = {"kind": "huggingface", "huggingface_config": json.dumps(LLAMA), "weights_dtype": "bfloat16", "preference": preference}
    steps = {"precision": "bf16-mixed", "micro_batch_size": PAIRS, "sequence_length": LENGTH} | (training or {})
    return Workload.model_validate({"model": described | model, "training": steps})


def run(rehearser: SharedRehearser, workload: Workload) -> Rehearsal:
    return rehearser.rehearse(gpu="a100-80", values={"workload": workload.model_dump(mode="json")})


def parameters() -> int:
    """Elements of the small Llama: embeddings, head and norm; of each layer attention and feed-forward, and two norms."""
    keys, inner = LLAMA["num_key_value_heads"] * HIDDEN // LLAMA["num_attention_heads"], LLAMA["intermediate_size"]
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * keys + 3 * HIDDEN * inner + 2 * HIDDEN
    return 2 * VOCABULARY * HIDDEN + LAYERS * layer + HIDDEN


@pytest.mark.parametrize(("dtype", "size"), [(None, 2), ("float32", 4)])
def test_a_copy_to_compare_with_takes_its_weights(rehearser: SharedRehearser, dtype: str | None, size: int) -> None:
    """It has no gradients and no moments: with few tokens the peak is in the optimizer's step."""
    short = {"micro_batch_size": 1, "sequence_length": 16}
    without = run(rehearser, paired({"reference": "none"}, training=short))

    copied = run(rehearser, paired({"reference": "copy", "reference_dtype": dtype}, training=short))

    more = copied.peak_allocated_bytes - without.peak_allocated_bytes
    assert 0 <= more - size * parameters() < 2**20


def test_the_model_without_its_adapters_costs_nothing_that_lasts(rehearser: SharedRehearser) -> None:
    """It reads the batch with the weights that are there; what that takes is gone before the backward, where the peak is."""
    adapters = {"rank": RANK}
    without = run(rehearser, paired({"reference": "none"}, adapters=adapters))

    compared = run(rehearser, paired({"reference": "without_adapters"}, adapters=adapters))

    assert compared.peak_allocated_bytes == without.peak_allocated_bytes
    assert compared.breakdown.parameters_bytes == without.breakdown.parameters_bytes


def test_llama_factory_s_loss_takes_the_logits_of_all_texts_twice_more_than_trl_s(rehearser: SharedRehearser) -> None:
    """
    While the reference reads a batch there are the logits and their logarithms of both, whole; TRL's has at its peak the policy's logits
    and their gradients, in fp32.
    """
    adapters = {"rank": RANK}
    trl = run(rehearser, paired({"reference": "without_adapters"}, adapters=adapters))

    other = run(rehearser, paired({"reference": "without_adapters", "trainer": "llama-factory"}, adapters=adapters))

    more = other.peak_allocated_bytes - trl.peak_allocated_bytes
    assert more / (2 * PAIRS * TEXT_LOGITS) == pytest.approx(2, rel=0.05)


def test_a_pair_is_two_texts(rehearser: SharedRehearser) -> None:
    """Each adds its logits in fp32 and their gradients at least."""
    small, large = (run(rehearser, paired({"reference": "none"}, training={"micro_batch_size": pairs})) for pairs in (16, 32))

    of_a_text = (large.peak_allocated_bytes - small.peak_allocated_bytes) / (2 * 16)
    assert 2 * TEXT_LOGITS < of_a_text < 5 * TEXT_LOGITS


@pytest.mark.parametrize(
    ("model", "parallelism", "reason"),
    [
        ({"preference": {"reference": "without_adapters"}}, {}, "the reference is the model without its adapters, and it has none"),
        ({"kernels": "liger"}, {}, "those kernels make no logits"),
        ({}, {"devices": 2, "strategy": "fsdp"}, "is whole on each GPU"),
    ],
)
def test_a_training_on_pairs_that_makes_no_sense_is_refused(model: dict[str, Any], parallelism: dict[str, Any], reason: str) -> None:
    """Where the description is read."""
    described = paired({"reference": "copy"}).model_dump(mode="json")

    with pytest.raises(ValidationError, match=reason):
        Workload.model_validate(described | {"model": described["model"] | model, "parallelism": parallelism})


def test_gpus_that_train_on_pairs_together_each_hold_the_copy(rehearser: SharedRehearser) -> None:
    """DDP has the policy alone in it: its buckets hold as many elements as there are gradients, in fp32 or less."""
    alone = run(rehearser, paired({"reference": "copy"}))
    described = paired({"reference": "copy"}).model_dump(mode="json") | {"parallelism": {"devices": 2}}

    together = rehearser.rehearse(gpu="a100-80", ranks=Ranks(2), values={"workload": described})

    assert together.num_ranks == 2
    assert 0 <= together.peak_allocated_bytes - alone.peak_allocated_bytes < 4 * parameters()
