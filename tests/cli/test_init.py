"""`memplan init` and `memplan explain-config`, as typed in a project's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Run, content

RECIPES = Path(__file__).parents[1] / "trees" / "recipes"
LORA = (
    "model: {_component_: torchtune.models.some, lora_rank: 8}\noptimizer: {_component_: torch.optim.AdamW}\n"
    "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n"
    "batch_size: 2\ngradient_accumulation_steps: 8\n"
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recipe, in which the commands run."""
    folder = Path(shutil.copytree(RECIPES, tmp_path / "project", ignore=shutil.ignore_patterns("axolotl.yml", "llama_factory.yaml")))
    monkeypatch.chdir(folder)
    return folder


def test_every_value_is_told_with_its_file_and_line(project: Path, run_memplan: Run) -> None:
    """Keys, defaults of the framework, what several keys decide, and memplan's own."""
    result = run_memplan("explain-config", "--format", "json", cwd=project)
    told = {each["field"]: each for each in json.loads(result.stdout)["fields"]}

    assert told["training.micro_batch_size"]["value"] == "2"
    assert (told["training.micro_batch_size"]["file"], told["training.micro_batch_size"]["line"]) == ("sft.yaml", 18)
    assert told["training.micro_batch_size"]["why"] == "`per_device_train_batch_size`: 2"
    assert told["model.adapters.dropout"]["why"] == "the framework's default: `lora_dropout` is not set"
    assert told["training.precision"]["why"] == "since `bf16` is true"
    assert told["optimizer.implementation"]["why"] == "since `optim` is paged_adamw_8bit"
    assert told["model.adapters.dtype"]["why"] == "memplan's default"
    assert "model.huggingface_config" not in told


def test_values_of_a_tree_come_from_its_files_and_its_starter(tree: Path, run_memplan: Run) -> None:
    """And those of a stage from its own file."""
    result = run_memplan("explain-config", "--config-path", str(tree), "--format", "json")
    told = {each["field"]: each for each in json.loads(result.stdout)["fields"]}

    assert told["model.encoder.hidden_size"]["why"] == "the layout's starter workload"
    assert told["stages.1.n_negatives"]["file"].endswith("01_stage.yaml")
    assert told["model.encoder.lora.rank"]["why"] == "`model.lora.r`: 8"


def test_variables_of_a_program_are_told_with_their_places(project: Path, run_memplan: Run) -> None:
    """Those that the recipe in its command has."""
    (project / "lora.yaml").write_text(LORA)
    result = run_memplan("explain-config", "--", "tune", "run", "lora_finetune_single_device", "--config", "lora.yaml", cwd=project)

    assert result.returncode == 0, result.stderr
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:]] == [
        ["gradient_accumulation_steps", "8", "lora.yaml:5"],
        ["micro_batch_size", "2", "lora.yaml:4"],
    ]


def test_init_remembers_a_recipe_and_shows_what_it_read(project: Path, run_memplan: Run) -> None:
    """Nothing else is written, and a plan then needs no options."""
    before = content(project)
    result = run_memplan("init", "--gpu", "t4", "--target-effective-batch", "16", cwd=project)

    assert result.returncode == 0, result.stderr
    assert "`per_device_train_batch_size`: 2" in result.stdout
    assert ".memplan/plan.yaml was written" in result.stdout
    written = (project / ".memplan" / "plan.yaml").read_text()
    assert "\nconfig: sft.yaml\n" in written
    assert "\ngpu: t4\n" in written
    assert "\ntarget_effective_batch_size: 16\n" in written
    assert {path: data for path, data in content(project).items() if not path.startswith(".memplan")} == before


def test_init_remembers_the_command_of_a_recipe_that_only_a_program_knows(project: Path, run_memplan: Run) -> None:
    """With where its batch is written."""
    (project / "sft.yaml").unlink()
    (project / "lora.yaml").write_text(LORA)
    result = run_memplan("init", cwd=project)

    assert result.returncode == 0, result.stderr
    written = (project / ".memplan" / "plan.yaml").read_text()
    assert 'command: "tune run lora_dpo_single_device --config lora.yaml"' in written
    assert "- micro_batch_size=lora.yaml:batch_size" in written


def test_init_remembers_the_command_of_a_recipe_that_memplans_model_is_not_true_for(project: Path, run_memplan: Run) -> None:
    """As one with packed texts: what a plan needs is its program."""
    (project / "sft.yaml").unlink()
    (project / "lora.yaml").write_text(LORA.replace("rlhf.loss.DPOLoss", "modules.loss.LinearCrossEntropyLoss") + "dtype: bf16\n")
    result = run_memplan("init", cwd=project)

    assert result.returncode == 0, result.stderr
    written = (project / ".memplan" / "plan.yaml").read_text()
    assert 'command: "tune run lora_finetune_single_device --config lora.yaml"' in written


def test_init_does_not_overwrite_what_is_remembered(project: Path, run_memplan: Run) -> None:
    """The same again is nothing; another GPU needs --force."""
    assert run_memplan("init", "--gpu", "t4", cwd=project).returncode == 0
    same = run_memplan("init", "--gpu", "t4", cwd=project)
    refused = run_memplan("init", "--gpu", "a100-40", cwd=project)
    forced = run_memplan("init", "--gpu", "a100-40", "--force", cwd=project)

    assert "says so already" in same.stdout
    assert refused.returncode == 2
    assert "is there already, and says something else" in refused.stderr
    assert forced.returncode == 0
    assert "gpu: a100-40" in (project / ".memplan" / "plan.yaml").read_text()


def test_a_dry_run_writes_nothing(project: Path, run_memplan: Run) -> None:
    """It shows the file."""
    before = content(project)
    result = run_memplan("init", "--dry-run", cwd=project)

    assert "\nconfig: sft.yaml\n" in result.stdout
    assert content(project) == before


def test_a_folder_without_a_training_is_one_clear_line(tmp_path: Path, run_memplan: Run) -> None:
    """And nothing is left behind."""
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run_memplan("init", cwd=empty)

    assert result.returncode == 2
    assert "has nothing that memplan recognises as a training" in result.stderr
    assert not list(empty.iterdir())


@pytest.mark.parametrize("command", ["init", "explain-config", "check"])
def test_a_function_and_a_command_exclude_each_other(project: Path, run_memplan: Run, command: str) -> None:
    """Neither is taken in the place of the other."""
    result = run_memplan(command, "step.py:build", "--", "python", "train.py", cwd=project)

    assert result.returncode == 2
    assert "a function and a command exclude each other" in result.stderr
    assert not (project / ".memplan").exists()


def test_init_finds_the_program_that_hydra_configures(tmp_path: Path, run_memplan: Run) -> None:
    """With the files that hold its batch and its accumulation."""
    project = Path(shutil.copytree(RECIPES.with_name("hydra"), tmp_path / "project"))

    result = run_memplan("init", "--gpu", "t4", cwd=project)

    assert result.returncode == 0, result.stderr
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:3]] == [
        ["gradient_accumulation_steps", "4", "configs/trainer/default.yaml:2"],
        ["micro_batch_size", "256", "configs/data/images.yaml:2"],
    ]
    assert "\ncommand: python train.py\n" in (project / ".memplan" / "plan.yaml").read_text().replace('"', "")
