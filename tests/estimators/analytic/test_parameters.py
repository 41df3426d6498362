"""Parameter counts, against figures that others published and sums worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.estimators.analytic.parameters import count, parameter_groups, rounded
from memplan.units import MIB
from memplan.workload.huggingface import ConfigJson, model_from_config
from memplan.workload.model import ContrastiveEncoderModel, Lora, ParametersModel, TransformerModel
from memplan.workload.workload import Workload

# The config.json values of each model's GPU; the counts are those of transformers 4.57.6's `model.num_parameters()`.
PUBLISHED = {
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "bert-base-uncased with its masked-language-model head": ({"model_type": "bert"}, 109_514_298),
    "distilbert-base-uncased with its head": ({"model_type": "distilbert"}, 66_985_530),
    "Llama 2 7B": ({"model_type": "llama"}, 6_738_415_616),
    "Llama 3.1 8B": (
        {"model_type": "llama", "vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8},
        8_030_261_248,
    ),
    "Qwen2 0.5B": (
        {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Mistral 7B": ({"model_type": "mistral"}, 7_241_732_096),
    "Qwen3 0.6B": (
        {
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
        596_049_920,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    """A Hugging Face config gives the number of parameters that the model has, to the last one."""
    config, published = PUBLISHED[name]
    model = TransformerModel.model_validate(model_from_config(ConfigJson(config, Path("config.json"))))

    counted = count(parameter_groups(model))

    # DistilBERT's head norm and projector are BERT's; its transform is the same size.
    assert counted == published


def test_lora_freezes_the_model_and_trains_its_adapters() -> None:
    """Rank r beside a layer of n inputs and m outputs trains r * (n + m)."""
    plain = {
        "architecture": "decoder",
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    model = TransformerModel.model_validate(plain | {"lora": Lora(rank=4, targets=("query", "down"))})

    assert count(parameter_groups(model), trainable_only=True) == 2 * (4 * (8 + 8) + 4 * (32 + 8))


def test_a_contrastive_encoder_is_its_channels_experts_and_projection(built_in: Workload) -> None:
    """Four encoders of 22.7 million, LoRA of rank 8 on all linear layers, gate, experts and projection with their biases."""
    model = built_in.model
    assert isinstance(model, ContrastiveEncoderModel)
    encoder = 30522 * 384 + 512 * 384 + 2 * 384 + 2 * 384 + 6 * (4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384)
    adapters = 6 * 8 * (4 * (384 + 384) + 2 * (384 + 1536))
    experts = (1536 * 4 + 4) + 4 * (1536 * 1024 + 1024 + 1024 * 1536 + 1536) + (1536 * 384 + 384)

    assert count(parameter_groups(model)) == 4 * (encoder + adapters) + experts
    assert count(parameter_groups(model), trainable_only=True) == 4 * adapters + experts


def test_plain_counts_are_taken_as_they_are() -> None:
    """A model by counts has the parameters that it says, of which some are trained."""
    model = ParametersModel(num_parameters=100, num_trainable_parameters=30, activation_bytes_per_sample=1)

    assert count(parameter_groups(model)) == 100
    assert count(parameter_groups(model), trainable_only=True) == 30


@pytest.mark.parametrize(
    ("size_bytes", "block_bytes"),
    [
        *((1, 512), (512, 512), (513, 1024), (MIB, MIB), (10 * MIB, 10 * MIB)),
        *((11 * MIB, 12 * MIB), (12 * MIB - 512, 12 * MIB), (12 * MIB + 512, 12 * MIB + 512)),
    ],
)
def test_blocks_are_rounded_as_the_caching_allocator_does(size_bytes: int, block_bytes: int) -> None:
    """Multiples of 512; from 10 MiB a segment of its own, whose rest of up to 1 MiB is not split off."""
    assert rounded(size_bytes) == block_bytes
