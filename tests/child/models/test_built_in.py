"""The built-in steps, rehearsed: against recordings of transformers' models, and against what their description says."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from memplan.estimators.analytic.optimizer_state import optimizer_state_bytes
from memplan.estimators.analytic.parameters import count, parameter_groups, rounded
from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from memplan.layouts.templates import template_data, templates_folder
from memplan.workload.model import Experts, Lora, TransformerModel
from memplan.workload.optimizer import Optimizer
from memplan.workload.workload import Workload
from memplan.workload.workload_file import workload_from
from tests.accuracy.test_analytic import Recorded, ours
from tests.conftest import RehearserOf, SharedRehearser

MIB = 2**20
ON_A100 = [recorded for recorded in ours() if recorded.gpu.name.startswith("NVIDIA A100")]
SMALL = {
    "kind": "transformer", "architecture": "decoder", "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
    "intermediate_size": 1024, "vocab_size": 4000, "num_positions": 256, "head": "language_model",
}  # fmt: skip


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    """One process for all."""
    return rehearser_of("memplan.child.models.built_in:build")


def run(rehearser: SharedRehearser, workload: Workload, *, gpu: str = "a100-80", **environment: str) -> Rehearsal:
    """One stage of the workload, the first, without context."""
    first = workload.model_copy(update={"stages": workload.stages[:1]})
    values = {"workload": first.model_dump(mode="json")}
    ranks = Ranks(workload.parallelism.devices, workload.parallelism.nodes)
    return rehearser.rehearse(gpu=find_gpu(gpu), values=values, context_bytes=0, environment=environment, ranks=ranks)


def small(training: dict[str, Any] | None = None, **changes: Any) -> Workload:
    """A small decoder, 8 texts of 128 tokens."""
    model = SMALL | changes.pop("model", {})
    training = {"micro_batch_size": 8, "sequence_length": 128} | (training or {})
    return workload_from({"model": model, "training": training} | changes, Path("workload.yaml"))


def contrastive(**changes: Any) -> Workload:
    """The built-in workload in small: two channels, short texts."""
    template = templates_folder() / "hydra-contrastive" / "workload.yaml"
    data = template_data(template)
    data["model"]["num_channels"] = 2
    data["training"] |= {"micro_batch_size": 4, "sequence_length": 64, "gradient_accumulation_steps": 1} | changes.pop("training", {})
    data["contrastive"] |= changes.pop("contrastive", {})
    data["stages"] = [{"name": "stage", "n_positives": 2, "n_negatives": 3} | changes.pop("stage", {})]
    return workload_from(data | changes, template)


@pytest.mark.parametrize(
    "recorded",
    [
        pytest.param(
            each,
            id=each.name,
            marks=[pytest.mark.heavy] if each.name.startswith(("contrastive-eval", "contrastive-fp32", "contrastive-checkpoint")) else [],
        )
        for each in ON_A100
    ],
)
def test_own_modules_allocate_what_those_of_transformers_do(rehearser: SharedRehearser, recorded: Recorded) -> None:
    """
    Peak allocated within 1% of the recordings of `tests/accuracy/reference_steps.py`, 2% with LoRA.

    What remains is GPT-2's buffers of causal masks (1 MiB a layer), and details of BERT's embeddings.
    """
    model = recorded.workload.model
    if isinstance(model, TransformerModel):
        model = model.model_copy(update={"huggingface_config": None})

    seen = run(rehearser, recorded.workload.model_copy(update={"model": model}), TORCH_CUDNN_SDPA_ENABLED="0")

    bound = 0.01 if isinstance(model, TransformerModel) else 0.02
    assert abs(seen.peak_allocated_bytes / recorded.peak_allocated_bytes - 1) <= bound


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [
        "gpt2-small-fp32",
        "llama-bf16-mixed-checkpoint",
        *(pytest.param(name, marks=pytest.mark.heavy) for name in ("bert-fp16-mixed", "qwen2-bf16-mixed")),
    ],
)
def test_a_hugging_face_config_is_rehearsed_to_the_byte(rehearser: SharedRehearser, name: str) -> None:
    """Built by transformers from its config alone, without weights: peak allocated and reserved equal the recordings."""
    recorded = next(recorded for recorded in ON_A100 if recorded.name.startswith(f"{name}@"))

    seen = run(rehearser, recorded.workload, TORCH_CUDNN_SDPA_ENABLED="0")

    assert (seen.peak_allocated_bytes, seen.peak_reserved_bytes) == (recorded.peak_allocated_bytes, recorded.peak_reserved_bytes)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"architecture": "encoder", "norm_position": "post", "num_token_types": 2, "head": "masked_language_model"},
        {"head": "none", "ties_embeddings": False},
        {"ties_embeddings": False, "rotary": True, "is_gated": True, "norm": "rms_norm", "has_linear_bias": False, "num_positions": 0},
        {"num_key_value_heads": 2, "has_qk_norm": True, "norm": "rms_norm", "has_attention_mask": False},
        {"has_fused_qkv": True, "lora": {"rank": 8, "dropout": 0.1, "targets": ["query", "up"]}},
        {"lora": {"rank": 4}, "is_gated": True, "activation": "silu"},
    ],
    ids=["decoder", "encoder", "headless", "llama", "grouped", "lora", "lora everywhere"],
)
def test_parameters_are_those_of_the_description(rehearser: SharedRehearser, model: dict[str, Any]) -> None:
    """Tensor by tensor, each rounded to 512 bytes; Adam's two moments for the trained ones, and a step counter each on the host."""
    workload = small(model=model, optimizer={"name": "adam"})
    groups = parameter_groups(workload.model)

    seen = run(rehearser, workload).breakdown

    expected = sum(group.size_bytes("float32") for group in groups)
    assert seen.parameters_bytes == pytest.approx(expected, rel=0.005)  # the estimate counts what large blocks leave over, too
    assert seen.optimizer_state_bytes == pytest.approx(2 * 4 * count(groups, trainable_only=True), rel=0.02)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("sgd", 0), ("sgd_momentum", 1), ("adam", 2), ("adamw", 2), ("nadam", 2), ("radam", 2), ("rmsprop", 1), ("adagrad", 1),
        ("adadelta", 2), ("lion", 1),
    ],
)  # fmt: skip
def test_every_optimizer_keeps_its_state(rehearser: SharedRehearser, name: str, states: int) -> None:
    """As many copies of the trained parameters as its formula has moments."""
    workload = small(optimizer={"name": name})

    seen = run(rehearser, workload).breakdown

    assert seen.optimizer_state_bytes == pytest.approx(states * seen.parameters_bytes, rel=0.01, abs=MIB / 4)


