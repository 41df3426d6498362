"""Rehearsals of our own steps and of the recorded programs, on the simulated GPU, in real processes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memplan.api.rehearsals import rehearse
from memplan.errors import MissingError, NoKernelsError, UsageError
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.cuda_context import context_of
from tests.conftest import SHARED, RehearserOf, shared_files, skip_without

STEPS = Path(__file__).parents[1] / "child" / "steps.py"
MIB = 2**20
RECORDINGS = shared_files("recordings/standin/*.json.gz")


def marks_of(recording: Path) -> list[pytest.MarkDecorator]:
    return [] if name_of(recording) in RUN_ALWAYS or not recording.exists() else [pytest.mark.heavy]


def name_of(recording: Path) -> str:
    return recording.name.removesuffix(".json.gz")


def card(memory_bytes: int, name: str = "t4") -> GpuSpec:
    return find_gpu(name).model_copy(update={"total_memory_bytes": memory_bytes})


RUN_ALWAYS = ("gpt2-bf16-a100", "gpt2-oom-t4", "mlp-t4", "resnet-t4")
"""A language model and a vision model, and a GPU that is too small; the rest takes a minute: `make heavy`."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=name_of(path), marks=marks_of(path)) for path in RECORDINGS],
)
def test_every_recording_is_reproduced(torch_build: TorchBuild, rehearser_of: RehearserOf, path: Path) -> None:
    """
    Same workload, same PyTorch, same GPU: the peaks of each step, retries and failure are equal, to the byte.

    Rehearsed without what the recorder had turned off.
    """
    skip_without(path)
    record = json.loads(gzip.decompress(path.read_bytes()))
    if record["torch"] != torch_build.version:
        pytest.skip(f"recorded with PyTorch {record['torch']}, this is {torch_build.version}")
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": record["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"],
        "TORCH_CUDNN_SDPA_ENABLED": "0",
        "MEMPLAN_ASK_CUDNN": "0",
    }

    seen = rehearser_of(f"{SHARED}/standin/workloads/{record['workload']}:build").rehearse(
        gpu=card(record["total_memory"], record["device"]),
        values=record["values"],
        steps=3,
        context_bytes=0,
        library_workspaces=False,
        environment=environment,
    )

    steps = [(step.peak_allocated_bytes, step.peak_reserved_bytes, step.allocated_bytes, step.reserved_bytes) for step in seen.steps]
    assert steps == [(step["peak_allocated"], step["peak_reserved"], step["allocated"], step["reserved"]) for step in record["steps"]]
    assert seen.num_alloc_retries == record["retries"]
    assert (seen.out_of_memory is None) == (record["failure"] is None)


@pytest.mark.parametrize("name", ["t4", "a100-40", "a100-80", "h100", "h200", "rtx4090"])
def test_categories_are_those_of_the_program(rehearser_of: RehearserOf, name: str) -> None:
    """On six GPUs: 16 MiB of weights, as much of gradients, twice that of Adam's moments, and the context beside them."""
    seen = rehearser_of(f"{STEPS}:mlp").rehearse(gpu=name, checks_tensor_types=True)

    breakdown = seen.breakdown
    assert (breakdown.parameters_bytes, breakdown.gradients_bytes, breakdown.optimizer_state_bytes) == (16 * MIB, 16 * MIB, 32 * MIB)
    assert seen.gpu_name == find_gpu(name).name
    assert seen.fits
    assert not seen.grows
    assert seen.device_used_bytes == seen.peak_reserved_bytes + context_of(find_gpu(name)).expected_bytes
    assert breakdown.total_bytes == seen.device_used_bytes


def test_a_function_that_takes_no_device_is_called_without_one(rehearser_of: RehearserOf) -> None:
    """Its first value is a value, and it takes what the one with a device takes; what it does not take is told without a device."""
    without = rehearse(f"{STEPS}:chooses_its_device", gpu=find_gpu("t4"), values={"batch": 64})

    assert without.peak_allocated_bytes == rehearser_of(f"{STEPS}:mlp").rehearse(gpu="t4", values={"batch": 64}).peak_allocated_bytes
    with pytest.raises(UsageError, match="it takes batch, width"):
        rehearse(f"{STEPS}:chooses_its_device", gpu=find_gpu("t4"), values={"size": 64})
    with pytest.raises(UsageError, match="it takes nothing\n"):
        rehearse(f"{STEPS}:takes_nothing", gpu=find_gpu("t4"), values={"size": 64})


@pytest.mark.heavy
def test_two_rehearsals_see_the_same(torch_build: TorchBuild) -> None:
    """Nothing random decides an allocation."""
    assert rehearse(f"{STEPS}:mlp", gpu=find_gpu("t4")) == rehearse(f"{STEPS}:mlp", gpu=find_gpu("t4"))


