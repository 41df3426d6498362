"""
Fine-tuning of models of transformers, rehearsed: what adapters, quantized layers and types of weights take.

Compared once with TRL 0.25.1, peft 0.18.0, bitsandbytes 0.50.2 and transformers 4.57.6 under PyTorch 2.13, rehearsed on a simulated A100:
a Llama of 4 layers (hidden 1024, vocabulary 32,000), batch 4 x 512, AdamW, bf16. Peak allocated in MiB, the trainer's and ours: adapters
1402.3 and 1425.2, with checkpointing 1025.8 and 1026.7; 4 bits 1445.9 and 1468.5, 971.7 and 973.0; 8 bits 1608.2 and 1630.3, 992.6 and
992.6; everything trained 2019.6 and 2046.4, 1666.5 and 1666.5. Ours has a mask of padding, which those without checkpointing keep.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from memplan.errors import UsageError
from memplan.execution.rehearsal import Rehearsal
from memplan.workload.workload import Workload
from tests.conftest import RehearserOf, SharedRehearser

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

HIDDEN, INNER, LAYERS, VOCABULARY, KEYS = 256, 704, 2, 8000, 128
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
LINEARS = {
    "q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, KEYS), "v_proj": (HIDDEN, KEYS), "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN),
}  # fmt: skip
RANK = 8


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    """One process for all."""
    return rehearser_of("memplan.child.models.built_in:build")


def tuned(*, training: dict[str, Any] | None = None, **model: Any) -> Workload:
    """A step of adapters beside a small Llama in bf16."""
    described = {"kind": "huggingface", "huggingface_config": json.dumps(LLAMA), "weights_dtype": "bfloat16", "adapters": {"rank": RANK}}
    steps = {"precision": "bf16-mixed", "micro_batch_size": 2, "sequence_length": 64} | (training or {})
    return Workload.model_validate({"model": described | model, "training": steps})


def run(rehearser: SharedRehearser, workload: Workload) -> Rehearsal:
    return rehearser.rehearse(gpu="a100-80", values={"workload": workload.model_dump(mode="json")})


def in_blocks(*sizes: int) -> int:
    """Tensors that stay take blocks of 512 bytes."""
    return sum(-(-size // 512) * 512 for size in sizes)


def adapters(*targets: str) -> list[int]:
    """Elements of the two matrices of each adapter of the model."""
    shapes = [LINEARS[name] for name in targets or LINEARS]
    return LAYERS * [elements for inputs, outputs in shapes for elements in (RANK * inputs, RANK * outputs)]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (("all-linear",), ()),
        (("q_proj", "v_proj"), ("q_proj", "v_proj")),
        ((r"model.layers.[\d]+.(mlp|self_attn).(up|down|v)_proj",), ("up_proj", "down_proj", "v_proj")),
    ],
)
def test_only_the_adapters_are_trained(rehearser: SharedRehearser, targets: tuple[str, ...], adapted: tuple[str, ...]) -> None:
    """In fp32 beside weights in bf16: two moments of 4 bytes for each of their elements, and none for the head."""
    seen = run(rehearser, tuned(adapters={"rank": RANK, "targets": targets}))
    trained = in_blocks(*(4 * elements for elements in adapters(*adapted)))

    assert seen.breakdown.optimizer_state_bytes == 2 * trained


@pytest.mark.heavy
@pytest.mark.parametrize("ties", [False, True])
def test_what_is_trained_whole_beside_adapters_is_a_copy(rehearser: SharedRehearser, ties: bool) -> None:
    """
    PEFT's `modules_to_save`: the frozen module stays, and where head and embeddings share a weight, each copy is one of its own.

    Compared once with peft 0.18.0 and transformers 5.17 under PyTorch 2.11, rehearsed on a simulated A100: a Llama of 4 layers (hidden
    1024, vocabulary 32,000), adapters of rank 16 by a regular expression, batch 4 x 512, AdamW, bf16. Peak allocated in MiB, PEFT's and
    ours: 1421.5 and 1421.5 without copies; 1809.6 and 1809.6 with those of head and embeddings, 1403.0 and 1403.0 with checkpointing,
    1746.1 and 1746.1 where they are tied; 1614.0 and 1614.0 with that of the head.
    """
    config = json.dumps(LLAMA | {"tie_word_embeddings": ties})
    beside = {"rank": RANK, "trained_modules": ["lm_head", "embed_tokens"]}
    plain = run(rehearser, tuned(huggingface_config=config))
    seen = run(rehearser, tuned(huggingface_config=config, adapters=beside))
    wide = run(rehearser, tuned(huggingface_config=config, adapters=beside | {"trained_dtype": "float32"}))
    copies = 2 * in_blocks(2 * VOCABULARY * HIDDEN)

    assert seen.breakdown.parameters_bytes - plain.breakdown.parameters_bytes == copies
    assert seen.breakdown.optimizer_state_bytes - plain.breakdown.optimizer_state_bytes == 2 * copies
    assert wide.breakdown.parameters_bytes - plain.breakdown.parameters_bytes == 2 * copies
    assert wide.breakdown.optimizer_state_bytes - plain.breakdown.optimizer_state_bytes == 4 * copies


def linear_bytes(of_weight: dict[str, list[int]]) -> int:
    return LAYERS * sum(in_blocks(*sizes) for sizes in of_weight.values())


QUANTIZED = {
    # two weights a byte, an fp32 scale for each 64, and 16 values that four bits stand for
    "4bit": lambda n, _: [n // 2, n // 64 * 4, 16 * 4],
    # scales of a byte, an fp32 scale for 256 of them, 256 values that a byte stands for, and what they are shifted by
    "4bit-double": lambda n, _: [n // 2, n // 64, -(-n // 64 // 256) * 4, 16 * 4, 256 * 4, 4],
    # a byte for each weight, an fp32 scale for each row
    "8bit": lambda n, rows: [n, rows * 4],
}


@pytest.mark.heavy
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_frozen_layers_are_kept_in_few_bits(rehearser: SharedRehearser, quantization: str) -> None:
    """What bitsandbytes keeps for each linear layer; the embeddings and the head stay in bf16."""
    seen = run(rehearser, tuned(quantization=quantization))
    plain = run(rehearser, tuned())
    sizes = {name: QUANTIZED[quantization](inputs * outputs, outputs) for name, (inputs, outputs) in LINEARS.items()}
    in_bf16 = {name: [2 * inputs * outputs] for name, (inputs, outputs) in LINEARS.items()}

    saved = plain.breakdown.parameters_bytes - seen.breakdown.parameters_bytes
    assert saved == pytest.approx(linear_bytes(in_bf16) - linear_bytes(sizes), rel=0.02)


@pytest.mark.heavy
def test_norms_in_fp32_make_their_outputs_wider(rehearser: SharedRehearser) -> None:
    """What a norm's fp32 weight meets becomes fp32, and autocast makes a copy of it in bf16 for each layer that follows."""
    narrow = run(rehearser, tuned(quantization="4bit"))
    wide = run(rehearser, tuned(quantization="4bit", norm_dtype="float32"))

    assert wide.peak_allocated_bytes > narrow.peak_allocated_bytes


