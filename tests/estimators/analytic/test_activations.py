"""What a block keeps, element by element as read off allocator traces (PyTorch 2.13, transformers 4.57.6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memplan.dtypes import Precision
from memplan.estimators.analytic import activations as act
from memplan.workload.huggingface import ConfigJson, model_from_config
from memplan.workload.model import TransformerModel

TOKENS = 4096
GPT2 = {"model_type": "gpt2"}
LLAMA = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}


def model_of(config: dict[str, Any], **changes: Any) -> TransformerModel:
    return TransformerModel.model_validate(model_from_config(ConfigJson(config, Path("config.json"))) | changes)


def call_of(model: TransformerModel, precision: Precision, capability: tuple[int, int] = (8, 0)) -> act.Call:
    return act.make_call(model, sequences=8, sequence_length=512, precision=precision, compute_capability=capability)


def test_a_gpt2_block_under_autocast_keeps_86_bytes_an_element_and_its_mask() -> None:
    """
    The trace of gpt2, bf16, 8 x 512 on an A100: what stands there for one of the 12 blocks.

    MiB a block: 2 residuals of 12, fused projection's input 6 and output 18, attention's output 6, log-sums 0.1875, mask bias 4,
    dropout masks 3 + 3, feed-forward's input 6, gelu_new 3 x 48 + 24, second layer's input 24, and norm statistics.
    """
    model = model_of(GPT2)
    mib = 2**20

    kept = act.block_bytes(model, call_of(model, "bf16-mixed"))

    assert kept == int((24 + 6 + 18 + 6 + 0.1875 + 4 + 6 + 6 + 168 + 24) * mib) + 2 * TOKENS * 8


def test_autocast_casts_once_for_each_layer_that_reads_a_norm() -> None:
    """Three projections and two branches of a gate keep five casts of fp32 norms; in pure bf16 they share two tensors."""
    model = model_of(LLAMA)
    width = TOKENS * 1024 * 2

    mixed = call_of(model, "bf16-mixed")
    pure = call_of(model, "bf16")

    assert act.linear_input_bytes(model, mixed, ("query", "key", "value"), width=1024, is_stream=True) == 3 * width
    assert act.linear_input_bytes(model, pure, ("query", "key", "value"), width=1024, is_stream=True) == width


@pytest.mark.parametrize(
    ("attention", "masked", "precision", "capability", "kernel"),
    [
        ("sdpa", True, "bf16-mixed", (8, 0), "efficient"),
        ("sdpa", False, "bf16-mixed", (8, 0), "flash"),
        ("sdpa", False, "fp32", (8, 0), "efficient"),
        ("sdpa", False, "fp16-mixed", (7, 5), "efficient"),
        ("sdpa", False, "bf16-mixed", (7, 5), "math"),
        ("eager", False, "bf16-mixed", (9, 0), "eager"),
        ("flash_attention_2", True, "bf16", (9, 0), "flash"),
        ("sdpa", False, "bf16", None, "flash"),
    ],
)
def test_the_kernel_that_attention_takes(attention: str, masked: bool, precision: Precision, capability: Any, kernel: str) -> None:
    """A mask rules flash out; bf16 before 8.0 has only the math kernel; an unknown GPU counts as 8.0."""
    model = model_of(GPT2, attention=attention, has_attention_mask=masked)

    assert act.attention_kernel(model, precision, capability) == kernel


def test_grouped_queries_without_a_mask_have_flash_or_no_fused_kernel() -> None:
    """transformers then hands grouped keys over as they are: fp32, and fp16 before 8.0, fall back to the math kernel."""
    model = model_of(LLAMA, has_attention_mask=False)

    assert act.attention_kernel(model, "fp32", (8, 0)) == "math"
    assert act.attention_kernel(model, "fp16-mixed", (7, 5)) == "math"
    assert act.attention_kernel(model, "fp16-mixed", (8, 0)) == "flash"


def test_flash_attention_keeps_grouped_keys_and_no_mask() -> None:
    """flash_attention_2 with a padding mask: 4 of 16 heads of keys and values, no bias of all pairs."""
    masked = model_of(LLAMA, attention="flash_attention_2")
    plain = model_of(LLAMA, attention="flash_attention_2", has_attention_mask=False)

    assert act.attention_bytes(masked, call_of(masked, "bf16")) == act.attention_bytes(plain, call_of(plain, "bf16"))
    assert act.shared_mask_bytes(masked, call_of(masked, "bf16")) == 0


def test_fused_attention_keeps_no_matrix_of_all_pairs() -> None:
    """Without a mask, doubling the sequence doubles what a fused kernel keeps; by hand the matrix grows with its square."""
    fused = model_of(GPT2, has_attention_mask=False)
    eager = model_of(GPT2, attention="eager", has_attention_mask=False)

    def kept(model: TransformerModel, sequence_length: int) -> int:
        call = act.make_call(model, sequences=1, sequence_length=sequence_length, precision="bf16-mixed", compute_capability=(8, 0))
        return act.attention_bytes(model, call)

    assert kept(fused, 2048) == 2 * kept(fused, 1024)
    assert kept(eager, 2048) - 2 * kept(eager, 1024) == 2 * 1024**2 * 12 * (4 + 1 + 2)


@pytest.mark.parametrize(("activation", "bytes_each"), [("relu", 0), ("gelu", 2), ("silu", 2), ("gelu_new", 3 * 4 + 2)])
def test_what_a_nonlinearity_keeps(activation: str, bytes_each: int) -> None:
    """Bytes of each element inside the feed-forward under bf16 autocast, the second layer's input left out."""
    model = model_of(GPT2, activation=activation)

    assert act.activation_bytes_per_element(model, call_of(model, "bf16-mixed")) == bytes_each


def test_an_adapter_keeps_its_input_dropout_mask_and_narrow_output() -> None:
    """LoRA with dropout on a layer of 1024: a copy of 2 bytes, a mask of 1, and rank x 2 bytes a token; frozen layers keep nothing."""
    adapted = model_of(LLAMA, lora={"rank": 8, "dropout": 0.1, "targets": ["down"]})
    call = call_of(adapted, "bf16-mixed")

    assert act.linear_input_bytes(adapted, call, ("down",), width=2816, is_stream=False) == TOKENS * (3 * 2816 + 8 * 2)
    assert act.linear_input_bytes(adapted, call, ("gate", "up"), width=1024, is_stream=True) == 0


def test_eval_mode_turns_dropout_off() -> None:
    """A model in eval mode keeps no masks of its own dropout."""
    training, evaluating = model_of(GPT2), model_of(GPT2, is_in_eval_mode=True)

    assert (
        act.block_bytes(training, call_of(training, "fp32")) - act.block_bytes(evaluating, call_of(evaluating, "fp32")) == 2 * TOKENS * 768
    )


def test_checkpointing_keeps_a_block_input_only() -> None:
    """One tensor of the residual stream a block: fp32 under autocast, 2 bytes in pure bf16."""
    model = model_of(GPT2)

    assert act.block_input_bytes(model, call_of(model, "bf16-mixed")) == TOKENS * 768 * 4
    assert act.block_input_bytes(model, call_of(model, "bf16")) == TOKENS * 768 * 2


def test_the_loss_of_a_causal_model_peaks_at_three_fp32_logits() -> None:
    """Log-probabilities, the loss's gradient and the logits' gradient, in fp32 whatever the precision."""
    model = model_of(GPT2)

    assert act.head_bytes(model, call_of(model, "bf16")).loss_peak_bytes == 3 * 4 * TOKENS * 50257
