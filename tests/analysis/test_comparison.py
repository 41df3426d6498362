"""One program on many GPUs: kinds that ask the same of memory share what was searched, and no figure differs for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.analysis.comparison import compare
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.estimators.rehearsal_cache import RehearsalCache
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.estimators.steps import Step
from memplan.hardware.catalog import catalog_gpus, find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.cuda_context import usual_context
from memplan.programs.function_program import function_program
from memplan.units import GIB
from tests.estimators.test_rehearsed import workload
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

SIZED = Path(__file__).with_name("sized_by_multiprocessors.py")
STEPS = Path(__file__).parents[1] / "child" / "steps.py"


def sized(name: str, gib: int) -> GpuSpec:
    """A kind of GPU in a size that a small workload fills."""
    return find_gpu(name).model_copy(update={"total_memory_bytes": gib * GIB})


@pytest.mark.heavy
@pytest.mark.parametrize("most_at_once", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_what_is_shared_is_what_each_shows_by_itself(torch_build: TorchBuild, tmp_path: Path, most_at_once: int) -> None:
    """To the byte, for five kinds of five capabilities, of which some ask otherwise (H100); a second time nothing is run."""
    program = workload(target_effective_batch_size=64)
    gpus = [sized(name, gib) for name, gib in (("t4", 3), ("a10", 3), ("rtx4090", 5), ("h100", 4), ("rtx5090", 3))]
    told: list[Step] = []
    together = compare(program, gpus, RehearsedEstimator(RehearsalCache(tmp_path), told.append), most_at_once=most_at_once)

    assert together == [row for gpu in gpus for row in compare(program, [gpu], RehearsedEstimator())]
    assert [row.gpu for row in together] == gpus
    told.clear()
    if most_at_once == 1:  # two at once may come to be compared in another order
        assert compare(program, gpus, RehearsedEstimator(RehearsalCache(tmp_path), told.append)) == together
        assert told == []


@pytest.mark.heavy
def test_kinds_with_other_contexts_share_what_was_searched(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The second, which holds fewer threads, is run once, to see that it asks the same; the context is its own."""
    program, gpus = function_program(f"{STEPS}:mlp"), [sized(name, 3) for name in ("rtx3090", "a5000")]
    told: list[Step] = []

    first, second = compare(program, gpus, RehearsedEstimator(RehearsalCache(tmp_path), told.append, is_slow=True), fills_gpu=True)

    assert [step.gpu.kind for step in told].count(gpus[1].kind) == 1
    planned = program.with_training(micro_batch_size=second.stages[0].planned.micro_batch_size)
    assert second.device_used_bytes == RehearsedEstimator(is_slow=True)(planned, gpus[1], None).device_used.expected_bytes
    assert usual_context(gpus[0]).expected_bytes > usual_context(gpus[1]).expected_bytes
    assert first.stages[0].planned == second.stages[0].planned


@pytest.mark.heavy
def test_a_kind_that_asks_otherwise_is_searched_by_itself(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Its number of multiprocessors decides a size: another kind's figures would be wrong. Each is that of its own kind at that batch."""
    program, gpus = function_program(f"{SIZED}:build"), [sized(name, 1) for name in ("t4", "rtx2080ti", "rtx4090")]
    rows = compare(program, gpus, RehearsedEstimator(RehearsalCache(tmp_path), is_slow=True), fills_gpu=True)
    afresh = RehearsedEstimator(is_slow=True)

    for row in rows:
        [stage] = row.stages
        used = afresh(program.with_training(micro_batch_size=stage.planned.micro_batch_size), row.gpu, None).device_used
        assert (stage.device_used_bytes, row.fits) == (used.expected_bytes, used.high_bytes <= row.budget_bytes)
    assert rows[0].stages[0].planned.micro_batch_size > rows[1].stages[0].planned.micro_batch_size


def test_formulas_are_asked_for_each(tmp_path: Path) -> None:
    """In the order that was asked for, each once."""
    gpus = [card.spec for card in catalog_gpus() if not card.is_mig][:5]

    rows = compare(workload(), gpus, AnalyticEstimator(), most_at_once=4)

    assert [row.gpu for row in rows] == gpus


def test_a_gpu_without_kernels_is_not_planned(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The row says why, and the others have theirs; no build has kernels for capability 2.0 any more."""
    t4 = sized("t4", 3)
    old = t4.model_copy(update={"name": "Tesla M2090", "compute_capability": (2, 0)})

    rows = compare(workload(micro_batch_size=1), [old, t4], RehearsedEstimator(RehearsalCache(tmp_path)))

    assert [(row.gpu, row.fits, row.problem) for row in rows] == [(old, False, "this PyTorch has no kernels for it"), (t4, True, None)]