@pytest.mark.heavy
@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_in_fp32_are_twice_as_large_and_stay_tied(rehearser: SharedRehearser, *, is_tied: bool) -> None:
    """Their weights and moments, and the head's; once where they are the same."""
    config = {"adapters": None, "huggingface_config": json.dumps(LLAMA | {"tie_word_embeddings": is_tied})}
    short, long = (run(rehearser, tuned(embeddings_dtype=dtype, **config)) for dtype in (None, "float32"))

    more_bytes = 2 * VOCABULARY * HIDDEN * (1 if is_tied else 2)
    assert long.breakdown.parameters_bytes - short.breakdown.parameters_bytes == more_bytes
    assert long.breakdown.optimizer_state_bytes - short.breakdown.optimizer_state_bytes == 2 * more_bytes


@pytest.mark.heavy
def test_weights_in_bf16_under_autocast_are_half_as_large(rehearser: SharedRehearser) -> None:
    """`torch_dtype: bfloat16` with `bf16: true`, everything trained: parameters, gradients and moments of two bytes."""
    full = {"adapters": None}
    short, long = (run(rehearser, tuned(weights_dtype=dtype, **full)) for dtype in ("bfloat16", None))

    for category in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert getattr(long.breakdown, category) == pytest.approx(2 * getattr(short.breakdown, category), rel=0.01)


