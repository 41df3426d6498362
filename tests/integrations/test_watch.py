"""The callbacks of Lightning and transformers, in processes of their own on the simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from memplan.hardware.torch_install import TorchBuild
from memplan.integrations.watch import Watch
from tests.hardware.nvml_driver import GIB, Driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine
from tests.training.processes import Train

__all__ = ["torch_build"]


def saved_plan(folder: Path, *, micro: int, accumulation: int, reserved: int) -> Path:
    """What `memplan --format json` prints, as far as a training is held to it."""
    estimate = {"peak_allocated_bytes": reserved, "peak_reserved_bytes": reserved, "device_used": {"expected_bytes": reserved}}
    planned = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
    path = folder / "plan.json"
    path.write_text(json.dumps({"stages": [{"planned": planned, "estimate": estimate}], "gpu": {"others_used_bytes": 0}}))
    return path


@pytest.mark.heavy
@pytest.mark.parametrize("trainer", ["transformers_trainer", "lightning_trainer"])
def test_a_training_is_held_to_its_plan(train: Train, torch_build: TorchBuild, driver: Driver, tmp_path: Path, trainer: str) -> None:
    """The peak beside the plan's after the first step and each epoch, samples and batches a second; another batch than planned is told."""
    plan = saved_plan(tmp_path, micro=8, accumulation=2, reserved=2 * GIB)

    told, said = train(machine(torch_build, driver, "t4"), trainer, tmp_path / "out", plan, 4)

    assert [epoch["epoch"] for epoch in told["epochs"]] == [0, 1]
    assert all(epoch["samples_per_second"] > epoch["batches_per_second"] > 0 for epoch in told["epochs"])
    assert all(2**20 < epoch["peak_allocated_bytes"] <= epoch["peak_reserved_bytes"] for epoch in told["epochs"])
    assert "the plan is for a micro-batch of 8, and 4 is configured: something overrides it" in told["warnings"]
    assert said.count("memplan: training on Tesla T4: memory ") == 1
    assert "precisions fp16 native, bf16 emulated, tf32 none, fp8 none" in said
    assert said.count("memplan: first step: ") == 1
    assert "planned 2.00 GiB (-" in said


PEAKS = ["memplan/peak_allocated_gib", "memplan/peak_reserved_gib"]
SPEEDS = ["memplan/batches_per_second", "memplan/samples_per_second"]


WITH_LOGGERS = [("transformers_trainer", True), ("transformers_trainer", False), ("lightning_trainer", True)]


@pytest.mark.heavy
@pytest.mark.parametrize(("trainer", "has_plan"), WITH_LOGGERS)
def test_the_numbers_go_to_the_trainers_logger(
    train: Train, torch_build: TorchBuild, driver: Driver, tmp_path: Path, trainer: str, has_plan: bool
) -> None:
    """Peaks after the first step, peaks and speed after each epoch; with the planned peak where there is a plan."""
    plan = saved_plan(tmp_path, micro=4, accumulation=2, reserved=2 * GIB) if has_plan else ""

    told, _ = train(machine(torch_build, driver, "t4"), trainer, tmp_path / "out", plan, 4)

    planned = ["memplan/planned_reserved_gib"] if has_plan else []
    assert [sorted(metrics) for metrics in told["metrics"]] == [
        sorted([*PEAKS, *planned]),
        *[sorted([*PEAKS, *planned, *SPEEDS])] * 2,
    ]
    for metrics, epoch in zip(told["metrics"][1:], told["epochs"], strict=True):
        assert metrics["memplan/peak_reserved_gib"] == epoch["peak_reserved_bytes"] / GIB
        assert metrics["memplan/samples_per_second"] == epoch["samples_per_second"]
    if has_plan:
        assert told["metrics"][0]["memplan/planned_reserved_gib"] == 2.0


@pytest.mark.heavy
def test_a_batch_size_that_changes_elsewhere_is_told(train: Train, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """Lightning's second epoch has a loader with twice the batch."""
    told, _ = train(machine(torch_build, driver, "t4"), "lightning_trainer", tmp_path / "out", "", 4)

    assert told["batch"] == 8
    assert any("the batch size is changed elsewhere" in warning for warning in told["warnings"])


def test_without_a_gpu_a_watch_does_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """This process has none."""
    assert not torch.cuda.is_available()
    watch = Watch(saved_plan(tmp_path, micro=8, accumulation=1, reserved=GIB))

    watch.begin(device=None, configured=4, accumulation=2)
    watch.batch(torch.zeros(99, 2))
    watch.step_ended()
    watch.epoch_ended(0)

    assert (watch.epochs, watch.warnings, capsys.readouterr().err) == ([], [], "")
