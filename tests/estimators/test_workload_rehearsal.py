"""`--method rehearsed`: plans whose every size was run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.estimators import analytic
from memplan.estimators.registry import ESTIMATORS
from memplan.estimators.workload_rehearsal import estimate
from memplan.hardware.catalog import card_of_size, find_card
from memplan.planner.planner import make_plan
from memplan.standin.build import TorchBuild
from memplan.units import GIB, parse_size
from memplan.workload.reader import workload_from
from memplan.workload.workload import Workload
from tests.conftest import Run
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

MODEL = {
    "kind": "transformer", "architecture": "decoder", "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "intermediate_size": 2048, "vocab_size": 16000, "num_positions": 512, "head": "language_model",
}  # fmt: skip


def workload(**training: object) -> Workload:
    """A small decoder that is to see 4096 texts a step."""
    return workload_from(
        {"model": MODEL, "training": {"sequence_length": 256, "precision": "bf16-mixed"} | training}, Path("workload.yaml")
    )


def test_a_plan_recommends_what_was_run_and_the_next_size_does_not_fit(torch_build: TorchBuild) -> None:
    """The largest micro-batch within the budget, by the same estimator; the search began at the formulas' answer."""
    gpu = find_card("t4")
    plan = make_plan(workload(), gpu, ESTIMATORS["rehearsed"], method="rehearsed", fills_card=True)

    size = plan.after.training.micro_batch_size
    fits = [plan.budget.fits(estimate(workload(micro_batch_size=tried), gpu, None).device_used) for tried in (size, size + 1)]
    assert plan.fits
    assert fits == [True, False]
    assert plan.stages[0].estimate.method == "rehearsed"


def test_accumulation_is_run_as_two_micro_batches(torch_build: TorchBuild) -> None:
    """All that follow are like the second; the same step is run once."""
    gpu = find_card("t4")
    few, many = (estimate(workload(gradient_accumulation_steps=count), gpu, None) for count in (2, 64))

    assert few is many


def test_a_size_that_no_card_has_is_measured_all_the_same(torch_build: TorchBuild) -> None:
    """The card has memory without end, so that there is a peak to compare; one of which only the size is known gets a kind."""
    size = card_of_size(parse_size("2GiB"))

    seen = estimate(workload(micro_batch_size=256), size, None)

    assert seen.fits
    assert seen.peak_reserved_bytes > 2 * GIB


def test_the_formulas_are_near(torch_build: TorchBuild) -> None:
    """Peak allocated, by formula and by rehearsal, on two cards: within 5%."""
    for name in ("t4", "a100-80"):
        formula, seen = (by(workload(micro_batch_size=32), find_card(name), None) for by in (analytic.estimate, estimate))
        assert formula.peak_allocated_bytes == pytest.approx(seen.peak_allocated_bytes, rel=0.05)


def test_the_command_says_how_it_found_out(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """--profile on a machine without a GPU rehearses, and says so; --method analytic contradicts it."""
    file = tmp_path / "workload.json"
    file.write_text(json.dumps({"model": MODEL, "training": {"sequence_length": 256}}))
    arguments = ["--gpu", "t4", "--config-path", file, "--profile", "--target-effective-batch", "64"]

    result, answer, wrong = (run_memplan(*arguments, *more) for more in ([], ["--format", "json"], ["--method", "analytic"]))

    assert "rehearsed: the real PyTorch ran the step on a stand-in card" in result.stdout
    assert "the step was rehearsed" in result.stdout
    plan = json.loads(answer.stdout)
    assert (plan["method"], plan["fits"], plan["effective_batch_size"]) == ("rehearsed", True, 64)
    assert wrong.returncode == 2
