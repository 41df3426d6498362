"""`--curves`, `--report`, `--snapshot`, `--levers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.hardware.torch_install import TorchBuild
from memplan.traces.snapshot import read_snapshot
from tests.conftest import Run
from tests.estimators.test_rehearsed import small_workload
from tests.standin.conftest import torch_build

__all__ = ["small_workload", "torch_build"]


@pytest.mark.heavy
def test_curves_are_shown_and_told(run_memplan: Run) -> None:
    """In the terminal as bars with the budget, in JSON as points."""
    shown = run_memplan("--gpu", "rtx4090", "--curves")
    told = json.loads(run_memplan("--gpu", "rtx4090", "--curves", "--format", "json").stdout)

    assert "memory of 01_stage by micro-batch" in shown.stdout
    assert "by negatives" in shown.stdout
    assert "planned" in shown.stdout
    assert "over the budget" in shown.stdout
    assert [curve["variable"] for curve in told["curves"]] == ["micro_batch_size", "n_negatives"]
    assert all(isinstance(point["device_used_bytes"], int) for curve in told["curves"] for point in curve["points"])
    assert json.loads(run_memplan("--gpu", "rtx4090", "--format", "json").stdout)["curves"] == []


def test_a_report_of_formulas_has_no_time(run_memplan: Run, tmp_path: Path) -> None:
    result = run_memplan("--gpu", "rtx4090", "--report", tmp_path / "plan.html")

    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert f"Wrote {tmp_path / 'plan.html'}." in result.stderr
    assert "memory by micro-batch" in page
    assert "Memory over time" not in page


@pytest.mark.heavy
def test_a_rehearsed_plan_is_drawn_whole(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path, small_workload: Path) -> None:
    """The page has memory over time, the snapshot opens again."""
    result = run_memplan(
        "--gpu", "t4", "--config-path", small_workload, "--target-effective-batch", "32", "--report", tmp_path / "plan.html",
        "--snapshot", tmp_path / "step.pickle", MEMPLAN_METHOD="rehearsed", XDG_CACHE_HOME=str(tmp_path / "cache"),
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert "Memory over time, step 2" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert len(read_snapshot(tmp_path / "step.pickle").trace.actions) > 1000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--snapshot", "step.pickle"], 3, "only a rehearsed step has a snapshot"),
        (["--report", "no/such/folder.html"], 2, "no such folder"),
        (["--method", "guide", "--curves"], 2, "there are no curves or reports of the guide's numbers"),
        (["--method", "guide", "--levers"], 2, "neither pins nor levers"),
        (["--curves=speed"], 2, "there is no curve of 'speed'"),
    ],
)
def test_mistakes_are_told(run_memplan: Run, arguments: list[str], code: int, message: str) -> None:
    result = run_memplan("--gpu-memory", "24", *arguments)

    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_levers_of_a_plan_that_fits_are_told_when_they_are_asked_for(run_memplan: Run) -> None:
    asked, unasked = run_memplan("--gpu", "a100-80", "--levers"), run_memplan("--gpu", "a100-80")

    assert "what would help" in asked.stdout
    assert "up to micro-batch" in asked.stdout
    assert "what would help" not in unasked.stdout
