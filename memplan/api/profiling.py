"""The steps of a plan run on this machine's GPU; under torchrun on that of each process."""

from __future__ import annotations

from memplan.analysis.profile import Profile, StageProfile, largest_of_ranks, profile_of
from memplan.errors import UsageError
from memplan.estimators.calibration import keep_calibration
from memplan.estimators.measured import MeasuredEstimator
from memplan.hardware.detect import detect_gpus
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torchrun import gather, rank_of, share
from memplan.planner.fitting import budget_of
from memplan.planner.plan import Plan


def run_profile(plan: Plan | None) -> Profile | None:
    """
    Return what the GPU says to *plan*; None in a process of torchrun that is not rank 0: it gets the plan of rank 0, and tells it.

    Raises NotRehearsedError where the step cannot be built or run, DoesNotFitError where not even CUDA itself can begin.
    """
    rank = rank_of()
    if rank.num_ranks > 1:  # all run one plan: what each would plan by itself depends on what the others do meanwhile
        plan = Plan.model_validate(share(plan and plan.model_dump(mode="json", round_trip=True)))
    assert plan is not None
    if rank.num_ranks > 1:
        card = _gpu_of(rank.local)
        budget = budget_of(card, plan.budget.margin, plan.after)
        plan = plan.model_copy(update={"gpu": card, "budget": budget})
    with MeasuredEstimator(plan.gpu) as measure:
        stages = profile_of(plan, measure)
    is_kept = keep_calibration(plan.gpu, [stage.measured for stage in stages])
    if rank.num_ranks > 1:
        told = gather([stage.model_dump(mode="json", round_trip=True) for stage in stages])
        if rank.number != 0:
            return None
        stages = largest_of_ranks([[StageProfile.model_validate(stage) for stage in each] for each in told])
    return Profile(stages=stages, num_ranks=rank.num_ranks, is_kept=is_kept)


def _gpu_of(local: int) -> GpuSpec:
    """Return the GPU of the process with that number on this machine."""
    found = detect_gpus()
    if local >= len(found):
        raise UsageError(
            f"torchrun started a process number {local} here, and CUDA shows {len(found)} GPU(s)",
            hint=f"start it with {len(found)} process(es) on this machine: `torchrun --nproc-per-node {len(found)}`",
        )
    return found[local]
