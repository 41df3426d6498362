"""A Hugging Face config.json: which model it becomes, what is said of what is not followed, and what a wrong one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.workload.huggingface import ConfigJson, not_heeded
from memplan.workload.model import HuggingFaceModel, TransformerModel
from memplan.workload.workload_file import read_huggingface_config, read_workload

SMALL_BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def model_of(folder: Path, **config: Any) -> TransformerModel | HuggingFaceModel:
    """What the config.json with these values becomes."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    model = read_workload(path).model
    assert isinstance(model, (TransformerModel, HuggingFaceModel))
    return model


@pytest.mark.parametrize(
    ("model_type", "architecture", "head", "has_pooler"),
    [
        ("bert", "BertForMaskedLM", "masked_language_model", False),
        ("bert", "BertForSequenceClassification", "sequence_classification", True),
        ("bert", "BertForTokenClassification", "token_classification", False),
        ("bert", "BertForQuestionAnswering", "question_answering", False),
        ("bert", "BertModel", "none", True),
        ("bert", None, "masked_language_model", False),
        ("distilbert", "DistilBertModel", "none", False),
        ("xlm-roberta", "XLMRobertaForSequenceClassification", "sequence_classification", True),
        ("gpt2", "GPT2LMHeadModel", "language_model", False),
        ("gpt2", "GPT2ForSequenceClassification", "sequence_classification", False),
        ("gpt2", None, "language_model", False),
        ("llama", "LlamaForCausalLM", "language_model", False),
        ("qwen3", "Qwen3Model", "none", False),
    ],
)
def test_architectures_decide_the_head(tmp_path: Path, model_type: str, architecture: str | None, head: str, has_pooler: bool) -> None:
    """Where the file names none, the family's usual one."""
    named = {} if architecture is None else {"architectures": [architecture]}

    model = model_of(tmp_path, model_type=model_type, **named)

    assert isinstance(model, TransformerModel)
    assert (model.head, model.has_pooler) == (head, has_pooler)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mpnet", "architectures": ["MPNetForMaskedLM"]},
        {"model_type": "bert", "architectures": ["BertForPreTraining"]},
        {"model_type": "bert", "architectures": ["RobertaForMaskedLM"]},
        {"model_type": "bert", "hidden_act": "quick_gelu"},
    ],
)
def test_what_no_formula_is_for_is_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    """Another family, another head, the class of another family, an activation that is not known."""
    model = model_of(tmp_path, **config)

    assert isinstance(model, HuggingFaceModel)
    assert json.loads(model.huggingface_config) == config


def test_the_classes_are_those_that_the_file_names(tmp_path: Path) -> None:
    """By their names or their number; two where it says nothing."""
    named = model_of(tmp_path, **SMALL_BERT, id2label={"0": "a", "1": "b", "2": "c"})
    counted = model_of(tmp_path, **SMALL_BERT, num_labels=5)
    silent = model_of(tmp_path, **SMALL_BERT)

    assert [model.num_labels for model in (named, counted, silent) if isinstance(model, TransformerModel)] == [3, 5, 2]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"hidden_size": "64"}, "`hidden_size` is '64', not a whole number from 1"),
        ({"hidden_size": True}, "`hidden_size` is True, not a whole number from 1"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0, not a whole number from 1"),
        ({"num_attention_heads": [4]}, "`num_attention_heads` is [4], not a whole number from 1"),
        ({"hidden_dropout_prob": 1}, "`hidden_dropout_prob` is 1, not a number from 0 to less than 1"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` is 'yes', not true or false"),
        ({"hidden_act": 3}, "`hidden_act` is 3, not a text"),
        ({"architectures": "BertModel"}, "`architectures` is 'BertModel', not a list of class names"),
        ({"architectures": [1]}, "`architectures` is [1], not a list of class names"),
        ({"num_labels": -1}, "`num_labels` is -1, not a whole number from 1"),
    ],
)
def test_a_value_of_a_wrong_type_is_told_with_its_line(tmp_path: Path, wrong: dict[str, Any], problem: str) -> None:
    """Never a traceback."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL_BERT | wrong, indent=1))
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if f'"{next(iter(wrong))}"' in text)

    with pytest.raises(ConfigError) as refused:
        read_workload(path)

    assert refused.value.message == f"{path}:{line}: {problem}"


@pytest.mark.parametrize("content", ["[]", "{}", '{"model_type": 3}', "3"])
def test_what_is_no_model_at_all_is_said(tmp_path: Path, content: str) -> None:
    """Where a workload file names it."""
    (tmp_path / "model.json").write_text(content)
    (tmp_path / "workload.yaml").write_text("model: {kind: huggingface, config: model.json}\n")

    with pytest.raises(ConfigError, match=r"model\.json: is not a Hugging Face config\.json: no `model_type`"):
        read_workload(tmp_path / "workload.yaml")


def test_null_is_as_nothing(tmp_path: Path) -> None:
    """Files that transformers wrote are full of it."""
    model = model_of(tmp_path, model_type="gpt2", n_inner=None, architectures=None, tie_word_embeddings=None)

    assert isinstance(model, TransformerModel)
    assert (model.intermediate_size, model.ties_embeddings) == (4 * 768, True)


def test_a_length_that_the_model_cannot_take_is_not_assumed(tmp_path: Path) -> None:
    """512 tokens, or as many as it has positions for."""
    for positions, length in ((77, 77), (514, 512), (None, 512)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": "clip_text_model", "max_position_embeddings": positions}))

        assert read_huggingface_config(path)[0].training.sequence_length == length


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"torch_dtype": "bfloat16"}, "`torch_dtype` bfloat16 is ignored"),
        ({"torch_dtype": None, "dtype": "float16"}, "`torch_dtype` float16"),
        ({"quantization_config": {"load_in_4bit": True}}, "`quantization_config` is ignored"),
        ({"architectures": None}, "names no `architectures`"),
    ],
)
def test_what_is_not_followed_is_said(config: dict[str, Any], told: str) -> None:
    """One sentence each, and none for a file that a plan follows."""
    silent = {**SMALL_BERT, "architectures": ["BertModel"], "torch_dtype": "float32"}

    assert not_heeded(ConfigJson(silent, Path("config.json"))) == []
    (sentence,) = not_heeded(ConfigJson(silent | config, Path("config.json")))
    assert sentence.startswith(told)
