"""Recipes of frameworks, planned and written as typed."""

from __future__ import annotations

import json
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
