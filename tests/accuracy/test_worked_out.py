"""
What is planned from a few rehearsals is what rehearsals say: thirteen kinds of program, each on one of three kinds of GPU.

`python benchmarks/accuracy.py` holds every program to rehearsals on all three, and prints the figures.
"""

from __future__ import annotations

import statistics
from itertools import cycle

import pytest

from memplan.analysis.make_plan import make_plan
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.estimators.workload_steps import step_of, values_of
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.workload.workload import Workload
from tests.accuracy.programs_to_plan import PROGRAMS
from tests.accuracy.sweeps import CARDS, assess
from tests.conftest import RehearserOf
from tests.estimators.test_rehearsed import workload
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

MEDIAN, WORST = 0.002, 0.02
"""Of the peak: how far what was worked out may be from a rehearsal."""


def hold(program: str, card: str) -> None:
    """Work out *program* on *card*, and hold it to rehearsals."""
    seen = assess(program, card)

    assert seen.errors, "every point was rehearsed"
    assert statistics.median(map(abs, seen.errors)) <= MEDIAN
    assert max(map(abs, seen.errors)) <= WORST
    assert seen.reported_bytes == seen.rehearsed_bytes
    assert (seen.fits, seen.next_fits) == (True, False)


@pytest.mark.heavy
@pytest.mark.parametrize(("program", "card"), list(zip(PROGRAMS, cycle(CARDS), strict=False)))
def test_every_program_is_worked_out_as_it_is_rehearsed(torch_build: TorchBuild, program: str, card: str) -> None:
    """The largest batch called fitting fits, the next does not; what was reported for it, and every point between, is a rehearsal's."""
    hold(program, card)


def test_a_program_is_worked_out_as_it_is_rehearsed(torch_build: TorchBuild) -> None:
    """One of them in every run of the tests: two networks and two optimizers in one step."""
    hold("adversarial", "t4")


@pytest.mark.heavy
def test_a_plan_reports_what_a_fresh_rehearsal_says(rehearser_of: RehearserOf, built_in: Workload) -> None:
    """A decoder and a contrastive encoder (smaller than the one that is built in), each as planned, in another process than the plan's."""
    fresh = rehearser_of("memplan.child.models.built_in:build")
    encoder = built_in.model.encoder.model_copy(update={"num_layers": 2})  # type: ignore[union-attr]
    small = built_in.model_copy(update={"model": built_in.model.model_copy(update={"encoder": encoder, "num_channels": 1})})
    for planned, gpu in ((workload(), find_gpu("a100-40")), (small.with_training(sequence_length=128), find_gpu("t4"))):
        plan = make_plan(planned, gpu, RehearsedEstimator(), target=64)
        stages = plan.after.stages or (None,)
        for stage, reported in zip(stages, plan.stages, strict=True):
            step = step_of(plan.after, gpu, stage)
            seen = fresh.rehearse(gpu=step.gpu, values=values_of(step))

            assert reported.estimate.peak_reserved_bytes == seen.peak_reserved_bytes
            assert reported.estimate.peak_allocated_bytes == seen.peak_allocated_bytes
