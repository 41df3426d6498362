"""Recipes of frameworks, planned and written as typed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from memplan.hardware.torch_install import TorchBuild
from tests.conftest import Run, content


def test_a_plan_is_written_into_a_recipe_and_undone(recipes: Path, run_memplan: Run) -> None:
    """Exactly the two values of the batch, and every byte back."""
    path = recipes / "llama_factory.yaml"
    path.write_text(path.read_text().replace("finetuning_type: lora", "finetuning_type: full"))
    before = content(recipes)
    options = ("--gpu", "a100-40", "--config-path", str(path), "--target-effective-batch", "64", "--num-gpus", "2")

    applied = run_memplan(*options, "--method", "analytic", "--apply")
    changed = {line for line in path.read_text().splitlines() if line not in before["llama_factory.yaml"].decode().splitlines()}
    undone = run_memplan("undo", "--config-path", str(recipes))

    assert applied.returncode == 0, applied.stderr
    assert changed == {"per_device_train_batch_size: 32", "gradient_accumulation_steps: 1"}
    assert undone.returncode == 0, undone.stderr
    after = content(recipes)
    assert {name: after[name] for name in before} == before


def test_a_recipe_without_its_option_is_told_how_to_be_named(recipes: Path, run_memplan: Run) -> None:
    """Neither is it a sub-command, nor a program."""
    result = run_memplan("--gpu", "t4", "sft.yaml", cwd=recipes)

    assert (result.returncode, result.stdout) == (2, "")
    assert "sft.yaml is not a command of memplan" in result.stderr
    assert "`--config-path sft.yaml`" in result.stderr


def test_what_puts_a_recipe_below_back_is_said_as_it_is_typed_here(recipes: Path, run_memplan: Run) -> None:
    """The journal lies beside the recipe, and `memplan undo` in the project's folder would find none."""
    path = recipes / "llama_factory.yaml"
    path.write_text(path.read_text().replace("finetuning_type: lora", "finetuning_type: full"))
    before = path.read_bytes()
    options = ("--gpu", "a100-40", "--config-path", str(path), "--target-effective-batch", "64", "--method", "analytic")

    applied = run_memplan(*options, "--apply", cwd=recipes.parent)
    (undo,) = re.findall(r"`(memplan undo .*)` puts them back", applied.stderr)
    undone = run_memplan(*shlex.split(undo)[1:], cwd=recipes.parent)

    assert undo == f"memplan undo {recipes.name}"
    assert (undone.returncode, path.read_bytes()) == (0, before)


def test_a_recipe_is_planned_as_its_launcher_starts_it(recipes: Path, run_memplan: Run) -> None:
    """Four GPUs that shard it, whatever --num-gpus would say; remembered by init, checked alike, and refused for a program."""
    path, launch = recipes / "llama_factory.yaml", recipes / "launch.yaml"
    path.write_text(path.read_text().replace("finetuning_type: lora", "finetuning_type: full"))
    launch.write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\nnum_processes: 4\n"
    )
    before = launch.read_bytes()
    options = ("--gpu", "a100-40", "--config-path", path.name, "--launch-config", launch.name, "--method", "analytic")

    planned = run_memplan(*options, "--apply", cwd=recipes)
    kept = run_memplan("init", *options[:-2], cwd=recipes)
    again = run_memplan("--method", "analytic", cwd=recipes)
    checked = run_memplan("check", *options, cwd=recipes)
    compared = run_memplan("compare", "t4", *options[2:], "--num-gpus", "2,4", "--format", "json", cwd=recipes)
    refused = run_memplan("--gpu", "t4", "--launch-config", launch.name, "--", "python", "train.py", cwd=recipes)

    assert "GPUs     4, fully sharded (FSDP2); the table is for each" in planned.stdout, planned.stderr
    assert f"{path.name} (llama-factory, launched with {launch.name})" in " ".join(planned.stdout.split())
    assert kept.returncode == 0, kept.stderr
    assert "launch_config: launch.yaml" in (recipes / ".memplan" / "plan.yaml").read_text()
    assert "GPUs 4, fully sharded (FSDP2)" in " ".join(again.stdout.split()), again.stderr
    assert checked.stdout.startswith("fits: "), checked.stderr
    assert sorted(row["num_gpus"] for row in json.loads(compared.stdout)["gpus"]) == [2, 4]
    assert (refused.returncode, "--launch-config is for a recipe" in refused.stderr) == (2, True)
    assert launch.read_bytes() == before


def test_the_negatives_of_a_retriever_are_planned_and_written(retriever: Path, run_memplan: Run) -> None:
    """Pinned as a stage's are; the budget leaves room for what the program itself may take more, and the report says so."""
    before = content(retriever.parent)
    options = ("--gpu", "t4", "--config-path", str(retriever), "--method", "analytic", "--pin", "n_negatives=7")

    applied = run_memplan(*options, "--apply")
    changed = {line for line in retriever.read_text().splitlines() if line not in before["rag_retrieval.yaml"].decode().splitlines()}
    undone = run_memplan("undo", "--config-path", str(retriever.parent))

    assert applied.returncode == 0, applied.stderr
    assert "5% left free, and 10% for what the program itself may take more" in " ".join(applied.stdout.split())
    assert changed == {
        "neg_nums: 7          # for each query", "batch_size: 8        # queries on a GPU", "gradient_accumulation_steps: 1"
    }  # fmt: skip
    assert undone.returncode == 0, undone.stderr
    assert {name: content(retriever.parent)[name] for name in before} == before


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_recipe_with_adapters_and_quantized_weights_is_rehearsed(recipes: Path, run_memplan: Run, torch_build: TorchBuild) -> None:
    """There are no formulas for it, and its breakdown says what is frozen."""
    options = ("--gpu", "t4", "--config-path", str(recipes / "sft.yaml"), "--format", "json")
    result = run_memplan(*options, MEMPLAN_METHOD="auto")

    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    (stage,) = plan["stages"]
    assert plan["method"] == "rehearsed"
    assert (plan["target_effective_batch_size"], stage["planned"]["effective_batch_size"]) == (8, 8)
    assert 0 < stage["estimate"]["breakdown"]["optimizer_state_bytes"] < stage["estimate"]["breakdown"]["parameters_bytes"] / 10