@pytest.mark.heavy
def test_checkpointing_of_adapters_saves_memory(rehearser: SharedRehearser) -> None:
    """The embeddings' output is made to require gradients, without which nothing of a frozen model would be computed again."""
    longer = {"micro_batch_size": 8, "sequence_length": 256}
    plain = run(rehearser, tuned(training=longer))
    saving = run(rehearser, tuned(training=longer | {"activation_checkpointing": True}))

    assert saving.breakdown.optimizer_state_bytes == plain.breakdown.optimizer_state_bytes > 0
    assert saving.peak_allocated_bytes < plain.peak_allocated_bytes


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_liger_s_kernels_make_no_logits(rehearser: SharedRehearser) -> None:
    """
    Its loss goes over the rows of the last hidden states in parts: the logits of all, in fp32 and with their gradient, are not made.

    Compared once with transformers 4.57.6 and liger-kernel 0.6.4 under PyTorch 2.13, rehearsed on a simulated A100: a Llama of 12 layers
    (hidden 2048, vocabulary 128,000), batch 4 x 1024, AdamW, bf16, checkpointing. Peak allocated in GiB, the Trainer's and ours: 21.60 and
    21.60; without Liger 24.03.
    """
    longer = {"micro_batch_size": 8, "sequence_length": 256, "activation_checkpointing": True}
    plain, fused = (run(rehearser, tuned(training=longer, kernels=kernels)) for kernels in (None, "liger"))

    logits_bytes = 4 * 8 * 256 * VOCABULARY
    assert plain.peak_allocated_bytes - fused.peak_allocated_bytes > 1.5 * logits_bytes
    assert fused.breakdown.optimizer_state_bytes == plain.breakdown.optimizer_state_bytes


def test_a_layer_that_is_not_there_cannot_be_adapted(rehearser: SharedRehearser) -> None:
    """Nor the head, nor an embedding: an adapter there is not left out without a word."""
    for targets, missing in ((["c_attn"], "c_attn"), (["q_proj", "lm_head", "embed_tokens"], "lm_head or embed_tokens")):
        with pytest.raises(UsageError, match=f"LlamaForCausalLM has no linear layer {missing} beside its head"):
            run(rehearser, tuned(adapters={"rank": RANK, "targets": targets}))


def test_a_module_that_is_not_there_cannot_be_trained_whole(rehearser: SharedRehearser) -> None:
    """Nor one with adapters, whose own weights are frozen."""
    for named, problem in (("wte", "LlamaForCausalLM has no module wte to train"), ("mlp", "mlp is to be trained whole, and has adapters")):
        with pytest.raises(UsageError, match=problem):
            run(rehearser, tuned(adapters={"rank": RANK, "trained_modules": [named]}))


def test_targets_that_are_no_regular_expression_are_refused() -> None:
    """With what is wrong about it."""
    with pytest.raises(ValueError, match="'layers\\.\\(q' is not a regular expression: missing \\)"):
        tuned(adapters={"rank": RANK, "targets": ["layers.(q"]})


def test_quantized_weights_need_adapters() -> None:
    """They cannot be trained."""
    with pytest.raises(ValueError, match="quantized weights cannot be trained: adapters are missing"):
        tuned(quantization="4bit", adapters=None)
