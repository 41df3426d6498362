"""Levers: what a change does to memory, and the batch that it allows."""

from __future__ import annotations

import pytest

from memplan.analysis.levers import find_levers, in_training_mode
from memplan.analysis.make_plan import make_plan
from memplan.errors import NotRehearsedError
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.estimators.base import Estimator
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.budget import MemoryBudget
from memplan.memory.estimate import MemoryEstimate
from memplan.planner.plan import Lever
from memplan.workload.model import HuggingFaceModel
from memplan.workload.optimizer import Optimizer
from memplan.workload.parallelism import Parallelism
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload
from tests.estimators.test_rehearsed import workload
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


@pytest.fixture(scope="module")
def rehearsals(torch_build: TorchBuild) -> RehearsedEstimator:
    return RehearsedEstimator()


@pytest.fixture(scope="module")
def levers(rehearsals: RehearsedEstimator) -> dict[str, Lever]:
    """Of a small decoder on a T4, for a target of 64."""
    step = workload(micro_batch_size=16, gradient_accumulation_steps=4)
    gpu = find_gpu("t4")
    budget = MemoryBudget(total_bytes=gpu.total_memory_bytes)
    return {lever.change: lever for lever in find_levers(step, gpu=gpu, budget=budget, estimator=rehearsals, most=64, fits=True)}


@pytest.mark.heavy
def test_each_saving_is_that_of_a_rehearsal(rehearsals: RehearsedEstimator, levers: dict[str, Lever]) -> None:
    """Checkpointing on, Adafactor, half the sequence: what the step takes with the change, rehearsed here again."""
    step, gpu = workload(micro_batch_size=16, gradient_accumulation_steps=4), find_gpu("t4")
    before = rehearsals(step, gpu, None).device_used_bytes
    changed = {
        "turn activation checkpointing on": step.with_training(activation_checkpointing=True),
        "use an 8-bit Adam": step.model_copy(update={"optimizer": Optimizer(name="adam8bit")}),
        "use Adafactor, whose second moments are factored": step.model_copy(update={"optimizer": Optimizer(name="adafactor")}),
        "halve the sequence length to 128": step.with_training(sequence_length=128),
    }
    for change, candidate in changed.items():
        after = rehearsals(candidate, gpu, None).device_used_bytes

        assert levers[change].method == "rehearsed"
        assert levers[change].device_used_bytes == after
        assert levers[change].saving_bytes == before - after > 0
        assert levers[change].micro_batch_size == 64


@pytest.mark.heavy
def test_allocator_settings_are_tried_without_another_rehearsal(rehearsals: RehearsedEstimator, levers: dict[str, Lever]) -> None:
    """By the simulated allocator, and as the real one says where the step is rehearsed with them."""
    step, gpu = workload(micro_batch_size=16, gradient_accumulation_steps=4), find_gpu("t4")
    for settings in ("expandable_segments:True", "roundup_power2_divisions:8"):
        simulated = rehearsals.with_allocator_settings(settings)(step, gpu, None)

        real = rehearsals(step.with_training(allocator_settings=settings), gpu, None)
        assert simulated.peak_reserved_bytes == real.peak_reserved_bytes
        assert simulated.device_used == real.device_used
    assert all(lever.saving_bytes > 0 for change, lever in levers.items() if "PYTORCH_ALLOC_CONF" in change)


def test_a_trade_is_told_of_a_plan_that_fits(built_in: Workload, a100: GpuSpec) -> None:
    """Checkpointing off costs memory and saves time: with fewer samples, since it allows fewer."""
    plan = make_plan(in_training_mode(built_in), a100, AnalyticEstimator(), with_levers=True)

    lever = next(lever for lever in plan.levers if "checkpointing off" in lever.change)
    assert lever.saving_bytes < 0
    assert lever.micro_batch_size is not None
    assert lever.micro_batch_size < 32
    assert any("GradCache" in lever.change for lever in plan.levers)
    assert any(lever.change == "at most 12 negatives in every stage instead of 24" for lever in plan.levers)
    assert not any("use a GPU like" in lever.change for lever in plan.levers)


def test_without_being_asked_a_plan_that_fits_has_none(built_in: Workload, a100: GpuSpec) -> None:
    assert make_plan(built_in, a100, AnalyticEstimator()).levers == ()


class WithoutAdafactor(Estimator):
    """What a model of a package takes, by the formulas for another; with Adafactor it does not run."""

    method = "rehearsed"

    def __init__(self, other: Workload) -> None:
        self.other = other

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        assert isinstance(program, Workload)
        if program.optimizer.name == "adafactor":
            raise NotRehearsedError("it was ended by SIGKILL")
        step = self.other.model_copy(update={"training": program.training, "optimizer": program.optimizer})
        return AnalyticEstimator()(step, gpu, stage)


def test_a_change_that_nobody_can_tell_of_is_left_out(built_in: Workload, a100: GpuSpec) -> None:
    """Neither a rehearsal nor formulas: the others are told, and that it does not fit."""
    step = built_in.model_copy(update={"model": HuggingFaceModel(huggingface_config="config.json")})
    budget = MemoryBudget(total_bytes=2**30)

    levers = find_levers(step, gpu=a100, budget=budget, estimator=WithoutAdafactor(built_in), most=1)

    assert "use a micro-batch of 1" in {lever.change for lever in levers}
    assert not any("Adafactor" in lever.change for lever in levers)


@pytest.mark.heavy
def test_several_gpus_are_offered_to_share_the_model(rehearsals: RehearsedEstimator) -> None:
    """Fully sharded, a step on 8 GPUs is rehearsed as such; DeepSpeed's stages too, or by formulas where it is not installed."""
    step = workload(micro_batch_size=16).model_copy(update={"parallelism": Parallelism(devices=8)})
    sharded = step.model_copy(update={"parallelism": Parallelism(devices=8, strategy="fsdp")})
    gpu = find_gpu("t4")
    budget = MemoryBudget(total_bytes=gpu.total_memory_bytes)

    levers = {each.change: each for each in find_levers(step, gpu=gpu, budget=budget, estimator=rehearsals, most=64, fits=True)}

    fsdp = levers["FSDP (strategy fsdp), everything sharded over 8 GPUs"]
    assert fsdp.method == "rehearsed"
    assert fsdp.device_used_bytes == rehearsals(sharded, gpu, None).device_used_bytes
    assert fsdp.saving_bytes == rehearsals(step, gpu, None).device_used_bytes - fsdp.device_used_bytes > 0


@pytest.mark.heavy
def test_one_gpu_has_nobody_to_share_with(levers: dict[str, Lever]) -> None:
    """Nothing is offered that needs several."""
    assert not any("sharded" in change for change in levers)
