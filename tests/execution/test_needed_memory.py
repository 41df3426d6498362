"""What a program needs that takes what is free: cuDNN's kernels are tried with as much workspace as there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.execution.needed_memory import with_needs
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.reports.rehearsal_view import view_rehearsal
from memplan.standin.build import ASKED_CUDNN
from tests.conftest import RehearserOf

STEPS = Path(__file__).parents[1] / "child" / "device_steps.py"
GIB = 2**30


@pytest.fixture
def run(rehearser_of: RehearserOf, torch_build: TorchBuild) -> Callable[[GpuSpec], Rehearsal]:
    """Rehearse a convolution whose kernels are tried: with 16 GiB with 3 GiB of workspace, with the smallest that there are in 2.8 GiB."""
    if torch_build.cudnn_version not in ASKED_CUDNN:
        pytest.skip(f"cuDNN {torch_build.cudnn} is not asked without a GPU")
    rehearser = rehearser_of(f"{STEPS}:build")
    return lambda gpu: rehearser.rehearse(gpu=gpu, values={"program": "wide_convolution"}, steps=2)


def gpu_with(gib: float) -> GpuSpec:
    """A GPU with so much memory."""
    return find_gpu("a100-80").model_copy(update={"total_memory_bytes": int(gib * GIB)})


def test_it_is_not_asked_where_there_is_room_for_the_largest_workspace(run: Callable[[GpuSpec], Rehearsal]) -> None:
    """One run says that it fits."""
    told: list[str] = []

    found = with_needs(run, gpu_with(16), on_next_run=told.append)

    assert (found.verdict, found.needs, told) == ("fits", None, [])
    assert found.breakdown.workspaces_bytes > 2 * GIB


@pytest.mark.parametrize("gib", [3.0, 3.5])
def test_a_program_fits_that_needs_no_more_than_there_is(run: Callable[[GpuSpec], Rehearsal], gib: float) -> None:
    """With 3.5 GiB a workspace that was free in the first step is not in the second: PyTorch catches that, and takes another kernel."""
    told: list[str] = []

    alone, found = run(gpu_with(gib)), with_needs(run, gpu_with(gib), on_next_run=told.append)

    assert alone.verdict != "fits"
    assert found.verdict == "fits"
    assert found.needs is not None
    assert found.needs == run(find_gpu("a100-80").endless()).device_used  # as a plan has it
    assert told == ["unlimited memory and small workspaces of cuDNN, to find how much it needs"]
    view = view_rehearsal(found, gpu_with(gib))
    assert dict(view.facts)["needs"].startswith("2.56 GiB, at most 2.78 GiB, with small workspaces")
    assert view.headline.startswith("Fits on NVIDIA A100-SXM4-80GB: ")
    assert not any("barely fits" in warning for warning in view.warnings)
    was_caught = any("the error was caught, as PyTorch does" in warning for warning in view.warnings)
    assert was_caught is (found.out_of_memory is not None)


def test_what_was_interrupted_says_nothing_of_what_is_needed(run: Callable[[GpuSpec], Rehearsal]) -> None:
    """It may have ended before its optimizer was made."""
    whole = find_gpu("a100-80").endless()

    def interrupted(gpu: GpuSpec) -> Rehearsal:
        return run(gpu).model_copy(update={"was_interrupted": gpu == whole})

    found = with_needs(interrupted, gpu_with(3.0))

    assert (found.was_interrupted, found.needs, found.verdict) == (True, None, "tight")


def test_a_program_that_needs_more_than_there_is_does_not_fit_for_that(run: Callable[[GpuSpec], Rehearsal]) -> None:
    """It is told how much it needs."""
    found = with_needs(run, gpu_with(2.75))

    assert found.verdict == "tight"
    assert found.needs is not None
    assert found.needs.high_bytes > 2.75 * GIB


CONVOLUTIONS = """
import torch
from torch import nn

def build(device, batch):
    wide = [nn.Conv2d(48, 48, 3, padding=1) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), *wide, nn.Conv2d(48, 12, 1)).to(device)
    update = torch.optim.SGD(model.parameters(), 0.1)
    def step():
        with torch.no_grad():
            model(torch.randn(batch, 3, 256, 256, device=device))
        model(torch.randn(4, 3, 256, 256, device=device)).mean().backward()
        update.step()
        update.zero_grad()
    return step
"""


def test_a_kernel_with_less_workspace_is_pytorchs_choice_and_not_the_programs(
    rehearser_of: RehearserOf, torch_build: TorchBuild, tmp_path: Path
) -> None:
    """The program catches nothing: where there is no room for what cuDNN asks for first, PyTorch tries the next."""
    if torch_build.cudnn_version not in ASKED_CUDNN:
        pytest.skip(f"cuDNN {torch_build.cudnn} is not asked without a GPU")
    (tmp_path / "convolutions.py").write_text(CONVOLUTIONS)
    gpu = find_gpu("rtx3060")

    found = rehearser_of(f"{tmp_path}/convolutions.py:build").rehearse(gpu=gpu, values={"batch": 320}, steps=2)

    assert found.out_of_memory is not None
    assert found.out_of_memory.is_of_workspace
    assert found.verdict == "tight"
    view = view_rehearsal(found, gpu)
    assert view.headline.startswith("Tight on NVIDIA GeForce RTX 3060: ")
    assert view.headline.endswith("and PyTorch took another kernel")
    assert any("as PyTorch does where a workspace of cuDNN's is not free" in warning for warning in view.warnings)
