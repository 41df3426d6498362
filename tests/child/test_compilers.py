"""What compilers ask of the simulated GPU: constants are known, times are those of the work, and what only serves running is left out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.cuda_context import context_of
from memplan.standin.build import build
from memplan.standin.launch import command_for, environment_for, own_caches
from memplan.units import MIB
from tests.conftest import RehearserOf
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

STEPS = Path(__file__).with_name("compiler_steps.py")
TUNED = Path(__file__).parents[2] / "benchmarks" / "compiled" / "linear_attention.py"
"""Three kernels for four shapes, with as many configurations each as are asked for, forward and backward."""

TOKENS, ROWS = 4096, 8193

Run = Callable[..., Rehearsal]


@pytest.fixture
def run(rehearser_of: RehearserOf) -> Run:
    """Rehearse a program by its name, two steps."""

    def rehearse(program: str, **values: int) -> Rehearsal:
        return rehearser_of(f"{STEPS}:build").rehearse(gpu="a100-80", values={"program": program, **values}, steps=2)

    return rehearse


@pytest.mark.heavy
def test_where_inductor_pads_by_time_both_ends_are_run(run: Run) -> None:
    """A product with odd rows is padded, as on a GPU: its result is 8,200 columns wide; the other end is not."""
    seen = run("padding")

    assert seen.verdict == "fits"
    assert [finding.kind for finding in seen.findings] == ["chosen_by_time"]
    assert "pad_mm.py at " in seen.findings[0].message
    assert f"{STEPS.name}:" in seen.findings[0].message
    assert seen.assumed_range is not None
    assert seen.assumed_range.high_bytes == seen.device_used.expected_bytes
    assert seen.assumed_range.low_bytes < seen.assumed_range.high_bytes
    assert seen.peak_allocated_bytes >= TOKENS * (ROWS + 7) * 2 + TOKENS * ROWS * 2


@pytest.mark.heavy
def test_a_product_that_needs_no_padding_is_run_once(run: Run) -> None:
    """Nothing is chosen, and nothing is told."""
    seen = run("padding", rows=ROWS - 1)

    assert seen.findings == ()
    assert seen.assumed_range is None


@pytest.mark.heavy
def test_constants_that_inductor_folds_are_known(run: Run) -> None:
    """It reads them from the device: that is no question of the program's, and guesses nothing."""
    seen = run("constants")

    assert seen.verdict == "fits"
    assert seen.reads == ()


def test_a_triton_with_other_options_compiles(run: Run) -> None:
    """Its optimizer is left out, whatever a version passes to it."""
    assert run("later_triton").verdict == "fits"


@pytest.mark.parametrize("program", ["asks", "whole"])
def test_dynamo_does_not_follow_the_recorder(run: Run, program: str) -> None:
    """A compiled program that reads a value, and a compiled step with its backward, call the recorder in the midst of what Dynamo sees."""
    assert run(program).verdict == "fits"


def test_the_state_of_a_compiled_optimizer_is_its_state(run: Run) -> None:
    """The module that its step becomes has it as buffers: two moments and a count for a weight of 1 MiB."""
    breakdown = run("updates").breakdown

    assert (breakdown.parameters_bytes, breakdown.optimizer_state_bytes) == (MIB, 2 * MIB + 512)


@pytest.mark.heavy
def test_the_masks_that_a_compiled_forward_keeps_are_no_batch(run: Run) -> None:
    """A dropout's mask has a byte for each element; the batch is 64 indices of 8 bytes."""
    assert run("dropout").breakdown.batch_data_bytes == 512


def test_a_program_may_time_itself(run: Run) -> None:
    """It finds the same times in every step, and that decides nothing."""
    seen = run("timing")

    assert seen.verdict == "fits"
    assert seen.findings == ()


def test_of_a_kernels_configurations_one_is_tried(run: Run) -> None:
    """With the buffer of 256 MiB by which Triton's benchmark overwrites the cache (`get_empty_cache_for_benchmark`)."""
    seen = run("tuned")

    assert seen.verdict == "fits"
    assert seen.peak_allocated_bytes >= 256 * MIB


@pytest.mark.heavy
def test_of_the_layouts_of_flex_attention_one_is_tried(run: Run) -> None:
    """The step itself raises an error where more of them are compiled."""
    assert run("flex").failure is None


def test_where_a_configuration_may_decide_memory_all_are_tried(run: Run) -> None:
    """The program says where kernels get scratch memory: how much, each configuration has its own answer."""
    assert run("tuned", rows=ROWS + 1).verdict == "fits"


@pytest.mark.heavy
def test_what_is_left_out_allocates_nothing(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The same program on the simulated GPU alone, with all configurations and their machine code, finds the same peaks."""
    gpu = find_gpu("a100-40")
    environment = environment_for([gpu], build(torch_build), context_bytes=context_of(gpu).expected_bytes) | own_caches(tmp_path)
    words = [sys.executable, "-X", "faulthandler", str(TUNED), "3"]
    alone = subprocess.run(command_for(words), env=environment, check=False, capture_output=True, text=True)

    seen = rehearse_script([str(TUNED), "3"], gpu=gpu)

    # Not its exit code: a thread of autograd that frees Python objects while Python is finalized aborts now and then.
    assert alone.stdout.split() == [str(seen.peak_allocated_bytes), str(seen.peak_reserved_bytes)], alone.stderr
