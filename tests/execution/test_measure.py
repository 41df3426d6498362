"""Steps that are run on a GPU, here the simulated GPU as the machine's own, with its NVML."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.api.rehearsals import rehearse
from memplan.errors import UsageError
from memplan.estimators.calibration import calibrated, keep_calibration
from memplan.execution.measure import Measurer
from memplan.execution.measurement import Measurement, compare, contradiction
from memplan.execution.rehearsal import OutOfMemory
from memplan.execution.step_source import StepSource
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.budget import MemoryBudget
from memplan.memory.cuda_context import KERNELS_BYTES, context_of, usual_context, with_context
from tests.hardware.nvml_driver import GIB, Driver
from tests.standin.conftest import torch_build
from tests.standin.machine import CONTEXT_BYTES as REAL_CONTEXT_BYTES
from tests.standin.machine import machine, uuid_of

__all__ = ["torch_build"]

STEPS = Path(__file__).parents[1] / "child" / "steps.py"
MIB = 2**20


def here(name: str, number: int = 0) -> GpuSpec:
    """A GPU as it is found on the machine."""
    return find_gpu(name).model_copy(update={"uuid": uuid_of(number), "driver_version": "580.95.05 (CUDA 13.0)"})


def measure(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], gpu: GpuSpec, function: str = "mlp", **values: object
) -> Measurement:
    """What the step of steps.py takes of *gpu*, in the environment of a machine. NVML is this process's: it is loaded once."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Measurer(StepSource(str(STEPS), function), gpu) as measurer:
        return measurer.measure(values)


