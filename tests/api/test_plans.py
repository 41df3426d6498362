"""`memplan.plan`, what a plan can do, and `memplan.undo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memplan
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.planner.saved_plan import read_saved_plan
from memplan.workload.workload import Workload
from tests.conftest import content
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


def analytic(tree: Path, **options: object) -> memplan.Plan:
    """A plan by formulas, which take no time."""
    return memplan.plan(tree, gpu="rtx4090", target_effective_batch_size=64, method="analytic", **options)  # type: ignore[arg-type]


def test_a_plan_is_shown_written_and_taken_back(tree: Path) -> None:
    """The diff names what apply changes; undo puts every byte back."""
    before = content(tree)
    plan = analytic(tree)

    diff = plan.diff()
    written = plan.apply()

    assert plan.fits
    assert f"+++ {written[0]}" in diff
    assert analytic(tree).diff() == ""
    assert [path.name for path in memplan.undo(tree)] == [path.name for path in written]
    assert {name: data for name, data in content(tree).items() if name in before} == before


def test_a_training_that_would_be_resumed_with_another_batch_is_a_warning(recipes: Path) -> None:
    """The first, before an apply; not where the effective batch stays."""
    path = recipes / "llama_factory.yaml"
    path.write_text(path.read_text().replace("finetuning_type: lora", "finetuning_type: full"))
    (recipes / "saves" / "tiny" / "checkpoint-500").mkdir(parents=True)
    warning = analytic(path).warnings[0]

    assert "checkpoint-500: a checkpoint of a training with an effective batch of 8: resumed with 64" in warning
    assert "`target_effective_batch_size=8`" in warning
    same = memplan.plan(path, gpu="rtx4090", target_effective_batch_size=8, method="analytic")
    assert not any("checkpoint-500" in each for each in same.warnings)


def test_an_undo_of_some_files_leaves_the_others(tree: Path) -> None:
    """Those that are named."""
    written = analytic(tree, grow_negatives=True).apply()
    assert len(written) > 1

    assert [path.name for path in memplan.undo(tree, files=written[:1])] == [written[0].name]


def test_what_does_not_fit_is_not_written(tree: Path) -> None:
    """It says how much it is short of, and apply raises."""
    before = content(tree)
    plan = memplan.plan(tree, gpu_memory="2GiB", method="analytic")

    assert not plan.fits
    assert plan.missing_bytes > 0
    with pytest.raises(memplan.DoesNotFitError, match="not written"):
        plan.apply()
    assert content(tree) == before


def test_a_workload_is_planned_and_has_no_files(built_in: Workload) -> None:
    """A value instead of a path: there is nothing to write."""
    plan = memplan.plan(built_in, gpu="a100-80", method="analytic")

    assert plan.after.name == built_in.name
    with pytest.raises(memplan.UsageError, match="nothing to apply to"):
        plan.diff()


def test_pins_are_values_of_python(tree: Path) -> None:
    """Numbers and truth, as well as text."""
    plan = analytic(tree, pins={"micro_batch_size": 2, "is_in_eval_mode": False})

    assert plan.after.training.micro_batch_size == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "rtx9999"}, "unknown GPU: 'rtx9999'"),
        ({"gpu": "t4", "pins": {"speed": 3}}, "no such field"),
        ({"gpu": "t4", "target_effective_batch_size": "most"}, 'a whole number from 1 on, or "max"'),
        ({"gpu": "t4", "target_effective_batch_size": "max", "pins": {"micro_batch_size": 2}}, "and micro_batch_size is pinned"),
        ({"gpu": memplan.GpuSpec(name="mine", total_memory_bytes=2**34, origin="test"), "gpu_memory": "24"}, "goes with the name"),
    ],
)
def test_what_makes_no_sense_is_refused_in_python_s_words(tree: Path, options: dict[str, object], message: str) -> None:
    """No option of the command line in the message or its hint."""
    with pytest.raises(memplan.UsageError, match=message) as caught:
        memplan.plan(tree, method="analytic", **options)  # type: ignore[arg-type]

    assert "--" not in str(caught.value)


def test_the_largest_batch_is_found_whatever_the_files_aim_at(tree: Path) -> None:
    """Without accumulation: one sample more is over the budget."""
    plan = memplan.plan(tree, gpu="rtx4090", target_effective_batch_size="max", method="analytic")

    planned = plan.stages[0].planned
    assert (plan.fits, planned.gradient_accumulation_steps) == (True, 1)
    assert planned.micro_batch_size > 1
    assert not any("names no batch size" in warning for warning in plan.warnings)
    more: dict[str, str | int | float | bool] = {"micro_batch_size": planned.micro_batch_size + 1}
    assert not memplan.plan(tree, gpu="rtx4090", pins=more, method="analytic").fits


def test_a_saved_plan_is_read_by_what_watches_a_training(tree: Path, tmp_path: Path) -> None:
    """The same as `memplan --format json` prints, as far as a monitor is concerned."""
    plan, path = analytic(tree), tmp_path / "plan.json"

    plan.save(path)

    saved = read_saved_plan(path)
    assert saved.micro_batch_size == plan.after.training.micro_batch_size
    assert saved.peak_reserved_bytes == max(stage.estimate.peak_reserved_bytes for stage in plan.stages)
    assert "configuration" not in json.loads(path.read_text())


def test_a_plan_that_cannot_be_saved_says_why(tree: Path, tmp_path: Path) -> None:
    """A folder that is not there."""
    with pytest.raises(memplan.UsageError, match="No such file or directory"):
        analytic(tree).save(tmp_path / "nowhere" / "plan.json")


def test_a_notebook_shows_a_plan_as_a_report(tree: Path) -> None:
    """An element with its own style and no page around it, the verdict and every stage."""
    plan = analytic(tree)

    shown = plan._repr_html_()

    assert shown.startswith('<div class="memplan">')
    assert "<html" not in shown
    assert f"micro-batch {plan.after.training.micro_batch_size}" in shown
    assert all(f"<td>{stage.name}</td>" in shown for stage in plan.stages)


@pytest.mark.parametrize(("capability", "is_warned"), [((2, 0), True), ((7, 5), False), (None, False)])
def test_a_plan_by_formulas_warns_of_a_gpu_without_kernels(
    torch_build: TorchBuild, tree: Path, capability: tuple[int, int] | None, is_warned: bool
) -> None:
    """No build has kernels for capability 2.0 any more: what fits there does not run."""
    old = find_gpu("a100-80").model_copy(update={"compute_capability": capability})

    plan = memplan.plan(tree, gpu=old, target_effective_batch_size=64, method="analytic")

    assert plan.fits
    assert any("has no kernels for" in warning for warning in plan.warnings) == is_warned


@pytest.mark.parametrize("source", [["python", "train.py"], "train_step.py:build", "workload"])
def test_a_launchers_file_is_for_recipes(built_in: Workload, source: list[str] | str) -> None:
    """A command names it itself; nothing launches a function of the user's, or a Workload."""
    with pytest.raises(memplan.UsageError, match="launch_config is for a recipe"):
        memplan.plan(built_in if source == "workload" else source, gpu="t4", launch_config="launch.yaml")
