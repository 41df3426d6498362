"""Curves of a plan."""

from __future__ import annotations

import pytest

from memplan.analysis.curves import curves_of, heaviest_step
from memplan.analysis.make_plan import make_plan
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.estimators.steps import Step
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.workload.workload import Workload
from tests.estimators.test_rehearsed import workload
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


def test_by_formulas_each_point_is_an_estimate(built_in: Workload, a100: GpuSpec) -> None:
    """Micro-batch and negatives of the heaviest stage; what fits is what the budget says."""
    plan = make_plan(built_in, a100, AnalyticEstimator())

    micro, negatives = curves_of(plan, AnalyticEstimator())

    assert (micro.variable, negatives.variable) == ("micro_batch_size", "n_negatives")
    assert micro.planned in [point.value for point in micro.points]
    assert negatives.planned in [point.value for point in negatives.points]
    _, gpu, stage = heaviest_step(plan, AnalyticEstimator())
    for point in micro.points:
        used = AnalyticEstimator()(plan.after.with_training(micro_batch_size=point.value), gpu, stage).device_used
        assert (point.device_used_bytes, point.fits) == (used.expected_bytes, plan.budget.fits(used))
    assert [point.fits for point in micro.points] == sorted([point.fits for point in micro.points], reverse=True)
    assert not micro.points[-1].fits


def test_positives_have_a_curve_where_they_cost_memory_and_lengths_where_they_are_asked_for(built_in: Workload, a100: GpuSpec) -> None:
    """With pairs a row holds one positive, however many there are."""
    assert built_in.contrastive is not None
    grouped = built_in.model_copy(update={"contrastive": built_in.contrastive.model_copy(update={"sampling": "group"})})
    paired, group = (make_plan(workload, a100, AnalyticEstimator()) for workload in (built_in, grouped))

    assert [curve.variable for curve in curves_of(group, AnalyticEstimator())] == ["micro_batch_size", "n_negatives", "n_positives"]
    assert [curve.variable for curve in curves_of(paired, AnalyticEstimator())] == ["micro_batch_size", "n_negatives"]
    (lengths,) = curves_of(paired, AnalyticEstimator(), ["sequence_length"])
    assert (lengths.variable, lengths.points[-1].value, lengths.planned) == ("sequence_length", 512, 512)
    sizes = [point.device_used_bytes for point in lengths.points]
    assert sizes == sorted(sizes)


def test_a_plan_that_does_not_fit_has_curves_too(built_in: Workload) -> None:
    """From the smallest try on."""
    plan = make_plan(built_in, find_gpu("rtx4060"), AnalyticEstimator())

    micro, negatives = curves_of(plan, AnalyticEstimator())

    assert not plan.fits
    assert (micro.planned, micro.points[0].fits) == (1, False)
    assert negatives.points[0].fits


@pytest.mark.heavy
def test_what_is_worked_out_is_what_a_rehearsal_says(torch_build: TorchBuild) -> None:
    """Fewer rehearsals than points; each point that was worked out is rehearsed here, and differs by less than 2%."""
    told: list[Step] = []
    rehearsals = RehearsedEstimator(on_rehearsal=told.append)
    plan = make_plan(workload(), find_gpu("a100-40"), rehearsals, target=128)

    (curve,) = curves_of(plan, rehearsals)

    told.clear()
    worked_out = [point for point in curve.points if point.method == "worked out"]
    assert worked_out
    for point in worked_out:
        seen = rehearsals(plan.after.with_training(micro_batch_size=point.value), plan.gpu, None)
        assert point.device_used_bytes == pytest.approx(seen.device_used_bytes, rel=0.02)
    assert len(told) == len(worked_out)
    assert next(point for point in curve.points if point.value == curve.planned).method == "rehearsed"
