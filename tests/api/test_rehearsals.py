"""`memplan.rehearse`."""

from __future__ import annotations

from pathlib import Path

import pytest

import memplan
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

STEPS = Path(__file__).parents[1] / "child" / "steps.py"


@pytest.fixture(scope="module")
def rehearsal(torch_build: TorchBuild) -> memplan.Rehearsal:
    """A small step on an A100."""
    return memplan.rehearse(f"{STEPS}:mlp", gpu="a100-80", values={"batch": 8}, checks_tensor_types=False)


def test_a_rehearsal_knows_its_gpu_and_its_memory(rehearsal: memplan.Rehearsal) -> None:
    """By name of the catalogue."""
    assert rehearsal.gpu.name == "NVIDIA A100-SXM4-80GB"
    assert rehearsal.fits
    assert 0 < rehearsal.peak_allocated_bytes <= rehearsal.peak_reserved_bytes < rehearsal.device_used_bytes


def test_the_json_has_no_second_description_of_the_gpu(rehearsal: memplan.Rehearsal) -> None:
    """The same fields as those of the command."""
    assert "gpu" not in rehearsal.model_dump()


def test_a_notebook_shows_a_rehearsal_as_a_report(rehearsal: memplan.Rehearsal) -> None:
    """An element with its own style: the verdict and the breakdown."""
    shown = rehearsal._repr_html_()

    assert shown.startswith('<div class="memplan">')
    assert "Fits on NVIDIA A100-SXM4-80GB" in shown
    assert "CUDA context" in shown


def test_an_unknown_gpu_is_refused_in_python_s_words() -> None:
    """No option of the command line in the message or its hint."""
    with pytest.raises(memplan.UsageError, match="unknown GPU: 'rtx9999'") as caught:
        memplan.rehearse(f"{STEPS}:mlp", gpu="rtx9999")

    assert "--" not in str(caught.value)