TRAINER = '''#!{python}
"""Trains from a recipe as `trl sft --config FILE` does, another model than memplan would build of it."""
import sys
from pathlib import Path

import torch
from ruamel.yaml import YAML

recipe = YAML(typ="safe").load(Path(sys.argv[3]))
{first}
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    for _ in range(recipe["gradient_accumulation_steps"]):
        x = torch.randn(recipe["per_device_train_batch_size"], recipe["max_length"], 1024).cuda()
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
'''


def installed_trainer(folder: Path, *, first: str = "") -> dict[str, str]:
    """Install a `trl` of our own into *folder*; return the variables with which it is found."""
    folder.mkdir()
    (folder / "trl").write_text(TRAINER.format(python=sys.executable, first=first))
    (folder / "trl").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "MEMPLAN_METHOD": "auto"}


@pytest.mark.heavy
def test_the_trainer_of_a_recipe_is_planned_where_it_is_installed(
    recipes: Path, tmp_path: Path, run_memplan: Run, torch_build: TorchBuild
) -> None:
    """The recipe is read with the values that are tried, and written; memplan's own model of it is another."""
    environment = installed_trainer(tmp_path / "bin")
    path = recipes / "sft.yaml"
    before = path.read_text()

    options = ("--gpu", "t4", "--config-path", path, "--target-effective-batch", "64", "--format", "json")
    result = run_memplan(*options, "--apply", cwd=tmp_path, **environment)

    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    (stage,) = plan["stages"]
    assert plan["source"] == "trl"
    assert any("planned by running the program that trains from" in note for note in plan["notes"])
    # two layers of 1024 x 4096 with their biases in fp32
    assert stage["estimate"]["breakdown"]["parameters_bytes"] == 4 * (2 * 1024 * 4096 + 4096 + 1024)
    assert path.read_text() == before.replace("batch_size: 2 ", "batch_size: 64 ").replace("accumulation_steps: 4", "accumulation_steps: 1")


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_trainer_that_does_not_run_leaves_memplan_s_own_model(
    recipes: Path, tmp_path: Path, run_memplan: Run, torch_build: TorchBuild
) -> None:
    """The report says why it was not the program."""
    environment = installed_trainer(tmp_path / "bin", first="import a_package_that_is_missing")

    result = run_memplan("--gpu", "t4", "--config-path", recipes / "sft.yaml", "--format", "json", cwd=tmp_path, **environment)

    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["source"] == f"{recipes / 'sft.yaml'} (trl-sft)"
    assert any("which trains from it, was not planned" in note and "a_package_that_is_missing" in note for note in plan["notes"])


def test_a_recipe_that_is_sharded_is_refused_by_its_line(recipes: Path, run_memplan: Run) -> None:
    """Exit code 2, one line and what to type; nothing is left behind."""
    path = recipes / "axolotl.yml"
    path.write_text(path.read_text() + "deepspeed: zero3.json\n")
    before = content(recipes)

    result = run_memplan("--gpu", "t4", "--config-path", str(path))

    assert result.returncode == 2
    assert f"{path}:23: `deepspeed` names zero3.json, which is neither beside it nor below a folder that it is in" in result.stderr
    assert "-- axolotl train" in result.stderr
    assert "Traceback" not in result.stderr
    assert content(recipes) == before


def test_the_value_of_an_option_is_no_program(run_memplan: Run, tmp_path: Path) -> None:
    """Whatever it is called."""
    result = run_memplan("rehearse", "--gpu", "python3", "step.py:build", cwd=tmp_path)

    assert result.returncode == 2
    assert "python3 is a program" not in result.stderr
    assert "unknown GPU" in result.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--gpu", "t4"], "python3 is not a command of memplan"),
        (["rehearse", "--gpu", "t4", "--steps", "4"], "python3 is a program"),
        (["check", "--gpu=t4"], "python3 is a program"),
        (["compare", "t4", "--format", "json"], "python3 is a program"),
    ],
)
def test_the_command_of_a_program_follows_two_dashes(run_memplan: Run, tmp_path: Path, options: list[str], problem: str) -> None:
    """Without them its first word would be a command of memplan, and its options memplan's."""
    result = run_memplan(*options, "python3", "train.py", "--batch-size", "{micro_batch_size}", cwd=tmp_path)

    assert result.returncode == 2
    assert problem in result.stderr
    assert "follows two dashes: `-- python3 train.py --batch-size '{micro_batch_size}'`" in " ".join(result.stderr.split())