@pytest.mark.parametrize(
    ("values", "memory_mib", "step", "phase"),
    [
        ({"width": 4096}, 200, 0, "build"),
        ({"batch": 65536}, 300, 1, "forward"),
        ({"batch": 1, "width": 4096, "depth": 2}, 250, 1, "backward"),
        ({"batch": 1, "width": 4096, "depth": 2}, 400, 1, "optimizer"),
    ],
    ids=["build", "forward", "backward", "optimizer"],
)
def test_out_of_memory_is_an_answer(rehearser_of: RehearserOf, values: dict[str, Any], memory_mib: int, step: int, phase: str) -> None:
    """Wherever it happens: which allocation, in which phase, at which line of the user's file."""
    seen = rehearser_of(f"{STEPS}:mlp").rehearse(gpu=card(memory_mib * MIB), values=values, context_bytes=0, checks_tensor_types=True)

    assert not seen.fits
    assert seen.out_of_memory is not None
    assert (seen.out_of_memory.step, seen.out_of_memory.phase) == (step, phase)
    assert "Tried to allocate" in seen.out_of_memory.message
    assert seen.out_of_memory.requested_bytes > seen.out_of_memory.free_bytes
    assert (seen.out_of_memory.place or "").startswith(str(STEPS))
    assert seen.peak_reserved_bytes <= memory_mib * MIB


def test_memory_that_grows_is_noticed(rehearser_of: RehearserOf) -> None:
    """The last step's peak is above the one before."""
    assert rehearser_of(f"{STEPS}:grows").rehearse(gpu="t4", checks_tensor_types=True).grows


def test_values_that_went_to_the_device_come_back_until_a_kernel_ran(rehearser_of: RehearserOf) -> None:
    """The step itself asserts it; one step is enough."""
    assert rehearser_of(f"{STEPS}:reads_values").rehearse(gpu="t4", steps=1).fits


def test_nvml_tells_the_same_card(rehearser_of: RehearserOf) -> None:
    """nvidia-ml-py sees the GPU's name, its total, and what the program holds."""
    assert rehearser_of(f"{STEPS}:asks_nvml").rehearse(gpu="h200", steps=1).fits


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("fails", "failed in its step 2 at .*steps.py:[0-9]+: RuntimeError: the data ran out"),
        ("floods", "exit code 7; its last output:\n(.*\n)*the very last words"),
        ("missing", "has no function 'missing'"),
        ("not_a_function", "has no function 'not_a_function'"),
    ],
)
def test_a_program_that_fails_leaves_its_last_words(rehearser_of: RehearserOf, function: str, problem: str) -> None:
    """An exception, a flood of output, a wrong name."""
    with pytest.raises(UsageError, match=problem) as caught:
        rehearser_of(f"{STEPS}:{function}").rehearse(gpu="t4")

    assert len(caught.value.message) < 20_000


@pytest.mark.heavy
def test_a_program_that_hangs_is_ended(torch_build: TorchBuild) -> None:
    """After the time that it was given."""
    with pytest.raises(UsageError, match="did not end within 6 seconds"):
        rehearse(f"{STEPS}:hangs", gpu=find_gpu("t4"), timeout_seconds=6)


def test_what_is_not_served_is_named_and_gives_no_number(rehearser_of: RehearserOf) -> None:
    """cuSPARSE is asked for the size of a product of sparse matrices: the call is named."""
    with pytest.raises((MissingError, UsageError), match=r"cusparseSpGEMM"):
        rehearser_of(f"{STEPS}:multiplies_sparse").rehearse(gpu="a100-80", steps=1)


@pytest.mark.parametrize(
    ("target", "problem"), [("steps.py", "does not say FILE.py:build"), ("nowhere.py:build", "nowhere.py does not exist")]
)
def test_a_target_that_makes_no_sense_is_refused(target: str, problem: str, a100: GpuSpec) -> None:
    """Before anything is built or run."""
    with pytest.raises(UsageError, match=problem):
        rehearse(target, gpu=a100)


def test_a_gpu_without_kernels_has_no_verdict(rehearser_of: RehearserOf, a100: GpuSpec) -> None:
    """A step that takes next to nothing would be called a fit: no build of PyTorch runs on capability 2.0 any more."""
    old = a100.model_copy(update={"compute_capability": (2, 0)})

    with pytest.raises(NoKernelsError, match=r"has no kernels for .* \(compute capability 2\.0\)"):
        rehearser_of(f"{STEPS}:mlp").rehearse(gpu=old)
