"""Workload files and Hugging Face configs: what they become, and what a wrong one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.errors import ConfigError
from memplan.workload.model import TransformerModel
from memplan.workload.workload_file import read_workload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MINIMAL = "model:\n  kind: parameters\n  num_parameters: 100\n  activation_bytes_per_sample: 10\n"


def write(folder: Path, text: str, name: str = "workload.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_workload_file_is_read(tmp_path: Path) -> None:
    """What it does not say has its default."""
    workload = read_workload(write(tmp_path, MINIMAL + "training: {micro_batch_size: 3}\n"))

    assert (workload.training.micro_batch_size, workload.optimizer.name) == (3, "adamw")


def test_a_hugging_face_config_is_a_workload(tmp_path: Path) -> None:
    """config.json alone is enough: transformers is not needed."""
    workload = read_workload(write(tmp_path, json.dumps(LLAMA), "config.json"))

    assert isinstance(workload.model, TransformerModel)
    assert (workload.model.norm, workload.model.is_gated, workload.model.key_value_heads) == ("rms_norm", True, 2)


def test_a_workload_names_a_config_and_overwrites_parts_of_it(tmp_path: Path) -> None:
    """`kind: huggingface` reads the file beside it; its other keys win."""
    write(tmp_path, json.dumps(LLAMA), "config.json")
    text = "model:\n  kind: huggingface\n  config: config.json\n  attention: eager\n  lora: {rank: 4}\n"

    model = read_workload(write(tmp_path, text)).model

    assert isinstance(model, TransformerModel)
    assert model.attention == "eager"
    assert model.lora is not None


def test_a_workload_names_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is looked up by its name: the folder beside the file first, then the catalogue."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = write(tmp_path, "model: {kind: huggingface, name: meta-llama/Llama-3.1-8B, lora: {rank: 8}}\n")

    published = read_workload(path).model
    (tmp_path / "meta-llama" / "Llama-3.1-8B").mkdir(parents=True)
    write(tmp_path / "meta-llama" / "Llama-3.1-8B", json.dumps(LLAMA), "config.json")
    local = read_workload(path).model

    assert isinstance(published, TransformerModel)
    assert isinstance(local, TransformerModel)
    assert (published.num_layers, published.vocab_size, published.lora is None) == (32, 128256, False)
    assert (local.num_layers, local.hidden_size) == (2, 64)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (MINIMAL + "training:\n  micro_batch_size: -4\n", 6, "`training.micro_batch_size` is -4: input should be greater than 0"),
        (MINIMAL + "training:\n  micro_batch: 4\n", 6, "`training.micro_batch`: no such field"),
        ("model:\n  kind: parameters\n  num_parameters: 0\n  activation_bytes_per_sample: 1\n", 3, "`model.num_parameters` is 0"),
        ("model:\n  kind: parameters\n  num_parameters: 5\n", 2, "`model.activation_bytes_per_sample`: is missing"),
        ("model: {kind: convnet}\n", 1, "`model`: `kind` must be transformer, contrastive_encoder, parameters or huggingface"),
        (MINIMAL + "training: {precision: fp8}\n", 5, "`training.precision` is 'fp8'"),
        (MINIMAL + MINIMAL, 5, "`model` is set here and in line 1"),
        ("- a list\n", None, "is not a workload"),
        ("a: [1\n", 2, "is not valid YAML"),
        ("model:\n  kind: huggingface\n", 2, "`model.config` must name"),
        ("model:\n  kind: huggingface\n  name: 7\n", 3, "or `model.name` a model"),
        ("model:\n  kind: huggingface\n  name: no/such-model\n", 3, "`model.name`: unknown model: 'no/such-model'"),
        ("model:\n  kind: huggingface\n  config: a.json\n  name: gpt2\n", 3, "`model` takes `config` or `name`, not both"),
    ],
)
def test_a_wrong_file_is_told_where(tmp_path: Path, text: str, line: int | None, problem: str) -> None:
    """One line with file, line and value."""
    path = write(tmp_path, text)

    with pytest.raises(ConfigError) as caught:
        read_workload(path)

    where = f"{path}:{line}: " if line else f"{path}: "
    assert caught.value.message.startswith(where)
    assert problem in caught.value.message
    assert "\n" not in caught.value.message


def test_a_named_config_has_to_be_one(tmp_path: Path) -> None:
    """A list is no config.json."""
    write(tmp_path, "[]", "config.json")

    with pytest.raises(ConfigError, match=r"is not a Hugging Face config\.json"):
        read_workload(write(tmp_path, "model: {kind: huggingface, config: config.json}\n"))