@pytest.mark.heavy
def test_a_measurement_is_what_a_rehearsal_says(torch_build: TorchBuild, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program on the same kind of GPU: each peak of each step, each category but the context, which nobody knew."""
    seen = measure(monkeypatch, machine(torch_build, driver, "t4"), here("t4"))
    rehearsed = rehearse(f"{STEPS}:mlp", gpu="t4")

    differing = {row.name for row in compare(rehearsed, seen) if row.difference_bytes}
    assert (seen.method, seen.steps, seen.gpu_name) == ("measured", rehearsed.steps, "Tesla T4")
    assert differing <= {"CUDA context"}


@pytest.mark.heavy
def test_another_program_on_the_card_is_not_counted(torch_build: TorchBuild, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of which somebody holds two GiB; it runs on the second of two unlike GPUs, which it sees alone."""
    environment = machine(torch_build, driver, "a100-80", "t4", busy={1: 2 * GIB})

    seen = measure(monkeypatch, environment, here("t4", 1))

    assert seen.gpu_name == "Tesla T4"
    # the usual context where this process's NVML answers for another machine
    assert seen.breakdown.cuda_context_bytes in (REAL_CONTEXT_BYTES, usual_context(here("t4", 1)).expected_bytes)


def test_running_out_of_memory_is_an_answer(torch_build: TorchBuild, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where, and by how much; the plan that says otherwise is contradicted."""
    busy = {0: 15_835_660_288 - REAL_CONTEXT_BYTES - 48 * MIB}

    seen = measure(monkeypatch, machine(torch_build, driver, "t4", busy=busy), here("t4"))

    assert not seen.fits
    assert seen.out_of_memory is not None
    assert (contradiction(seen, MemoryBudget(total_bytes=2**60)) or "").startswith("memory ran out in step 1, ")


@pytest.mark.heavy
def test_what_is_over_the_budget_contradicts_a_plan(torch_build: TorchBuild, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran, and took more than it may."""
    seen = measure(monkeypatch, machine(torch_build, driver, "t4"), here("t4"))

    most = seen.device_used.high_bytes
    assert contradiction(seen, MemoryBudget(total_bytes=most, margin=0)) is None
    assert "over the budget" in (contradiction(seen, MemoryBudget(total_bytes=most - 1, margin=0)) or "")


@pytest.mark.heavy
def test_a_program_that_fails_says_so(torch_build: TorchBuild, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rehearsal does."""
    with pytest.raises(UsageError, match="the data ran out"):
        measure(monkeypatch, machine(torch_build, driver, "t4"), here("t4"), "fails")


@pytest.mark.heavy
def test_the_drivers_figures_are_those_of_the_process(torch_build: TorchBuild, driver: Driver) -> None:
    """In a process of its own, which loads this machine's NVML: the context is what it is, others' memory is not in it."""
    code = (
        "from memplan.hardware.detect import detect_gpus\nfrom memplan.execution.measure import Measurer\n"
        "from memplan.execution.step_source import StepSource\n"
        f"with Measurer(StepSource({str(STEPS)!r}, 'mlp'), detect_gpus()[0]) as measurer:\n    for _ in range(3):\n"
        "        seen = measurer.measure({})\n"
        "        print(seen.device_bytes, seen.context_bytes, seen.libraries_bytes, seen.peak_reserved_bytes)"
    )
    whole, busy, silent, mute = (
        driver.run("-c", code, **machine(torch_build, driver, "t4", **options))  # type: ignore[arg-type]
        for options in (
            {},
            {"busy": {0: GIB}},
            {"refused": "refuse nvmlDeviceGetComputeRunningProcesses_v3 4\n"},
            {"refused": "refuse nvmlDeviceGetHandleByUUID 4\n"},
        )
    )

    told = whole.stdout.split()[:4]
    assert told[1:3] == [str(REAL_CONTEXT_BYTES), "0"], whole.stderr
    assert int(told[0]) == int(told[3]) + REAL_CONTEXT_BYTES
    assert whole.stdout.split() == told * 3  # a second run with the same measurer is waited for as the first is
    assert busy.stdout == whole.stdout, busy.stderr
    assert silent.stdout == whole.stdout, silent.stderr  # by what all hold more than before
    assert mute.stdout.split() == ["None", "None", "0", told[3]] * 3, mute.stderr


# what was learnt


OUT = OutOfMemory(message="", requested_bytes=1, free_bytes=0, step=1, phase="forward", place=None)


def test_what_was_learnt_is_kept_by_card_driver_and_pytorch(tmp_path: Path) -> None:
    """Another driver, another PyTorch or another GPU knows nothing of it; nor does a GPU that is not of this machine."""
    gpu = here("t4")
    seen = Measurement.model_construct(torch="2.13.0+cu130", context_bytes=300 * MIB, libraries_bytes=20 * MIB)

    assert keep_calibration(gpu, [seen], tmp_path)

    assert calibrated(gpu, "2.13.0+cu130", tmp_path).context_bytes == 320 * MIB
    others = [gpu.model_copy(update={"driver_version": "590.1"}), here("a100-80"), find_gpu("t4")]
    assert [calibrated(other, "2.13.0+cu130", tmp_path).context_bytes for other in others] == [None, None, None]
    assert calibrated(gpu, "2.14.0+cu130", tmp_path).context_bytes is None


def test_a_calibration_that_cannot_be_read_or_written_is_none(tmp_path: Path) -> None:
    """A torn file, a folder that is a file, a driver that told nothing."""
    gpu = here("t4")
    seen = Measurement.model_construct(torch="2.13.0", context_bytes=300 * MIB, libraries_bytes=0)
    assert keep_calibration(gpu, [seen], tmp_path)
    next((tmp_path / "calibrations").glob("*.json")).write_text("{")
    (tmp_path / "file").touch()
    odds: list[dict[str, object]] = [{"context_bytes": None}, {"out_of_memory": OUT}, {"context_bytes": 5 * GIB}]

    assert calibrated(gpu, "2.13.0", tmp_path) == gpu
    assert not keep_calibration(gpu, [seen], tmp_path / "file")
    assert not keep_calibration(gpu, [seen.model_copy(update=odd) for odd in odds], tmp_path)
    assert len(list((tmp_path / "calibrations").iterdir())) == 1


@pytest.mark.heavy
def test_a_measured_context_takes_the_place_of_the_usual_one(torch_build: TorchBuild) -> None:
    """In every figure, with room for kernels that another program loads."""
    usual = rehearse(f"{STEPS}:mlp", gpu="t4")
    gpu = here("t4").model_copy(update={"context_bytes": 300 * MIB})

    told = with_context(usual, gpu, made_on=find_gpu("t4"))

    assert told.device_used_bytes == usual.device_used_bytes - usual_context(gpu).expected_bytes + 300 * MIB
    assert told.device_used.high_bytes == usual.peak_reserved_bytes + 300 * MIB + KERNELS_BYTES
    assert told.breakdown.total_bytes == told.device_used_bytes
    assert context_of(gpu).expected_bytes == 300 * MIB
