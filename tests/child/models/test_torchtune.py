"""
Decoders as torchtune builds them, rehearsed: against torchtune's own recipes, and against what their description says.

The recipes (torchtune 0.6.1, its main branch of April 2026 for LinearCrossEntropyLoss; PyTorch 2.11) were rehearsed on a simulated A100 of
80 GB on 2026-11-28: four layers, 2 x 512 tokens, two micro-batches, fused AdamW, bf16, adapters of rank 8 beside every layer of a block but
the key's. What they allocated at their peak is in MiB below.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from memplan.errors import UsageError
from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from memplan.workload.workload import Workload
from tests.conftest import RehearserOf, SharedRehearser

MIB = 2**20
LAYERS, HIDDEN, INNER, VOCABULARY, KEYS, POSITIONS = 4, 1024, 2816, 32_000, 256, 8192
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = LLAMA | {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = LLAMA | {
    "model_type": "qwen3", "intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
PHI3 = LLAMA | {"model_type": "phi3", "num_key_value_heads": 16, "vocab_size": 32_064, "max_position_embeddings": 4096}
GEMMA = LLAMA | {
    "model_type": "gemma", "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
TARGETS = ["q_proj", "v_proj", "output_proj", r".*\.(gate|up|down)_proj"]
ADAPTERS = {"rank": 8, "targets": TARGETS, "dtype": "bfloat16"}
LATER: dict[str, Any] = {"loss": "chunked_states"}


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    """One process for all."""
    return rehearser_of("memplan.child.models.built_in:build")


def described(config: dict[str, Any] = LLAMA, *, training: dict[str, Any] | None = None, **changes: Any) -> Workload:
    """A step of a small decoder in bf16; fields of the workload, and of its model."""
    others = {name: changes.pop(name) for name in ("optimizer", "parallelism") if name in changes}
    model = {"kind": "torchtune", "huggingface_config": json.dumps(config)} | changes
    steps = {"precision": "bf16", "micro_batch_size": 2, "gradient_accumulation_steps": 2, "sequence_length": 512} | (training or {})
    optimizer = {"implementation": "fused"}
    return Workload.model_validate({"model": model, "training": steps, "optimizer": optimizer} | others)


def run(rehearser: SharedRehearser, workload: Workload, ranks: int = 1) -> Rehearsal:
    later = getattr(workload.model, "loss", None) == "chunked_states"
    settings = "expandable_segments:True" if later else ""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
    values = {"workload": workload.model_dump(mode="json")}
    return rehearser.rehearse(gpu=find_gpu("a100-80"), values=values, environment=environment, ranks=Ranks(ranks, 1))


CHECKPOINTED = {"training": {"activation_checkpointing": True}}
ONCE: dict[str, Any] = {"training": {"gradient_accumulation_steps": 1}, "optimizer": {"implementation": "fused", "steps_in_backward": True}}
OF_RECIPES = [
    ("adapters", described(adapters=ADAPTERS), 619.8),
    ("adapters, checkpointed", described(adapters=ADAPTERS, **CHECKPOINTED), 461.0),
    ("adapters with dropout", described(adapters=ADAPTERS | {"dropout": 0.05}), 673.5),
    ("4 bits", described(adapters=ADAPTERS, quantization="nf4"), 555.8),
    ("4 bits, checkpointed", described(adapters=ADAPTERS, quantization="nf4", **CHECKPOINTED), 396.9),
    ("all logits at once", described(adapters=ADAPTERS, loss="whole"), 791.5),
    ("everything", described(), 1330.8),
    ("everything, checkpointed", described(**CHECKPOINTED), 1127.2),
    ("steps in the backward", described(**ONCE), 1112.5),
    ("fp32", described(training={"precision": "fp32"}), 2554.3),
    ("later, adapters", described(adapters=ADAPTERS, **LATER), 564.4),
    ("later, everything", described(**LATER), 1336.4),
    ("Qwen 2, adapters", described(QWEN2, adapters=ADAPTERS), 640.0),
    ("Qwen 2, everything", described(QWEN2), 1182.8),
    ("Qwen 3, adapters", described(QWEN3, adapters=ADAPTERS, **LATER), 647.9),
    ("Qwen 3, everything", described(QWEN3, **LATER), 1343.9),
    ("Phi 3, adapters", described(PHI3, adapters=ADAPTERS), 634.1),
    ("Phi 3, everything", described(PHI3), 1382.2),
    ("Gemma, adapters", described(GEMMA, adapters=ADAPTERS), 664.1),
    ("Gemma, everything", described(GEMMA), 1291.7),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("workload", "recipe_mib"), [case[1:] for case in OF_RECIPES], ids=[case[0] for case in OF_RECIPES])
def test_a_recipe_takes_what_torchtune_takes(rehearser: SharedRehearser, workload: Workload, recipe_mib: float) -> None:
    """To 1%: the allocator's blocks differ with what is allocated before, as weights that are quantized on the GPU."""
    assert run(rehearser, workload).peak_allocated_bytes / MIB == pytest.approx(recipe_mib, rel=0.01)


