"""
Rehearsals beside a GPU: `pytest -m gpu` on a machine with one, recordings of GPUs on every other.

On a machine without a GPU the suite itself is tried on the simulated GPU as the machine's own, where everything has to be equal.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from memplan.batch_finder.find_batch import find_batch
from memplan.errors import MissingError
from memplan.hardware.detect import detect_gpus
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from tests.accuracy.on_card import FILE, RECORDINGS, Program, hold, programs, record, torch_of
from tests.hardware.nvml_driver import Driver
from tests.standin.conftest import torch_build
from tests.standin.machine import CONTEXT_BYTES, machine

__all__ = ["torch_build"]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_accuracy.py"
RECORDED = sorted(RECORDINGS.glob("*.json"))


@pytest.fixture(scope="module")
def gpu() -> GpuSpec:
    """A GPU of this machine."""
    try:
        return detect_gpus()[0]
    except MissingError as error:
        pytest.skip(f"no GPU here: {error.message}")


@pytest.mark.gpu
@pytest.mark.parametrize("program", list(programs()), ids=lambda program: program.name)
def test_a_card_allocates_what_a_rehearsal_says(torch_build: TorchBuild, gpu: GpuSpec, program: Program, tmp_path: Path) -> None:
    """Allocated equal, reserved within 0.5%; of convolutions what the GPU reserved lies in the range."""
    held = hold(record(program, gpu, tmp_path))

    assert held.holds or (held.convolves and held.is_in_range), held


@pytest.mark.gpu
def test_the_batch_that_a_rehearsal_foresees_runs_on_the_card(torch_build: TorchBuild, gpu: GpuSpec) -> None:
    """And the search says so after a few trials."""
    found = find_batch(f"{FILE}:gqa_decoder", gpu=gpu, most_tries=8)

    assert found.ended == "found"
    assert found.size is not None
    assert abs(found.size - found.start) <= max(2, found.start // 50)


@pytest.mark.parametrize("path", RECORDED or [None], ids=lambda path: path.stem if path else "none")
def test_recordings_of_cards_are_what_rehearsals_say(torch_build: TorchBuild, path: Path | None) -> None:
    """Each that was made with the PyTorch that is here."""
    if path is None:
        pytest.skip("no GPU has been recorded yet: `python benchmarks/gpu_accuracy.py` does so")
    if torch_of(path) != torch_build.version:
        pytest.skip(f"recorded with PyTorch {torch_of(path)}, this is {torch_build.version}")

    held = hold(path)

    assert held.holds or (held.convolves and held.is_in_range), held


@pytest.fixture(scope="module")
def suite(
    torch_build: TorchBuild, driver: Driver, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Two programs of the suite, run on the simulated GPU: the folder with their recordings, and how that ended."""
    folder = tmp_path_factory.mktemp("recordings")
    done = driver.run(
        str(BENCHMARK), "--to", str(folder), "--part", "suite", "--only", "lora-8", "--only", "unet-8", **machine(torch_build, driver, "t4")
    )
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.heavy
def test_the_suite_runs_and_writes_what_it_saw(suite: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """On the simulated GPU: a recording for each program, and all of it equal."""
    folder, done = suite

    recorded = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert [each["program"] for each in recorded] == ["lora-8", "unet-8"]
    assert all(each["gpu"]["driver_version"].startswith("580.95.05") for each in recorded)
    assert [each["measured"]["context_bytes"] for each in recorded] == [CONTEXT_BYTES] * 2
    lora, unet = (hold(path) for path in sorted(folder.glob("*.json")))
    assert lora.holds
    assert lora.same_requests
    assert (lora.convolves, unet.convolves) == (False, True)
    assert "allocated equal in 1 of 1, reserved within 0.5% in 1 of 1" in done.stdout


@pytest.mark.heavy
def test_a_difference_is_seen(suite: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """A recording that says one block more does not hold."""
    for made in suite[0].glob("*lora-8*"):
        shutil.copy(made, tmp_path)
    (path,) = tmp_path.glob("*.json")
    told = json.loads(path.read_text())
    told["measured"]["peak_allocated_bytes"] += 512
    path.write_text(json.dumps(told))

    assert not hold(path).holds
