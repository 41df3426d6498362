"""What is planned: the configuration that a path means, and what is said of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.api.configuration import command_configuration, function_configuration, is_installed, read_configuration, trainer_of
from memplan.errors import UsageError
from memplan.layouts.registry import locate
from memplan.layouts.writer import edits_for, unwritable
from memplan.programs.command_program import CommandProgram
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
    assert any("weights of pretrained models are not read" in note for note in skipping.notes)


def test_a_configuration_has_no_weights_to_skip() -> None:
    """memplan's own modules are made without any."""
    with pytest.raises(UsageError, match="skip_weights is for programs"):
        read_configuration(Path("built-in")).skipping_weights()


def install(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, package: str = "anything") -> None:
    """Put a program of that name first on PATH, which imports *package*."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\nfrom {package}.cli import main\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_program_is_installed_where_it_is_there_and_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script in this folder may be any of that name, and is run where it is typed."""
    install(tmp_path / "bin", "some-trainer", monkeypatch, package="some_package")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    assert is_installed(["some-trainer", "run", "--config", "a.yaml"])
    assert is_installed(["USE_V1=1", "some-trainer", "run"], package="some_package")
    assert not is_installed(["some-trainer", "run"], package="another_package")
    assert not is_installed(["another-trainer", "run"])
    assert not is_installed(["python", "train.py", "a.yaml"])


def test_the_program_that_trains_from_a_recipe_is_told(recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its variables where they stand in the recipe, and what makes it short; none where it is not installed."""
    located = locate(recipes / "sft.yaml")
    assert located is not None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert trainer_of(located) is None

    install(tmp_path / "bin", "trl", monkeypatch)
    found = trainer_of(located)

    assert found is not None
    program = found.program
    assert isinstance(program, CommandProgram)
    assert program.command == ("trl", "sft", "--config", str(recipes / "sft.yaml"))
    assert program.variables == {"micro_batch_size", "gradient_accumulation_steps", "sequence_length"}
    assert (program.training.micro_batch_size, program.training.gradient_accumulation_steps) == (2, 4)
    assert "planned by running the program that trains from" in found.noticed[0]


def test_a_recipe_that_only_its_program_knows_is_that_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed; else what to type is said."""
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(
        "model:\n  _component_: torchtune.models.llama3.lora_llama3_8b\nbatch_size: 2\noptimizer: {_component_: torch.optim.AdamW}\n"
        "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n"
    )
    install(tmp_path / "bin", "tune", monkeypatch, package="ray.tune")  # Ray's has the same name
    with pytest.raises(UsageError, match="through its command"):
        read_configuration(recipe)

    install(tmp_path / "bin", "tune", monkeypatch, package="torchtune")

    found = read_configuration(recipe)
    assert isinstance(found.program, CommandProgram)
    assert found.program.command[:2] == ("tune", "run")


def test_a_batch_within_an_argument_of_a_data_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI's configuration is recognised, and its layout does not know that key: it is looked for by its name."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    Path("config.yaml").write_text(
        "model: {class_path: m.M}\ntrainer: {max_steps: 10}\n"
        "data:\n  class_path: m.D\n  init_args:\n    train_params: {batch_size: 16}\n    val_params: {batch_size: 16}\n"
    )

    found = command_configuration([sys.executable, "train.py", "fit", "--config", "config.yaml"], fields=[], short=[])

    assert isinstance(found.program, CommandProgram)
    assert [place.key for place in found.program.places] == ["data.init_args.train_params.batch_size"]
    assert "found by its name: micro_batch_size=config.yaml:data.init_args.train_params.batch_size" in found.notes


def test_the_trainer_of_a_tree_is_run_for_each_stage(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of the curriculum has negatives of its own."""
    install(tmp_path / "bin", "naics-embedder", monkeypatch)
    configuration = read_configuration(tree)
    assert configuration.located is not None
    assert configuration.reading is not None

    found = trainer_of(configuration.located, configuration.reading.stage_files)

    assert found is not None
    program = found.program
    assert isinstance(program, CommandProgram)
    assert [stage.name for stage in program.stages] == sorted(configuration.reading.stage_files)
    assert [(stage.n_positives, stage.n_negatives) for stage in sorted(configuration.workload.stages, key=lambda stage: stage.name)] == [
        (stage.n_positives, stage.n_negatives) for stage in program.stages
    ]
