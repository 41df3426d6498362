"""`memplan rehearse` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.standin.build import TorchBuild
from tests.conftest import Run
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

STEPS = Path(__file__).parents[1] / "programs" / "steps.py"


def test_a_step_that_fits(run_memplan: Run, torch_build: TorchBuild) -> None:
    """The report in words; its exit code is 0."""
    result = run_memplan("rehearse", "--gpu", "a100-80", f"{STEPS}:mlp", "--set", "batch=128", "--set", "optimizer=SGD", "--steps", "4")

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Fits on NVIDIA A100-SXM4-80GB: ")
    assert "4 steps" in result.stdout
    assert "optimizer state" not in result.stdout


def test_a_step_that_does_not_fit(run_memplan: Run, torch_build: TorchBuild) -> None:
    """Exit code 1, where it happened, and the same as JSON."""
    arguments = ["rehearse", "--gpu", "t4", "--gpu-memory", "1GiB", f"{STEPS}:mlp", "--set", "batch=1048576"]

    result, answer = run_memplan(*arguments), run_memplan(*arguments, "--format", "json")

    assert (result.returncode, answer.returncode) == (1, 1)
    assert "Does not fit on Tesla T4: out of memory in step 1, forward, at " in result.stdout
    assert "tried to allocate 4.00 GiB" in result.stdout
    assert json.loads(answer.stdout)["out_of_memory"]["phase"] == "forward"
    assert answer.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "t4", "nowhere.py:build"], "nowhere.py does not exist"),
        (["--gpu", "t9000", f"{STEPS}:mlp"], "is no card of the catalogue"),
        (["--gpu", "t4", f"{STEPS}:mlp", "--set", "batch"], "does not say NAME=VALUE"),
        (["--gpu", "t4", f"{STEPS}:mlp", "--steps", "0"], "0 is not in the range"),
        ([f"{STEPS}:mlp"], "say which card to stand in for"),
    ],
)
def test_bad_input_gets_one_clear_line(run_memplan: Run, arguments: list[str], problem: str) -> None:
    """Exit code 2, no traceback, nothing on standard output."""
    result = run_memplan("rehearse", *arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr
    assert "Traceback" not in result.stderr
