"""What is planned: the configuration that a path means, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.api.configuration import function_configuration, read_configuration
from memplan.errors import UsageError
from memplan.layouts.writer import edits_for, unwritable
from memplan.workload.model import HuggingFaceModel, TransformerModel

BERT: dict[str, Any] = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have some."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.mark.parametrize(
    ("shell", "settings"),
    [
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "expandable_segments:True",
        ),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128", "PYTORCH_CUDA_ALLOC_CONF": ""}, ""),
        ({}, ""),
    ],
)
def test_the_shell_s_allocator_settings_are_planned_with(
    tree: Path, monkeypatch: pytest.MonkeyPatch, shell: dict[str, str], settings: str
) -> None:
    """As the training that is started there will run; it is said, and nothing of it is written."""
    for name, value in shell.items():
        monkeypatch.setenv(name, value)

    configuration = read_configuration(tree)

    assert configuration.workload.training.allocator_settings == settings
    assert any("as this shell has it" in note for note in configuration.notes) == bool(settings)
    assert configuration.reading is not None
    assert edits_for(configuration.reading, configuration.workload) == []
    assert unwritable(configuration.reading, configuration.workload) == []


def test_settings_of_the_workload_come_before_the_shell_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload that names some is trained under them."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    path = tmp_path / "workload.yaml"
    path.write_text(
        "model: {kind: parameters, num_parameters: 1, activation_bytes_per_sample: 1}\n"
        "training: {allocator_settings: 'roundup_power2_divisions:4'}\n"
    )

    configuration = read_configuration(path)

    assert configuration.workload.training.allocator_settings == "roundup_power2_divisions:4"
    assert not any("shell" in note for note in configuration.notes)


def test_settings_that_pytorch_refuses_are_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is planned."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:lots")

    with pytest.raises(UsageError, match="PYTORCH_ALLOC_CONF=max_split_size_mb:lots"):
        read_configuration(tree)


def test_a_config_json_is_planned_and_told_of(tmp_path: Path) -> None:
    """With formulas where there are some, and with what is not followed of it."""
    files = {
        "bert": BERT | {"torch_dtype": "float16"},
        "mpnet": {"model_type": "mpnet", "architectures": ["MPNetForMaskedLM"], "quantization_config": {"load_in_8bit": True}},
    }
    for name, content in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))

    bert, mpnet = (read_configuration(tmp_path / name) for name in files)

    assert isinstance(bert.workload.model, TransformerModel)
    assert any("`torch_dtype` float16" in note for note in bert.notes)
    assert isinstance(mpnet.workload.model, HuggingFaceModel)
    assert any("`quantization_config` is ignored" in note for note in mpnet.notes)
    assert not bert.has_batch


def test_a_program_skips_weights_and_says_so(tmp_path: Path) -> None:
    """It is another program for what is kept of its rehearsals, and the report notes it."""
    (tmp_path / "step.py").write_text("def build(device, batch=8): ...\n")
    plain = function_configuration(f"{tmp_path / 'step.py'}:build")

    skipping = plain.skipping_weights()

    assert (plain.program.model_dump()["skips_weights"], skipping.program.model_dump()["skips_weights"]) == (False, True)
    assert any("weights of pretrained models were not read" in note for note in skipping.notes)


def test_a_configuration_has_no_weights_to_skip() -> None:
    """memplan's own modules are made without any."""
    with pytest.raises(UsageError, match="skip_weights is for programs"):
        read_configuration(Path("built-in")).skipping_weights()