@pytest.mark.parametrize(("adapters", "recipe_mib"), [(ADAPTERS, 406.3), (None, 633.9)])
@pytest.mark.heavy
def test_four_gpus_take_what_torchtune_takes(rehearser: SharedRehearser, adapters: dict[str, Any] | None, recipe_mib: float) -> None:
    """Its recipes reduce gradients after every micro-batch, and leave the loss out of what is sharded."""
    workload = described(adapters=adapters, parallelism={"devices": 4, "strategy": "fsdp"}, **CHECKPOINTED)

    assert run(rehearser, workload, ranks=4).peak_allocated_bytes / MIB == pytest.approx(recipe_mib, rel=0.01)


def in_blocks(*sizes: int) -> int:
    """Tensors that stay take blocks of 512 bytes."""
    return sum(-(-size // 512) * 512 for size in sizes)


SMALL = LLAMA | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 8000}


def test_only_the_adapters_are_trained(rehearser: SharedRehearser) -> None:
    """In the type of the weights: two moments of 2 bytes for each of their elements, and a count of steps for each matrix."""
    seen = run(rehearser, described(SMALL, adapters=ADAPTERS, training={"sequence_length": 64}))
    shapes = [(256, 256), (256, 128), (256, 256), (256, 704), (256, 704), (704, 256)]
    elements = [8 * size for shape in shapes for size in shape] * 2

    assert seen.breakdown.optimizer_state_bytes == in_blocks(*(2 * [2 * number for number in elements]), *(4 for _ in elements))


@pytest.mark.parametrize(("shares", "tables"), [(True, 1), (False, 2)])
def test_blocks_with_adapters_have_a_table_of_positions_each(rehearser: SharedRehearser, shares: bool, tables: int) -> None:
    """But those of Llama 3.1 and later: fp32, a cosine and a sine for each pair of a head's 32 elements."""
    training = {"sequence_length": 64}
    ours = run(rehearser, described(SMALL, adapters=ADAPTERS, shares_positions=shares, num_positions=4096, training=training))
    none = run(rehearser, described(SMALL, adapters=ADAPTERS, shares_positions=True, num_positions=64, training=training))
    table, short_table = in_blocks(4 * 4096 * 32), in_blocks(4 * 64 * 32)

    difference = ours.breakdown.parameters_bytes - none.breakdown.parameters_bytes
    assert difference == tables * table - short_table + (tables - 1) * in_blocks(4 * 16)


def test_four_bits_keep_half_a_byte_an_element(rehearser: SharedRehearser) -> None:
    """And a byte for each 64, two for each 256 of those, and two small tables a layer."""
    training = {"sequence_length": 64}
    whole = run(rehearser, described(SMALL, adapters=ADAPTERS, training=training)).breakdown.parameters_bytes
    seen = run(rehearser, described(SMALL, adapters=ADAPTERS, quantization="nf4", training=training)).breakdown.parameters_bytes
    elements = [256 * 256, 256 * 128, 256 * 128, 256 * 256, 256 * 704, 256 * 704, 704 * 256] * 2
    scales = [-(-number // 64 // 256) * 256 for number in elements]

    saved = in_blocks(*(2 * number for number in elements))
    kept = sum(in_blocks(number // 2, scale, scale // 256 * 2, 2, 32) for number, scale in zip(elements, scales, strict=True))
    assert whole - seen == saved - kept


def test_of_qwen_layers_without_an_adapter_stay_as_they_are(rehearser: SharedRehearser) -> None:
    """Its builders quantize what has one, those of others every linear layer of a block: here the feed-forward's three."""
    training, only = {"sequence_length": 64}, ADAPTERS | {"targets": ["q_proj"]}
    of_qwen = SMALL | {"model_type": "qwen2"}
    saved = []
    for config in (SMALL, of_qwen):
        whole = run(rehearser, described(config, adapters=only, training=training)).breakdown.parameters_bytes
        seen = run(rehearser, described(config, adapters=only, quantization="nf4", training=training)).breakdown.parameters_bytes
        saved.append(whole - seen)

    assert saved[1] < 2 * 2 * 256 * 256 < saved[0]


def test_an_optimizer_that_steps_in_the_backward_lets_gradients_go(rehearser: SharedRehearser) -> None:
    """One after the other: the peak is lower than with all of them at the end."""
    deep, training = SMALL | {"num_hidden_layers": 16}, {"sequence_length": 16, "gradient_accumulation_steps": 1}
    whole = run(rehearser, described(deep, training=training))
    stepped = run(rehearser, described(deep, training=training, optimizer=ONCE["optimizer"]))

    assert stepped.breakdown.optimizer_state_bytes == whole.breakdown.optimizer_state_bytes
    gradients_of_layers = 16 * 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704)
    assert stepped.peak_allocated_bytes < whole.peak_allocated_bytes - gradients_of_layers / 2


def test_a_family_that_torchtune_builds_otherwise_is_no_model_of_it(rehearser: SharedRehearser) -> None:
    """The families are named."""
    with pytest.raises(UsageError, match="memplan has no decoder of torchtune for gemma2: llama, mistral, qwen2"):
        run(rehearser, described(SMALL | {"model_type": "gemma2"}))


def test_an_adapter_beside_a_layer_that_is_not_there_is_an_error(rehearser: SharedRehearser) -> None:
    """Its name is told."""
    with pytest.raises(UsageError, match="no linear layer o_proj beside its head"):
        run(rehearser, described(SMALL, adapters={"rank": 8, "targets": ["o_proj"]}))