@pytest.mark.heavy
def test_a_factored_optimizer_keeps_rows_and_columns(rehearser: SharedRehearser) -> None:
    """transformers' Adafactor: far less than the parameters."""
    seen = run(rehearser, small(optimizer={"name": "adafactor"})).breakdown

    assert 0 < seen.optimizer_state_bytes < seen.parameters_bytes / 20


def test_precision_decides_what_is_kept(rehearser: SharedRehearser) -> None:
    """Weights in two bytes take half; autocast leaves them in four."""
    kept = {precision: run(rehearser, small({"precision": precision})).breakdown for precision in ("fp32", "bf16-mixed", "bf16")}

    assert kept["bf16"].parameters_bytes == pytest.approx(kept["fp32"].parameters_bytes / 2, rel=0.02)
    assert kept["bf16-mixed"].parameters_bytes == kept["fp32"].parameters_bytes
    assert kept["bf16"].optimizer_state_bytes == pytest.approx(kept["fp32"].optimizer_state_bytes / 2, rel=0.02)


def test_checkpointing_saves_in_training_mode_only(rehearser: SharedRehearser) -> None:
    """Left in eval mode the switch has no effect, and the rehearsal finds that."""
    plain, on = run(rehearser, small()), run(rehearser, small({"activation_checkpointing": True}))
    left = run(rehearser, small({"activation_checkpointing": True}, model={"is_in_eval_mode": True}))

    assert on.peak_allocated_bytes < plain.peak_allocated_bytes == left.peak_allocated_bytes
    assert [finding.kind for finding in left.findings] == ["checkpointing_without_effect"]
    assert not on.findings


def test_accumulation_keeps_the_gradients_through_the_second_micro_batch(rehearser: SharedRehearser) -> None:
    """They are there when its activations are."""
    once, twice = run(rehearser, small()), run(rehearser, small({"gradient_accumulation_steps": 2}))

    assert twice.peak_allocated_bytes > once.peak_allocated_bytes


def test_a_contrastive_step_grows_with_each_negative(rehearser: SharedRehearser) -> None:
    """By about the same bytes for each: items are encoded alike, and what sorting and sums take on top is small."""
    peaks = [run(rehearser, contrastive(stage={"n_negatives": count})).peak_allocated_bytes for count in (2, 4, 6)]

    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.2)
    assert peaks[1] > peaks[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"contrastive": {"sampling": "group"}},
        {"contrastive": {"sampling": "per_positive"}},
        {"contrastive": {"in_batch_negatives": "positives"}},
        {"contrastive": {"in_batch_negatives": "all", "gathers_negatives": True}, "parallelism": {"devices": 4}},
        {"contrastive": {"in_batch_negatives": "positives"}, "stage": {"n_negatives": 0}},
        {"contrastive": {"in_batch_negatives": "negatives", "query_length": 16}},
    ],
    ids=["group", "per positive", "in-batch", "gathered", "no negatives of its own", "short queries"],
)
def test_every_way_to_sample_runs(rehearser: SharedRehearser, changes: dict[str, Any]) -> None:
    """Three steps to their end, with gradients for every adapter; a fourth where DDP made its buckets anew in the second."""
    seen = run(rehearser, contrastive(**changes))

    assert seen.fits
    assert len(seen.steps) == (3 if seen.num_ranks == 1 else 4)
    assert "parameters_without_gradient" not in {finding.kind for finding in seen.findings}


