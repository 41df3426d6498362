"""Negatives: what a stage can have more of, once the micro-batch stands.

One micro-batch serves all stages, so the stage with the most negatives decides it and the others have memory left. Their n_negatives
grow into that, up to the stage's limit.
"""

from __future__ import annotations

from collections.abc import Callable

from memplan.planner.search import largest_fitting
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload


def limit_of(stage: Stage, workload: Workload) -> int:
    """Return the most negatives that *stage* may get: its own limit, or what the stage with the most has."""
    if stage.max_n_negatives is not None:
        return stage.max_n_negatives
    return max(other.n_negatives for other in workload.stages)


def grow(stage: Stage, *, limit: int, fits: Callable[[Stage], bool]) -> Stage:
    """Return *stage* with the most negatives from its present count to *limit* with which it fits; as it is when that does not fit."""
    if limit > stage.n_negatives and fits(with_negatives(stage, limit)):
        return with_negatives(stage, limit)  # the micro-batch was chosen for a stage with as many: this is the usual case
    found = largest_fitting(lambda count: fits(with_negatives(stage, count)), low=stage.n_negatives, high=limit)
    return stage if found is None else with_negatives(stage, found)


def with_negatives(stage: Stage, n_negatives: int) -> Stage:
    """Return *stage* with that many negatives; a limit below them goes."""
    limit = stage.max_n_negatives
    return stage.model_copy(
        update={"n_negatives": n_negatives, "max_n_negatives": None if limit is not None and limit < n_negatives else limit}
    )