@pytest.mark.heavy
def test_a_cached_loss_holds_a_mini_batch_at_a_time(rehearser: SharedRehearser) -> None:
    """The whole batch's activations are never there at once."""
    whole = run(rehearser, contrastive(training={"micro_batch_size": 16}))
    cached = run(rehearser, contrastive(training={"micro_batch_size": 16}, contrastive={"cached_loss_mini_batch_size": 8}))

    assert cached.breakdown.activations_bytes < whole.breakdown.activations_bytes / 3


def test_a_model_by_counts_takes_what_was_counted(rehearser: SharedRehearser) -> None:
    """10 million parameters, 8 of them trained; 3 MiB of activations a sample; overhead; SGD without state."""
    model = {
        "kind": "parameters",
        "num_parameters": 10_000_000,
        "num_trainable_parameters": 8_000_000,
        "activation_bytes_per_sample": 3 * MIB,
        "overhead_bytes": 64 * MIB,
    }
    workload = workload_from({"model": model, "training": {"micro_batch_size": 8}, "optimizer": {"name": "sgd"}}, Path("workload.yaml"))

    seen = run(rehearser, workload)

    assert seen.breakdown.parameters_bytes == pytest.approx(10_000_000 * 4 + 64 * MIB, rel=0.01)
    assert seen.breakdown.activations_bytes >= 24 * MIB


def test_descriptions_of_adapters_and_experts_are_followed(rehearser: SharedRehearser) -> None:
    """Wider adapters and more experts: more trained parameters."""
    workload = contrastive()
    encoder = workload.model.encoder.model_copy(update={"lora": Lora(rank=64)})  # type: ignore[union-attr]
    wider = workload.model.model_copy(update={"encoder": encoder, "experts": Experts(num_experts=8, hidden_size=512)})

    plain, more = run(rehearser, workload), run(rehearser, workload.model_copy(update={"model": wider}))

    for seen, model in ((plain, workload.model), (more, wider)):
        trained = count(parameter_groups(model), trainable_only=True)
        assert seen.breakdown.optimizer_state_bytes == pytest.approx(2 * 4 * trained, rel=0.02)


@pytest.mark.parametrize(("name", "moments"), [("adam8bit", 2), ("lion8bit", 1)])
def test_eight_bit_optimizers_keep_bytes(rehearser: SharedRehearser, name: str, moments: int) -> None:
    """A byte a moment and 4 for each block of 256, fp32 below 4096 elements, and a table of 256 values for each moment."""
    step = small(optimizer={"name": name})
    sizes = [(group.num_tensors, prod(group.shape)) for group in parameter_groups(step.model) if group.is_trainable]
    each = [
        (tensors, rounded(elements * 4) if elements < 4096 else rounded(elements) + rounded(-(-elements // 256) * 4))
        for tensors, elements in sizes
    ]

    assert run(rehearser, step).breakdown.optimizer_state_bytes == moments * (sum(tensors * size for tensors, size in each) + 256 * 4)


@pytest.mark.parametrize(
    ("optimizer", "tables"),
    [
        (Optimizer(name="adam8bit", quantizes_embeddings=False), 2),
        (Optimizer(name="adam32bit"), 0),
        (Optimizer(name="adam8bit", is_paged=True), 2),
        (Optimizer(name="adam32bit", is_paged=True), 0),
    ],
)
def test_moments_of_bitsandbytes_may_be_fp32_or_managed_memory(rehearser: SharedRehearser, optimizer: Optimizer, tables: int) -> None:
    """Those of embeddings, where transformers' Trainer says so, or all; large ones of a paged optimizer take nothing of the GPU's."""
    step = small(optimizer=optimizer.model_dump())

    expected = optimizer_state_bytes(list(parameter_groups(step.model)), optimizer, dtype="float32")
    assert run(rehearser, step).breakdown.optimizer_state_bytes == expected + tables * 256 * 4


def test_the_request_is_plain_json() -> None:
    """What travels to the process is what a workload file could say."""
    assert Workload.model_validate(json.loads(small().model_dump_json())) == small()
